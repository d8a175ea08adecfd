"""ONNX Runtime's ops that add and normalise, taken apart: where a product ends at one, the sums can be its kernel's.

`SkipLayerNormalization` and its simplified sister become a function of each call: one or two Adds, and the
normalisation as an op of its own that reads their sum. Like functions of the model they are inlined to look for
fusions, and only those stay inlined that a fusion reaches into. The bias comes first, as where ONNX Runtime's optimiser
finds the op, so that it makes it again where the original nodes run.

What stays of such an op is the op again in the end, which adds one row of zeros: its kernel takes a quarter to half of
the time of ONNX Runtime's kernel for the normalisation alone (results/h200-optimized.json).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnxfuse.graph.functions import OPENED, FunctionKey, call_key, functions_of, walk
from onnxfuse.graph.operators import PRODUCTS

_NORMALISATIONS = {"SkipLayerNormalization": "LayerNormalization",
                   "SkipSimplifiedLayerNormalization": "SimplifiedLayerNormalization"}  # fmt: skip
_WHOLE = {alone: whole for whole, alone in _NORMALISATIONS.items()}
_PARAMETERS = {"SkipLayerNormalization": ("gamma", "beta", "bias"),
               "SkipSimplifiedLayerNormalization": ("gamma", "bias")}  # fmt: skip
_DOMAIN = "com.microsoft"
_EPSILON = 1e-12  # of ONNX Runtime's op where a node has none; LayerNormalization's own is another
_NEAR = 8  # nodes between a product and the op that may belong to its epilogue


def functions_and_openings(proto: ModelProto) -> dict[FunctionKey, FunctionProto]:
    """The model's own functions, and those that ops stand for.

    Raises:
        ModelError: a function calls itself.
    """
    return {**functions_of(proto), **openings(proto)}


def openings(proto: ModelProto, everywhere: bool = False) -> dict[FunctionKey, FunctionProto]:
    """A function for each op that stands behind a product, at any depth of branches and bodies.

    Args:
        proto: the model; its own functions are not looked into.
        everywhere: for each other one as well.
    """
    nodes = [node for node in walk(proto.graph.node) if (node.domain, node.op_type) in OPENED and _can_be_opened(node)]
    if not nodes:
        return {}
    makers = {name: each for each in enumerate(walk(proto.graph.node)) for name in each[1].output if name}
    counts = Counter(map(call_key, nodes))
    found: dict[FunctionKey, FunctionProto] = {}
    for node in nodes:
        products = [_product_before(name, makers) for name in node.input[:2]]
        if counts[call_key(node)] == 1 and (everywhere or max(products) >= 0):
            found[call_key(node)] = _function(node, proto, products.index(max(products)))
    return found


def _can_be_opened(node: NodeProto) -> bool:
    """Whether nothing reads the mean or the deviation, which ONNX Runtime computes on no GPU."""
    return any(node.output[:1]) and not any(node.output[1:3]) and len(node.input) > 2 and all(node.input[:3])


def _product_before(name: str, makers: Mapping[str, tuple[int, NodeProto]]) -> int:
    """The position of a product near before a value; -1 where there is none."""
    stack, seen = [name], 0
    while stack and seen < _NEAR:
        place, maker = makers.get(stack.pop(), (-1, NodeProto()))
        seen += 1
        if (f"{maker.domain}::{maker.op_type}" if maker.domain else maker.op_type) in PRODUCTS:
            return place
        stack += maker.input[:2]
    return -1


def _function(node: NodeProto, proto: ModelProto, product: int) -> FunctionProto:
    """What a node computes, its inputs and outputs in their order; the bias is added to the input of a product."""
    parameters = _PARAMETERS[node.op_type]
    given = dict(zip(("x", "skip", *parameters), (*node.input, "", ""), strict=False))
    first, second = ("skip", "x") if product else ("x", "skip")
    nodes = [helper.make_node("Add", [first, "bias"], ["biased"])] if given.get("bias") else []
    nodes.append(helper.make_node("Add", [nodes[0].output[0] if nodes else first, second], ["sum"]))
    scales = ["gamma", *(["beta"] if given.get("beta") else [])]
    norm = helper.make_node(_NORMALISATIONS[node.op_type], ["sum", *scales], ["y"], axis=-1, stash_type=1)
    norm.attribute.add(name="epsilon", ref_attr_name="epsilon", type=norm.attribute[0].FLOAT)
    return helper.make_function(
        node.domain, node.op_type, ["x", "skip", *parameters], ["y", "mean", "deviation", "sum"],
        [*nodes, norm], list(proto.opset_import), attribute_protos=[helper.make_attribute("epsilon", _EPSILON)],
    )  # fmt: skip


def add_zeros(scope: GraphProto, rows: Mapping[str, tuple[int, int]], named: Callable[[str], str]) -> None:
    """Put the op itself in the place of what is left of it: its kernel normalises faster than that of the rest.

    Args:
        scope: a graph of the model, which is edited.
        rows: length and type of the rows of each normalisation, by what it makes.
        named: a name that is not taken, near to one.
    """
    if rows:
        nodes = [new for node in scope.node for new in adding_zeros(node, rows, named)]
        del scope.node[:]
        scope.node.extend(nodes)


def adding_zeros(
    node: NodeProto, rows: Mapping[str, tuple[int, int]], named: Callable[[str], str]
) -> Iterable[NodeProto]:
    """The node, or the op in its place: zeros `[1, 1, length]` are repeated over the sum's rows `[rows, 1, length]`."""
    if node.op_type not in _WHOLE or node.output[0] not in rows:
        return [node]
    (length, dtype), (total, *scales), (y,) = rows[node.output[0]], node.input, node.output
    rows_of, row, as_rows, zeros, normalised, shape = (
        named(f"{y}.{role}") for role in ("rows", "row", "as_rows", "zeros", "normalised", "shape")
    )
    whole = helper.make_node(
        _WHOLE[node.op_type], [as_rows, zeros, *scales], [normalised], node.name, domain=_DOMAIN
    )  # fmt: skip
    whole.attribute.extend(attribute for attribute in node.attribute if attribute.name == "epsilon")
    return [
        _constant(rows_of, [-1, 1, length]),
        _constant(row, [1, 1, length]),
        helper.make_node("Reshape", [total, rows_of], [as_rows]),
        helper.make_node("ConstantOfShape", [row], [zeros], value=helper.make_tensor("value", dtype, [1], [0])),
        whole,
        helper.make_node("Shape", [total], [shape]),
        helper.make_node("Reshape", [normalised, shape], [y]),
    ]


def _constant(name: str, values: Sequence[int]) -> NodeProto:
    value = helper.make_tensor("value", TensorProto.INT64, [len(values)], values)
    return helper.make_node("Constant", [], [name], value=value)
