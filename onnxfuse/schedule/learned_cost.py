"""How much longer a kernel takes than its family's terms say: learnt from timed kernels, a factor for the estimate.

The terms add up what is understood. What they leave depends on many sizes at once; small neural networks are fitted to
its logarithm by `python -m tests.perf.learn`, which also tells what they gain on sites that they have not seen, and the
factor is that of their mean. Source of the idea: Chen et al., Learning to Optimize Tensor Programs (2018), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.device import DeviceSpec
from onnxfuse.ir.fusion import NONLINEAR
from onnxfuse.schedule import cost_model
from onnxfuse.schedule.kernel_family import Amount, AnyTile, Candidate, Flow, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.networks import networks

MATHS = ("f16", "bf16", "tf32")  # arithmetic of the kernels that were timed
FAMILIES = ("hopper", "hopper_swapped", "small_m", "portable")
LONGEST_GRANULE = 256  # bytes that a pitch is looked at as a multiple of
NEAR = 1.6  # times the best estimate of a size: what is farther away is not chosen, whatever was learnt of it
MOST = 0.5  # of the logarithm: a tile unlike all that were timed keeps its place among the others


@dataclass(frozen=True)
class Kernels:
    """Tiles of one site, each at some size, that a model of costs looks at together.

    Attributes:
        entries: the tiles, and `flows` how their blocks run.
        which: of them, i64[kernels].
        estimates: microseconds by the terms of their families, and of copies that they read, f64[kernels].
        sizes: m, n and k, i64[kernels] each or one for all.
    """

    entries: Sequence[Candidate]
    flows: Sequence[Flow]
    which: NDArray[np.intp]
    estimates: NDArray[np.float64]
    sizes: Problem

    def of_tiles(self, trait: Callable[[Any], float]) -> NDArray[np.float64]:
        """A trait of each kernel's tile."""
        return np.array([trait(entry.tile) for entry in self.entries])[self.which]


@dataclass(frozen=True)
class _Blocks:
    """The sizes of the tiles of several kernels, in place of one tile's."""

    block_m: Any
    block_n: Any
    threads: Any
    last_wave_splits: Any


def factors(
    entries: Sequence[Candidate],
    flows: Sequence[Flow],
    estimates: NDArray[np.float64],
    spec: KernelSpec,
    problem: Problem,
    device: DeviceSpec,
) -> NDArray[np.float64]:
    """How many times their estimates tiles take, f64[tiles, sizes].

    It is 1 for kernels unlike those that were timed, empty ones among them, and for tiles whose estimate is far from
    the best of a size.

    Args:
        entries: the tiles.
        flows: how their blocks run.
        estimates: microseconds, by the terms of their families, and of copies that they read, f64[tiles, sizes].
        spec: the kernel.
        problem: the sizes, arrays or numbers.
        device: to plan for.
    """
    found, known = np.ones(estimates.shape), networks(device.arch)
    if known is None or not is_alike(spec, problem):
        return found
    in_families = np.array([entry.family.name in FAMILIES for entry in entries])
    near = np.isfinite(estimates) & (estimates <= NEAR * estimates.min(axis=0))
    sizes = np.stack([np.broadcast_to(size, estimates.shape[1]) for size in (problem.m, problem.n, problem.k)])
    which, at = np.nonzero(in_families[:, None] & near & (sizes > 0).all(axis=0))
    m, n, k = sizes[:, at]
    kernels = Kernels(entries, flows, which, estimates[which, at], Problem(m, n, k, stored_k=problem.stored_k))
    seen = features(kernels, spec, device)
    table = np.stack([seen[name] for name in known.names], axis=-1, dtype=np.float64)
    found[which, at] = np.exp(np.clip(known(table), -MOST, MOST))
    return found


def is_alike(spec: KernelSpec, problem: Problem) -> bool:
    """Whether such kernels were timed: one product, of floats as they lie, whose outputs lie as lhs does."""
    across = any(access.transposed for access in (*spec.loads, *spec.outs))
    plain = spec.quantization is None and spec.math in MATHS and spec.lhs_order == "mk" and not across
    return plain and isinstance(problem.batch, int) and problem.batch == 1


def features(kernels: Kernels, spec: KernelSpec, device: DeviceSpec) -> dict[str, NDArray[np.float64]]:
    """What the networks see, by name, f64[kernels] each; sizes and times as logarithms to the base of 2."""
    rows, columns = kernels.of_tiles(lambda tile: tile.block_m), kernels.of_tiles(lambda tile: tile.block_n)
    threads, lasts = kernels.of_tiles(lambda tile: tile.threads), kernels.of_tiles(_last_wave_splits)
    blocks, splits = _Blocks(rows, columns, threads, lasts), kernels.of_tiles(_splits)
    seen = {
        **_of_problem(kernels.sizes, spec),
        **_of_tiles(kernels, blocks, splits, spec),
        **_of_both(kernels, blocks, splits, spec, device),
    }
    return {name: np.broadcast_to(value, kernels.which.shape) for name, value in seen.items()}


def _of_problem(sizes: Problem, spec: KernelSpec) -> dict[str, Amount]:
    width = spec.dtype.bytes
    return {
        "m": np.log2(sizes.m), "n": np.log2(sizes.n), "k": np.log2(sizes.k),
        "fp32": spec.math == "tf32", "two parts": spec.parts == 2, "three parts": spec.parts == 3,
        "rhs [n, k]": spec.rhs_order == "nk", "tile operands": sum(load.kind == "tile" for load in spec.loads),
        "nonlinear": sum(step.op in NONLINEAR for step in spec.steps),
        "granule of k": np.log2(np.gcd(sizes.k * width, LONGEST_GRANULE)),
        "granule of n": np.log2(np.gcd(sizes.n * width, LONGEST_GRANULE)),
        "granule of rhs": np.log2(np.gcd(sizes.rhs_row(spec.rhs_order) * width, LONGEST_GRANULE)),
        "copies": len(spec.copied),
    }  # fmt: skip


def _of_tiles(kernels: Kernels, blocks: _Blocks, splits: NDArray[np.float64], spec: KernelSpec) -> dict[str, Amount]:
    """Not every family's tiles have all of these traits."""
    names = np.array([entry.family.name for entry in kernels.entries])[kernels.which]
    clusters = kernels.of_tiles(lambda tile: getattr(tile, "cluster", 1))
    return {
        "block_m": np.log2(blocks.block_m), "block_n": np.log2(blocks.block_n * spec.parts),
        "threads": np.log2(blocks.threads), "keeps rhs": kernels.of_tiles(lambda tile: getattr(tile, "kept_k", 0) > 0),
        "ping-pong": kernels.of_tiles(lambda tile: getattr(tile, "pingpong", False)),
        "splits": np.log2(splits), "sharing": np.log2(np.maximum(clusters // splits, 1)),
        "rows of a box": kernels.of_tiles(lambda tile: getattr(tile, "lhs_rows", 0) / 16),
        "depth": np.log2([reads.depth for reads in kernels.flows])[kernels.which],
        "at once": np.log2([reads.blocks for reads in kernels.flows])[kernels.which],
        **{name: names == name for name in FAMILIES},
    }  # fmt: skip


def _of_both(
    kernels: Kernels, blocks: _Blocks, splits: NDArray[np.float64], spec: KernelSpec, device: DeviceSpec
) -> dict[str, Amount]:
    us, sizes = kernels.estimates, kernels.sizes
    paces = np.array([entry.pace for entry in kernels.entries])[kernels.which]
    waves = cost_model.tiles_of(blocks, sizes) * splits / device.multiprocessors
    begun, saved = np.ceil(waves), cost_model.saved_of_last_wave(blocks, sizes, device)
    whole = begun - saved
    multiplying = cost_model.multiplying(blocks, paces, spec, sizes, device, splits) * whole / begun
    moving = cost_model.moving(spec, sizes, device) / us
    return {
        "early": begun * sizes.k <= np.array([reads.early_depth for reads in kernels.flows])[kernels.which],
        "waves": np.log2(waves), "whole waves": np.log2(whole), "last wave": waves / whole, "saved": saved,
        "rows in tiles": cost_model.filled(sizes.m, blocks.block_m),
        "columns in tiles": cost_model.filled(sizes.n, blocks.block_n),
        "moving": moving, "log of moving": np.log2(np.maximum(moving, 1e-3)),
        "multiplying": multiplying / us,
        "estimate": np.log2(us), "share of k": np.log2(sizes.k / splits),
    }  # fmt: skip


def _last_wave_splits(tile: AnyTile) -> int:
    """Blocks that share a tile of the last wave."""
    return int(getattr(tile, "last_wave_splits", 1))


def _splits(tile: AnyTile) -> int:
    """Blocks that share the tile along k."""
    return int(getattr(tile, "splits", 1))
