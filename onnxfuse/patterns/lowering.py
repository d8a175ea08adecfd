"""Match -> Fusion: names for the axes, parts and loads for the leaves, a straight line of steps for the expressions."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.dtypes import BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.fusion import MAX_LOADS, PART_AXIS, Axis, Dim, Fusion, Load, Out, RhsPart, Step, Tensor, Value
from onnxfuse.graph import Graph, Size
from onnxfuse.patterns.epilogue_graph import ACC, CONSTANT, LOAD, Expression, Ref
from onnxfuse.patterns.features import features_of
from onnxfuse.patterns.match import Match, Operand
from onnxfuse.patterns.product import Product

LEADING_AXES = ("h", "g", "f", "e", "d", "c")  # between the batch and the rows, for products of rank 4 and more


@dataclass(frozen=True)
class _Line:
    """The epilogue written out: steps over loads, and the name of every expression."""

    steps: tuple[Step, ...]
    loads: tuple[Load, ...]
    operands: tuple[Operand, ...]
    names: dict[Ref, Value]


def lower(graph: Graph, match: Match, pattern: str) -> Fusion:
    """The fusion that computes a match whose ranges are equal parts.

    Raises:
        NotFusable: more operands than a kernel takes, or an operand that the axes cannot name.
    """
    first = match.products[0]
    rows = _row_axes(first.rows)
    line = _straight_line(match)
    fusion = Fusion(
        anchor=match.label,
        pattern=pattern,
        features=(),
        axes=(*rows, Axis("n", match.columns), Axis("k", first.k), *_part_axis(match)),
        lhs=Tensor(first.lhs, first.dtype, (*_dims(rows), ("k",))),
        rhs=_weights(match),
        parts=_parts(match),
        operands=tuple(_operand(graph, operand, rows, match) for operand in line.operands),
        loads=line.loads,
        steps=line.steps,
        outs=tuple(_outs(graph, match, rows, line)),
    )
    return features_of(fusion, any(graph.nodes[index].op == "Cast" for index in match.nodes))


def product_tensor(match: Match, product: Product) -> Tensor:
    """What a product's node makes, `[..., m, n]` or with its parts packed, `[..., m, (p n)]`."""
    return Tensor(product.out, product.dtype, (*_dims(_row_axes(product.rows)), _columns(product.n, match)))


def _row_axes(sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    """`m`; `b, m`; `b, h, m`; ... for the output's dimensions but the last."""
    names = (*("b", *LEADING_AXES)[: len(sizes) - 1], "m")
    if len(names) != len(sizes):
        raise NotFusable("rank_too_high", "", f"the product has {len(sizes) + 1} dimensions")
    return tuple(Axis(name, size if isinstance(size, int) else None) for name, size in zip(names, sizes, strict=True))


def _dims(axes: tuple[Axis, ...]) -> tuple[Dim, ...]:
    return tuple((axis.name,) for axis in axes)


def _columns(width: int, match: Match) -> Dim:
    """The columns of a tensor: one part, or all of them side by side."""
    return ("n",) if width == match.columns else (PART_AXIS, "n")


def _part_axis(match: Match) -> tuple[Axis, ...]:
    packed = {product.n for product, _ in match.ranges} - {match.columns}
    return tuple(Axis(PART_AXIS, width // match.columns) for width in packed)


def _weights(match: Match) -> tuple[Tensor, ...]:
    """The right-hand sides, each once."""
    products = {product.rhs: product for product, _ in match.ranges}
    return tuple(_weight(product, match) for product in products.values())


def _weight(product: Product, match: Match) -> Tensor:
    columns = _columns(product.n, match)
    dims: tuple[Dim, ...] = (("k",), columns) if product.rhs_order == "kn" else (columns, ("k",))
    return Tensor(product.rhs, product.dtype, dims)


def _parts(match: Match) -> tuple[RhsPart, ...]:
    weights = list(dict.fromkeys(product.rhs for product, _ in match.ranges))
    return tuple(
        RhsPart(weights.index(product.rhs), None if product.n == match.columns else start // match.columns)
        for product, start in match.ranges
    )


def _operand(graph: Graph, operand: Operand, rows: tuple[Axis, ...], match: Match) -> Tensor:
    columns = _columns(operand.columns, match) if operand.columns > 1 else ("n",)
    names = (*_dims(rows), columns)
    dims = tuple(name if varies else () for name, varies in zip(names, operand.varies, strict=True))
    return Tensor(operand.name, BY_ONNX[graph.dtype(operand.name) or 0], dims[len(dims) - operand.rank :])


def _outs(graph: Graph, match: Match, rows: tuple[Axis, ...], line: _Line) -> list[Out]:
    """A store of each range of each exit."""
    outs = []
    for out in match.exits:
        packed = len(out.refs) > 1
        columns = _columns(match.columns * len(out.refs), match)
        tensor = Tensor(out.name, BY_ONNX[graph.dtype(out.name) or 0], (*_dims(rows), columns))
        for index, ref in enumerate(out.refs):
            value = line.names[ref]
            assert isinstance(value, str), f"{out.name} is computed from a product"
            outs.append(Out(tensor, value, index if packed else None))
    return outs


def _straight_line(match: Match) -> _Line:
    """Number the leaves and print the expressions in order."""
    graph, names = match.epilogue, dict[Ref, Value]()
    steps: list[Step] = []
    loads: dict[Load, str] = {}
    operands: dict[str, int] = {}
    parts = [(product.out, start) for product, start in match.ranges]
    for ref in graph.reachable(match.roots):
        expression = graph.expressions[ref]
        if expression.op == CONSTANT:
            names[ref] = float.fromhex(expression.hexadecimal)
        elif expression.op == ACC:
            names[ref] = f"acc{parts.index((expression.operand, expression.offset or 0))}"
        elif expression.op == LOAD:
            index = operands.setdefault(expression.operand, len(operands))
            load = Load(index, _load_part(match, expression))
            names[ref] = loads.setdefault(load, f"op{len(loads)}")
        else:
            names[ref] = f"t{len(steps)}"
            steps.append(Step(f"t{len(steps)}", expression.op, tuple(names[i] for i in expression.inputs)))
    if len(loads) > MAX_LOADS:
        raise NotFusable("too_many_operands", match.label, f"{len(loads)} operands; a kernel takes {MAX_LOADS}")
    return _Line(tuple(steps), tuple(loads), tuple(match.operands[name] for name in operands), names)


def _load_part(match: Match, load: Expression) -> int | None:
    """Which column range of a packed operand a load reads; None where the operand is not packed."""
    operand = match.operands[load.operand]
    if load.offset is None or operand.columns == match.columns:
        return None
    return load.offset // match.columns
