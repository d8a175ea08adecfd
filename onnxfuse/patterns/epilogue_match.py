"""A match whose products stay ordinary nodes: the fusion of their epilogue, and what the nodes make."""

from __future__ import annotations

import math
from dataclasses import replace

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.ir.fusion import Fusion, Tensor
from onnxfuse.patterns.build_fusion import lower_with_names
from onnxfuse.patterns.classify import pattern_of
from onnxfuse.patterns.epilogue_graph import EpilogueGraph, Ref
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.region_growth import made_value


def match_epilogue(graph: Graph, match: Match) -> tuple[Fusion, tuple[Tensor, ...]]:
    """The same match with its products as their nodes make them, and those products, one for each tensor of rhs.

    Such a product is `[..., m, n]`, or with its parts packed `[..., m, (p n)]`.

    A Gemm's own factors and bias stay with it: then the rewritten model computes the same bits as the original.

    Raises:
        NotFusable: the steps need a product without its node's own arithmetic.
    """
    made = _as_made(match)
    fusion, names = lower_with_names(graph, made, pattern_of(made))
    products = {product.matrix: product for product, _ in made.ranges}
    if made.ranges != match.ranges or len(products) != len({product.out for product, _ in made.ranges}):
        raise NotFusable("nothing_follows", match.label, "the product is not read as its node makes it")
    tensors = tuple(names.tensor(product.out, product.dtype, product.out_view) for product in products.values())
    for tensor in tensors:
        _check_shape(graph, fusion, tensor)
    return fusion, tensors


def _check_shape(graph: Graph, fusion: Fusion, product: Tensor) -> None:
    """What the node makes must lie as the fusion's axes say."""
    shape = graph.shape(product.name)
    sizes = [None if None in known else math.prod(size or 0 for size in known) for known in _sizes(fusion, product)]
    if shape is None or len(shape) != len(sizes):
        raise NotFusable(
            "unknown_rank", fusion.anchor, f"the product {product.name!r} has an unknown number of dimensions"
        )
    if any(isinstance(own, int) and size is not None and own != size for own, size in zip(shape, sizes, strict=True)):
        raise NotFusable("invalid_model", fusion.anchor, f"the product {product.name!r} has shape {list(shape)}")


def _sizes(fusion: Fusion, tensor: Tensor) -> list[list[int | None]]:
    sizes = [[fusion.size(axis) for axis in dim] for dim in tensor.dims]
    if tensor.wide is not None:
        dimension, whole = tensor.wide
        sizes[dimension] = [whole]
    return sizes


def _as_made(match: Match) -> Match:
    """The match over accumulators that have their nodes' own arithmetic in them already."""
    old, new = match.epilogue, EpilogueGraph()
    names: dict[Ref, Ref] = {}
    for product, start in match.ranges:
        names[old.moved(made_value(old, product, match.operands), start)] = new.moved(new.acc(product.out), start)
    for ref in old.reachable(match.roots):
        if ref not in names:
            names[ref] = new.copied(old.expressions[ref], names)
    live_outs = tuple(replace(out, refs=tuple(names[ref] for ref in out.refs)) for out in match.live_outs)
    return replace(match, epilogue=new, live_outs=live_outs)
