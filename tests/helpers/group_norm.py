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
        groups: of an image; each is of so many `channels`.
        count: images.
        pixels: of a channel.
        offset: elements by which tensors begin behind an aligned address.
        mean: about which the numbers of an image lie, in deviations.
    """

    groups: int
    channels: int
    count: int
    pixels: int
    offset: int = 0
    mean: float = 0.0

    @property
    def strides(self) -> tuple[int, int]:
        """Of what channels have, along groups and along a group's elements, as the bridge walks them."""
        return self.channels * (self.groups > 1), int(self.channels > 1 and self.pixels == 1)

    @property
    def runs(self) -> tuple[int, int]:
        """Groups and elements that these strides walk; behind them comes the first number again, or the next one."""
        return self.groups if self.groups > 1 else self.count, self.channels if self.pixels == 1 else self.pixels


@dataclass
class GroupProblem:
    """Tensors of a launch: x, what channels are multiplied by and what is added to them, and the output."""

    spec: GroupNormSpec
    images: Images
    x: np.ndarray  # [count, groups * channels, pixels]
    parameters: list[np.ndarray]  # [groups * channels] each, or one number
    out: np.ndarray

    @property
    def tensors(self) -> list[np.ndarray]:
        """All of them; the output is the last."""
        return [self.x, *self.parameters, self.out]

    @property
    def rows(self) -> int:
        """Groups of all images."""
        return self.images.count * self.images.groups

    def arguments(self, pointers: Sequence[int]) -> np.ndarray:
        """The kernel's argument; a pointer for each of the tensors."""
        filled, images = np.zeros((), ARGUMENTS), self.images
        elements = images.channels * images.pixels
        filled["loads"][0], filled["outs"][0] = (pointers[0], 0, elements, 1), (pointers[-1], 0, elements, 1)
        for index, (pointer, load) in enumerate(zip(pointers[1:-1], self.spec.loads[1:], strict=True), 1):
            strides = (0, 0) if load.kind == "scalar" else images.strides
            filled["loads"][index] = (pointer, 0, *strides)
            filled["loads_outer"][index] = (0, int(images.pixels > 1), 0, *images.runs, 1, 0)
        filled["m"], filled["n"], filled["batch"] = self.rows, elements, 1
        return filled

    def reference(self) -> np.ndarray:
        """What the output should be, in float64."""
        spec = self.spec
        rows = self.x.astype(np.float64).reshape(self.images.count, self.images.groups, -1)
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


def make_spec(dtype: DType = F16, out: DType | None = None, kinds: Sequence[str] = ("tile", "tile")) -> GroupNormSpec:
    """Groups of channels, scaled and shifted by numbers of some kinds and the same type, with SiLU behind; or bare."""
    steps = (*AFFINE, *SILU) if kinds else ()
    parameters = (Access(kind, dtype, 1) for kind in kinds)
    value = steps[-1].result if steps else "acc0"
    outs = (Access("tile", out or dtype, 8),)
    return GroupNormSpec((Access("tile", dtype, 8), *parameters), outs, steps, (value,), True, epsilon=1e-5)


def make_images(spec: GroupNormSpec, images: Images, seed: int = 5) -> GroupProblem:
    """A problem with random numbers."""
    rng, channels = np.random.default_rng(seed), images.groups * images.channels

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
    parameters = [placed(drawn(1 if load.kind == "scalar" else channels), dtype) for load in spec.loads[1:]]
    return GroupProblem(spec, images, x, parameters, placed(np.full(shape, np.nan, np.float32), spec.outs[0].dtype))
