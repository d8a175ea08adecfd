"""What the cost model knows of each architecture: one file each, every constant with its unit and source."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cache, lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from onnxfuse.device import DeviceSpec

FOLDER = Path(__file__).parent
Asked = ParamSpec("Asked")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Calibration:
    """Constants of one architecture; `sm_90a.toml` says what each is, in which unit, and where it comes from.

    Attributes:
        products: by arithmetic.
        launches: by family, as fill and round_trip.
        copied: by bytes of a copy, as `copied_crowded`.
        copied_beside: of less than 16 bytes, where a block is `alone` or runs `beside` others.
        library_advantage: by arithmetic; 1 where there is no row.
        library_products: by arithmetic; where there is no row, `library_advantage` holds.
        library_launch: by arithmetic, of a `vector`, and of a product with a pitch of no multiple of 16 bytes,
            `misaligned`; as `library_depth`.
        library_turned: by arithmetic and the order of rhs; 1 where there is no row.
        library_behind: by step of the epilogue; nothing where there is no row.
        library_misaligned: by bytes that the pitches of lhs, rhs and the product are multiples of.
        library_sustained: `most`, of products of so many microseconds as `last` and more; nothing up to `first`.
        library_quantized: `launch`, `read` and `row` of MatMulNBits by itself, up to `few` rows; `unpacked` of all rhs.
        biasing: by the model's nodes; 1 where there is no row.
        normalising: by the op's type.
        normalising_alone: `launch` of a LayerNormalization, and of each `element`.
        norm_launch: of this project's kernel, beside what memory takes.
        small_m_meeting: microseconds of a `cluster` that shares k, and of each `sum` that its other blocks send.
        small_m_sectors: by the depth of a step.
        exact: arithmetic of exact fp32.
        hopper_pitch: of `lhs` and of `rhs` by its order; then by the bytes that its pitch is a multiple of.
        hopper_epilogue: by what an output needs: each `sum` of a part, each `nonlinear` value, each value of a `tile`
            operand, of one whose place the output takes (`in place`; more with a bank `conflict`), each that is
            `copied` out by threads; and of a tile each `refill` of a slab.
        hopper_whole_slabs_depth: of outputs `in place` of an operand, and of `nonlinear` or only `linear` steps.
        hopper_clustered: by blocks of a cluster.
        hopper_enough_products: by warp groups of a tile.
        hopper_quantized: elements of `4 bits` or `8 bits` that become numbers in a microsecond, or `in fp32`, and how
            many times as many by `four groups`; how many times as fast the `widest` tiles multiply; microseconds of a
            `zero point` of a block, of a `step` of the ring, of a `row` that TMA loads, and of the `sums` of groups
            that share k.
        attention_launch: `beginning` of a kernel, `tile` of rows, `block` of keys, `share` of a tile that is split.
        attention_turned: the `beginning` and the `block` of the kernel that turns fp32 values.
        attention_shares: `beginning` of a kernel for few rows; of warps that share them, a `tile` of rows, an `element`
            of a block of keys, and a column of a block's share that is `added`.
        attention_few_rows: of the model's own nodes, `beginning` of all, `reading` over memory's time for q, keys and
            values, of a `key` up to `most_keys`, and of a `score` over memory's time for all of them.
        attention_pace: of a row and a key, by kernel; likewise `attention_column`.
        attention_operand: that comes in `vectors` or by `elements`.
        pace: by table, then by tile or schedule.
    """

    products: Mapping[str, float]
    bytes: float
    launches: Mapping[str, float]
    fill: Mapping[str, float]
    round_trip: Mapping[str, float]
    read_again: float
    sums_added: float
    kept_register: float
    copied: Mapping[str, float]
    copied_crowded: Mapping[str, float]
    copied_beside: Mapping[str, float]
    launch: float
    odds: float
    kn_in_models: float
    regret: float
    exact: str
    library_advantage: Mapping[str, float]
    library_products: Mapping[str, float]
    library_launch: Mapping[str, float]
    library_depth: Mapping[str, float]
    library_sustained: Mapping[str, float]
    library_granule: int
    library_turned: Mapping[str, float]
    library_in_sectors: float
    library_behind: Mapping[str, float]
    library_misaligned: Mapping[str, float]
    library_misaligned_memory: float
    library_quantized: Mapping[str, float]
    biasing: Mapping[str, float]
    convolution: float
    normalising: Mapping[str, float]
    normalising_alone: Mapping[str, float]
    norm_launch: float
    unknown_size: int
    pointwise_blocks: int
    pointwise_bytes_in_flight: int
    hopper_loaded_row: float
    hopper_turned_rows: float
    hopper_received_row: float
    hopper_cluster: float
    hopper_clusters_in_turn: float
    hopper_pitch: Mapping[str, Mapping[str, float]]
    hopper_alone: float
    hopper_early_bytes: float
    hopper_full_early_bytes: Mapping[str, float]
    hopper_ahead: float
    small_m_alone: float
    small_m_narrow: float
    small_m_meeting: Mapping[str, float]
    small_m_sectors: Mapping[str, float]
    small_m_short_row: float
    small_m_early_bytes: float
    hopper_zero_row: float
    hopper_box: float
    hopper_epilogue: Mapping[str, float]
    hopper_long: float
    hopper_step: float
    hopper_meeting: float
    hopper_exchanged: float
    hopper_clustered: Mapping[str, int]
    hopper_enough_products: Mapping[str, int]
    hopper_enough_stages: int
    hopper_ahead_depth: int
    hopper_whole_slabs_depth: Mapping[str, int]
    hopper_most_stages: int
    hopper_widest_slab: int
    hopper_shortest_run: int
    hopper_quantized: Mapping[str, float]
    hopper_quantized_early_bytes: float
    attention_launch: Mapping[str, float]
    attention_pace: Mapping[str, float]
    attention_column: Mapping[str, float]
    attention_operand: Mapping[str, float]
    attention_by_elements: float
    attention_product: float
    attention_turned: Mapping[str, float]
    attention_shares: Mapping[str, float]
    attention_few_rows: Mapping[str, float]
    pointwise_most_rows: int
    hopper_one_wave_group_rows: int
    pace: Mapping[str, Mapping[str, float]]


_REPLACED: dict[str, Calibration] = {}
_KEPT: list[_lru_cache_wrapper[Any]] = []


def calibration(device: DeviceSpec) -> Calibration:
    """The constants of an architecture."""
    return calibration_of(device.arch)


def calibration_of(arch: str) -> Calibration:
    """The same by its name, for kernels of one architecture alone."""
    return _REPLACED.get(arch) or _read(arch)


@contextmanager
def replaced(device: DeviceSpec, other: Calibration) -> Iterator[None]:
    """Other constants for a while, as a fit tries them; then those that were before, which may be others as well."""
    before = calibration(device)
    _replace(device, other)
    try:
        yield
    finally:
        _replace(device, before)


def _replace(device: DeviceSpec, other: Calibration) -> None:
    _REPLACED[device.arch] = other
    for function in _KEPT:
        function.cache_clear()


def kept(function: Callable[Asked, Made], most: int) -> Callable[Asked, Made]:
    """The function that remembers what it made last, until the constants that it reads are others.

    Args:
        function: of what can be hashed.
        most: results that it remembers.
    """
    remembering = lru_cache(most)(function)
    _KEPT.append(remembering)
    return cast("Callable[Asked, Made]", remembering)


@cache
def entries(arch: str) -> Mapping[str, Any]:
    """Every constant's table, with what a file takes over from the one that it is `like`; paces under `pace`."""
    found = tomllib.loads((FOLDER / f"{arch}.toml").read_text())
    like = found.pop("like", None)
    return {**(entries(like) if like else {}), **found}


@cache
def _read(arch: str) -> Calibration:
    constants = dict(entries(arch))
    paces = {name: table["value"] for name, table in constants.pop("pace").items()}
    return Calibration(**{name: entry["value"] for name, entry in constants.items()}, pace=paces)
