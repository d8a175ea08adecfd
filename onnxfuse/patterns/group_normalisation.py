"""Normalisations of groups of channels: an op, or an InstanceNormalization between two Reshapes as torch exports it.

Scale and shift of each channel behind it are its kernel's, and so is an activation behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, Size, node_label
from onnxfuse.graph.operators import qualified_op
from onnxfuse.ir.fusion import Axis, Dim, Load, Out, Step, Tensor, Value, load_name, step_name
from onnxfuse.ir.group_normalisation import CHANNEL, GROUP, IMAGE, GroupNormalisation
from onnxfuse.ir.normalisation import NORMAL
from onnxfuse.patterns.epilogue_graph import EpilogueGraph
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import LiveOut, Match
from onnxfuse.patterns.normalisation import AFFINE, DEFAULT_EPSILON, PATTERN, NormalisationMatch

MOST_BEHIND = 3  # nodes that scale and shift
MOST_BEFORE = 4  # nodes that make the shape of the image again
ACTIVATIONS = {"Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh"}


@dataclass(frozen=True)
class Core:
    """The nodes that normalise, and what is behind them.

    Attributes:
        anchor: the node that it is named after.
        nodes: all of them.
        copied: nodes that tell the image's shape, which others read as well.
        x: the image `[b, channels, ...]`.
        normal: what the nodes make.
        groups: of an image.
        epsilon: what is added to the variance.
        affine: how channels are scaled and shifted, in order.
        activation: names of steps behind; each takes the last value, and `mul` that before it as well.
    """

    anchor: gs.Node
    nodes: tuple[gs.Node, ...]
    x: gs.Tensor
    normal: gs.Tensor
    groups: int
    epsilon: float
    copied: tuple[gs.Node, ...] = ()
    affine: tuple[tuple[str, gs.Tensor], ...] = ()
    activation: tuple[str, ...] = ()


def group_normalisations(graph: Graph, points: InsertionPoints) -> Iterator[tuple[Match, GroupNormalisation]]:
    """Every normalisation of groups of channels in a scope whose nodes no fusion has."""
    for node in graph.nodes:
        core = _between_views(graph, node) or _of_op(graph, node)
        if core is None or graph.is_folded(core.normal.name):
            continue
        core = _activated(graph, _with_parameters(graph, core, points), points)
        lowered = _lowered(graph, core)
        if lowered is None or any(map(points.is_taken, core.nodes)):
            continue
        try:
            yield points.placed(_match(graph, core, lowered)), lowered
        except NotFusable:  # its parameters are computed of what it makes
            continue


def reserved_views(graph: Graph) -> frozenset[int]:
    """The nodes of normalisations between views: a product that took the first view would leave the others."""
    cores = (_between_views(graph, node) for node in graph.nodes)
    return frozenset(graph.index(node) for core in cores if core and _lowered(graph, core) for node in core.nodes)


def _channels(graph: Graph, x: gs.Tensor) -> int | None:
    """How many an image `[b, channels, pixels ...]` has."""
    shape = graph.shape(x.name) or ()
    return shape[1] if len(shape) > 2 and isinstance(shape[1], int) else None


def _of_op(graph: Graph, node: gs.Node) -> Core | None:
    """An op of its own, whose scale and shift are of channels."""
    op = qualified_op(node)
    if op not in ("InstanceNormalization", "GroupNormalization") or len(node.inputs) != 3:
        return None
    x, *parameters = node.inputs
    channels = _channels(graph, x)
    groups = channels if op == "InstanceNormalization" else int(node.attrs.get("num_groups", 0))
    if not channels or not groups or any(graph.shape(each.name) != (channels,) for each in parameters):
        return None
    affine = tuple(zip(("mul", "add"), parameters, strict=True))
    epsilon = float(node.attrs.get("epsilon", DEFAULT_EPSILON))
    return Core(node, (node,), x, node.outputs[0], groups, epsilon, affine=affine)


def _between_views(graph: Graph, node: gs.Node) -> Core | None:
    """An InstanceNormalization of groups as channels, `[b, groups, pixels]`, of ones and zeros."""
    views = _views(graph, node) if qualified_op(node) == "InstanceNormalization" and len(node.inputs) == 3 else None
    if views is None:
        return None
    before, after = views
    x, normal = before.inputs[0], after.outputs[0]
    rows, image = graph.shape(before.outputs[0].name) or (), graph.shape(x.name) or ()
    channels, groups = _channels(graph, x), rows[1] if len(rows) == 3 else None
    if not channels or not isinstance(groups, int) or rows[0] != image[0] or graph.shape(normal.name) != image:
        return None
    numbers = [graph.known_value(each) for each in node.inputs[1:]]
    is_plain = all(known is not None and np.all(known == number) for known, number in zip(numbers, (1, 0), strict=True))
    shaping = _shaping(graph, x, [before.inputs[1], after.inputs[1]])
    if channels % groups or not is_plain or shaping is None:
        return None
    epsilon = float(node.attrs.get("epsilon", DEFAULT_EPSILON))
    return Core(node, (before, node, after), x, normal, groups, epsilon, copied=shaping)


def _views(graph: Graph, node: gs.Node) -> tuple[gs.Node, gs.Node] | None:
    """The Reshapes before and behind a node, which alone reads and is read."""
    before = next((maker for maker in node.inputs[0].inputs if maker.op == "Reshape"), None)
    after = _only_reader(graph, node.outputs[0])
    is_between = before is not None and _only_reader(graph, before.outputs[0]) is node
    return (before, after) if is_between and after is not None and after.op == "Reshape" else None


def _shaping(graph: Graph, x: gs.Tensor, shapes: Sequence[gs.Tensor]) -> tuple[gs.Node, ...] | None:
    """The nodes that make shapes of that of x; None where they are made of anything else."""
    found: list[gs.Node] = []
    stack = [shape for shape in shapes if not _is_known(graph, shape)]
    while stack:
        maker = next(iter(stack.pop().inputs), None)
        if maker is None or len(found) > MOST_BEFORE:
            return None
        if maker in found:
            continue
        found.append(maker)
        stack += [each for each in maker.inputs if each is not x and each.name and not _is_known(graph, each)]
    return tuple(found)


def _is_known(graph: Graph, tensor: gs.Tensor) -> bool:
    """Whether every number of a tensor is known before the run."""
    known = graph.known_value(tensor)
    return known is not None and all(isinstance(number, (int, float, np.number)) for number in known.flat)


def _only_reader(graph: Graph, value: gs.Tensor) -> gs.Node | None:
    return value.outputs[0] if len(value.outputs) == 1 and not graph.is_escaping(value.name) else None


def _with_parameters(graph: Graph, core: Core, points: InsertionPoints) -> Core:
    """The same with what scales and shifts channels behind it."""
    for _ in range(MOST_BEHIND):
        node = _only_reader(graph, core.normal)
        if node is None or node.op not in AFFINE or points.is_taken(node):
            break
        first, second = node.inputs
        parameter = second if first is core.normal else first
        if parameter is core.normal or _dims_of(graph, core, parameter) is None:
            break
        affine = (*core.affine, (AFFINE[node.op], parameter))
        core = replace(core, nodes=(*core.nodes, node), normal=node.outputs[0], affine=affine)
    return core


def _activated(graph: Graph, core: Core, points: InsertionPoints) -> Core:
    """The same with an activation behind it: SiLU as a product with the sigmoid, or one of a node."""
    readers = core.normal.outputs
    if graph.is_escaping(core.normal.name) or any(map(points.is_taken, readers)):
        return core
    if len(readers) == 1 and readers[0].op in ACTIVATIONS:
        last, nodes = readers[0], list(readers)
        steps: tuple[str, ...] = (ACTIVATIONS[last.op],)
    elif sorted(reader.op for reader in readers) == ["Mul", "Sigmoid"]:
        last, gate = sorted(readers, key=lambda reader: reader.op)
        if _only_reader(graph, gate.outputs[0]) is not last:
            return core
        nodes, steps = [gate, last], ("sigmoid", "mul")
    else:
        return core
    if graph.shape(last.outputs[0].name) != graph.shape(core.x.name):
        return core
    return replace(core, nodes=(*core.nodes, *nodes), normal=last.outputs[0], activation=steps)


def _dims_of(graph: Graph, core: Core, parameter: gs.Tensor) -> tuple[Dim, ...] | None:
    """The dimensions of a parameter behind the normalisation: one of channels, `[channels, 1, 1]`, or none."""
    shape, rank = graph.shape(parameter.name), len(graph.shape(core.x.name) or ())
    if shape is None or len(shape) > rank or graph.dtype(parameter.name) not in FLOATS_BY_ONNX:
        return None
    whole = [1] * (rank - len(shape)) + list(shape)
    if any(size != 1 for place, size in enumerate(whole) if place != 1):
        return None
    if whole[1] not in (1, _channels(graph, core.x)):
        return None
    own: list[Dim] = [()] * len(shape)
    if whole[1] != 1:
        own[1 - rank] = (GROUP, CHANNEL)
    return tuple(own)


def _lowered(graph: Graph, core: Core) -> GroupNormalisation | None:
    """The fusion; None where its types or sizes are no kernel's."""
    shape, channels = graph.shape(core.x.name) or (), _channels(graph, core.x)
    dtypes = [FLOATS_BY_ONNX.get(graph.dtype(name) or 0) for name in (core.x.name, core.normal.name)]
    if not channels or channels % core.groups or None in dtypes or not 0 < core.epsilon < math.inf:
        return None
    axes = _axes(shape, core.groups, channels // core.groups)
    dims: tuple[Dim, ...] = ((IMAGE,), (GROUP, CHANNEL), *((axis.name,) for axis in axes[3:]))
    x, made = (
        Tensor(name, _known(dtype), dims) for name, dtype in zip((core.x.name, core.normal.name), dtypes, strict=True)
    )
    found = _steps(graph, core)
    if found is None:
        return None
    steps, operands = found
    kinds = {"add": "bias", "mul": "scale"}
    return GroupNormalisation(
        anchor=node_label(core.anchor),
        pattern=PATTERN,
        features=tuple(sorted({"groups", *(kinds[op] for op, _ in core.affine), *core.activation[:1]})),
        axes=axes,
        operands=(x, *operands),
        loads=tuple(map(Load, range(1 + len(operands)))),
        steps=steps,
        outs=(Out(made, steps[-1].result if steps else NORMAL),),
        centred=True,
        epsilon=core.epsilon,
    )


def _known(dtype: DType | None) -> DType:
    assert dtype is not None, "a float"
    return dtype


def _axes(shape: Sequence[Size], groups: int, channels: int) -> tuple[Axis, ...]:
    """`b g c p0 p1`."""
    sizes = [size if isinstance(size, int) else None for size in shape]
    pixels = [Axis("p" if len(sizes) == 3 else f"p{place}", size) for place, size in enumerate(sizes[2:])]
    return (Axis(IMAGE, sizes[0]), Axis(GROUP, groups), Axis(CHANNEL, channels), *pixels)


def _steps(graph: Graph, core: Core) -> tuple[tuple[Step, ...], tuple[Tensor, ...]] | None:
    """What is done to a normalised element, and the numbers of channels that it takes; known numbers are none."""
    steps: list[Step] = []
    operands: dict[str, Tensor] = {}
    last: Value = NORMAL
    for op, parameter in core.affine:
        known = graph.known_value(parameter)
        value: Value = float(known.flat[0]) if known is not None and known.size == 1 else ""
        if value == "":
            dtype = FLOATS_BY_ONNX.get(graph.dtype(parameter.name) or 0)
            is_own = graph.shape(parameter.name) == (_channels(graph, core.x),)  # an op's
            dims = ((GROUP, CHANNEL),) if is_own else _dims_of(graph, core, parameter)
            if dtype is None or dims is None:
                return None
            operands.setdefault(parameter.name, Tensor(parameter.name, dtype, dims))
            value = load_name(1 + [*operands].index(parameter.name))
        steps.append(Step(step_name(len(steps)), op, (last, value)))
        last = steps[-1].result
    before = last
    for op in core.activation:
        inputs = (before, last) if op == "mul" else (last,)
        steps.append(Step(step_name(len(steps)), op, inputs))
        last = steps[-1].result
    return tuple(steps), tuple(operands.values())


def _match(graph: Graph, core: Core, lowered: GroupNormalisation) -> NormalisationMatch:
    """Its nodes; what lives out of it is one value."""
    return NormalisationMatch(
        products=(),
        nodes=tuple(sorted(map(graph.index, core.nodes))),
        copied=tuple(sorted(map(graph.index, core.copied))),
        insertion_point=graph.index(core.nodes[-1]),
        folded=(),
        constants=(),
        columns=lowered.channels,
        live_outs=(LiveOut(core.normal.name, (), ()),),
        split=frozenset(),
        epilogue=EpilogueGraph(),
        anchor=lowered.anchor,
    )
