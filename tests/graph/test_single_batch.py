"""A batch that has a name and is one: told from a view of one and the rest, and from what that meets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.single_batch import batches_of_one
from onnxfuse.verify.verify import verify
from tests.helpers.onnx_build import FLOAT, Builder, run

HEADS, HEAD = 2, 8
WIDTH = HEADS * HEAD


def layer(target: list[int], rows: int | str = "rows", meets: bool = True) -> onnx.ModelProto:
    """A product viewed as heads, times a table of positions; back again, a product, and the residual."""
    b, rng = Builder(FLOAT), np.random.default_rng(0)
    x, table = b.input("x", ("batch", rows, WIDTH)), b.input("table", (rows if meets else 1, HEAD))
    first, second = (b.array(rng.standard_normal((WIDTH, WIDTH)) / 4) for _ in range(2))
    q = b("Transpose", b("Reshape", b("MatMul", x, first), b.integers(*target)), perm=(0, 2, 1, 3))
    turned = b("Transpose", b("Mul", q, table), perm=(0, 2, 1, 3))
    flat = b("Reshape", turned, b.integers(*target[:2], WIDTH))
    return b.model(b("Add", b("MatMul", flat, second), x) if meets else b("Relu", b("MatMul", flat, second)))


def given(batch: int, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"x": (batch, rows, WIDTH), "table": (rows, HEAD)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("target", "rows", "meets", "expected"),
    [
        ([1, -1, HEADS, HEAD], "rows", True, {"batch"}),
        ([1, 6, HEADS, HEAD], 6, True, {"batch"}),
        ([0, -1, HEADS, HEAD], "rows", True, set()),
        ([1, -1, HEADS, HEAD], "rows", False, set()),
        ([0, 6, HEADS, HEAD], 6, True, set()),
    ],
)
def test_a_batch_of_one_is_told(target: list[int], rows: int | str, meets: bool, expected: set[str]) -> None:
    assert batches_of_one(Graph(load_model(layer(target, rows, meets)))) == expected


def test_products_have_sizes_with_it_and_the_file_keeps_the_name() -> None:
    model = layer([1, -1, HEADS, HEAD])
    made, report = onnxfuse.optimize(model, arch="sm_90a")
    assert sum("residual" in site.features for site in report.fused) == 1
    assert [dim.dim_param for dim in made.graph.input[0].type.tensor_type.shape.dim][:2] == ["batch", "rows"]
    np.testing.assert_array_equal(run(model, given(1, 5))[0], run(made, given(1, 5))[0])
    with pytest.raises(Exception, match="Mul"):  # the model's own nodes: two sequences are no two rows
        run(model, given(2, 5))


def test_such_a_file_is_verified(tmp_path: Path) -> None:
    model = layer([1, 6, HEADS, HEAD], 6)
    made, _ = onnxfuse.optimize(model, arch="sm_90a")
    paths = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    for each, path in zip((model, made), paths, strict=True):
        onnx.save(each, path)
    assert verify(*paths).passed
