"""Products of one input that a kernel could compute together: groups of them, small enough to grow at once."""

from __future__ import annotations

from onnxfuse.graph.graph import Graph
from onnxfuse.patterns.product import Product, is_anchor
from onnxfuse.patterns.views import Piece

MAX_SIBLINGS = 8  # products of one input that grow together; those that meet in a value are in one group
MAX_REACHED = 64  # nodes after a product that are looked at for that


def siblings(graph: Graph, products: list[Product]) -> list[tuple[Product, ...]]:
    """Products that a kernel could compute together, the group with the last product first."""
    groups: dict[object, list[Product]] = {}
    for product in products:
        alone = None if product.is_weight else product.out
        form = product.quantized.form if product.quantized else None
        key = (alone, product.lhs, product.dtype, product.k, _rows(product), _batch(product), form)
        groups.setdefault(key, []).append(product)
    chunks = [chunk for group in groups.values() for chunk in _chunks(graph, group)]
    return sorted(chunks, key=lambda group: graph.index(group[-1].node), reverse=True)


def _chunks(graph: Graph, group: list[Product]) -> list[tuple[Product, ...]]:
    """Products of one input in groups that are small enough; those that meet stay together where there is room."""
    if len(group) <= MAX_SIBLINGS:
        return [tuple(group)]
    chunks: list[list[Product]] = [[]]
    for meeting in _meeting(graph, group):
        if len(chunks[-1]) + len(meeting) > MAX_SIBLINGS:
            chunks.append([])
        for product in meeting:
            if len(chunks[-1]) == MAX_SIBLINGS:
                chunks.append([])
            chunks[-1].append(product)
    return [tuple(sorted(chunk, key=lambda product: graph.index(product.node))) for chunk in chunks if chunk]


def _meeting(graph: Graph, group: list[Product]) -> list[list[Product]]:
    """The products that meet in some node before the next product, in the order of their first ones."""
    earlier = list(range(len(group)))  # for each product the first that it meets, or one on the way there
    by_node: dict[int, int] = {}

    def first(number: int) -> int:
        while earlier[number] != number:
            number = earlier[number]
        return number

    for number, product in enumerate(group):
        for node in _reached(graph, product):
            pair = first(by_node.setdefault(node, number)), first(number)
            earlier[max(pair)] = min(pair)
    sets: dict[int, list[Product]] = {}
    for number, product in enumerate(group):
        sets.setdefault(first(number), []).append(product)
    return list(sets.values())


def _reached(graph: Graph, product: Product) -> set[int]:
    """Nodes that read a product's result, through others, up to the next products."""
    found: set[int] = set()
    stack = list(product.node.outputs)
    while stack and len(found) < MAX_REACHED:
        readers = [node for node in stack.pop().outputs if not is_anchor(graph, node)]
        stack += [out for node in readers if graph.index(node) not in found for out in node.outputs]
        found.update(map(graph.index, readers))
    return found


def _rows(product: Product) -> tuple[Piece, ...]:
    """The pieces of its rows, in whichever dimensions: a Gemm has all of them in one."""
    return tuple(piece for dim in product.row_view for piece in dim if piece.size != 1)


def _batch(product: Product) -> tuple[Piece, ...]:
    """Those of the rows along which rhs has matrices of its own: all matrices of a kernel have them, or none."""
    own = {piece for dim in product.rhs_view for piece in dim}
    return tuple(piece for piece in _rows(product) if piece in own)
