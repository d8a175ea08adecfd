"""Match -> Fusion: names for the axes, parts and loads for the leaves, a straight line of steps for the expressions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnxfuse.dtypes import BY_ONNX, STORED, U8, DType
from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph
from onnxfuse.graph.value_types import element_text
from onnxfuse.ir.features import features_of
from onnxfuse.ir.fusion import (
    MAX_STEPS,
    PART_AXIS,
    Axis,
    Fusion,
    Load,
    Out,
    RhsPart,
    Step,
    StoredRhs,
    Tensor,
    Value,
    acc_name,
    load_name,
)
from onnxfuse.limits import MAX_LOADS
from onnxfuse.patterns.axis_names import AxisNames, name_axes, varies_by_part
from onnxfuse.patterns.epilogue_graph import ACC, Expression, Ref
from onnxfuse.patterns.match import Match, Operand, count_of
from onnxfuse.patterns.product import Product
from onnxfuse.patterns.quantized_weight import QuantizedWeight
from onnxfuse.patterns.views import COLUMNS, Piece


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
        NotFusable: more operands or steps than a kernel takes, or an operand that the axes cannot name.
    """
    return lower_with_names(graph, match, pattern)[0]


def lower_with_names(graph: Graph, match: Match, pattern: str) -> tuple[Fusion, AxisNames]:
    """The same, and what its axes are called."""
    first = match.products[0]
    line = _straight_line(match)
    names = _axis_names(match, line)
    fusion = Fusion(
        anchor=match.name,
        pattern=pattern,
        features=(),
        axes=(*names.axes, *_part_axis(match), *_stored_axes(first.quantized)),
        lhs=names.tensor(first.lhs, _dtype(graph, first.lhs), first.lhs_view),
        rhs=_weights(graph, match, names),
        parts=_parts(match),
        operands=tuple(_operand(graph, names, operand) for operand in line.operands),
        loads=line.loads,
        steps=line.steps,
        outs=tuple(_outs(graph, match, names, line)),
        quantization=None if first.quantized is None else first.quantized.form,
        stored=_stored(match, names),
    )
    return features_of(fusion, any(graph.nodes[index].op == "Cast" for index in match.nodes)), names


def _operand(graph: Graph, names: AxisNames, operand: Operand) -> Tensor:
    dtype = _dtype(graph, operand.name)
    if operand.whole is None:
        return names.tensor(operand.name, dtype, operand.view)
    *outer, _ = operand.view
    if operand.step > 1:
        return replace(names.tensor(operand.name, dtype, operand.view), wide=(len(outer) - 1, operand.whole))
    tensor = names.tensor(operand.name, dtype, (*outer, (Piece(COLUMNS, names.width),)))
    return replace(tensor, wide=(len(outer), operand.whole))


def _axis_names(match: Match, line: _Line) -> AxisNames:
    first = match.products[0]
    inputs = (first.lhs_view, *(product.rhs_view for product in match.products))
    tensors = (*inputs, *(operand.view for operand in line.operands), *(out.view for out in match.live_outs))
    columns = first.columns if len(first.columns) > 1 else (Piece(COLUMNS, match.columns),)
    return name_axes(first.row_view, (first.k,), columns, tensors, match.has_windows)


def _part_axis(match: Match) -> tuple[Axis, ...]:
    packed = {product.n for product, _ in match.ranges if not match.has_windows} - {match.columns}
    return tuple(Axis(PART_AXIS, count_of(width, match.columns)) for width in packed)


def _weights(graph: Graph, match: Match, names: AxisNames) -> tuple[Tensor, ...]:
    """The right-hand sides, each once."""
    return tuple(names.tensor(product.rhs, _rhs_dtype(graph, product), product.rhs_view) for product in _by_rhs(match))


def _by_rhs(match: Match) -> list[Product]:
    return list({product.matrix: product for product, _ in match.ranges}.values())


def _rhs_dtype(graph: Graph, product: Product) -> DType:
    return _dtype(graph, product.rhs) if product.quantized is None else STORED[product.quantized.form.bits]


def _stored_axes(weight: QuantizedWeight | None) -> tuple[Axis, ...]:
    if weight is None:
        return ()
    form, k = weight.form, weight.k
    sizes = {"kb": form.blocks(k), "kc": form.block, "kq": form.block_bytes}
    if form.zero_points:
        sizes["kz"] = form.zero_point_bytes(k)
    return tuple(Axis(name, size) for name, size in sizes.items())


def _stored(match: Match, names: AxisNames) -> tuple[StoredRhs, ...]:
    """What holds each right-hand side that is quantised."""
    return tuple(_stored_rhs(product, product.quantized, names) for product in _by_rhs(match) if product.quantized)


def _stored_rhs(product: Product, weight: QuantizedWeight, names: AxisNames) -> StoredRhs:
    columns = names.tensor(product.rhs, U8, product.rhs_view[:1])
    sizes = {axis.name: axis.size or 1 for axis in _stored_axes(weight)}

    def beside(name: str, dtype: DType, inner: str) -> Tensor:
        (dim,) = columns.dims
        if name not in weight.flat:
            return Tensor(name, dtype, (dim, (inner,)), columns.wide)
        return Tensor(name, dtype, ((*dim, inner),), (0, weight.n * sizes[inner]) if columns.wide else None)

    return StoredRhs(
        Tensor(product.rhs, U8, (*columns.dims, ("kb",), ("kq",)), columns.wide),
        beside(weight.scales, weight.form.scale, "kb"),
        None if weight.zero_points is None else beside(weight.zero_points, U8, "kz"),
    )


def _parts(match: Match) -> tuple[RhsPart, ...]:
    weights = [product.matrix for product in _by_rhs(match)]
    return tuple(
        RhsPart(weights.index(product.matrix), *_range(match, product.n, start)) for product, start in match.ranges
    )


def _range(match: Match, columns: int | str, first: int) -> tuple[int | None, int | None]:
    """Which columns are read of as many as a tensor has: a part, the start of a window, or neither where it is all."""
    if columns == match.columns:
        return None, None
    return (None, first) if match.has_windows else (count_of(first, match.columns), None)


def _dtype(graph: Graph, name: str) -> DType:
    number = graph.dtype(name)
    if number not in BY_ONNX:
        raise NotFusable("unsupported_dtype", name, f"{name!r} is {element_text(number)}")
    return BY_ONNX[number]


def _outs(graph: Graph, match: Match, names: AxisNames, line: _Line) -> list[Out]:
    """A store of each range of each live-out value."""
    outs = []
    for out in match.live_outs:
        packed = len(out.refs) > 1
        tensor = names.tensor(out.name, _dtype(graph, out.name), out.view)
        for index, ref in enumerate(out.refs):
            value = line.names[ref]
            assert isinstance(value, str), f"{out.name} is computed from a product"
            outs.append(Out(tensor, value, index if packed else None))
    return outs


def _straight_line(match: Match) -> _Line:
    """Number the leaves and print the expressions in order."""
    loads: dict[Load, str] = {}
    operands: dict[str, int] = {}
    parts = [(product.out, start) for product, start in match.ranges]

    def name_of(leaf: Expression) -> str:
        if leaf.op == ACC:
            return acc_name(parts.index((leaf.operand, leaf.offset or 0)))
        index = operands.setdefault(leaf.operand, len(operands))
        return loads.setdefault(Load(index, *_load_range(match, leaf)), load_name(len(loads)))

    steps, names = match.epilogue.straight_line(match.roots, name_of)
    read = [match.operands[name].name for name in operands]
    if len({*read}) < len(read):
        raise NotFusable("views_differ", match.label, "reads one operand in two ways")
    if len(loads) > MAX_LOADS:
        raise NotFusable("too_many_operands", match.label, f"{len(loads)} operands; a kernel takes {MAX_LOADS}")
    count = match.epilogue.count_steps(match.roots)
    if count > MAX_STEPS:
        raise NotFusable("too_many_steps", match.label, f"{count} steps; a kernel takes {MAX_STEPS}")
    return _Line(steps, tuple(loads), tuple(match.operands[name] for name in operands), names)


def _load_range(match: Match, load: Expression) -> tuple[int | None, int | None]:
    """Which columns of an operand a load reads, as `_range` has it; what is the same of every part has no range."""
    if load.offset is None or load.columns is None:
        return None, None
    operand = match.operands[load.operand]
    if operand.whole is not None:
        return None, load.offset // operand.step
    if not match.has_windows and not varies_by_part(operand.view, match.columns):
        return None, None
    return _range(match, load.columns, load.offset)
