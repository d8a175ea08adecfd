"""What a model stores of a tensor is read wherever it lies, and nothing that a run may change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.stored_numbers import stored_numbers
from tests.helpers.onnx_build import BFLOAT16, FLOAT, Builder

NUMBERS = np.arange(4096.0).reshape(64, 64)


def model_of(dtype: int, by_node: bool = False) -> onnx.ModelProto:
    b = Builder(dtype)
    x, numbers = b.input("x", ("rows", 64)), NUMBERS.astype(b.numpy)
    stored = b("Constant", value=numpy_helper.from_array(numbers)) if by_node else b.raw(numbers, "stored")
    return b.model(b("Add", x, stored))


def read(source: onnx.ModelProto | Path) -> np.ndarray | None:
    graph = Graph(load_model(source))
    (node,) = (node for node in graph.nodes if node.op == "Add")
    assert stored_numbers(graph, node.inputs[0]) is None
    return stored_numbers(graph, node.inputs[1])


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16, TensorProto.FLOAT16])
def test_in_the_model(dtype: int, by_node: bool) -> None:
    expected = NUMBERS.astype(helper.tensor_dtype_to_np_dtype(dtype)).astype(np.float64)
    assert np.array_equal(read(model_of(dtype, by_node)), expected)


def test_in_a_file(tmp_path: Path) -> None:
    onnx.save(model_of(FLOAT), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert np.array_equal(read(tmp_path / "m.onnx"), NUMBERS)
    (tmp_path / "m.data").unlink()
    assert read(tmp_path / "m.onnx") is None


def test_what_a_run_may_change_is_not_known() -> None:
    model = model_of(FLOAT)
    model.graph.input.append(helper.make_tensor_value_info("stored", FLOAT, (64, 64)))
    assert read(model) is None


def test_integers_are_no_numbers_of_a_mask() -> None:
    assert read(model_of(TensorProto.INT64)) is None
