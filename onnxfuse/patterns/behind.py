"""A match whose products stay ordinary nodes: the fusion of what is behind them, and what the nodes make."""

from __future__ import annotations

from dataclasses import replace

from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion, Tensor
from onnxfuse.graph import Graph
from onnxfuse.patterns.epilogue_graph import EpilogueGraph, Ref
from onnxfuse.patterns.growth import made_value
from onnxfuse.patterns.lowering import lower, product_tensor
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.parts import pattern_of


def match_behind(graph: Graph, match: Match) -> tuple[Fusion, tuple[Tensor, ...]]:
    """The same match with its products as their nodes make them, and those products, one for each tensor of rhs.

    A Gemm's own factors and bias stay with it: then the rewritten model computes the same bits as the original.

    Raises:
        NotFusable: the steps need a product without its node's own arithmetic.
    """
    made = _as_made(match)
    fusion = lower(graph, made, pattern_of(made))
    products = {product.rhs: product for product, _ in made.ranges}
    if made.ranges != match.ranges or len(products) != len({product.out for product, _ in made.ranges}):
        raise NotFusable("nothing_follows", match.label, "the product is not read as its node makes it")
    return fusion, tuple(product_tensor(made, product) for product in products.values())


def _as_made(match: Match) -> Match:
    """The match over accumulators that have their nodes' own arithmetic in them already."""
    old, new = match.epilogue, EpilogueGraph()
    names: dict[Ref, Ref] = {}
    for product, start in match.ranges:
        names[old.moved(made_value(old, product, match.operands), start)] = new.moved(new.acc(product.out), start)
    for ref in old.reachable(match.roots):
        if ref not in names:
            names[ref] = new.copied(old.expressions[ref], names)
    exits = tuple(replace(out, refs=tuple(names[ref] for ref in out.refs)) for out in match.exits)
    return replace(match, epilogue=new, exits=exits)
