"""The best tiles of a drawn problem, each launched by itself in a CUDA graph: what a plan could have chosen."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cupy
import numpy as np

from onnxfuse.analysis.axis_mapping import map_axes
from onnxfuse.analysis.vector_width import analyse
from onnxfuse.analysis.weight_order import with_padded_rows
from onnxfuse.device import DeviceSpec
from onnxfuse.ir.fusion import Fusion
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.plan import make_plan, replan
from onnxfuse.schedule.variant import ProductPlan, ProductVariant
from tests.helpers.kernel_problem import ARGUMENTS
from tests.perf.drawn import Drawn, model
from tests.perf.kernels import graph_of, image, launcher, timed_replay

NEAR, NEAREST = 1.6, 10  # tiles whose estimate is within this of the best are timed, so many at most
FAR, FURTHER = 5.0, 14  # and as many others, drawn at random, where the cost model is to be fitted
ROUNDS = 5
DIGITS = 2  # of microseconds
ACCESS = 16  # bytes, which addresses and pitches of TMA are multiples of


@dataclass(frozen=True)
class Choice:
    """A kernel and its estimated microseconds."""

    estimate: float
    variant: ProductVariant


@dataclass(frozen=True)
class Planned:
    """A problem's fusion, the order in which its weights are stored, its plan's tile, and the tiles to time."""

    fusion: Fusion
    order: str
    chosen: str
    choices: tuple[Choice, ...]


def plan_of(
    problem: Drawn, device: DeviceSpec, keep_weights: bool = False, weights: int = 1
) -> tuple[Fusion, ProductPlan] | None:
    """The fusion and the plan of a site by itself; None where the model leaves it to ONNX Runtime."""
    sites = analyse_model(model(problem, 1, weights), (device,), keep_weights=keep_weights).sites
    fusion = sites[0].fusion if len(sites) == 1 else None
    if not isinstance(fusion, Fusion) or not sites[0].plans:
        return None
    return fusion, sites[0].plans[0]


def plan_as_it_lies(problem: Drawn, device: DeviceSpec) -> tuple[Fusion, ProductPlan] | None:
    """The same of weights that stay as they lie, and are inputs but where only initializers are brought together."""
    return plan_of(problem, device, keep_weights=True, weights=int(problem.kind == "qkv"))


def plan_padded(problem: Drawn, device: DeviceSpec) -> tuple[Fusion, ProductPlan] | None:
    """The same of weights [n, k] with zeros behind their rows; None where a plan would store none."""
    found = plan_as_it_lies(replace(problem, order="nk"), device)
    padded = found and with_padded_rows(found[0], {rhs.name for rhs in found[0].rhs})
    if not padded:
        return None
    fusion, mapping = padded[0], map_axes(padded[0])
    return fusion, make_plan(fusion, mapping, analyse(fusion, mapping), device, exact_fp32=False)


def is_odd(problem: Drawn) -> bool:
    """Whether rows along k begin where TMA cannot read."""
    return problem.k * problem.element_bytes % ACCESS != 0


def order_of(fusion: Fusion) -> str:
    """In which the weights are stored."""
    return "nk" if fusion.rhs[0].axes[-1] == "k" else "kn"


def planned(problem: Drawn, device: DeviceSpec, further: int = 0) -> Planned | None:
    """What to time, with so many tiles more than the nearest; None where the model is not one kernel."""
    own = plan_of(problem, device)
    if own is None:
        return None
    order = order_of(own[0])
    is_padded = row_of(own[0], problem) > problem.k
    known = plan_of(replace(problem, order=order, dynamic=False), device, keep_weights=not is_padded)
    if known is None:
        return None
    chosen = next(each for each in own[1].tried if each.min_m <= problem.m <= each.max_m)
    fusion, plan = known
    tiles = [pair for pair in plan.ranked[0].tiles if math.isfinite(pair[0])]
    near = [pair for pair in tiles if pair[0] <= NEAR * tiles[0][0]][:NEAREST]
    near += [pair for pair in tiles if str(pair[1].tile) == str(chosen.tile) and pair not in near]
    far = [pair for pair in tiles if pair[0] <= FAR * tiles[0][0] and pair not in near]
    drawn = random.Random(str(problem)).sample(far, min(further, len(far)))
    choices = (Choice(us, replan(plan, entry).variants[0]) for us, entry in near + drawn)
    return Planned(fusion, order, str(chosen.tile), tuple(choices))


def row_of(fusion: Fusion, problem: Drawn) -> int:
    """Elements of a row of a weight [n, k], with the zeros behind it."""
    wide = fusion.rhs[0].wide
    return wide[1] if wide is not None and fusion.rhs[0].axes[-1] == "k" else problem.k


def compile_tiles(found: Planned, device: DeviceSpec, folder: Path) -> None:
    """Fill the cache."""
    for choice in found.choices:
        image(choice.variant, device, folder)


class Buffers:
    """Copies of a problem's tensors on the GPU, random; what `kernels.launcher` takes."""

    def __init__(self, problem: Drawn, fusion: Fusion, copies: int, weights: int) -> None:
        self.row, self.fusion, self.copies = problem, fusion, copies
        self.x = [_random(problem, (problem.m, problem.k)) for _ in range(copies)]
        count = len({rhs.name for rhs in fusion.rhs})
        columns = problem.width // count
        self.row_elements = row_of(fusion, problem)
        shape = (problem.k, columns) if problem.order == "kn" else (columns, self.row_elements)
        scale = problem.k**-0.5
        self.weights = [[_random(problem, shape, scale) for _ in range(count)] for _ in range(weights)]
        self.weight = [each[0] for each in self.weights]
        self.bias = _random(problem, (problem.width,))
        self.residual = [_random(problem, (problem.m, problem.n)) for _ in range(copies)]
        self.outs = [[_random(problem, (problem.m, problem.n)) for _ in fusion.outs] for _ in range(copies)]
        self.product: list[cupy.ndarray] = []

    def arguments(self, copy: int) -> np.ndarray:
        problem, made = self.row, np.zeros(1, ARGUMENTS)
        made["lhs"][0] = (self.x[copy].data.ptr, 0, problem.k, 1)
        weights = self.weights[copy % len(self.weights)]
        columns = problem.width // len(weights)
        strides = (columns, 1) if problem.order == "kn" else (1, self.row_elements)
        for part in range(problem.parts):
            packed = len(weights) < problem.parts
            offset = part * problem.n * strides[1] * problem.element_bytes if packed else 0
            made["rhs"][0, part] = (weights[0 if packed else part].data.ptr + offset, 0, *strides)
        for index, load in enumerate(self.fusion.loads):
            if "m" in _rows_of(self.fusion, load.operand):
                made["loads"][0, index] = (self.residual[copy].data.ptr, 0, problem.n, 1)
            else:
                start = self.bias.data.ptr + problem.element_bytes * (load.part or 0) * problem.n
                made["loads"][0, index] = (start, 0, 0, 1)
        for index, out in enumerate(self.outs[copy]):
            made["outs"][0, index] = (out.data.ptr, 0, problem.n, 1)
        for name, value in (("m", problem.m), ("n", problem.n), ("k", problem.k), ("batch", 1)):
            made[name] = value
        return made


def _rows_of(fusion: Fusion, operand: int) -> str:
    """`m` for an operand that varies along the rows."""
    lhs = {axis for axis in fusion.lhs.axes if axis not in fusion.rhs[0].axes}
    return "m" if lhs & {*fusion.operands[operand].axes} else ""


def _random(problem: Drawn, shape: tuple[int, ...], scale: float = 1.0) -> cupy.ndarray:
    """Normal numbers, bfloat16 as the bits of the upper halves."""
    drawn = cupy.random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    if problem.element_bytes == 4:
        return drawn
    if problem.is_bfloat16:
        return (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return drawn.astype(np.float16)


def time_tiles(
    problem: Drawn, found: Planned, copies: int, weights: int, device: DeviceSpec, folder: Path
) -> dict[str, tuple[float, float]]:
    """Microseconds and estimate of each tile, timed in turn."""
    buffers = Buffers(replace(problem, order=found.order), found.fusion, copies, weights)
    stream = cupy.cuda.Stream(non_blocking=True)
    launches = [launcher(choice.variant, device, buffers, folder) for choice in found.choices]
    replays = [graph_of(launch, copies, stream) for launch in launches]
    times = in_turn([partial(timed_replay, replay, stream) for replay in replays])
    return {
        str(choice.variant.tile): (round(us, DIGITS), round(choice.estimate, DIGITS))
        for choice, us in zip(found.choices, times, strict=True)
    }


def in_turn(runners: Sequence[Callable[[], float]], rounds: int = ROUNDS) -> list[float]:
    """The median of each, all run in every round, in an order that changes."""
    order = np.random.default_rng(0)
    times: list[list[float]] = [[] for _ in runners]
    for runner in runners:
        runner()
    for _ in range(rounds):
        for index in order.permutation(len(runners)):
            times[index].append(runners[index]())
    return [statistics.median(each) for each in times]
