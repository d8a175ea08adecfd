"""Counts of flags that are compared with zero: in fp32 the same flags come out, and other counts stay as they are."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto

import onnxfuse
from onnxfuse.graph.flag_counts import count_in_fp32
from tests.helpers.onnx_build import FLOAT, Builder, run

INT64 = TensorProto.INT64
FLAGS = {
    "none": np.zeros((3, 40), np.float32),
    "one": np.where(np.arange(120).reshape(3, 40) == 77, -np.inf, 1).astype(np.float32),
    "all": np.full((3, 40), np.inf, np.float32),
    "NaN": np.full((3, 40), np.nan, np.float32),
}


def counted(b: Builder, count: str, integer: int, axes: tuple[int, ...] | None, keepdims: int = 0) -> tuple[str, str]:
    """What is counted, and how many: `IsInf(x)`, of all or along axes."""
    flags = b("Cast", b("IsInf", b.input("x", (3, 40))), to=integer)
    own = (flags,) if axes is None else (flags, b.integers(*axes))
    return flags, b(count, *own, keepdims=keepdims)


def clipped(b: Builder, flag: str) -> str:
    """As T5 does: limits by a flag."""
    limit = b("Where", flag, b.array(2.0), b.array(3.0))
    return b("Mul", b("Identity", limit), b.array(1.0))


def types(model: ModelProto) -> set[int]:
    """What Casts make."""
    return {each.i for node in model.graph.node if node.op_type == "Cast" for each in node.attribute}


@pytest.mark.parametrize("axes", [None, (1,), (0, 1)])
@pytest.mark.parametrize("integer", [TensorProto.INT32, INT64])
@pytest.mark.parametrize("test", ["Greater", "Cast"])
@pytest.mark.parametrize("count", ["ReduceSum", "ReduceMax"])
def test_flags_are_as_they_were(count: str, test: str, integer: int, axes: tuple[int, ...] | None) -> None:
    b = Builder(FLOAT)
    _, number = counted(b, count, integer, axes)
    zero = b.raw(np.array(0, np.int32 if integer == TensorProto.INT32 else np.int64), "zero")
    flag = b("Greater", number, zero) if test == "Greater" else b("Cast", number, to=TensorProto.BOOL)
    model = b.model(clipped(b, flag))
    edited = onnx.ModelProto.FromString(model.SerializeToString())
    count_in_fp32(edited.graph)
    onnx.checker.check_model(edited, full_check=True)
    assert types(edited) == {TensorProto.FLOAT, TensorProto.BOOL}
    assert {node.op_type for node in edited.graph.node} >= {"ReduceSum"}
    for x in FLAGS.values():
        np.testing.assert_array_equal(run(model, {"x": x})[0], run(edited, {"x": x})[0])


@pytest.mark.parametrize("why", ["count", "flags", "one", "numbers", "axes", "vector"])
def test_what_is_no_flag_stays(why: str) -> None:
    """What else reads a count, numbers that are added, a zero that adds a dimension, axes that ReduceSum has not so."""
    b = Builder(FLOAT)
    flags, number = counted(b, "ReduceMax" if why == "axes" else "ReduceSum", INT64, None)
    if why == "numbers":
        number = b("ReduceSum", b("Cast", b("Abs", "x"), to=INT64), keepdims=0)
    flag = b("Greater", number, b.raw(np.array([0] if why == "vector" else int(why == "one")), "bound"))
    outs = [clipped(b, flag)]
    if why in ("count", "flags"):
        outs.append(b("Cast", {"count": number, "flags": flags}[why], to=FLOAT))
    model = b.model(*outs)
    if why == "axes":
        (node,) = (node for node in model.graph.node if node.op_type == "ReduceMax")
        node.attribute.append(onnx.helper.make_attribute("axes", [0]))
    before = model.SerializeToString()
    count_in_fp32(model.graph)
    assert model.SerializeToString() == before


def test_every_count_of_a_model_with_a_fusion_is_one_in_fp32() -> None:
    """Two sublayers of T5; the flags before the first product and behind it."""
    b, x = Builder(FLOAT), ""
    for name in ("first", "second"):
        x = x or b.input("x", (24, 64))
        any_infinite = b("Greater", b("ReduceSum", b("Cast", b("IsInf", x), to=INT64), keepdims=0), b.scalar(0))
        limit = b("Where", any_infinite, b.array(64504.0), b.array(65504.0))
        x = b("Clip", x, b("Neg", limit), limit)
        x = b("Add", b("MatMul", x, b.array(np.random.default_rng(1).standard_normal((64, 64)), name)), x)
    model = b.model(x)
    made, _ = onnxfuse.optimize(model, arch="sm_90a")
    assert INT64 not in types(made)
    rng = np.random.default_rng(0)
    for value in (1.0, np.inf):
        feed = rng.standard_normal((24, 64)).astype(np.float32)
        feed[3, 3] = value
        np.testing.assert_array_equal(run(model, {"x": feed})[0], run(made, {"x": feed})[0])
