"""Blocks of diffusion transformers: rows shifted, scaled and gated by ranges of what is made of a condition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, Builder

WIDTH = 16
TOP = 2**63 - 1  # how exporters write the end of an axis

Ranges = Callable[[Builder, str, int, int], list[str]]


def unsqueezed_behind(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """`[part[:, None] for part in modulation.chunk(count, dim=1)]`, as diffusers has it."""
    parts = b("Split", modulation, outputs=count, axis=1, num_outputs=count)
    return [b("Unsqueeze", part, b.integers(1)) for part in parts]


def unsqueezed_before(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """`modulation[:, None].chunk(count, dim=-1)`."""
    return list(b("Split", b("Unsqueeze", modulation, b.integers(1)), outputs=count, axis=-1, num_outputs=count))


def reshaped(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """The same, viewed as `[-1, 1, width]`."""
    parts = b("Split", modulation, outputs=count, axis=-1, num_outputs=count)
    return [b("Reshape", part, b.integers(-1, 1, width)) for part in parts]


def sliced(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """`modulation[:, None, start:stop]`, the last one to the end."""
    rows = b("Unsqueeze", modulation, b.integers(1))
    ends = [*(width * index for index in range(1, count)), TOP]
    starts = [width * index for index in range(count)]
    bounds = zip(starts, ends, strict=True)
    return [b("Slice", rows, b.integers(start), b.integers(end), b.integers(2)) for start, end in bounds]


def places(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """`modulation.reshape(-1, count, width).chunk(count, dim=1)`."""
    rows = b("Reshape", modulation, b.integers(-1, count, width))
    return list(b("Split", rows, outputs=count, axis=1, num_outputs=count))


def places_of_a_table(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """`(table[None] + modulation.reshape(-1, count, width)).chunk(count, dim=1)`, as PixArt, Sana and Wan have it."""
    table = b.array(draw(1, count, width), "table")
    rows = b("Add", table, b("Reshape", modulation, b.integers(-1, count, width)))
    return list(b("Split", rows, outputs=count, axis=1, num_outputs=count))


def sliced_places(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """The same as TorchScript writes it, the last one to the end."""
    rows = b("Reshape", modulation, b.integers(-1, count, width))
    ends = [*range(1, count), TOP]
    return [b("Slice", rows, b.integers(index), b.integers(end), b.integers(1)) for index, end in enumerate(ends)]


def unbound_places(b: Builder, modulation: str, width: int, count: int) -> list[str]:
    """`[part[:, None] for part in modulation.reshape(-1, count, width).unbind(1)]`, the last one as -1."""
    rows = b("Reshape", modulation, b.integers(-1, count, width))
    indices = [*range(count - 1), -1]
    return [b("Unsqueeze", b("Gather", rows, b.scalar(index), axis=1), b.integers(1)) for index in indices]


RANGES: list[Ranges] = [unsqueezed_behind, unsqueezed_before, reshaped, sliced]
PLACES: list[Ranges] = [places, places_of_a_table, sliced_places, unbound_places]


def product(b: Builder, x: str, k: int, n: int, name: str) -> str:
    weight = b.array(draw(k, n, seed=len(name)) / k**0.5, f"{name}_weight")
    return b("Add", b("MatMul", x, weight), b.array(draw(n, seed=3), f"{name}_bias"))


def modulated(b: Builder, x: str, shift: str, scale: str, width: int) -> str:
    """`norm(x) * (1 + scale) + shift`."""
    ones = b.array(np.ones(width))
    normal = b("LayerNormalization", x, ones, axis=-1)
    return b("Add", b("Mul", normal, b("Add", b.array(np.array(1.0)), scale)), shift)


def adaptive(
    ranges: Ranges, dtype: int = FLOAT, width: int = WIDTH, count: int = 6,
    ends: Callable[..., list[str]] | None = None, rows: tuple[int | str, int | str] = ("batch", "rows"),
) -> onnx.ModelProto:  # fmt: skip
    """Rows `[batch, rows, width]`, normalised, shifted and scaled, multiplied and gated: twice where six ranges are.

    Args:
        ranges: how they are taken.
        dtype: of all values.
        width: columns of a range.
        count: ranges of what is made of the condition.
        ends: further outputs, of the ranges and of what has all of them.
        rows: batches, and the rows of each.
    """
    b = Builder(dtype, opset=18)
    x, condition = b.input("x", (*rows, width)), b.input("condition", (rows[0], width))
    modulation = product(b, condition, width, count * width, "modulation")
    parts = ranges(b, modulation, width, count)
    for first in range(0, count - count % 3, 3):
        shift, scale, gate = parts[first : first + 3]
        y = product(b, modulated(b, x, shift, scale, width), width, width, f"block{first}")
        x = b("Add", x, b("Mul", gate, y))
    return b.model(x, *(ends(b, modulation, parts) if ends else ()))


def feed(width: int = WIDTH, dtype: type = np.float32, batch: int = 2, rows: int = 5) -> dict[str, np.ndarray]:
    shapes = {"x": (batch, rows, width), "condition": (batch, width)}
    return {name: draw(*shape, seed=7).astype(dtype) for name, shape in shapes.items()}
