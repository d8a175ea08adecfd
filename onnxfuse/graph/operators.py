"""Operators by name, and those that ONNX Runtime's optimiser writes and ONNX does not define.

ONNX's registry of operators is the process's own, so it knows them only as long as a `with known_operators()` lasts.
There it learns their element types; their shapes are rows of symbolic_shapes.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import onnx_graphsurgeon as gs
from onnx import TensorProto, TypeProto, defs
from onnx.shape_inference import InferenceContext

CONVOLUTIONS = frozenset({"Conv", "com.microsoft::NhwcConv"})  # which multiply matrices where they are pointwise
NBITS = "com.microsoft::MatMulNBits"  # a product with a weight of few bits
PRODUCTS = CONVOLUTIONS | {"MatMul", "Gemm", "com.microsoft::FusedMatMul", "com.microsoft::FusedGemm", "Einsum", NBITS}

MICROSOFTS = "com.microsoft"  # the domain of ONNX Runtime's own operators
# Operator -> outputs that have the element type of its first float input.
MICROSOFT: dict[str, tuple[int, ...]] = {
    "Attention": (0, 1),
    "BiasAdd": (0,),
    "BiasDropout": (0,),
    "BiasGelu": (0,),
    "BiasSoftmax": (0,),
    "BiasSplitGelu": (0,),
    "CausalConvWithState": (0, 1),
    "DecoderMaskedMultiHeadAttention": (0, 1, 2),
    "DequantizeLinear": (0,),
    "DynamicQuantizeMatMul": (0,),
    "EmbedLayerNormalization": (0,),
    "FastGelu": (0,),
    "FusedConv": (0,),
    "FusedGemm": (0,),
    "FusedMatMul": (0,),
    "GatherBlockQuantized": (0,),
    "Gelu": (0,),
    "GemmaRotaryEmbedding": (0, 1),
    "GroupNorm": (0,),
    "GroupQueryAttention": (0,),
    "MatMulBnb4": (0,),
    "MatMulIntegerToFloat": (0,),
    "MatMulNBits": (0,),
    "MoE": (0,),
    "MultiHeadAttention": (0, 1, 2),
    "NhwcConv": (0,),
    "PackedAttention": (0,),
    "PackedMultiHeadAttention": (0,),
    "QAttention": (0, 1),
    "QEmbedLayerNormalization": (0,),
    "QMoE": (0,),
    "QuickGelu": (0,),
    "RotaryEmbedding": (0,),
    "SkipGroupNorm": (0, 1),
    "SkipLayerNormalization": (0, 3),
    "SkipSimplifiedLayerNormalization": (0, 3),
    "SwiGLU": (0,),
}
# Operator -> outputs that have the element type of an input, and which: a cache may hold fewer bits than the rest.
CACHES: dict[str, dict[int, int]] = {"GroupQueryAttention": {1: 3, 2: 4}}
# ONNX Runtime knows these in ONNX's own domain from version 1 on; ONNX defines the first from 17 on, the second never.
UNVERSIONED: dict[str, tuple[int, ...]] = {"LayerNormalization": (0,), "SimplifiedLayerNormalization": (0,)}

_LOCK = threading.RLock()
_ANY = defs.OpSchema.FormalParameterOption.Variadic
_FLOATS = {1: "float", 10: "float16", 11: "double", 16: "bfloat16"}
_TENSORS = [f"tensor({name.lower()})" for name, number in TensorProto.DataType.items() if number]
_ATTRIBUTES = {"axis": defs.OpSchema.AttrType.INT, "epsilon": defs.OpSchema.AttrType.FLOAT,
               "stash_type": defs.OpSchema.AttrType.INT}  # fmt: skip


KNOWN_DOMAINS = (None, "", "ai.onnx", MICROSOFTS)


def name_of_op(node: gs.Node) -> str:
    """What a graph calls a node's op: with its domain where nothing is known of that, or it might be another."""
    return str(node.op) if node.domain in KNOWN_DOMAINS else f"{node.domain}::{node.op}"


def qualified_op(node: gs.Node) -> str:
    """The op of a graph's node with its domain, `com.microsoft::BiasGelu`; without one for ONNX's own."""
    return f"{node.domain}::{node.op}" if node.domain == MICROSOFTS else str(node.op)


@functools.cache
def keeps_type(op: str) -> bool:
    """Whether the first output of one of ONNX's ops has the element type of its first input, by its schema."""
    if not defs.has(op):
        return False
    schema = defs.get_schema(op)
    return bool(schema.inputs and schema.outputs) and schema.inputs[0].type_str == schema.outputs[0].type_str


@contextmanager
def known_operators(*, microsoft: bool) -> Iterator[None]:
    """ONNX's registry with the operators of this module.

    Args:
        microsoft: with those of `com.microsoft` too; the checker must not see these, since their attributes are not
            registered.
    """
    wanted = [("", op, outputs) for op, outputs in UNVERSIONED.items()]
    wanted += [(MICROSOFTS, op, outputs) for op, outputs in MICROSOFT.items()] if microsoft else []
    with _LOCK:
        made = [(op, domain) for domain, op, outputs in wanted if _register(domain, op, outputs)]
        try:
            yield
        finally:
            for op, domain in made:
                defs.deregister_schema(op, 1, domain)


def _register(domain: str, op: str, outputs: tuple[int, ...]) -> bool:
    """Whether the operator is new; one that somebody else has registered is left alone."""
    if defs.has(op, 1, domain):
        return False
    defs.register_schema(_schema(domain, op, outputs))
    return True


@functools.cache
def _schema(domain: str, op: str, outputs: tuple[int, ...]) -> defs.OpSchema:
    """Made once: a small model's inference takes less time than that of all schemas."""
    anything = [defs.OpSchema.FormalParameter(name, "T", param_option=_ANY, is_homogeneous=False) for name in "xy"]
    attributes = [defs.OpSchema.Attribute(name, kind, required=False) for name, kind in _ATTRIBUTES.items()]
    schema = defs.OpSchema(
        op, domain, 1, inputs=anything[:1], outputs=anything[1:], type_constraints=[("T", _TENSORS, "")],
        attributes=attributes,
    )  # fmt: skip

    def infer(context: InferenceContext) -> None:
        kind = _first_float(context)
        kinds = dict.fromkeys(outputs, kind) | {
            output: _kind(context, place) or kind for output, place in CACHES.get(op, {}).items()
        }
        for output, own in kinds.items():
            if own and output < context.get_num_outputs():
                context.set_output_type(output, TypeProto(tensor_type=TypeProto.Tensor(elem_type=own)))

    schema.set_type_and_shape_inference_function(infer)
    return schema


def _first_float(context: InferenceContext) -> int:
    kinds = (_kind(context, index) for index in range(context.get_num_inputs()))
    return next((kind for kind in kinds if kind in _FLOATS), 0)


def _kind(context: InferenceContext, index: int) -> int:
    """The element type of an input; 0 where it is not known."""
    given = context.get_input_type(index) if index < context.get_num_inputs() else None
    return 0 if given is None else int(given.tensor_type.elem_type)


def is_copy(node: gs.Node) -> bool:
    """Whether a node is a transpose that is run; the runtime's products read what only its last two axes change."""
    perm = tuple(node.attrs.get("perm", ()))
    kept = tuple(range(len(perm) - 2))
    return node.op == "Transpose" and perm != (*kept, len(perm) - 1, len(perm) - 2)
