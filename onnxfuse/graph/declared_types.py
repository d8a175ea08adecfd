"""Types of values: what inference tells, and what a model declares where inference tells nothing.

ONNX's own inference believes what a model declares of its intermediate values and fails where that contradicts, ONNX
Runtime fails where an element type does: converters leave shapes behind that were true of another batch size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, helper

from onnxfuse.graph.branch_names import infer_shapes
from onnxfuse.graph.carried_types import MADE_UP, loops, tell_bodies
from onnxfuse.graph.functions import subgraphs
from onnxfuse.graph.operators import UNVERSIONED

Types = Mapping[str, TypeProto]
MAX_PASSES = 8  # each of which may learn something from what the one before could not tell
MAX_LOOPS = 64  # each of which may read what another carried, and has a pass of its own
KEEP_TYPE = frozenset({"Imputer", "Normalizer", "Scaler"})  # of ai.onnx.ml, where ONNX infers nothing
Dimension = TensorShapeProto.Dimension

_AT = r"\(op_type:(\w+)(?:, node name: ([^)]*))?\): \[ShapeInferenceError\] "
_REFUSED = {
    re.compile(_AT + "Incompatible dimensions"): "the shapes of its inputs do not broadcast",
    re.compile(_AT + r"Input \d+ expected to have (rank \d+ but has rank \d+)"): "an input of it should have {}",
    re.compile(
        _AT + r"Dimension mismatch in unification between (\d+ and \d+)"
    ): "sizes {} of its inputs should be one",
    re.compile(_AT + r"'?axis'? must be in (\[[^\]]*\])"): "its axis is not in {}",
}
"""What ONNX Runtime refuses a node for as it loads a model, in ONNX's words and in ours."""


def inferred_types(model: ModelProto) -> ModelProto:
    """The model with the types of all values that can be told; a declared type that contradicts is not believed.

    Args:
        model: loses what it declares of intermediate values.

    Raises:
        onnx.shape_inference.InferenceError: the types of inputs and outputs contradict the nodes.
        ValueError: a node cannot have the shapes that it meets, or a value the type that is declared.
    """
    declared = _taken(model.graph)
    for _, graph in (inner for node in model.graph.node for inner in subgraphs(node)):
        _forget_stored(graph)
    inferred = infer_shapes(model, check_type=True, data_prop=True)
    known = _types(inferred.graph)
    _check_shapes(model, known)
    _check_elements(model, known, declared)
    if any(_contradicts(known[name], kind) for name, kind in declared.items() if name in known):
        declared = {name: _without_sizes(kind) for name, kind in declared.items()}
    for _ in range(MAX_PASSES + min(MAX_LOOPS, len(loops(model)))):
        carried, told = tell_bodies(model, known)
        learnt = dict(_learnt(inferred.graph, known, declared | carried))
        if not learnt and not told:
            break
        outputs = {value.name: value for value in model.graph.output}
        values = {value.name: value for value in model.graph.value_info}
        for name, kind in learnt.items():
            value = outputs.get(name) or values.get(name) or model.graph.value_info.add(name=name)
            value.type.CopyFrom(kind)
        inferred = infer_shapes(model, check_type=True, data_prop=True)
        known = _types(inferred.graph)
    return inferred


def _check_shapes(model: ModelProto, known: Types) -> None:
    """Where inference tells nothing of a value, it may have met shapes that ONNX Runtime refuses, and keeps to itself.

    Raises:
        ValueError: a node cannot have the shapes that it meets.
    """
    if all(name in known and _is_told(known[name]) for node in model.graph.node for name in node.output if name):
        return
    try:
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        for form, words in _REFUSED.items():
            fault = form.search(str(error))
            if fault is not None:
                raise ValueError(f"{_called(fault[1], fault[2])}: {words.format(*fault.groups()[2:])}") from None


def _check_elements(model: ModelProto, known: Types, declared: Types) -> None:
    """ONNX Runtime wants a declared element type to be the one that a node makes; what ONNX's own make is certain.

    Raises:
        ValueError: it is another.
    """
    certain = (node for node in model.graph.node if not (node.domain or node.op_type in UNVERSIONED))
    for node in (node for node in certain if not any(subgraphs(node))):
        for name in node.output:
            made, said = (kinds[name].tensor_type.elem_type if name in kinds else 0 for kinds in (known, declared))
            if made and said and made != said:
                types = [TensorProto.DataType.Name(element) for element in (made, said)]
                raise ValueError(
                    f"{_called(node.op_type, node.name)}: makes {name!r} in {types[0]}, declared {types[1]}"
                )


def _called(op: str, name: str | None) -> str:
    return f"{name} ({op})" if name else f"a {op} without a name"


def _is_told(kind: TypeProto) -> bool:
    """Whether inference told it: an output has a type all the same, and no shape then."""
    return kind.WhichOneof("value") != "tensor_type" or bool(kind.tensor_type.HasField("shape"))


def _taken(graph: GraphProto) -> dict[str, TypeProto]:
    """What a graph declares of values that nodes make; the graph forgets it."""
    made = {name for node in graph.node for name in node.output}
    declared: dict[str, TypeProto] = {}
    for value in (*graph.value_info, *graph.output):
        if value.name in made:
            declared[value.name] = TypeProto()
            declared[value.name].CopyFrom(value.type)
    del graph.value_info[:]
    for value in graph.output:
        if value.name in made and value.type.HasField("tensor_type"):
            value.ClearField("type")
    return declared


def _forget_stored(graph: GraphProto) -> None:
    """An initializer of a branch or body is of its own type, whatever is declared of it."""
    stored = {tensor.name for tensor in graph.initializer}
    kept = [value for value in graph.value_info if value.name not in stored]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for _, inner in (each for node in graph.node for each in subgraphs(node)):
        _forget_stored(inner)


def _types(graph: GraphProto) -> dict[str, TypeProto]:
    """The types that are known."""
    values: tuple[ValueInfoProto, ...] = (*graph.value_info, *graph.output, *graph.input)
    known = {value.name: value.type for value in values if value.type.WhichOneof("value")}
    for tensor in graph.initializer:
        known.setdefault(tensor.name, helper.make_tensor_type_proto(tensor.data_type, tuple(tensor.dims)))
    return known


def _learnt(graph: GraphProto, known: Types, declared: Types) -> Iterator[tuple[str, TypeProto]]:
    """What declarations and operators without inference add to what is known."""
    for name, kind in declared.items():
        merged = _merged(known.get(name), kind)
        if merged != known.get(name):
            yield name, merged
    for node in graph.node:
        read = known.get(node.input[0]) if node.input else None
        if node.domain != "ai.onnx.ml" or node.op_type not in KEEP_TYPE or read is None:
            continue
        merged = _merged(known.get(node.output[0]), _kept(node, read))
        if merged != known.get(node.output[0]):
            yield node.output[0], merged


def _kept(node: NodeProto, read: TypeProto) -> TypeProto:
    """The type of what an operator of KEEP_TYPE makes of a value of type `read`."""
    same = TypeProto()
    same.CopyFrom(read)
    if node.op_type != "Imputer":
        same.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return same


def _merged(known: TypeProto | None, declared: TypeProto) -> TypeProto:
    """What is known, and what is declared beyond it."""
    merged = TypeProto()
    merged.CopyFrom(declared if known is None else known)
    if known is None or not known.HasField("tensor_type") or not declared.HasField("tensor_type"):
        return merged
    tensor, other = merged.tensor_type, declared.tensor_type
    tensor.elem_type = tensor.elem_type or other.elem_type
    if not tensor.HasField("shape") and other.HasField("shape"):
        tensor.shape.CopyFrom(other.shape)
    if len(tensor.shape.dim) == len(other.shape.dim):
        for dim, said in zip(tensor.shape.dim, other.shape.dim, strict=True):
            if _is_open(dim) and not _is_open(said):
                dim.CopyFrom(said)
    return merged


def _contradicts(known: TypeProto, declared: TypeProto) -> bool:
    """Whether a declared shape is not what inference tells."""
    tensor, other = known.tensor_type, declared.tensor_type
    if not tensor.HasField("shape") or not other.HasField("shape"):
        return False
    dims = list(zip(tensor.shape.dim, other.shape.dim, strict=False))
    return len(tensor.shape.dim) != len(other.shape.dim) or any(
        said.HasField("dim_value") and not _is_open(dim) and dim.dim_value != said.dim_value for dim, said in dims
    )


def _without_sizes(kind: TypeProto) -> TypeProto:
    """The same type, but for sizes: where one is false, none is believed."""
    bare = TypeProto()
    bare.CopyFrom(kind)
    for dim in bare.tensor_type.shape.dim if kind.HasField("tensor_type") else ():
        dim.Clear()
    return bare


def _is_open(dim: Dimension) -> bool:
    """Whether nothing is known of a size."""
    return not dim.HasField("dim_value") and (not dim.dim_param or dim.dim_param.startswith(MADE_UP))
