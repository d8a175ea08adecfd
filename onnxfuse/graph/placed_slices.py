"""Slices put in places that the model fixes: a ScatterND as a Concat, or as a Gather of what one puts together.

Exporters write `q[:, :, text:] = rotated` so (CogVideoX, CogView 4, GLM-Image), and columns in turn: torch.export by
places along what it has turned to be the first dimension, TorchScript by those of every element. ONNX Runtime's CUDA
provider copies such a slice by one thread, element after element, and reads four integers for each of such elements:
1,024 slices of 3,072 elements take 1.2 ms on an H200, and 2.6 million elements 0.17. Where a model is written that has
any fusion, slices along one dimension are put there by ops that copy elements side by side. No bit changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from onnx import GraphProto, NodeProto, helper

from onnxfuse.graph.graph import Graph
from onnxfuse.graph.known_nodes import constant
from onnxfuse.graph.stored_numbers import stored_integers
from onnxfuse.graph.unread import drop_unread

NewName = Callable[[str], str]


@dataclass(frozen=True)
class Places:
    """Where slices are put.

    Attributes:
        axis: of the value that they are put in.
        size: of that axis.
        along: the place of each slice along it.
    """

    axis: int
    size: int
    along: tuple[int, ...]

    @property
    def is_range(self) -> bool:
        """Whether one follows the other."""
        return self.along == tuple(range(self.along[0], self.along[0] + len(self.along)))


def put_side_by_side(scope: GraphProto, graph: Graph, new_name: NewName) -> None:
    """Edit a scope in place.

    Args:
        scope: what has become of it.
        graph: what it was, with its sizes and what is known before a run.
        new_name: makes a name that is not taken.
    """
    found = ((node, places_of(node, graph)) for node in scope.node if node.op_type == "ScatterND")
    placed = {_made(node): places for node, places in found if places is not None}
    if not placed:
        return
    indices = [node.input[1] for node in scope.node if _made(node) in placed]
    nodes = [each for node in scope.node for each in _instead(node, placed.get(_made(node)), new_name)]
    del scope.node[:]
    scope.node.extend(nodes)
    drop_unread(scope, indices)


def _made(node: NodeProto) -> str:
    return node.output[0] if node.output else ""


def _instead(node: NodeProto, places: Places | None, new_name: NewName) -> list[NodeProto]:
    if places is None:
        return [node]
    return _between(node, places, new_name) if places.is_range else _gathered(node, places, new_name)


def places_of(node: NodeProto, graph: Graph) -> Places | None:
    """Where a ScatterND puts whole slices along one axis; None for any other."""
    shape, index = graph.shape(node.input[0]), graph.tensor(node.input[1])
    if not shape or len(shape) < 2 or any(each.name == "reduction" and each.s != b"none" for each in node.attribute):
        return None
    known = _of_first_axis(index, graph) or _of_a_grid(index, graph)
    sizes = shape[: len(known)]
    others = [axis for axis, along in enumerate(known) if along != _every(sizes[axis])]
    axis = others[0] if others else 0
    size = shape[axis]
    if not known or len(known) > len(shape) or len(others) > 1 or not isinstance(size, int):
        return None
    along = tuple(place + size if place < 0 else place for place in known[axis])
    is_fit = len(set(along)) == len(along) > 0 and all(0 <= place < size for place in along)
    return Places(axis, size, along) if is_fit else None


def _every(size: object) -> list[int]:
    return list(range(size)) if isinstance(size, int) else []


def _of_first_axis(index: gs.Tensor, graph: Graph) -> list[list[int]]:
    """The places of slices along the first axis, `[slices, 1]`; none of an index of another shape."""
    shape = graph.shape(index.name)
    is_column = shape is not None and len(shape) == 2 and shape[1] == 1
    known = stored_integers(graph, index) if is_column else None
    return [known] if known else []


def _of_a_grid(index: gs.Tensor, graph: Graph) -> list[list[int]]:
    """The places along each axis of an index of every combination of them; none of another.

    TorchScript makes it of a range along each axis, expanded to all of them and put beside each other.
    """
    maker = index.inputs[0] if index.inputs else None
    rank = len(graph.shape(index.name) or ()) - 1
    if maker is None or maker.op != "Concat" or maker.attrs.get("axis") not in (-1, rank) or len(maker.inputs) != rank:
        return []
    found = [_along(part, axis, rank, graph) for axis, part in enumerate(maker.inputs)]
    return [along for along in found if along] if all(found) else []


def _along(part: gs.Tensor, axis: int, rank: int, graph: Graph) -> list[int]:
    """What `[1, .., places, .., 1]` has that is expanded to the grid, with an axis of one behind it."""
    unsqueeze = part.inputs[0] if part.inputs else None
    expand = unsqueeze.inputs[0].inputs[0] if unsqueeze is not None and unsqueeze.inputs[0].inputs else None
    if unsqueeze is None or unsqueeze.op != "Unsqueeze" or expand is None or expand.op != "Expand":
        return []
    own, grid = (graph.shape(each.name) for each in (expand.inputs[0], expand.outputs[0]))
    if own is None or grid is None or len(grid) != rank or graph.shape(part.name) != (*grid, 1):
        return []
    sizes = (*(1,) * (rank - len(own)), *own)
    known = _fixed(expand.inputs[0], graph)
    return known if sizes == tuple(grid[axis] if at == axis else 1 for at in range(rank)) else []


def _fixed(tensor: gs.Tensor, graph: Graph) -> list[int]:
    """Integers that no run changes, or every so many of a vector of them; none where they are not known."""
    maker = tensor.inputs[0] if tensor.inputs else None
    known = stored_integers(graph, tensor)
    if known is not None or maker is None:
        return known or []
    if maker.op in ("Reshape", "Unsqueeze"):
        return _fixed(maker.inputs[0], graph)
    return _every_so_many(maker, graph) if maker.op == "Slice" and len(maker.inputs) == 5 else []


def _every_so_many(maker: gs.Node, graph: Graph) -> list[int]:
    vector = stored_integers(graph, maker.inputs[0])
    limits = [stored_integers(graph, each) for each in maker.inputs[1:]]
    is_plain = vector is not None and len(graph.shape(maker.inputs[0].name) or ()) == 1
    if vector is None or not is_plain or any(each is None or len(each) != 1 for each in limits):
        return []
    start, end, _, step = (each[0] for each in limits if each is not None)
    return vector[start:end:step] if start >= 0 and end >= 0 and step > 0 else []


def _between(node: NodeProto, places: Places, new_name: NewName) -> list[NodeProto]:
    """What was there before and behind, as a Concat with what is put between."""
    data, _, updates = node.input
    ends = ((0, places.along[0]), (places.along[-1] + 1, places.size))
    before, behind = (_slice(data, places.axis, each, node.output[0], new_name) for each in ends)
    parts = [name for made in (before, behind) for name in (made[-1].output if made else ())]
    parts.insert(int(bool(before)), updates)
    joint = helper.make_node("Concat", parts, list(node.output), name=node.name, axis=places.axis)
    return [*before, *behind, joint]


def _slice(data: str, axis: int, ends: tuple[int, int], name: str, new_name: NewName) -> list[NodeProto]:
    """The nodes that make a range of an axis, the last one it; none of an empty one."""
    if ends[0] == ends[1]:
        return []
    made = new_name(f"{name}/{ends[0]}")
    limits = [constant(new_name(f"{made}/limit"), np.array([value], np.int64)) for value in (*ends, axis)]
    names = (limit.output[0] for limit in limits)
    return [*limits, helper.make_node("Slice", [data, *names], [made], name=made)]


def _gathered(node: NodeProto, places: Places, new_name: NewName) -> list[NodeProto]:
    """All that was there and what is put, from which each place takes its slice."""
    data, _, updates = node.input
    both, order = (new_name(f"{node.output[0]}/{part}") for part in ("both", "order"))
    taken = np.arange(places.size)
    taken[list(places.along)] = places.size + np.arange(len(places.along))
    return [
        helper.make_node("Concat", [data, updates], [both], name=both, axis=places.axis),
        constant(order, taken),
        helper.make_node("Gather", [both, order], list(node.output), name=node.name, axis=places.axis),
    ]
