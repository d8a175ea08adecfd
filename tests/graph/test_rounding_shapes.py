"""The tables of what the CPU provider computes in 16 bits, against the Casts that ONNX Runtime puts around ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onnxfuse.graph.rounding_shapes import COMPUTES, MOVES
from tests.helpers.onnx_build import Builder

NUMBERS_OF_OTHERS = {"ArgMax", "Equal", "IsInf", "IsNaN", "Less", "NonZero", "Shape", "Size"}  # that make no floats
Inputs = Callable[[Builder], tuple[str, ...]]


def integers(*values: int) -> Inputs:
    return lambda b: (b.integers(*values),)


def two(b: Builder) -> tuple[str, ...]:
    return (b.input("y", (2, 4, 8)),)


def index(*shape: int) -> Inputs:
    return lambda b: (b.raw(np.zeros(shape, np.int64), "index"),)


def condition(b: Builder) -> tuple[str, ...]:
    return (b.raw(np.ones(2, np.bool_), "condition"),)


MORE_INPUTS: dict[str, Inputs] = {
    **dict.fromkeys(("Add", "Equal", "Less", "Max", "Mean", "Min", "Mul", "SequenceConstruct", "Sum"), two),
    "Compress": condition, "Expand": integers(2, 4, 8), "Gather": index(1), "GatherElements": index(2, 4, 8),
    "GatherND": index(1, 1), "Pad": integers(0, 0, 0, 0, 0, 1), "Reshape": integers(8, 8),
    "ReverseSequence": integers(1, 1, 1, 1), "ScatterElements": lambda b: (*index(2, 4, 8)(b), *two(b)),
    "ScatterND": lambda b: (*index(2, 1)(b), *two(b)), "Slice": lambda b: (b.integers(0), b.integers(1)),
    "Squeeze": lambda b: (), "Tile": integers(1, 2, 1), "TopK": integers(2), "Unsqueeze": integers(0),
}  # fmt: skip
ALONE = (
    "Abs", "ArgMax", "Ceil", "Clip", "Concat", "Dropout", "Elu", "Erf", "Flatten", "Floor", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Neg", "NonZero", "ReduceMax", "Relu", "Round", "Shape", "Shrink", "Sigmoid", "Sign", "Size",
    "Softmax", "Split", "SplitToSequence", "Sqrt", "Tanh", "Transpose", "Trilu",
)  # fmt: skip
ATTRIBUTES = {"Concat": {"axis": 0}, "Split": {"num_outputs": 1}}
OUTPUTS = {"TopK": 2}


def made(b: Builder, op: str) -> str:
    """What an op makes of [2, 4, 8], in 16 bits."""
    x = b.input("x", (2, 4, 8))
    more = MORE_INPUTS.get(op, lambda b: ())(b)
    out = b(op, x, *more, outputs=OUTPUTS.get(op, 1), **ATTRIBUTES.get(op, {}))
    out = out[0] if op in OUTPUTS else out
    out = b("SequenceAt", out, b.raw(np.array(0), "first")) if "Sequence" in op and op[0] == "S" else out
    return b("Cast", out, to=b.dtype) if op in NUMBERS_OF_OTHERS else out


@pytest.mark.parametrize("op", sorted({*MORE_INPUTS, *ALONE}))
def test_the_tables_are_those_of_the_provider(op: str, tmp_path: Path) -> None:
    b = Builder(TensorProto.FLOAT16, opset=20)
    model = b.model(made(b, op))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "as_run.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    assert (sum(node.op_type == "Cast" for node in nodes) == (op in NUMBERS_OF_OTHERS)) == (op in (*COMPUTES, *MOVES))
