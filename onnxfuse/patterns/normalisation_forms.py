"""The forms in which exporters write a normalisation of rows: an op, or its nodes one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.dtypes import F32, FLOATS_BY_ONNX
from onnxfuse.graph.graph import Graph, Size, element_readers
from onnxfuse.graph.operators import qualified_op
from onnxfuse.patterns.fallback_shape import only_feeding
from onnxfuse.patterns.row_shift import reduced_axes

LAST = -1  # axis
CENTRED = {"LayerNormalization": True, "SimplifiedLayerNormalization": False, "RMSNormalization": False}
DEFAULT_EPSILON = 1e-5  # of every op's
MEANS = ("ReduceMean", "GlobalAveragePool")
DOUBLE = onnx.TensorProto.DOUBLE  # in which TorchScript sums 16 bits
SUM = "ReduceSum"  # of squares, as linear attentions make rows one long
REDUCTIONS = ("ReduceMean", SUM, "ReduceL2")
VIEWS = ("Reshape", "Expand")
HANDING_ON = (*VIEWS, "Unsqueeze")
MOST_VIEWS = 4  # behind a variance
LEAST_FACTOR = 2.0**-32  # of a sum or a length; epsilon over it, and over its square, is a number of fp32
BOUNDS = ("Clip", "Max")  # from below
LARGEST_BOUND = 2.0**31  # whose square, over that of the least factor, fp32 has
MOST_RECIPROCAL = 2.0**48  # of a root: the square of one over it, over as many columns as a row has, fp32 has
FEWEST_BESIDE = 32  # rows that a warp reads a column of
Source = Callable[[Graph, gs.Tensor], tuple[list[gs.Node], gs.Tensor]]
"""What a value is of: the nodes between, and that."""


@dataclass(frozen=True)
class Core:
    """The nodes that normalise, without parameters or with those of an op.

    Attributes:
        anchor: the node that it is named after.
        nodes: all of them.
        x: what is normalised.
        normal: what they make.
        centred: whether the mean is subtracted.
        epsilon: what is added to the variance.
        affine: the ops with parameters that the nodes hold, in their order.
        scale: what the normalised row is multiplied by before those, for a row that is divided by its own length.
        least: that the variance counts for.
        added: what is added to the deviation.
        axis: the dimension of x that is normalised, from the end on.
        perm: how the first node permutes x, if it does.
    """

    anchor: gs.Node
    nodes: tuple[gs.Node, ...]
    x: gs.Tensor
    normal: gs.Tensor
    centred: bool
    epsilon: float
    affine: tuple[tuple[str, gs.Tensor], ...] = ()
    scale: float = 1.0
    least: float = 0.0
    added: float = 0.0
    axis: int = LAST
    perm: tuple[int, ...] = ()


def before_transpose(graph: Graph, core: Core) -> Core | None:
    """The same of what a Transpose makes rows of, as of images.

    None where none does, where others read what it makes, or where few rows lie beside each other before it.
    """
    first = maker(core.x, "Transpose")
    perm = tuple(first.attrs.get("perm", ())) if first is not None else ()
    if first is None or not perm or core.axis != LAST or perm[-1] == len(perm) - 1:
        return None
    nodes, x = (first, *core.nodes), first.inputs[0]
    beside = (graph.shape(x.name) or ())[perm[-1] + 1 :]
    if _are_few(beside) or not is_closed(graph, nodes, nodes[-1]):
        return None
    return replace(core, nodes=nodes, x=x, axis=perm[-1] - len(perm), perm=perm)


def _are_few(rows: Sequence[Size]) -> bool:
    """Whether sizes are known, and fewer together than a warp has lanes."""
    known = [size for size in rows if isinstance(size, int)]
    return len(known) == len(rows) and math.prod(known) < FEWEST_BESIDE


def of_op(graph: Graph, node: gs.Node) -> Core | None:
    """An op that normalises the last axis, and of which nobody reads the mean or the deviation."""
    op = qualified_op(node)
    if op not in CENTRED or len(node.inputs) < 2 or any(out.name for out in node.outputs[1:]):
        return None
    x, *parameters = node.inputs
    rank = len(graph.shape(x.name) or ())
    if rank == 0 or node.attrs.get("axis", -1) not in (-1, rank - 1):
        return None
    affine = [each for each in zip(("mul", "add"), parameters, strict=False) if each[1].name]
    epsilon = float(node.attrs.get("epsilon", DEFAULT_EPSILON))
    return Core(node, (node,), x, node.outputs[0], CENTRED[op], epsilon, tuple(affine))


def of_nodes(graph: Graph, node: gs.Node) -> Core | None:
    """What is written as a mean or a sum of squares along any axis, its root, and a quotient or a product with it."""
    axis = axis_of(graph, node) or LAST
    squares = squared(graph, node, *MEANS, SUM, axis=axis)
    summed = 1 if node.op != SUM else columns_of(graph, node, axis)
    if not squares or summed is None:
        return None
    for end in ends(graph, node):
        nodes, count = (*squares, node, *end.between, end.last), summed * end.factor
        core = of_rows(graph, node, nodes, end.divided, end.epsilon / count, count, axis)
        if core is not None:
            return replace(core, affine=end.affine, least=end.least / count)
    return None


def of_rows(
    graph: Graph,
    anchor: gs.Node,
    nodes: Sequence[gs.Node],
    divided: gs.Tensor,
    epsilon: float,
    count: float,
    axis: int = LAST,
) -> Core | None:
    """The same with the casts and the mean in front of them, if nobody else reads what they make on the way.

    Args:
        graph: the scope.
        anchor: what takes the mean or the sum of squares.
        nodes: from what the squares are of to the last.
        divided: by the root.
        epsilon: what is added to the mean of squares.
        count: how many squares are in what the root is of for one in their mean.
        axis: of the mean.
    """
    last = nodes[-1]
    for source in SOURCES:
        centring, x, whole = _centring(graph, nodes[0].inputs[0], divided, source, axis)
        every = (*centring, *nodes)
        dead = only_feeding(graph, [graph.index(node) for node in every if node.op in VIEWS])
        if x is whole and is_closed(graph, every, last, dead):
            is_centred = any(each.op == "Sub" for each in centring)
            return Core(anchor, every, x, last.outputs[0], is_centred, epsilon, scale=count**-0.5, axis=axis)
    return None


def columns_of(graph: Graph, reduction: gs.Node, axis: int = LAST) -> int | None:
    """How many elements of a row are reduced to one; None where that is not known before the run."""
    shape = graph.shape(reduction.inputs[0].name) or ()
    columns = shape[axis] if len(shape) >= -axis else None
    return columns if isinstance(columns, int) and columns > 0 else None


def squared(
    graph: Graph, node: gs.Node, *ops: str, behind: gs.Node | None = None, axis: int = LAST
) -> tuple[gs.Node, ...]:
    """The node that squares what another, of one of some ops, takes the mean or the sum of, by rows; a cast behind it.

    Nothing where there is no such node. torch.export widens squares of 16 bits for their sum alone, and views make of
    numbers one a row, behind the reduction or a node `behind` it.
    """
    is_along = node.op in ops and axis_of(graph, node) == axis
    if not is_along or not (kept_axis(graph, node) == axis or handed_on(graph, node, behind)):
        return ()
    cast = maker(node.inputs[0], "Cast")
    between = (cast,) if cast is not None and _widens(graph, cast) else ()
    square = maker((*between, node)[0].inputs[0], "Pow", "Mul")
    return (square, *between) if square is not None and is_square(graph, square) else ()


@dataclass(frozen=True)
class End:
    """What lies behind a mean of squares.

    Attributes:
        between: the nodes to its root, or to what rows are multiplied by.
        last: the node that divides or multiplies rows.
        divided: the rows.
        epsilon: what is added to the mean.
        factor: what that is multiplied by before.
        affine: what the reciprocal is multiplied by before the rows are.
        least: that the mean counts for when it is multiplied.
    """

    between: tuple[gs.Node, ...]
    last: gs.Node
    divided: gs.Tensor
    epsilon: float
    factor: float
    affine: tuple[tuple[str, gs.Tensor], ...] = ()
    least: float = 0.0


def ends(graph: Graph, mean: gs.Node) -> Iterator[End]:
    """The ways to read what lies behind a mean of squares: of a product either factor may be the rows.

    Flax and Haiku multiply the reciprocal by the scale, and rows by that.
    """
    found = root_of(graph, mean)
    if found is None:
        return
    nodes, root = found.nodes, found.nodes[-1].outputs[0]
    if nodes[-1].op == "Sqrt":
        last = reader(nodes[-1], "Div")
        if last is not None and last.inputs[1] is root:
            yield End(nodes, last, last.inputs[0], found.epsilon, found.factor, least=found.least)
        return
    product = reader(nodes[-1], "Mul")
    if product is None:
        return
    yield End(nodes, product, other(product, root), found.epsilon, found.factor, least=found.least)
    last = reader(product, "Mul")
    if last is not None:
        scale, rows = other(product, root), other(last, product.outputs[0])
        yield End((*nodes, product), last, rows, found.epsilon, found.factor, (("mul", scale),), found.least)


@dataclass(frozen=True)
class Root:
    """The root of a mean of squares, or one over it.

    Attributes:
        nodes: that make it.
        epsilon: what is added to the mean.
        factor: what that is multiplied by before: a sum, where it is one over their number.
        least: that this counts for, where nothing is added.
    """

    nodes: tuple[gs.Node, ...]
    epsilon: float
    factor: float
    least: float = 0.0


def root_of(graph: Graph, mean: gs.Node) -> Root | None:
    """The root behind a mean of squares; a cast, a number of squares or another factor, and epsilon before it.

    None is added where torch's exporter took an epsilon of 1e-8 for nothing.
    """
    views = handed_on(graph, mean)
    mean = views[-1] if views else mean
    cast = reader(mean, "Cast")
    if cast is not None and graph.dtype(cast.outputs[0].name) not in (*FLOATS_BY_ONNX, DOUBLE):
        return None
    scaled, factor = multiplied(graph, mean if cast is None else cast)
    add, bounded = reader(scaled, "Add"), reader(scaled, *BOUNDS)
    epsilon = 0.0 if add is None else number(graph, other(add, scaled.outputs[0]))
    least = 0.0 if bounded is None else least_of(graph, bounded, scaled)
    root = reader(add or bounded or scaled, "Sqrt", "Pow")
    if root is None or epsilon is None or least is None:
        return None
    own = {graph.index(node): node for node in (cast, scaled, add, bounded, root) if node and node is not mean}
    nodes = [*views, *own.values()]
    if root.op == "Pow":
        return Root(tuple(nodes), epsilon, factor, least) if number(graph, root.inputs[1]) == -0.5 else None
    return _with_reciprocal(graph, Root(tuple(nodes), epsilon, factor, least))


def _with_reciprocal(graph: Graph, root: Root) -> Root:
    """With one over it, if that alone reads it, and the most that this becomes, as Keras' UnitNormalization has it."""
    over = _one_over(graph, root.nodes[-1])
    most = reader(over[0], "Min") if over else None
    if most is None:
        return replace(root, nodes=(*root.nodes, *over))
    bound = number(graph, other(most, over[0].outputs[0])) if len(most.inputs) == 2 else None
    if bound is None or root.epsilon or not 1 / LARGEST_BOUND <= bound <= MOST_RECIPROCAL:
        return root  # whose reciprocal is read by what is none of it
    return replace(root, nodes=(*root.nodes, *over, most), least=max(root.least, bound**-2))


def least_of(graph: Graph, bounded: gs.Node, node: gs.Node) -> float | None:
    """The least that what a node makes becomes by another, if that is known and there is no greatest.

    Torch's `dynamo` exporter has a Max for a Clip in 16 bits.
    """
    if bounded.op == "Max":
        least = number(graph, other(bounded, node.outputs[0])) if len(bounded.inputs) == 2 else None
    elif "max" in bounded.attrs or any(tensor.name for tensor in bounded.inputs[2:]):
        least = None
    else:
        least = number(graph, bounded.inputs[1]) if len(bounded.inputs) > 1 else bounded.attrs.get("min")
    return None if least is None or least > LARGEST_BOUND else max(least, 0.0)


def multiplied(graph: Graph, node: gs.Node) -> tuple[gs.Node, float]:
    """The node that multiplies what another makes by a positive number or divides by it, and the factor.

    That node itself, and 1, where nothing does.
    """
    scaled = reader(node, "Mul", "Div")
    if scaled is None or (scaled.op == "Div" and scaled.inputs[0] is not node.outputs[0]):
        return node, 1.0
    by = number(graph, other(scaled, node.outputs[0]))
    if by is None or not LEAST_FACTOR <= by <= 1 / LEAST_FACTOR:
        return node, 1.0
    return scaled, by if scaled.op == "Mul" else 1 / by


def handed_on(graph: Graph, reduction: gs.Node, node: gs.Node | None = None) -> list[gs.Node]:
    """The views that keep one element of each row, as torch.export has them behind a variance.

    Of another axis than the last one their sizes have to be known: a body could not tell them of what it reads.

    Args:
        graph: the scope.
        reduction: what makes one element of each row.
        node: behind which they are, if that is another node.
    """
    rows = list((graph.shape(reduction.inputs[0].name) if reduction.inputs else None) or [None])
    axis = axis_of(graph, reduction) or LAST
    rows[axis] = 1
    views: list[gs.Node] = []
    node = node or reduction
    while None not in rows and len(views) < MOST_VIEWS and (view := _view_alone(graph, node)) is not None:
        is_told = axis == LAST or view.op == "Unsqueeze" or graph.known_integers(view.inputs[1]) is not None
        if graph.shape(view.outputs[0].name) != tuple(rows) or not is_told:
            break
        views.append(view)
        node = view
    return views


def _view_alone(graph: Graph, node: gs.Node) -> gs.Node | None:
    """The view that alone reads the elements of what a node makes."""
    value = node.outputs[0]
    readers = element_readers(value)
    return readers[0] if len(readers) == 1 and readers[0].op in HANDING_ON and readers[0].inputs[0] is value else None


def _one_over(graph: Graph, root: gs.Node) -> list[gs.Node]:
    """The node that makes one over a root, if it alone reads it."""
    over = reader(root, "Div", "Reciprocal")
    if over is None or over.inputs[-1] is not root.outputs[0]:
        return []
    return [over] if over.op == "Reciprocal" or number(graph, over.inputs[0]) == 1.0 else []


def _centring(
    graph: Graph, value: gs.Tensor, divided: gs.Tensor, source: Source, axis: int
) -> tuple[list[gs.Node], gs.Tensor, gs.Tensor]:
    """The nodes before what is squared and what is divided, casts and a mean that is subtracted, and what both are of.

    Those of a RMSNorm are the casts alone.
    """
    pairs = [before(graph, tensor, source, axis) for tensor in (value, divided)]
    if len({any(node.op == "Sub" for node in own) for own, _ in pairs}) > 1:  # one of them is centred, and no norm
        return [], value, divided
    nodes = {graph.index(node): node for own, _ in pairs for node in own}
    return [nodes[index] for index in sorted(nodes)], pairs[0][1], pairs[1][1]


def before(graph: Graph, tensor: gs.Tensor, source: Source, axis: int = LAST) -> tuple[list[gs.Node], gs.Tensor]:
    """The nodes before one of the two, and what they are of."""
    behind, tensor_before = _before_cast(graph, tensor)
    sub = maker(tensor_before, "Sub")
    mean = () if sub is None else _mean(graph, sub.inputs[1], axis)
    if sub is None or not mean:
        return source(graph, tensor)
    casts, whole = source(graph, sub.inputs[0])
    others, averaged = source(graph, mean[0].inputs[0])
    return ([*casts, *others, *mean, sub, *behind], whole) if averaged is whole else source(graph, tensor)


def _mean(graph: Graph, value: gs.Tensor, axis: int = LAST) -> tuple[gs.Node, ...]:
    """The nodes that make the means of rows: a reduction, or sums over their number, as torch.export has `var_mean`.

    Those of 16 bits it sums in fp32, and rounds the mean, which a kernel need not. TensorFlow copies the mean that
    a variance is about, so that no gradient goes that way.
    """
    copy = maker(value, "Identity")
    if copy is not None:
        copied = _mean(graph, copy.inputs[0], axis)
        return (*copied, copy) if copied else ()
    mean, cast = maker(value, *MEANS), maker(value, "Cast")
    if mean is not None:
        return (mean,) if kept_axis(graph, mean) == axis else ()
    if axis != LAST:
        return ()
    if cast is not None and graph.dtype(cast.inputs[0].name) == F32.onnx:
        sums = _sums_over_their_number(graph, cast.inputs[0])
        return (*sums, cast) if sums else ()
    return _sums_over_their_number(graph, value)


def _sums_over_their_number(graph: Graph, value: gs.Tensor) -> tuple[gs.Node, ...]:
    over = maker(value, "Div")
    views, total = _before_views(over.inputs[0]) if over is not None else ([], None)
    if over is None or total is None or total.op != SUM or axis_of(graph, total) != LAST:
        return ()
    *rows, _ = graph.shape(total.inputs[0].name) or (None,)
    is_kept = views == handed_on(graph, total) and graph.shape(over.outputs[0].name) == (*rows, 1)
    count = columns_of(graph, total)
    return (total, *views, over) if is_kept and count and number(graph, over.inputs[1]) == count else ()


def _before_views(tensor: gs.Tensor) -> tuple[list[gs.Node], gs.Node | None]:
    """The views that make a value, and the node before them."""
    views: list[gs.Node] = []
    while (view := maker(tensor, *VIEWS)) is not None and len(views) < MOST_VIEWS:
        views.insert(0, view)
        tensor = view.inputs[0]
    return views, next(iter(tensor.inputs), None)


def _before_cast(graph: Graph, tensor: gs.Tensor) -> tuple[list[gs.Node], gs.Tensor]:
    """The casts that widen what a tensor is of, and that."""
    casts: list[gs.Node] = []
    while (cast := maker(tensor, "Cast")) is not None and _widens(graph, cast):
        casts.append(cast)
        tensor = cast.inputs[0]
    return casts, tensor


def _widens(graph: Graph, cast: gs.Node) -> bool:
    """Whether a cast is one for the sake of the sums: to fp32, or from 16 bits to double, as TorchScript writes it."""
    read, after = (graph.dtype(tensor.name) or 0 for tensor in (cast.inputs[0], cast.outputs[0]))
    narrow = FLOATS_BY_ONNX.get(read)
    return narrow is not None and (after == F32.onnx or (after == DOUBLE and narrow.bytes == 2))


def _itself(graph: Graph, tensor: gs.Tensor) -> tuple[list[gs.Node], gs.Tensor]:
    return [], tensor


SOURCES: tuple[Source, ...] = (_before_cast, _itself)
"""What rows may be read through: kernels read 16 bits where a cast widens them for the sums alone."""


def is_closed(graph: Graph, nodes: Sequence[gs.Node], last: gs.Node, dead: Collection[int] = ()) -> bool:
    """Whether nobody else reads what is made on the way, but those that nobody needs then."""
    own = {*map(graph.index, nodes), *dead}
    return all(
        not graph.is_escaping(out.name) and all(graph.index(each) in own for each in out.outputs)
        for node in nodes
        if node is not last
        for out in node.outputs
    )


def maker(tensor: gs.Tensor, *ops: str) -> gs.Node | None:
    """The node of one of some ops that makes a value."""
    return next((node for node in tensor.inputs if node.op in ops), None)


def reader(node: gs.Node, *ops: str) -> gs.Node | None:
    """The node of one of some ops that alone reads what another makes."""
    readers = node.outputs[0].outputs
    return readers[0] if len(readers) == 1 and readers[0].op in ops else None


def other(node: gs.Node, tensor: gs.Tensor) -> gs.Tensor:
    """The other input of a node with two."""
    first, second = node.inputs
    return second if first is tensor else first


def number(graph: Graph, tensor: gs.Tensor) -> float | None:
    """A number that is known before the run."""
    known = graph.known_value(tensor)
    entry = known.item() if known is not None and known.size == 1 else None  # Python's own, of bfloat16 too
    return float(entry) if isinstance(entry, (int, float)) else None


def is_square(graph: Graph, node: gs.Node) -> bool:
    """Whether a product or a power is a square."""
    first, second = node.inputs
    return first is second if node.op == "Mul" else number(graph, second) == 2.0


def kept_axis(graph: Graph, reduction: gs.Node) -> int | None:
    """The axis along which a reduction is, from the end on; None where it is of several, or does not stay."""
    return axis_of(graph, reduction) if reduction.attrs.get("keepdims", 1) == 1 else None


def axis_of(graph: Graph, reduction: gs.Node) -> int | None:
    """The same whether it stays or not."""
    rank = len(graph.shape(reduction.inputs[0].name) or ()) if reduction.inputs else 0
    if reduction.op == "GlobalAveragePool":
        return LAST if rank == 3 else None
    axes = reduced_axes(graph, reduction) if rank and reduction.op in REDUCTIONS else None
    if axes is None or len(axes) != 1:
        return None
    return axes[0] - rank if axes[0] >= 0 else axes[0]
