"""What holds of every match beside its columns, of products or of normalised rows."""

from __future__ import annotations

from collections.abc import Collection

from onnxfuse.errors import NotFusable
from onnxfuse.graph.constant_propagation import is_complete
from onnxfuse.graph.graph import Graph, node_label
from onnxfuse.ir.fusion import Pointwise
from onnxfuse.patterns.match import Match


def check_opened(graph: Graph, nodes: Collection[int]) -> None:
    """Of an op that was taken apart all sums are among some nodes, or none: what stays of it is a normalisation alone.

    Raises:
        NotFusable: some are.
    """
    for index in nodes:
        sums = graph.opened_sums.get(index, frozenset())
        if not sums <= {*nodes}:
            raise NotFusable("unknown_op", node_label(graph.nodes[index]), "a normalisation is not pointwise")


def check_reads(graph: Graph, match: Match, fusion: Pointwise) -> None:
    """What the nodes read is an input of the kernel, or known: an operand that changes nothing may be neither.

    Raises:
        NotFusable: something is neither.
    """
    indices = (*match.copied, *match.nodes)
    nodes = [graph.nodes[index] for index in indices]
    inside = {tensor.name for node in nodes for tensor in node.outputs} | {tensor.name for tensor in fusion.inputs}
    for index, node in zip(indices, nodes, strict=True):
        for tensor in node.inputs[: 1 if index in match.shapes else None]:  # such a Reshape gets a shape of its own
            if tensor.name and tensor.name not in inside and not is_complete(graph.known_value(tensor)):
                detail = f"{tensor.name!r} does not change the result, and only the run knows it"
                raise NotFusable("operand_without_effect", node_label(node), detail)
