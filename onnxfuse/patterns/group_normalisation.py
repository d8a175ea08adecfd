"""Normalisations of groups of channels: an op, or an InstanceNormalization between two Reshapes as torch exports it.

Scale and shift of each channel behind it are its kernel's, and so is an activation behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.dtypes import FLOATS_BY_ONNX, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, Size, node_label
from onnxfuse.graph.operators import qualified_op
from onnxfuse.ir.fusion import NONLINEAR, Axis, Dim, Load, Out, Step, Tensor, load_name
from onnxfuse.ir.group_normalisation import CHANNEL, GROUP, IMAGE, GroupNormalisation
from onnxfuse.limits import MAX_LOADS
from onnxfuse.patterns.behind_groups import Tail, is_known
from onnxfuse.patterns.behind_rows import PATTERN
from onnxfuse.patterns.epilogue_graph import LOAD, EpilogueGraph, Ref
from onnxfuse.patterns.insertion_points import InsertionPoints
from onnxfuse.patterns.match import LiveOut, Match, ProductlessMatch
from onnxfuse.patterns.normalisation_forms import DEFAULT_EPSILON

MOST_BEFORE = 4  # nodes that make the shape of the image again


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
        affine: how an op scales and shifts channels, in order.
    """

    anchor: gs.Node
    nodes: tuple[gs.Node, ...]
    x: gs.Tensor
    normal: gs.Tensor
    groups: int
    epsilon: float
    copied: tuple[gs.Node, ...] = ()
    affine: tuple[tuple[str, gs.Tensor], ...] = ()


def group_normalisations(graph: Graph, points: InsertionPoints) -> Iterator[tuple[Match, GroupNormalisation]]:
    """Every normalisation of groups of channels in a scope whose nodes no fusion has."""
    for node in graph.nodes:
        core = _between_views(graph, node) or _of_op(graph, node)
        if core is None or graph.is_folded(core.normal.name):
            continue
        tail = ChannelTail(graph, core, points.is_taken)
        tail.grow()
        lowered = _lowered(graph, core, tail)
        if lowered is None or any(map(points.is_taken, core.nodes)):
            continue
        try:
            yield points.placed(_match(graph, core, tail, lowered)), lowered
        except NotFusable:  # its parameters are computed of what it makes
            continue


def reserved_views(graph: Graph) -> frozenset[int]:
    """The nodes of normalisations between views: a product that took the first view would leave the others."""
    cores = (_between_views(graph, node) for node in graph.nodes)
    return frozenset(graph.index(node) for core in cores if core and _is_computed(graph, core) for node in core.nodes)


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
    epsilon = float(node.attrs.get("epsilon", DEFAULT_EPSILON))
    return Core(node, (node,), x, node.outputs[0], groups, epsilon, affine=_affine(node))


def _between_views(graph: Graph, node: gs.Node) -> Core | None:
    """An InstanceNormalization of groups as channels, `[b, groups, pixels]`, of ones and zeros.

    Where every channel is a group, their numbers, which a model may have more of than are known, are the channels' own.
    """
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
    if channels % groups or not (is_plain or groups == channels) or shaping is None:
        return None
    epsilon = float(node.attrs.get("epsilon", DEFAULT_EPSILON))
    affine = () if is_plain else _affine(node)
    return Core(node, (before, node, after), x, normal, groups, epsilon, shaping, affine)


def _affine(node: gs.Node) -> tuple[tuple[str, gs.Tensor], ...]:
    """How an op scales and shifts what it normalises."""
    return tuple(zip(("mul", "add"), node.inputs[1:], strict=True))


def _views(graph: Graph, node: gs.Node) -> tuple[gs.Node, gs.Node] | None:
    """The Reshapes before and behind a node, which alone reads and is read."""
    before = next((maker for maker in node.inputs[0].inputs if maker.op == "Reshape"), None)
    after = _only_reader(graph, node.outputs[0])
    is_between = before is not None and _only_reader(graph, before.outputs[0]) is node
    return (before, after) if is_between and after is not None and after.op == "Reshape" else None


def _shaping(graph: Graph, x: gs.Tensor, shapes: Sequence[gs.Tensor]) -> tuple[gs.Node, ...] | None:
    """The nodes that make shapes of that of x; None where they are made of anything else."""
    found: list[gs.Node] = []
    stack = [shape for shape in shapes if not is_known(graph, shape)]
    while stack:
        maker = next(iter(stack.pop().inputs), None)
        if maker is None or len(found) > MOST_BEFORE:
            return None
        if maker in found:
            continue
        found.append(maker)
        stack += [each for each in maker.inputs if each is not x and each.name and not is_known(graph, each)]
    return tuple(found)


def _only_reader(graph: Graph, value: gs.Tensor) -> gs.Node | None:
    return value.outputs[0] if len(value.outputs) == 1 and not graph.is_escaping(value.name) else None


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


def _is_computed(graph: Graph, core: Core) -> bool:
    """Whether the types and sizes of what the nodes normalise are a kernel's."""
    channels = _channels(graph, core.x)
    dtypes = {FLOATS_BY_ONNX.get(graph.dtype(tensor.name) or 0) for tensor in (core.x, core.normal)}
    return bool(channels) and (channels or 0) % core.groups == 0 and None not in dtypes and 0 < core.epsilon < math.inf


def _lowered(graph: Graph, core: Core, tail: ChannelTail) -> GroupNormalisation | None:
    """The fusion; None where its types or sizes are no kernel's."""
    if not _is_computed(graph, core) or not tail.is_known:
        return None
    axes = _axes(graph.shape(core.x.name) or (), core.groups)
    dims: tuple[Dim, ...] = ((IMAGE,), (GROUP, CHANNEL), *((axis.name,) for axis in axes[3:]))
    x, made = (Tensor(each.name, _known(graph, each), dims) for each in (core.x, tail.made))
    steps, value = tail.steps([*tail.operands])
    ops = {step.op for step in steps}
    named = {"add": "bias", "mul": "scale"}
    features = {"groups", *(ops & NONLINEAR), *(named[step.op] for step in steps if step.op in named and _loads(step))}
    return GroupNormalisation(
        anchor=node_label(core.anchor),
        pattern=PATTERN,
        features=tuple(sorted(features)),
        axes=axes,
        operands=(x, *tail.operands.values()),
        loads=tuple(map(Load, range(1 + len(tail.operands)))),
        steps=steps,
        outs=(Out(made, value),),
        centred=True,
        epsilon=core.epsilon,
        along=tuple(axis.name for axis in axes if axis.name not in (IMAGE, GROUP)),
    )


def _loads(step: Step) -> bool:
    """Whether it takes the number of a channel."""
    return any(isinstance(value, str) and value.startswith(load_name(0)[:-1]) for value in step.inputs)


def _known(graph: Graph, tensor: gs.Tensor) -> DType:
    return FLOATS_BY_ONNX[graph.dtype(tensor.name) or 0]


def _axes(shape: Sequence[Size], groups: int) -> tuple[Axis, ...]:
    """`b g c p0 p1`."""
    batch, channels, *pixels = (size if isinstance(size, int) else None for size in shape)
    own = [Axis("p" if len(pixels) == 1 else f"p{place}", size) for place, size in enumerate(pixels)]
    return (Axis(IMAGE, batch), Axis(GROUP, groups), Axis(CHANNEL, (channels or 0) // groups), *own)


class ChannelTail(Tail):
    """What is behind such a normalisation, with numbers of its channels.

    Attributes:
        operands: the numbers of channels, by name.
        is_known: whether those of an op itself are.
    """

    def __init__(self, graph: Graph, core: Core, is_taken: Callable[[gs.Node], bool]) -> None:
        super().__init__(graph, core.x, core.normal, is_taken)
        self.core = core
        self.operands: dict[str, Tensor] = {}
        self.is_known = True
        for op, parameter in core.affine:
            number = super().leaf(parameter)
            own = self._channels(parameter, ((GROUP, CHANNEL),)) if number is None else number
            if own is None:
                self.is_known = False
                break
            self.root = self.epilogue.apply(op, self.root, own)

    def grow(self) -> None:
        """Take in what is behind, and forget operands of nodes that are behind the end."""
        super().grow()
        read = {each.operand for each in self.epilogue.leaves(LOAD, (self.root,))}
        self.operands = {name: each for name, each in self.operands.items() if name in read}

    def leaf(self, tensor: gs.Tensor) -> Ref | None:
        """A number, or one of each channel."""
        number = super().leaf(tensor)
        return self._channels(tensor, _dims_of(self.graph, self.core, tensor)) if number is None else number

    def _channels(self, parameter: gs.Tensor, dims: tuple[Dim, ...] | None) -> Ref | None:
        dtype = FLOATS_BY_ONNX.get(self.graph.dtype(parameter.name) or 0)
        if dims is None or dtype is None or len(self.operands) > MAX_LOADS - 2:
            return None
        self.operands.setdefault(parameter.name, Tensor(parameter.name, dtype, dims))
        return self.epilogue.load(parameter.name)


def _match(graph: Graph, core: Core, tail: ChannelTail, lowered: GroupNormalisation) -> ProductlessMatch:
    """Its nodes; what lives out of it is one value."""
    return ProductlessMatch(
        products=(),
        nodes=tuple(sorted(map(graph.index, (*core.nodes, *tail.nodes)))),
        copied=tuple(sorted(map(graph.index, core.copied))),
        insertion_point=max(map(graph.index, (*core.nodes, *tail.nodes))),
        folded=(),
        constants=(),
        columns=lowered.channels,
        live_outs=(LiveOut(tail.made.name, (), ()),),
        split=frozenset(),
        epilogue=EpilogueGraph(),
        anchor=lowered.anchor,
    )
