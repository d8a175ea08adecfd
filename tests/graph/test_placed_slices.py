"""ScatterNDs to places that the model fixes: other ops put the same slices there, and other scatters stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto

import onnxfuse
from tests.helpers.onnx_build import FLOAT, Builder, run

SIZE, WIDTH = 24, 16
PLACES = {
    "the end": range(9, SIZE),
    "the beginning": range(5),
    "between": range(3, 11),
    "all": range(SIZE),
    "one": [7],
    "every third": range(1, 20, 3),
    "backwards": range(SIZE - 1, -1, -1),
    "from the end": range(-5, 0),
    "anywhere": [4, 23, 0, 11],
}
LEFT = {"twice": [3, 3], "with a sum": [3, 4], "by elements": [3, 4], "of the run": [3, 4]}


def scattered(places: list[int], why: str = "") -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Behind a product: `y[places] = x`, and a product of that."""
    b, rng = Builder(FLOAT), np.random.default_rng(0)
    given: dict[str, np.ndarray] = {"data": rng.standard_normal((SIZE, 3, WIDTH)).astype(np.float32)}
    shape = (len(places), 3, WIDTH)
    index = np.array(places)[:, None]
    if why == "by elements":
        shape, index = (len(places), WIDTH), np.array([(place, 1) for place in places])
    given["x"] = rng.standard_normal(shape).astype(np.float32)
    data = b.input("data", ("whole" if why == "of the run" else SIZE, 3, WIDTH))
    x = b.input("x", (*shape[:-1], WIDTH))
    extra = {"reduction": "add"} if why == "with a sum" else {}
    made = b("ScatterND", b("Sigmoid", data), b.array(index, integer=True), b("Tanh", x), **extra)
    weight = b.array(rng.standard_normal((WIDTH, WIDTH)))
    return b.model(b("Relu", b("MatMul", made, weight))), given


def by_grid(axis: int, places: list[int], every: str = "") -> tuple[ModelProto, dict[str, np.ndarray]]:
    """As TorchScript writes it: a range along each axis, expanded to all of them and put beside each other."""
    b, rng = Builder(FLOAT), np.random.default_rng(0)
    shape = (3, SIZE, WIDTH)
    grid = [len(places) if at == axis else size for at, size in enumerate(shape)]
    data, x = b.input("data", shape), b.input("x", grid)
    parts = []
    for at, size in enumerate(grid):
        own = list(range(size)) if at != axis else places
        vector = b.array(own, integer=True)
        if at == axis and every == "sliced":
            vector = b("Slice", b.array(range(shape[axis]), integer=True), *map(b.integers, (0, 1 << 62, 0, 2)))
        column = b("Reshape", vector, b.integers(size, *(1,) * (len(shape) - 1 - at)))
        if every != "sliced" or at != axis:
            column = b.array(np.array(own).reshape(size, *(1,) * (len(shape) - 1 - at)), integer=True)
        parts.append(b("Unsqueeze", b("Expand", column, b.integers(*grid)), b.integers(-1)))
    made = b("ScatterND", b("Sigmoid", data), b("Concat", *parts, axis=-1), b("Tanh", x))
    weight = b.array(rng.standard_normal((WIDTH, WIDTH)))
    given = {name: rng.standard_normal(dims).astype(np.float32) for name, dims in (("data", shape), ("x", grid))}
    return b.model(b("Relu", b("MatMul", made, weight))), given


def ops(model: ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("name", PLACES)
def test_the_same_slices_are_there(name: str) -> None:
    model, given = scattered(list(PLACES[name]))
    made, report = onnxfuse.optimize(model, arch="sm_90a")
    assert report.fused
    assert "ScatterND" not in ops(made)
    assert ("Gather" in ops(made)) == (name in ("every third", "backwards", "anywhere"))
    np.testing.assert_array_equal(run(model, given)[0], run(made, given)[0])


@pytest.mark.parametrize(
    ("axis", "places", "every"),
    [
        (1, [*range(9, SIZE)], ""),
        (2, [*range(0, WIDTH, 2)], ""),
        (2, [*range(0, WIDTH, 2)], "sliced"),
        (0, [2, 0], ""),
        (1, [*range(SIZE)], ""),
    ],
)
def test_places_of_every_element_are_those_along_an_axis(axis: int, places: list[int], every: str) -> None:
    """And what made them is gone."""
    model, given = by_grid(axis, places, every)
    made, report = onnxfuse.optimize(model, arch="sm_90a")
    assert report.fused
    assert not ops(made) & {"ScatterND", "Expand", "Unsqueeze"}
    np.testing.assert_array_equal(run(model, given)[0], run(made, given)[0])


@pytest.mark.parametrize("why", LEFT)
def test_other_scatters_stay(why: str) -> None:
    model, given = scattered(LEFT[why], why)
    made, _ = onnxfuse.optimize(model, arch="sm_90a")
    assert "ScatterND" in ops(made)
    if why != "twice":
        np.testing.assert_array_equal(run(model, given)[0], run(made, given)[0])
