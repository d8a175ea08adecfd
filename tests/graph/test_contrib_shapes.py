"""What ONNX Runtime's own ops make: types and shapes, as runs make them where its CPU provider has the op."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.symbolic import Size

FLOAT, HALF, INT32, INT64, UINT8, UINT4 = (
    getattr(TensorProto, name) for name in ("FLOAT", "FLOAT16", "INT32", "INT64", "UINT8", "UINT4")
)
B, S, P = 1, 3, 4  # sizes of a run: batch, sequence, past; with a past the CPU takes one batch
RUN = {"b": B, "s": S, "past": P, "tokens": 7}
Entry = tuple[int, tuple[int | str, ...]] | tuple[int, tuple[int | str, ...], int]


@dataclass(frozen=True)
class Case:
    """A node, the type and shape of each input (with a value where zeros will not do), and what it makes.

    Attributes:
        made: of each output the shape; None where nothing has to be known.
        runs: whether ONNX Runtime's CPU provider has the op, and numpy the types of its inputs.
    """

    op: str
    inputs: tuple[Entry | None, ...]
    made: tuple[tuple[Size, ...] | None, ...]
    attributes: dict[str, object] = field(default_factory=dict)
    runs: bool = True


def half(*shape: int | str) -> Entry:
    return FLOAT, shape


CACHE = (half("b", 4, "past", 8),) * 2
LENGTHS = ((INT32, ("b",), P + S - 1), (INT32, (), P + S))
CASES = {
    "grouped heads": Case(
        "GroupQueryAttention", (half("b", "s", 64), *(half("b", "s", 32),) * 2, *CACHE, *LENGTHS),
        (("b", "s", 64), ("b", 4, None, 8), ("b", 4, None, 8)), {"num_heads": 8, "kv_num_heads": 4}),
    "grouped heads, packed": Case(
        "GroupQueryAttention", (half("b", "s", 128), None, None, *CACHE, *LENGTHS),
        (("b", "s", 64), ("b", 4, None, 8), ("b", 4, None, 8)), {"num_heads": 8, "kv_num_heads": 4}),
    "heads": Case("MultiHeadAttention", (half("b", "s", 64),) * 3, (("b", "s", 64),), {"num_heads": 8}),
    "heads of a longer value": Case(
        "MultiHeadAttention", (half("b", "s", 64), half("b", 5, 64), half("b", 5, 96)), (("b", "s", 96),),
        {"num_heads": 8}),
    "heads, packed": Case(
        "MultiHeadAttention", (half("b", "s", 8, 3, 16),), (("b", "s", 128),), {"num_heads": 8}, runs=False),
    "heads, keys packed": Case(
        "MultiHeadAttention", (half("b", "s", 128), half("b", 5, 8, 2, 16)), (("b", "s", 128),), {"num_heads": 8},
        runs=False),
    "heads of a cache": Case(
        "MultiHeadAttention", (half("b", "s", 64), half("b", 8, 5, 8), half("b", 8, 5, 8)), (("b", "s", 64),),
        {"num_heads": 8}),
    "heads of tokens": Case(
        "PackedMultiHeadAttention",
        (half("tokens", 64), half("tokens", 64), half("tokens", 96), None, (INT32, ("b", "s")), (INT32, (3,))),
        (("tokens", 96),), {"num_heads": 8}, runs=False),
    "heads of tokens, packed": Case(
        "PackedMultiHeadAttention", (half("tokens", 8, 3, 16), None, None, None, (INT32, ("b", "s")), (INT32, (3,))),
        (("tokens", 128),), {"num_heads": 8}, runs=False),
    "attention": Case("Attention", (half("b", "s", 48), half(48, 192), half(192)), (("b", "s", 64),), {"num_heads": 8}),
    "attention of other widths": Case(
        "Attention", (half("b", "s", 48), half(48, 160), half(160)), (("b", "s", 32),),
        {"num_heads": 8, "qkv_hidden_sizes": [64, 64, 32]}),
    "attention with a cache": Case(
        "Attention", (half("b", "s", 64), half(64, 192), half(192), None, half(2, "b", 8, "past", 8)),
        (("b", "s", 64), (2, "b", 8, None, 8)), {"num_heads": 8, "unidirectional": 1}),
    "attention of tokens": Case(
        "PackedAttention", (half("tokens", 48), half(48, 192), half(192), (INT32, ("b", "s")), (INT32, (3,))),
        (("tokens", 64),), {"num_heads": 8}, runs=False),
    "positions": Case(
        "RotaryEmbedding", (half("b", "s", 64), (INT64, ("b", "s")), half(9, 4), half(9, 4)), (("b", "s", 64),),
        {"num_heads": 8}),
    "groups": Case(
        "GroupNorm", (half("b", "s", 5, 32), (FLOAT, (32,)), (FLOAT, (32,))), (("b", "s", 5, 32),),
        {"groups": 4, "activation": 0}, runs=False),
    "groups of a sum": Case(
        "SkipGroupNorm", (half("b", "s", 5, 32), (FLOAT, (32,)), (FLOAT, (32,)), half("b", "s", 5, 32)),
        (("b", "s", 5, 32),) * 2, {"groups": 4, "activation": 0}, runs=False),
    "convolution": Case(
        "NhwcConv", (half("b", 9, 11, 16), half(24, 3, 3, 16)), (("b", 5, 6, 24),),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, runs=False),
    "convolution with an activation": Case(
        "FusedConv", (half("b", 16, 9, 11), half(24, 16, 3, 3), half(24)), (("b", 24, 5, 6),),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "activation": "Relu"}),
    "convolution with a sum": Case(
        "FusedConv", (half("b", 16, 9, 11), half(24, 16, 1, 1), half(24), half("b", 24, 9, 11)), (("b", 24, 9, 11),),
        {"kernel_shape": [1, 1]}),
    "softmax of a sum": Case(
        "BiasSoftmax", (half("b", 4, "s", 8), half("b", 1, "s", 8)), (("b", 4, "s", 8),),
        {"axis": 3, "is_inner_broadcast": 0}, runs=False),
    "experts": Case(
        "MoE", (half("b", "s", 16), half("tokens", 4), half(4, 8, 16), None, half(4, 16, 8)), (("b", "s", 16),),
        {"k": 2}, runs=False),
    "experts of few bits": Case(
        "QMoE", (half("b", "s", 16), half("tokens", 4), (UINT8, (4, 8, 8)), half(4, 8), None, (UINT8, (4, 16, 4))),
        (("b", "s", 16),), {"k": 2}, runs=False),
    "four bits": Case(
        "MatMulNBits", (half("b", "s", 64), (UINT8, (48, 2, 16)), half(48, 2)), (("b", "s", 48),),
        {"K": 64, "N": 48, "bits": 4, "block_size": 32}),
    "four bits of floats": Case(
        "MatMulBnb4", (half("b", "s", 64), (UINT8, (1536,)), (FLOAT, (48,))), (("b", "s", 48),),
        {"K": 64, "N": 48, "block_size": 64, "quant_type": 1}),
    "attention of integers": Case(
        "QAttention", ((UINT8, ("b", "s", 48)), (UINT8, (48, 192)), half(192), half(), half(), None, (UINT8, ()),
        (UINT8, ())), (("b", "s", 64),), {"num_heads": 8}),
    "an embedding of integers": Case(
        "QEmbedLayerNormalization", ((INT32, ("b", "s")), None, (UINT8, (24, 64)), (UINT8, (9, 64)), None,
        (UINT8, (64,)), (UINT8, (64,)), None, half(), half(), None, half(), half(), (UINT8, ()), (UINT8, ()), None,
        (UINT8, ()), (UINT8, ())), (("b", "s", 64),), runs=False),
    "columns over time": Case(
        "CausalConvWithState", (half("b", 16, "s"), half(16, 1, 4), None, half("b", 16, 3)),
        (("b", 16, "s"), ("b", 16, 3)), {"ndim": 1}),
    "rows of four bits": Case(
        "GatherBlockQuantized", ((UINT4, (24, 64)), (INT64, ("b", "s")), half(24, 2)), (("b", "s", 64),),
        {"block_size": 32}, runs=False),
    "rows of four bits in bytes": Case(
        "GatherBlockQuantized", ((UINT8, (24, 32)), (INT64, ("b", "s")), half(24, 2)), (("b", "s", 64),),
        {"block_size": 32, "bits": 4}),
    "rows of eight bits": Case(
        "GatherBlockQuantized", ((UINT8, (24, 64)), (INT64, ("b", "s")), half(24, 2), (UINT8, (24, 2))),
        (("b", "s", 64),), {"block_size": 32, "bits": 8}),
    "rows of half a block": Case(
        "GatherBlockQuantized", ((UINT8, (24, 8)), (INT64, ("b", "s")), half(24, 1)), (("b", "s", None),),
        {"block_size": 32}),
    "columns of four bits": Case(
        "GatherBlockQuantized", ((UINT4, (64, 24)), (INT64, ("s",)), half(2, 24)), ((64, "s"),),
        {"block_size": 32, "gather_axis": 1, "quantize_axis": 0}, runs=False),
    "from integers": Case(
        "DequantizeLinear", ((UINT8, ("b", "s", 64)), half(), (UINT8, ())), (("b", "s", 64),)),
    "of integers": Case(
        "MatMulIntegerToFloat", ((UINT8, ("b", "s", 64)), (UINT8, (64, 48)), half(), half(), (UINT8, ()), (UINT8, ())),
        (("b", "s", 48),)),
    "to integers and back": Case(
        "DynamicQuantizeMatMul", (half("b", "s", 64), (UINT8, (64, 48)), half(), (UINT8, ())), (("b", "s", 48),)),
    "gate": Case("SwiGLU", (half("b", "s", 64), half("b", "s", 64)), (("b", "s", 64),), runs=False),
    "gate, packed": Case("SwiGLU", (half("b", "s", 64),), (("b", "s", 32),), runs=False),
    "bias and dropout": Case("BiasDropout", (half("b", "s", 64), half(64)), (("b", "s", 64),), runs=False),
}  # fmt: skip


def model(case: Case, element: int) -> ModelProto:
    """The node with its inputs, floats of an element type; what it makes is declared nowhere."""
    names = [f"x{index}" if entry else "" for index, entry in enumerate(case.inputs)]
    outputs = [f"y{index}" for index in range(len(case.made))]
    node = helper.make_node(case.op, names, outputs, domain="com.microsoft", **case.attributes)
    inputs = [
        helper.make_tensor_value_info(name, element if entry[0] == FLOAT else entry[0], entry[1])
        for name, entry in zip(names, case.inputs, strict=True)
        if entry
    ]
    readers = [helper.make_node("Identity", [name], [f"z{index}"]) for index, name in enumerate(outputs)]
    graph = helper.make_graph([node, *readers], "test", inputs, [])
    for index in range(len(outputs)):
        graph.output.add(name=f"z{index}").type.tensor_type.elem_type = element
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("element", [FLOAT, HALF])
@pytest.mark.parametrize("name", CASES)
def test_types_and_shapes(name: str, element: int) -> None:
    case = CASES[name]
    graph = Graph(load_model(model(case, element)))
    for index, shape in enumerate(case.made):
        assert graph.dtype(f"y{index}") == element
        assert graph.shape(f"y{index}") == shape


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.runs])
def test_a_run_makes_the_same(name: str) -> None:
    case = CASES[name]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model(case, FLOAT).SerializeToString(), options, ["CPUExecutionProvider"])
    feed = {
        f"x{index}": np.full(
            [RUN.get(size, size) for size in entry[1]], (*entry, 0)[2], helper.tensor_dtype_to_np_dtype(entry[0])
        )
        for index, entry in enumerate(case.inputs)
        if entry
    }
    for shape, value in zip(case.made, session.run(None, feed), strict=True):
        sizes = [RUN.get(size, size) for size in shape or value.shape]
        assert len(sizes) == value.ndim
        assert all(size is None or size == own for size, own in zip(sizes, value.shape, strict=True))


def test_a_cache_of_fewer_bits_stays_so() -> None:
    case = CASES["grouped heads"]
    proto = model(case, HALF)
    for value in proto.graph.input[3:5]:
        value.type.tensor_type.elem_type = TensorProto.INT8
    for value in proto.graph.output[1:]:
        value.type.tensor_type.elem_type = TensorProto.INT8
    graph = Graph(load_model(proto))
    assert [graph.dtype(name) for name in ("y0", "y1", "y2")] == [HALF, TensorProto.INT8, TensorProto.INT8]


@pytest.mark.parametrize(("bits", "width"), [(4, 16), (8, 8)])
def test_of_stored_bytes_it_is_known_how_many_numbers_one_block_has(bits: int, width: int) -> None:
    """As Olive's rounding quantises T5's table of positions, which has fewer heads than a block."""
    inputs = ((UINT8, (24, 8)), (INT64, ("b", "s")), half(24, 1))
    case = Case("GatherBlockQuantized", inputs, (("b", "s", width),), {"block_size": 32, "bits": bits})
    proto = model(case, FLOAT)
    del proto.graph.input[0]
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((24, 8), np.uint8), "x0"))
    assert Graph(load_model(proto)).shape("y0") == ("b", "s", width)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"x1": np.zeros((B, S), np.int64), "x2": np.ones((24, 1), np.float32)}
    assert session.run(None, feed)[0].shape == (B, S, width)
