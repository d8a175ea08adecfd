"""One launch of the kernel that normalises groups of channels: tensors and arguments, and what it should compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.ir.fusion import Step
from onnxfuse.schedule.group_norm_tile import GroupNormSpec
from onnxfuse.schedule.kernel_spec import Access
from tests.helpers.kernel_problem import ARGUMENTS, NUMPY
from tests.helpers.reference_fusion import OPS

AFFINE = (Step("t0", "mul", ("acc0", "op1")), Step("t1", "add", ("t0", "op2")))
SILU = (Step("t2", "sigmoid", ("t1",)), Step("t3", "mul", ("t1", "t2")))
UNITS = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-20}  # of a rounding; of fp32 what sums and the root are off by


@dataclass(frozen=True)
class Images:
    """The run-time side of a launch.

    Attributes:
        count: images.
        pixels: of a channel.
        offset: elements by which tensors begin behind an aligned address.
        mean: about which the numbers of an image lie, in deviations.
    """

    count: int
    pixels: int
    offset: int = 0
    mean: float = 0.0


@dataclass
class GroupProblem:
    """Tensors of a launch: x, what channels are multiplied by and what is added to them, and the output."""

    spec: GroupNormSpec
    images: Images
    x: np.ndarray  # [count, groups * channels, pixels]
    parameters: list[np.ndarray]  # [groups * channels] each
    out: np.ndarray

    @property
    def tensors(self) -> list[np.ndarray]:
        """All of them; the output is the last."""
        return [self.x, *self.parameters, self.out]

    @property
    def rows(self) -> int:
        """Groups of all images."""
        return self.images.count * self.spec.groups

    def arguments(self, pointers: Sequence[int]) -> np.ndarray:
        """The kernel's argument; a pointer for each of the tensors."""
        filled = np.zeros((), ARGUMENTS)
        for index, load in enumerate(pointers[:-1]):
            filled["loads"][index] = (load, 0, 0, 1)
        filled["outs"][0] = (pointers[-1], 0, 0, 1)
        filled["m"], filled["n"], filled["batch"] = self.rows, self.spec.channels * self.images.pixels, 1
        return filled

    def reference(self) -> np.ndarray:
        """What the output should be, in float64."""
        spec, count = self.spec, self.images.count
        rows = self.x.astype(np.float64).reshape(count, spec.groups, -1)
        centred = rows - rows.mean(-1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + spec.epsilon)
        values = {"acc0": normal.reshape(self.x.shape)}
        values |= {f"op{index}": each.astype(np.float64)[:, None] for index, each in enumerate(self.parameters, 1)}
        for step in spec.steps:
            values[step.result] = OPS[step.op](*(values[str(each)] for each in step.inputs))
        return values[str(spec.out_values[0])]

    def check(self) -> None:
        """Off by a rounding of the result, and by the roundings of fp32 of a number far from zero."""
        wanted, unit = self.reference(), UNITS[self.spec.outs[0].dtype]
        near = 2.0**-18 * (1 + abs(self.images.mean)) * np.abs(wanted).max()
        np.testing.assert_allclose(self.out.astype(np.float64), wanted, rtol=2 * unit, atol=near + 2.0**-20)


def make_spec(
    groups: int, channels: int, dtype: DType = F16, out: DType | None = None, affine: bool = True, silu: bool = True
) -> GroupNormSpec:
    """Groups of channels, scaled and shifted by numbers of the same type, with SiLU behind."""
    steps = (AFFINE if affine else ()) + (SILU if silu else ())
    loads = (Access("tile", dtype, 8), *(Access("tile", dtype, 1) for _ in range(2 * affine)))
    value = steps[-1].result if steps else "acc0"
    outs = (Access("tile", out or dtype, 8),)
    return GroupNormSpec(loads, outs, steps, (value,), True, epsilon=1e-5, groups=groups, channels=channels)


def make_images(spec: GroupNormSpec, images: Images, seed: int = 5) -> GroupProblem:
    """A problem with random numbers."""
    rng, channels = np.random.default_rng(seed), spec.groups * spec.channels

    def placed(values: np.ndarray, dtype: DType) -> np.ndarray:
        memory = np.zeros(values.size + 16, NUMPY[dtype])
        first = (-memory.ctypes.data // memory.itemsize) % (16 // memory.itemsize) + images.offset
        found = memory[first : first + values.size].reshape(values.shape)
        found[...] = values
        return found

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    shape, dtype = (images.count, channels, images.pixels), spec.loads[0].dtype
    x = placed(drawn(*shape) + np.float32(images.mean), dtype)
    parameters = [placed(drawn(channels), dtype) for _ in spec.loads[1:]]
    return GroupProblem(spec, images, x, parameters, placed(np.full(shape, np.nan, np.float32), spec.outs[0].dtype))
