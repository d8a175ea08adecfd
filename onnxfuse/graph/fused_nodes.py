"""The fused nodes of a written model: what they see in a run, and each beside the nodes that it stands for.

The original nodes are those of the fused node's fallback function, so one file tells both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import FunctionProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, helper, numpy_helper
from onnx.shape_inference import infer_shapes

from onnxfuse.dtypes import FED_BY_ONNX
from onnxfuse.graph import group_query
from onnxfuse.graph.archive import unpack
from onnxfuse.graph.external_data import read_data
from onnxfuse.graph.extract import KERNELS, Ports, site_model
from onnxfuse.graph.fallback_body import RESTORING, renamed
from onnxfuse.graph.functions import DOMAIN, walk, with_attributes
from onnxfuse.graph.load import Model, load_model
from onnxfuse.graph.save import save_model

SHAPE_OF = "onnxfuse.shape:"  # with a value's name: the output that tells its shape
BEFORE, AFTER = "before", "after"
SHAPE_OPS = frozenset({"Constant", "Shape", "Gather", "Concat"})  # what a fallback adds beside the model's own nodes

_ELEMENTS = {dtype.name: dtype.onnx for dtype in FED_BY_ONNX.values()}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DistinctNode:
    """A fused node, and how many of the model are like it.

    Attributes:
        name: of the first of them.
        count: nodes with the same body, kernels and shapes.
        replaces: the original nodes' operators.
        inputs: name, ONNX element type and shape of what it reads beside the kernels: `x0`, `x1`, ...
        outputs: of what it makes: `y0`, `y1`, ...
        weights: positions of the inputs that are initializers.
        flops: of the products in it; 0 where they stay nodes of their own.
    """

    name: str
    count: int
    replaces: tuple[str, ...]
    inputs: Ports
    outputs: Ports
    weights: frozenset[int]
    flops: int
    node: NodeProto
    body: FunctionProto
    kernels: bytes


@dataclass(frozen=True)
class FusedNode:
    """What a fused node says of itself.

    Attributes:
        name: of the node.
        attributes: its strings; `artifact` has their grammar.
        archive: the name of its first input, the kernels.
        inputs: how many it has, the kernels among them.
        outputs: how many it has.
        types: ONNX's element types of what it reads beside the kernels; 0 of what is neither stored nor an input.
    """

    name: str
    attributes: dict[str, str]
    archive: str
    inputs: int
    outputs: int
    types: tuple[int, ...]


def fused_nodes(model: Path) -> tuple[list[FusedNode], dict[str, bytes]]:
    """Every fused node of a model, at any depth, and the archives of kernels that they name; none where one is missing.

    Raises:
        ModelError: the model, or an archive in a file beside it, cannot be read.
    """
    source = load_model(model)
    stored = {tensor.name: tensor for tensor in source.proto.graph.initializer}
    types = {value.name: value.type.tensor_type.elem_type for value in source.proto.graph.input}
    types |= {name: tensor.data_type for name, tensor in stored.items()}
    nodes = [_described(node, types) for node in walk(source.proto.graph.node) if node.domain == DOMAIN]
    names = dict.fromkeys(node.archive for node in nodes)
    return nodes, {name: _archive(source, stored[name]) if name in stored else b"" for name in names}


def descriptions_of(model: Path) -> dict[str, str]:
    """What the metadata of a model say, by key; kernels are described under the name of their archive.

    Raises:
        ModelError: the model cannot be read.
    """
    return {entry.key: entry.value for entry in load_model(model).proto.metadata_props}


def _described(node: NodeProto, types: Mapping[str, int]) -> FusedNode:
    attributes = {each.name: each.s.decode(errors="replace") for each in node.attribute}
    archive, read = (node.input[0] if node.input else ""), tuple(types.get(name, 0) for name in node.input[1:])
    return FusedNode(node.name or ", ".join(node.output), attributes, archive, len(node.input), len(node.output), read)


def uses_tf32(model: Path) -> bool:
    """Whether some fused node, at any depth, says that its kernels compute products in TF32.

    Raises:
        ModelError: the model cannot be read.
    """
    nodes = (node for node in walk(load_model(model).proto.graph.node) if node.domain == DOMAIN)
    maths = (each.s.decode() for node in nodes for each in node.attribute if each.name == "math")
    return any("tf32" in names.split(",") for names in maths)


def architectures_of(model: Path) -> tuple[str, ...]:
    """What the kernels of a model are for, `sm_80` or `ptx`, sorted; nothing of a model without fused nodes.

    Raises:
        ModelError: the model cannot be read.
    """
    source = load_model(model)
    archives = {node.input[0] for node in _fused(source.proto)}
    stored = [tensor for tensor in source.proto.graph.initializer if tensor.name in archives]
    return tuple(sorted({record.architecture for tensor in stored for record in unpack(_archive(source, tensor))}))


def write_with_shapes(model: Path, target: Path) -> list[str]:
    """Write a copy of a model whose outputs are the shapes of what its fused nodes read and make; their values' names.

    Raises:
        ModelError: the model cannot be read.
        OutputError: the disk refuses.
    """
    source = load_model(model)
    names = list(dict.fromkeys(name for node in _fused(source.proto) for name in _values(node)))
    graph = source.proto.graph
    graph.node.extend(helper.make_node("Shape", [name], [f"{SHAPE_OF}{name}"]) for name in names)
    del graph.output[:]
    graph.output.extend(helper.make_tensor_value_info(f"{SHAPE_OF}{name}", TensorProto.INT64, None) for name in names)
    save_model(source.proto, source, target)
    return names


def _fused(proto: ModelProto) -> Iterator[NodeProto]:
    return (node for node in proto.graph.node if node.domain == DOMAIN)


def _values(node: NodeProto) -> Iterator[str]:
    return (name for name in (*node.input[1:], *node.output) if name)


def read_sites(model: Path, shapes: Mapping[str, Shape]) -> list[DistinctNode]:
    """The distinct fused nodes of a model's main graph, in its order.

    Args:
        model: what `optimize` wrote.
        shapes: of the values that `write_with_shapes` named.

    Raises:
        ModelError: the model cannot be read.
    """
    source = load_model(model)
    bodies = {body.name: body for body in source.proto.functions if body.domain == DOMAIN}
    initializers = {tensor.name: tensor for tensor in source.proto.graph.initializer}
    kernels = {name: _archive(source, initializers[name]) for name in {node.input[0] for node in _fused(source.proto)}}
    sites: dict[object, DistinctNode] = {}
    for node in _fused(source.proto):
        attributes = {each.name: each.s.decode() for each in node.attribute}
        inputs = _ports("x", attributes["in_types"], [shapes[name] for name in node.input[1:]])
        outputs = _ports("y", attributes["out_types"], [shapes[name] for name in node.output])
        if inputs is None or outputs is None:
            continue
        key = (node.op_type, attributes["kernel"], inputs, outputs)
        if key in sites:
            sites[key] = replace(sites[key], count=sites[key].count + 1)
            continue
        body = bodies[node.op_type]
        sites[key] = DistinctNode(
            name=node.name,
            count=1,
            replaces=tuple(
                each.op_type for each in body.node if each.op_type not in SHAPE_OPS and each.doc_string != RESTORING
            ),
            inputs=inputs,
            outputs=outputs,
            weights=frozenset(index for index, name in enumerate(node.input[1:]) if name in initializers),
            flops=flops_of(attributes, [shape for _, _, shape in inputs]),
            node=node,
            body=body,
            kernels=kernels[node.input[0]],
        )
    return list(sites.values())


def _archive(source: Model, tensor: TensorProto) -> bytes:
    external = tensor.data_location == TensorProto.EXTERNAL
    return read_data(source, tensor) if external else bytes(numpy_helper.to_array(tensor).tobytes())


def _ports(prefix: str, types: str, shapes: list[Shape]) -> tuple[tuple[str, int, Shape], ...] | None:
    """The ports of a node; None where it has one of another type than kernels read."""
    names = types.split(",")
    if not all(name in _ELEMENTS for name in names):
        return None
    typed = zip(names, shapes, strict=True)
    return tuple((f"{prefix}{index}", _ELEMENTS[name], shape) for index, (name, shape) in enumerate(typed))


def flops_of(attributes: Mapping[str, str], shapes: list[Shape]) -> int:
    """Multiplications and additions of a fused node's products, each counted once.

    Args:
        attributes: of the node; `artifact` has their grammar.
        shapes: of its inputs after the kernels.
    """
    arguments = dict(entry.split("=", 1) for entry in attributes["arguments"].split(" "))
    if "rhs" not in arguments:
        return 0
    dims = [_dims(text) for text in attributes["axes"].split("->")[0].split(",")]
    sizes = _bound(dict(_size(entry) for entry in attributes.get("sizes", "").split()), dims, shapes)
    lhs = set(_axes(dims[int(arguments["lhs"])]))
    factors = {int(entry.split("[")[0]) for entry in arguments["rhs"].split(",")}
    if "o=" in attributes["problem"]:  # of an attention; the second product has the rows of the first
        depth = {axis for entry in attributes["problem"].split() if entry[:2] == "k=" for axis in entry[2:].split("*")}
        keys, values = (set(_axes(dims[index])) for index in sorted(factors))
        return sum(2 * math.prod(sizes[axis] for axis in axes) for axes in (lhs | keys, (lhs | values) - depth))
    # Beside them a quantised rhs has blocks of k and bytes of a block.
    walked = {axis for entry in attributes["problem"].split() for axis in entry.split("=")[1].split("*")}
    walked |= set(re.findall(r"\[(\w+)=", arguments["rhs"]))
    return sum(2 * math.prod(sizes[axis] for axis in lhs | walked & set(_axes(dims[index]))) for index in factors)


def _size(entry: str) -> tuple[str, int]:
    axis, size = entry.split("=")
    return axis, int(size)


def _dims(text: str) -> list[list[str]]:
    """The dimensions of an einops item as lists of axes; of a window (`n:6144`), those of the window."""
    dims: list[list[str]] = []
    inside = False
    for token in re.sub(r":\d+", "", text).replace("(", " ( ").replace(")", " ) ").split():
        if token in "()":
            inside = token == "("
            dims += [[]] if inside else []
        elif inside:
            dims[-1].append(token)
        else:
            dims.append([] if token == "1" else [token])
    return dims


def _axes(dims: list[list[str]]) -> Iterator[str]:
    return (axis for dim in dims for axis in dim)


def _bound(sizes: dict[str, int], dims: list[list[list[str]]], shapes: list[Shape]) -> dict[str, int]:
    """The size of every axis: a dimension tells the one axis of it that is not known yet."""
    for tensor, shape in zip(dims, shapes, strict=True):
        for axes, size in zip(tensor, shape, strict=True):
            unknown = [axis for axis in axes if axis not in sizes]  # none in a window
            if len(unknown) == 1:
                sizes[unknown[0]] = size // math.prod(sizes[axis] for axis in axes if axis != unknown[0])
    return sizes


def site_models(site: DistinctNode, copies: int) -> dict[str, bytes]:
    """Two models of `copies` copies of a site: its original nodes (`before`) and the fused node (`after`)."""
    names = [KERNELS, *(name for name, _, _ in site.inputs)], [name for name, _, _ in site.outputs]
    fused = NodeProto(op_type=site.node.op_type, domain=DOMAIN)
    fused.attribute.extend(site.node.attribute)
    fused.input.extend(names[0])
    fused.output.extend(names[1])
    opsets = list(site.body.opset_import)
    own = [*opsets, OperatorSetIdProto(domain=DOMAIN, version=1)]
    after = site_model(own, [fused], site.inputs, site.outputs, copies, site.kernels, [site.body])
    if any(node.doc_string == RESTORING and node.op_type == "Cast" for node in site.body.node):
        return {AFTER: after}  # the original reads integers of types that a run cannot be given
    stock, inputs = _with_own_order(site)
    return {BEFORE: site_model(opsets, stock, inputs, site.outputs, copies), AFTER: after}


def _with_own_order(site: DistinctNode) -> tuple[list[NodeProto], Ports]:
    """The original nodes, and their inputs with weights as the original stores them: it has nothing to restore."""
    given = {attribute.name: attribute for attribute in site.node.attribute}
    nodes = [with_attributes(node, given) for node in site.body.node]
    restoring = [node for node in nodes if node.doc_string == RESTORING]
    own = {_restored(restoring, name): name for name, _, _ in site.inputs}
    shapes = _shapes_of(restoring, site)
    ports = [
        (name, element, shapes.get(value, shape))
        for (name, element, shape), value in zip(site.inputs, own, strict=True)
    ]
    return [renamed(node, own) for node in nodes if node.doc_string != RESTORING], ports


def _restored(restoring: Sequence[NodeProto], value: str) -> str:
    """What the last of the nodes makes of a stored weight: each reads it first, and then what it needs to know."""
    for node in restoring:
        value = node.output[0] if node.input[:1] == [value] else value
    return value


def _shapes_of(nodes: Sequence[NodeProto], site: DistinctNode) -> dict[str, list[int]]:
    """Of the values that nodes make of a site's inputs."""
    values = [helper.make_tensor_value_info(*port) for port in site.inputs]
    model = helper.make_model(helper.make_graph(nodes, "restoring", values, []), opset_imports=site.body.opset_import)
    made = infer_shapes(model, data_prop=True).graph.value_info
    return {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in made}


def lengths_of(site: DistinctNode) -> dict[str, int]:
    """The last key's place, by the input that tells it of each sequence: what a GroupQueryAttention would refuse drawn.

    The number of keys is a dimension of an input, which a body has of its Shape.
    """
    shapes, makers = {name: shape for name, _, shape in site.inputs}, {}
    for node in site.body.node:
        makers.update(dict.fromkeys(node.output, node))
        if (node.domain, node.op_type) == (group_query.DOMAIN, group_query.OP):
            value = node.input[group_query.TOTAL]
            while value in makers:
                value = makers[value].input[0]
            return {node.input[group_query.LENGTHS]: shapes[value][-1] - 1}
    return {}


OPSETS = (OperatorSetIdProto(domain="", version=17),)


def copy_model(length: int, copies: int) -> tuple[bytes, Ports, Ports]:
    """A model that reads and writes `length` floats, and its ports: what memory allows."""
    inputs, outputs = (("x0", TensorProto.FLOAT, (length,)),), (("y0", TensorProto.FLOAT, (length,)),)
    return site_model(OPSETS, [helper.make_node("Neg", ["x0"], ["y0"])], inputs, outputs, copies), inputs, outputs


def product_model(element: int, side: int, copies: int) -> tuple[bytes, Ports, Ports]:
    """A model that multiplies two square matrices, and its ports: what the library reaches."""
    shape = (side, side)
    inputs, outputs = (("x0", element, shape), ("x1", element, shape)), (("y0", element, shape),)
    node = helper.make_node("MatMul", ["x0", "x1"], ["y0"])
    return site_model(OPSETS, [node], inputs, outputs, copies), inputs, outputs
