"""Match -> Fusion: names for the axes, parts and loads for the leaves, a straight line of steps for the expressions."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.dtypes import BY_ONNX
from onnxfuse.errors import NotFusable
from onnxfuse.fusion import (
    MAX_LOADS,
    NONLINEAR,
    Axis,
    Dim,
    Fusion,
    Load,
    Out,
    RhsPart,
    Step,
    Tensor,
    Value,
)
from onnxfuse.graph import Graph, Size
from onnxfuse.patterns.epilogue_graph import ACC, CONSTANT, LOAD, Expression, Ref
from onnxfuse.patterns.matcher import Match, Operand

LEADING_AXES = ("h", "g", "f", "e", "d", "c")  # between the batch and the rows, for products of rank 4 and more


def leaves(match: Match, op: str) -> list[Expression]:
    """The leaves of one kind that a match's value depends on, each once."""
    graph = match.epilogue
    return [graph.expressions[ref] for ref in graph.reachable((match.root,)) if graph.expressions[ref].op == op]


def acc_offsets(match: Match) -> list[int]:
    """First columns of the ranges of the product that meet in the match's value, ascending."""
    return sorted({leaf.offset for leaf in leaves(match, ACC) if leaf.offset is not None})


def is_nonlinear(match: Match) -> bool:
    """Whether the epilogue has an activation, not only sums and scales."""
    graph = match.epilogue
    return any(graph.expressions[ref].op in NONLINEAR for ref in graph.reachable((match.root,)))


@dataclass(frozen=True)
class _Line:
    """The epilogue written out: steps over loads."""

    steps: tuple[Step, ...]
    loads: tuple[Load, ...]
    value: str
    operands: tuple[Operand, ...]


def lower(graph: Graph, match: Match, pattern: str) -> Fusion:
    """The fusion that computes a match whose parts are equal column ranges.

    Raises:
        NotFusable: more operands than a kernel takes, or an operand that the axes cannot name.
    """
    product = match.product
    rows = _row_axes(product.rows)
    packed = product.n // match.columns
    line = _straight_line(match)
    columns: Dim = ("n",) if packed == 1 else ("p", "n")
    rhs_dims: tuple[Dim, ...] = (("k",), columns) if product.rhs_order == "kn" else (columns, ("k",))
    row_dims = tuple((axis.name,) for axis in rows)
    inputs = [
        Tensor(
            operand.name,
            BY_ONNX[graph.dtype(operand.name) or 0],
            _operand_dims(operand, rows, _columns_of(operand, match)),
        )
        for operand in line.operands
    ]
    out = Tensor(match.out, BY_ONNX[graph.dtype(match.out) or 0], (*row_dims, ("n",)))
    parts = tuple(RhsPart(0, None if packed == 1 else offset // match.columns) for offset in acc_offsets(match))
    packed_axes = () if packed == 1 else (Axis("p", packed),)
    return Fusion(
        anchor=product.label,
        pattern=pattern,
        features=_features(match, line, len(parts), inputs, graph),
        axes=(*rows, Axis("n", match.columns), Axis("k", product.k), *packed_axes),
        lhs=Tensor(product.lhs, product.dtype, (*row_dims, ("k",))),
        rhs=(Tensor(product.rhs, product.dtype, rhs_dims),),
        parts=parts,
        operands=tuple(inputs),
        loads=line.loads,
        steps=line.steps,
        outs=(Out(out, line.value),),
    )


def _row_axes(sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    """`m`; `b, m`; `b, h, m`; ... for the output's dimensions but the last."""
    names = (*("b", *LEADING_AXES)[: len(sizes) - 1], "m")
    if len(names) != len(sizes):
        raise NotFusable("rank_too_high", "", f"the product has {len(sizes) + 1} dimensions")
    return tuple(Axis(name, size if isinstance(size, int) else None) for name, size in zip(names, sizes, strict=True))


def _columns_of(operand: Operand, match: Match) -> Dim:
    return ("p", "n") if operand.columns > match.columns else ("n",)


def _operand_dims(operand: Operand, rows: tuple[Axis, ...], columns: Dim) -> tuple[Dim, ...]:
    names: tuple[Dim, ...] = (*((axis.name,) for axis in rows), columns)
    dims = tuple(name if varies else () for name, varies in zip(names, operand.varies, strict=True))
    return dims[len(dims) - operand.rank :]


def _straight_line(match: Match) -> _Line:
    """Number the leaves and print the expressions in order."""
    graph, names = match.epilogue, dict[Ref, Value]()
    steps: list[Step] = []
    loads: dict[Load, str] = {}
    operands: dict[str, int] = {}
    offsets = acc_offsets(match)
    for ref in graph.reachable((match.root,)):
        expression = graph.expressions[ref]
        if expression.op == CONSTANT:
            names[ref] = float.fromhex(expression.hexadecimal)
        elif expression.op == ACC:
            names[ref] = f"acc{offsets.index(expression.offset or 0)}"
        elif expression.op == LOAD:
            index = operands.setdefault(expression.operand, len(operands))
            load = Load(index, _load_part(match, expression))
            names[ref] = loads.setdefault(load, f"op{len(loads)}")
        else:
            names[ref] = f"t{len(steps)}"
            steps.append(Step(f"t{len(steps)}", expression.op, tuple(names[i] for i in expression.inputs)))
    if len(loads) > MAX_LOADS:
        raise NotFusable("too_many_operands", match.product.label, f"{len(loads)} operands; a kernel takes {MAX_LOADS}")
    value = names[match.root]
    if not isinstance(value, str):
        raise NotFusable("constant_result", match.product.label, "the result does not depend on the product")
    return _Line(tuple(steps), tuple(loads), value, tuple(match.operands[name] for name in operands))


def _load_part(match: Match, load: Expression) -> int | None:
    """Which column range of a packed operand a load reads; None where the operand is not packed."""
    operand = match.operands[load.operand]
    if load.offset is None or operand.columns == match.columns:
        return None
    return load.offset // match.columns


def _features(match: Match, line: _Line, parts: int, operands: list[Tensor], graph: Graph) -> tuple[str, ...]:
    """What the kernel does beside the product, in the report's words."""
    found = set()
    kinds = {f"op{index}": _kind(operands[load.operand]) for index, load in enumerate(line.loads)}
    for step in line.steps:
        read = {kinds[value] for value in step.inputs if isinstance(value, str) and value in kinds}
        if step.op in ("add", "sub"):
            found |= {"bias"} if "row" in read else set()
            found |= {"residual"} if "tile" in read else set()
        elif step.op in ("mul", "div") and read:
            found.add("scale")
    if is_nonlinear(match):
        found.add("activation")
    if parts > 1:
        found.add("gate")
    if any(graph.nodes[index].op == "Cast" for index in match.nodes if graph.nodes[index].outputs[0].name != ""):
        found.add("cast")
    return tuple(sorted(found))


def _kind(tensor: Tensor) -> str:
    columns = "n" in tensor.axes
    rows = any(axis not in ("n", "p") for axis in tensor.axes)
    return {(True, True): "tile", (False, True): "row", (True, False): "column", (False, False): "scalar"}[
        rows, columns
    ]
