"""A trial on the GPU: every implementation of a site compiled, put into models, timed side by side, and remembered."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onnxfuse.device import DeviceSpec
from onnxfuse.graph.extract import fused_nodes, site_model, stock_nodes, subgraph_id
from onnxfuse.graph.fallback_body import opsets_of
from onnxfuse.graph.padded_rows import PaddedRows
from onnxfuse.ir.fusion import Fusion, Pointwise, Tensor
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.compile_kernels import Kernels, compile_implementations
from onnxfuse.lowering.fused_node import replacement
from onnxfuse.lowering.pack import pack_implementations
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.runtime import driver
from onnxfuse.runtime.session import onnxruntime
from onnxfuse.runtime.timing import WEIGHT_SCALE, Port, copies_for, time_models
from onnxfuse.schedule.variant import AnyVariant
from onnxfuse.tune.search import Trial
from onnxfuse.tune.timing_cache import Key, read_times, write_times


def site_key(site: Site) -> str:
    """Equal for sites that have equal times: the same nodes, axes, sizes and types, whatever they are called."""
    whole = replacement(site.one_kernel, "")
    return "\n".join([subgraph_id(whole), *(whole.attributes[name] for name in _KEY_ATTRIBUTES)])


LARGE_INTEGER = 8  # of 4 bits, about what a scale is multiplied by
_KEY_ATTRIBUTES = ("axes", "sizes", "problem", "in_types", "out_types")


def group_sites(sites: Iterable[Site]) -> list[list[Site]]:
    """Sites with equal times, together."""
    groups: dict[str, list[Site]] = {}
    for site in sites:
        groups.setdefault(site_key(site), []).append(site)
    return list(groups.values())


def sizes_at(fusion: Pointwise, loop: Sequence[str], size: int) -> dict[str, int]:
    """A size for every axis such that a loop has about so many steps.

    Its innermost unknown axis takes what the others leave.

    Args:
        fusion: of the axes.
        loop: the axes of the mapping's m or n.
        size: of the loop.
    """
    sizes = {axis.name: axis.size for axis in fusion.axes}
    unknown = [axis for axis in loop if sizes[axis] is None]
    known = math.prod(sizes[axis] or 1 for axis in loop)
    chosen = {unknown[-1]: max(size // known, 1)} if unknown else {}
    return {axis: chosen.get(axis, size or 1) for axis, size in sizes.items()}


@dataclass(frozen=True)
class SessionTimer:
    """Times trials in sessions of ONNX Runtime on the GPU; what was timed before comes from the cache."""

    cache: Path | None

    def __call__(self, trial: Trial) -> Mapping[str, float]:
        """Microseconds of each implementation of the trial; one that fails to run has none.

        Times are kept only where every implementation has one: what failed may have failed for a moment, as where a
        shared GPU had no memory left.

        Raises:
            CompileError: NVRTC refused a kernel.
            DeviceError: ONNX Runtime or the bridge does not load.
        """
        inputs, outputs = ports(trial)
        key = self._key(trial, inputs)
        known = read_times(self.cache, key)
        if known is not None:
            return known
        copies = copies_for([*inputs, *outputs])
        times = time_models(trial_models(trial, inputs, outputs, copies), inputs, outputs, copies)
        if times.keys() == trial.implementations.keys():
            write_times(self.cache, key, times)
        return times

    def _key(self, trial: Trial, inputs: Sequence[Port]) -> Key:
        return {
            "gpu": driver.device_name(),
            "driver": driver.driver_version(),
            "onnxruntime": onnxruntime().__version__,
            "onnxfuse": version("onnxfuse"),
            "problem": site_key(trial.site),
            "shapes": [list(port.shape) for port in inputs],
            "kernels": {
                name: [_digest(*pair) for pair in implementation.variants]
                for name, implementation in trial.implementations.items()
                if implementation is not None
            },
        }


def trial_models(trial: Trial, inputs: Sequence[Port], outputs: Sequence[Port], copies: int) -> dict[str, bytes]:
    """A model of each implementation, by its name."""
    made = [(port.name, port.element, port.shape) for port in outputs]
    kernels = compile_implementations(
        implementation for implementation in trial.implementations.values() if implementation is not None
    )
    models = {}
    for name, implementation in trial.implementations.items():
        nodes, archive = _written(trial, implementation, kernels)
        shapes = _shapes(trial, implementation, inputs)
        read = [(port.name, port.element, shape) for port, shape in zip(inputs, shapes, strict=True)]
        models[name] = site_model(opsets_of(trial.site.graph, nodes), nodes, read, made, copies, archive)
    return models


def _written(trial: Trial, implementation: Implementation | None, kernels: Kernels) -> tuple[list[Any], bytes]:
    """The site's nodes in one implementation, and the kernels that they read."""
    whole = replacement(replace(trial.site.one_kernel, transposed={}), "")
    if implementation is None:
        return stock_nodes(whole), b""
    archive, (kernel,) = pack_implementations([implementation], kernels)
    sizes = _sizes(trial)
    wide = {
        tensor.name: _shape(tensor, sizes) for tensor in trial.site.fusion.operands if tensor.name in whole.expanded
    }
    factors = {name: _factors(trial.site, name, shape) for name, shape in wide.items()}
    return fused_nodes(whole, replacement(implementation, kernel), factors), archive


def _factors(site: Site, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Along each dimension how often an expanded operand has what the model gives."""
    told = site.match.expanded.get(name)
    return (
        (1,) * len(shape)
        if told is None
        else tuple(1 if entry == 1 else size for entry, size in zip(told.entries, shape, strict=True))
    )


def _shapes(trial: Trial, implementation: Implementation | None, inputs: Sequence[Port]) -> Iterator[tuple[int, ...]]:
    """The inputs' shapes: one implementation may take a weight in the model's order where another does not."""
    for port, tensor in zip(inputs, trial.site.fusion.inputs, strict=True):
        perm = trial.site.transposed.get(tensor.name)
        as_model = implementation is None or tensor.name not in implementation.transposed
        if as_model and isinstance(perm, PaddedRows):
            yield perm.model_shape(port.shape)
        elif not as_model or not isinstance(perm, tuple):
            yield port.shape
        else:
            yield tuple(port.shape[perm.index(place)] for place in range(len(perm)))


def _digest(device: DeviceSpec, variant: AnyVariant) -> str:
    return hashlib.sha256(kernel_source(variant, device).encode()).hexdigest()


def ports(trial: Trial) -> tuple[list[Port], list[Port]]:
    """What one copy of the trial's site reads and makes."""
    fusion, sizes = trial.site.fusion, _sizes(trial)
    scales = _weight_scales(fusion) if isinstance(fusion, Fusion) else {}
    inputs = [
        Port(f"x{index}", tensor.dtype.onnx, _given(trial.site, tensor, sizes), scales.get(tensor.name, 1.0))
        for index, tensor in enumerate(fusion.inputs)
    ]
    return inputs, [
        Port(f"y{index}", tensor.dtype.onnx, _shape(tensor, sizes)) for index, tensor in enumerate(fusion.outputs)
    ]


def _weight_scales(fusion: Fusion) -> dict[str, float]:
    """Of the random values of what holds rhs."""
    scales = {tensor.name: WEIGHT_SCALE for group in fusion.stored_rhs for tensor in group}
    return scales | {each.scales.name: WEIGHT_SCALE / LARGE_INTEGER for each in fusion.stored}


def _given(site: Site, tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that an input has before it is expanded."""
    shape = _shape(tensor, sizes)
    return tuple(size // times for size, times in zip(shape, _factors(site, tensor.name, shape), strict=True))


def _sizes(trial: Trial) -> dict[str, int]:
    """A size for every axis: of a loop that the trial's size says nothing of, the one that the plan was made for."""
    found: dict[str, int] = {}
    for loop, size in reversed(_loops(trial)):  # an axis of both m and n is of m
        sizes = sizes_at(trial.site.fusion, loop, size)
        found |= {axis: sizes[axis] for axis in loop}
    return sizes_at(trial.site.fusion, (), 0) | found


def _loops(trial: Trial) -> list[tuple[tuple[str, ...], int]]:
    """The loops and their sizes; those of an attention are equal."""
    site, mapping = trial.site, trial.site.mapping
    if site.whole is not None:
        return [(mapping.m, trial.size), (mapping.n, trial.size)]
    sizes, rhs = site.plans[0].sizes, _rhs(site.fusion)
    assert sizes is not None, "a plan of a product has them"
    problem = sizes.at(trial.size)
    # Of batches that share rhs, the rows count together.
    shared = not any(axis in rhs.axes for axis in mapping.batch)
    rows = (*mapping.batch, *mapping.m) if shared else mapping.m
    batches = [] if shared else [(mapping.batch, int(problem.batch))]
    return [(rows, problem.m), (mapping.n, problem.n), (mapping.k, problem.k), *batches]


def _rhs(fusion: Pointwise) -> Tensor:
    assert isinstance(fusion, Fusion), "a product has one"
    return fusion.rhs[0]


def _shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = [math.prod(sizes[axis] for axis in dim) for dim in tensor.dims]
    if tensor.wide is not None:
        dimension, size = tensor.wide
        shape[dimension] = size
    return tuple(shape)
