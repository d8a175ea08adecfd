"""The tables of what the CPU provider computes in 16 bits, against the Casts that ONNX Runtime puts around ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onnxfuse.device import resolve
from onnxfuse.graph.rounding_shapes import COMPUTES, MOVES
from onnxfuse.pipeline import analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder
from tests.tools import sweep

COLUMNS = 32

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


def vector(b: Builder, seed: int = 0) -> str:
    return b.array(draw(COLUMNS, seed=seed))


def tokens(b: Builder) -> str:
    """What no node of 16 bits makes."""
    return b("Tanh", b.input("x", ("batch", 6, COLUMNS)))


def with_positions(b: Builder) -> list[str]:
    """As a ViT adds as many of them as there are tokens, whose number is known: nobody needs the Shape."""
    normal = b("LayerNormalization", tokens(b), vector(b), vector(b, 1))
    count = b("Unsqueeze", b("Gather", b("Shape", normal), b.scalar(1)), b.integers(0))
    table = b.array(draw(8, COLUMNS, seed=2), "positions")
    return [b("Tanh", b("Add", normal, b("Slice", table, b.integers(0), count, b.integers(0))))]


def with_a_half_that_passes(b: Builder) -> list[str]:
    """As a rotary embedding of some columns of normalised heads leaves the others, which a Concat puts beside them."""
    x = tokens(b)
    length = b("Clip", b("ReduceL2", x, b.integers(-1), keepdims=1), b.array(1e-3))
    normal = b("Mul", b("Div", x, length), vector(b))
    first, second = (
        b("Slice", normal, *map(b.integers, each)) for each in ((0, COLUMNS // 2, 2), (COLUMNS // 2, 2**63 - 1, 2))
    )
    beside = b("Concat", b("Softmax", first), second, axis=-1)
    return [b("Sqrt", b("Abs", beside)), b("Reshape", first, b.integers(0, -1))]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("view", ["Reshape", "Unsqueeze"])
def test_what_a_concat_reads_of_a_body_is_rounded_where_the_model_rounds_it(view: str, first: bool) -> None:
    """Beside an input of the graph, before it or behind it."""
    b = Builder(TensorProto.FLOAT16, opset=18)
    product = b("MatMul", b.input("x", ("batch", 6, COLUMNS)), b.array(draw(COLUMNS, COLUMNS)))
    axes = b.integers(0, 1, 6, COLUMNS) if view == "Reshape" else b.integers(1)
    viewed, beside = b(view, b("Add", product, vector(b)), axes), b.input("beside", ("batch", 1, 6, COLUMNS))
    model = b.model(b("Tanh", b("Concat", *((viewed, beside) if first else (beside, viewed)), axis=1)))
    analysis = analyse_model(model, resolve("sm_90a", list))
    (site,) = analysis.sites
    assert viewed == site.match.out
    feed = {"x": draw(3, 6, COLUMNS).astype(np.float16), "beside": draw(3, 1, 6, COLUMNS, seed=1).astype(np.float16)}
    assert not sweep.difference(model, sweep.rewritten(analysis), [feed])


@pytest.mark.parametrize("form", [with_positions, with_a_half_that_passes])
def test_what_a_body_makes_is_rounded_where_the_model_rounds_it(form: Callable[[Builder], list[str]]) -> None:
    b = Builder(TensorProto.FLOAT16, opset=18)
    model = b.model(*form(b))
    analysis = analyse_model(model, resolve("sm_90a", list))
    (site,) = analysis.sites
    assert site.fusion.pattern == "normalisation"
    assert len(site.match.nodes) > 1
    feeds = [{"x": draw(batch, 6, COLUMNS, seed=batch).astype(np.float16)} for batch in (1, 7)]
    assert not sweep.difference(model, sweep.rewritten(analysis), feeds)
