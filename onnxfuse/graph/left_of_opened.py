"""What is left of an op that was taken apart (opened_ops.py), once a kernel makes its sums: the normalisation."""

from __future__ import annotations

from onnxfuse.graph.graph import Graph


def left_of_opened(graph: Graph) -> dict[str, tuple[int, int]]:
    """Length and type of the rows of each normalisation that is left of an opened op, by what it makes."""
    found: dict[str, tuple[int, int]] = {}
    for total in {graph.nodes[max(sums)].outputs[0].name for sums in graph.opened_sums.values()}:
        length, dtype = (graph.shape(total) or (None,))[-1], graph.dtype(total)
        if isinstance(length, int) and dtype is not None:
            left = (node for node in graph.readers(total) if graph.opened(node))
            found |= {node.outputs[0].name: (length, dtype) for node in left}
    return found
