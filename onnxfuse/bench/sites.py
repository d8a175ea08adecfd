"""How long each fused node takes, beside the nodes that it stands for and beside what the device allows.

A site's two models are timed side by side as `tune` times implementations: copies of the site that together miss the
cache, in one CUDA graph. Weights are random and reach both as inputs. The floor is the larger of two times: every byte
of its inputs and outputs once, at the rate at which ONNX Runtime's Neg reads and writes a large tensor in the same run;
and its products' operations, at the rate of ONNX Runtime's MatMul of two large square matrices of the same type.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onnxfuse.bench.contender import open_on
from onnxfuse.graph.fused_nodes import (
    AFTER,
    BEFORE,
    SHAPE_OF,
    DistinctNode,
    copy_model,
    lengths_of,
    product_model,
    read_sites,
    site_models,
    write_with_shapes,
)
from onnxfuse.progress import Progress, counted
from onnxfuse.runtime.feeds import Array, input_specs, make_feeds
from onnxfuse.runtime.ort_values import to_ort_value
from onnxfuse.runtime.timing import WEIGHT_SCALE, Port, copies_for, time_models
from onnxfuse.staging import scratch_folder

PROBES = {"cuda": (1 << 26, 8192), "cpu": (1 << 20, 256)}  # floats that are copied, side of the matrices
COPIES = 2


@dataclass(frozen=True)
class SiteTimes:
    """One distinct site; times in microseconds.

    Attributes:
        name: of the first fused node of its kind.
        count: how many of the model are like it.
        replaces: the original nodes' operators.
        before: of the original nodes; None where they fail to run by themselves.
        after: of the fused node.
        floor: what the device allows; None where a rate of the device could not be measured.
        bound_by: `bytes` or `flops`, whichever makes the floor; empty without one.
        bytes: that it reads and writes at least.
        flops: of its products.
    """

    name: str
    count: int
    replaces: tuple[str, ...]
    before: float | None
    after: float | None
    floor: float | None
    bound_by: str
    bytes: int
    flops: int

    @property
    def ratio(self) -> float | None:
        """How many times as fast the fused node is."""
        return self.before / self.after if self.before and self.after else None

    def to_dict(self) -> dict[str, Any]:
        """This site in what `--json` prints."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass
class Rates:
    """What the device allows, measured when first asked; None where what measures it fails to run."""

    device: str

    @functools.cached_property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        data, *ports = copy_model(PROBES[self.device][0], COPIES)
        return self._rate(8 * PROBES[self.device][0], data, *map(_as_ports, ports))

    def product(self, element: int) -> float | None:
        """Operations a second of products of one ONNX element type."""
        if element not in self._products:
            data, *ports = product_model(element, PROBES[self.device][1], COPIES)
            self._products[element] = self._rate(2 * PROBES[self.device][1] ** 3, data, *map(_as_ports, ports))
        return self._products[element]

    @functools.cached_property
    def _products(self) -> dict[int, float | None]:
        return {}

    def _rate(self, amount: int, data: bytes, inputs: list[Port], outputs: list[Port]) -> float | None:
        microseconds = time_models({"": data}, inputs, outputs, COPIES, self.device).get("")
        return None if microseconds is None else amount / microseconds * 1e6


def time_sites(
    optimized: Path, feeds: Mapping[str, Array], device: str, progress: Progress, session_options: Any = None
) -> tuple[SiteTimes, ...]:
    """Time each distinct fused node of a model's main graph, at the shapes that it has with these inputs.

    Raises:
        ModelError: the model cannot be run.
        DeviceError: ONNX Runtime does not start its CUDA provider.
    """
    sites = read_sites(optimized, _shapes(optimized, feeds, device, session_options))
    rates = Rates(device)
    return tuple(_time_site(site, rates) for site in counted("timing sites", sites, progress))


def _inputs_of(session: Any, feeds: Mapping[str, Array]) -> dict[str, Any]:
    """Those of the feeds that a session reads."""
    specs = input_specs(session)
    values = {name: array for name, array in feeds.items() if name in {spec.name for spec in specs}}
    checked = make_feeds(specs, values)
    return {spec.name: to_ort_value(spec, checked[spec.name]) for spec in specs}


def _shapes(
    model: Path, feeds: Mapping[str, Array], device: str, session_options: Any = None
) -> dict[str, tuple[int, ...]]:
    """The shapes of what fused nodes read and make in one run."""
    with scratch_folder() as folder:
        path = folder / "shapes.onnx"
        names = write_with_shapes(model, path)
        if not names:
            return {}
        session = open_on(path, device, session_options=session_options)
        results = session.run([f"{SHAPE_OF}{name}" for name in names], _inputs_of(session, feeds))
    return {name: tuple(map(int, value)) for name, value in zip(names, results, strict=True)}


def _time_site(site: DistinctNode, rates: Rates) -> SiteTimes:
    inputs, outputs = _as_ports(site.inputs, site.weights, lengths_of(site)), _as_ports(site.outputs)
    moved = sum(port.bytes for port in (*inputs, *outputs))
    copies = copies_for([*inputs, *outputs]) if rates.device == "cuda" else COPIES
    times = time_models(site_models(site, copies), inputs, outputs, copies, rates.device)
    floor, bound_by = _floor(moved, site.flops, rates, inputs[0].element)
    return SiteTimes(
        name=site.name,
        count=site.count,
        replaces=site.replaces,
        before=times.get(BEFORE),
        after=times.get(AFTER),
        floor=floor,
        bound_by=bound_by,
        bytes=moved,
        flops=site.flops,
    )


def _floor(moved: int, flops: int, rates: Rates, element: int) -> tuple[float | None, str]:
    """The microseconds that the device allows for some bytes and operations, and which of the two makes them."""
    needed = {"bytes": (moved, rates.bandwidth)} | ({"flops": (flops, rates.product(element))} if flops else {})
    floors = {name: amount / rate * 1e6 for name, (amount, rate) in needed.items() if rate is not None}
    if len(floors) < len(needed):
        return None, ""
    bound_by = max(floors, key=lambda name: floors[name])
    return floors[bound_by], bound_by


def _as_ports(
    ports: Any, weights: frozenset[int] = frozenset(), known: Mapping[str, int] = MappingProxyType({})
) -> list[Port]:
    """Random inputs of the size of activations and weights, but those whose value is known."""
    scales = (WEIGHT_SCALE if index in weights else 1.0 for index in range(len(ports)))
    return [
        Port(name, element, tuple(shape), scale, known.get(name))
        for (name, element, shape), scale in zip(ports, scales, strict=True)
    ]
