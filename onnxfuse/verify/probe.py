"""Copies of a model whose intermediate values can be read: what the fused nodes make, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import helper

from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.save import save_model


@dataclass(frozen=True)
class Probe:
    """A value to be read: its name, its ONNX element type, and whether it is an output of the model anyway."""

    name: str
    element: int
    is_output: bool


def fused_values(original: Path, optimized: Path) -> list[Probe]:
    """What the fused nodes of the main graph make and the original makes under the same name, in the graph's order.

    Raises:
        ModelError: a model cannot be read.
    """
    made = [name for node in load_model(optimized).proto.graph.node if node.domain == DOMAIN for name in node.output]
    graph = Graph(load_model(original))
    outputs = {value.name for value in graph.model.proto.graph.output}
    own = {name for node in graph.model.proto.graph.node for name in node.output}
    known = ((name, graph.dtype(name)) for name in made if name in own)
    return [Probe(name, element, name in outputs) for name, element in known if element]


def write_probed(model: Path, probes: Sequence[Probe], target: Path) -> Path:
    """Write a copy of a model in which some values are outputs as well, external data with it.

    Raises:
        ModelError: the model cannot be read.
        OutputError: the disk refuses.
    """
    source = load_model(model)
    source.proto.graph.output.extend(
        helper.make_tensor_value_info(probe.name, probe.element, None) for probe in probes if not probe.is_output
    )
    save_model(source.proto, source, target)
    return target
