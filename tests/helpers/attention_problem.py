"""One launch of the attention kernel: its tensors, its arguments and maps, and what it should compute, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.schedule.attention_tile import GROUP_ROWS, ROW_BYTES, AttentionSpec, AttentionTile, is_mapped
from tests.helpers.kernel_problem import ARGUMENTS, NUMPY
from tests.helpers.reference_fusion import OPS


@dataclass(frozen=True)
class AttentionSize:
    """The run-time side of a launch.

    Attributes:
        batch: outer batches.
        heads: of q.
        rows: queries of a head.
        keys: keys and values of a head.
        kv_heads: heads of keys and values; 0: as many as q has.
        tokens_first: tensors lie as [batch, tokens, heads, columns], and not as [batch, heads, tokens, columns].
        masks: shape of each load, with 1 where it is broadcast.
    """

    batch: int
    heads: int
    rows: int
    keys: int
    kv_heads: int = 0
    tokens_first: bool = False
    masks: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def shared_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads


@dataclass
class AttentionProblem:
    """Tensors as [batch, heads, tokens, columns], whatever their order in memory."""

    spec: AttentionSpec
    size: AttentionSize
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    loads: list[np.ndarray]
    out: np.ndarray

    @property
    def tensors(self) -> list[np.ndarray]:
        """All, the output last."""
        return [self.query, self.keys, self.values, *self.loads, self.out]

    def arguments(self, pointers: Sequence[int]) -> np.ndarray:
        """The kernel's first argument; a pointer for each of the tensors."""
        filled = np.zeros((), ARGUMENTS)
        size = self.size
        q, k, v, *loads, out = (strides(tensor) for tensor in self.tensors)
        filled["lhs"] = (pointers[0], q[1], q[2], q[3])
        filled["rhs"][0] = (pointers[1], k[1], k[3], k[2])
        filled["rhs"][1] = (pointers[2], v[1], v[2], v[3])
        filled["outs"][0] = (pointers[-1], out[1], out[2], out[3])
        filled["outs_outer"][0]["batch_stride"] = out[0]
        for index, load in enumerate(loads):
            filled["loads"][index] = (pointers[3 + index], load[1], load[2], load[3])
            filled["loads_outer"][index]["batch_stride"] = load[0]
        filled["lhs_outer"]["batches"] = size.heads
        filled["lhs_outer"]["batch_stride"] = q[0]
        filled["rhs_outer"]["batch_stride"] = k[0]
        filled["values_outer"]["batch_stride"] = v[0]
        filled["rhs_outer"]["batches"] = filled["values_outer"]["batches"] = size.shared_heads
        filled["m"], filled["n"], filled["k"] = size.rows, size.keys, self.spec.head
        filled["batch"] = size.batch * size.heads
        return filled

    def maps(self, tile: AttentionTile) -> list[tuple[int, list[int], list[int], list[int]]]:
        """Of each map: number of the tensor; extents, strides in elements and box, the contiguous axis first."""
        boxes = [(0, GROUP_ROWS), (1, tile.block_n), (2, tile.block_n)]
        boxes += [(3 + index, tile.block_m) for index, load in enumerate(self.spec.loads) if is_mapped(load)]
        found = []
        for number, rows in boxes:
            tensor = self.tensors[number]
            extents, steps = list(tensor.shape[::-1]), strides(tensor)[::-1]
            pitch = 16 // tensor.itemsize
            steps = [steps[0], *(step or -(-extents[0] // pitch) * pitch for step in steps[1:])]
            found.append((number, extents, steps, [ROW_BYTES // tensor.itemsize, rows, 1, 1]))
        return found

    def reference(self) -> np.ndarray:
        """In float64."""
        size = self.size
        q, k, v = (tensor.astype(np.float64) for tensor in (self.query, self.keys, self.values))
        repeats = size.heads // size.shared_heads
        k, v = np.repeat(k, repeats, 1), np.repeat(v, repeats, 1)
        known: dict[str, np.ndarray] = {"acc0": q @ k.swapaxes(-1, -2)}
        known |= {f"op{index}": load.astype(np.float64) for index, load in enumerate(self.loads)}
        with np.errstate(all="ignore"):
            for step in self.spec.score:
                known[step.result] = OPS[step.op](*(known.get(value, value) for value in step.inputs))
            score = known[self.spec.score_value] * self.spec.scale
            powers = np.exp(score - score.max(-1, keepdims=True))
            probabilities = powers / powers.sum(-1, keepdims=True)
            if self.spec.guarded:
                probabilities = np.where(np.isnan(probabilities), 0, probabilities)
            known = {"acc0": probabilities @ v}
            for step in self.spec.result:
                known[step.result] = OPS[step.op](*(known.get(value, value) for value in step.inputs))
        return known[self.spec.result_value]


def strides(tensor: np.ndarray) -> list[int]:
    """In elements, 0 along an axis of one element but for the last."""
    steps = zip(tensor.strides[:-1], tensor.shape[:-1], strict=True)
    return [
        *(step // tensor.itemsize if extent > 1 else 0 for step, extent in steps),
        tensor.strides[-1] // tensor.itemsize,
    ]


def make_attention(spec: AttentionSpec, size: AttentionSize, seed: int = 0) -> AttentionProblem:
    """Random tensors; masks of zeros and minus infinity, or of small numbers."""
    generator = np.random.default_rng(seed)
    dtype = NUMPY[spec.dtype]

    def tensor(heads: int, tokens: int, columns: int, empty: bool = False, dtype: np.dtype = dtype) -> np.ndarray:
        shape = (size.batch, tokens, heads, columns) if size.tokens_first else (size.batch, heads, tokens, columns)
        values = np.full(shape, np.nan) if empty else generator.standard_normal(shape)
        return values.astype(dtype).swapaxes(1, 2) if size.tokens_first else values.astype(dtype)

    loads = []
    for load, shape in zip(spec.loads, size.masks, strict=True):
        values = generator.standard_normal(shape)
        values[generator.random(shape) < 0.3] = -np.inf
        loads.append(values.astype(NUMPY[load.dtype]))
    return AttentionProblem(
        spec,
        size,
        tensor(size.heads, size.rows, spec.head),
        tensor(size.shared_heads, size.keys, spec.head),
        tensor(size.shared_heads, size.keys, spec.value_head),
        loads,
        tensor(size.heads, size.rows, spec.value_head, empty=True, dtype=NUMPY[spec.outs[0].dtype]),
    )
