"""Symbols of sizes: arithmetic that is right for all values, and shapes that are those of a run."""

from __future__ import annotations

import math

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxfuse import symbolic
from onnxfuse.graph import Graph, load_model
from tests import corpus
from tests.onnx_build import run

VALUES = {"B": 2, "S": 3, "T": 5}
SIZES = st.lists(st.sampled_from([1, 2, 4, *VALUES]), max_size=4).map(symbolic.multiply)


def value(size: symbolic.Size, values: dict[str, int]) -> int:
    """A symbol's value, by Python's own arithmetic."""
    if isinstance(size, int):
        return size
    return math.prod(int(text) if text.isdecimal() else values[text] for text in size.split("*"))


@given(SIZES, SIZES)
def test_products_and_quotients_are_right(first: symbolic.Size, second: symbolic.Size) -> None:
    product = symbolic.multiply((first, second))
    assert value(product, VALUES) == value(first, VALUES) * value(second, VALUES)
    assert symbolic.divide(product, second) == first
    quotient = symbolic.divide(first, second)
    assert quotient is None or symbolic.multiply((quotient, second)) == first


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(1, "S", "S"), ("S", 1, "S"), ("S", "S", "S"), ("S", 4, 4), (4, "S", 4), (3, 3, 3), ("S", "T", None),
     (None, 1, None), (None, 4, 4), (None, "S", None)],
)  # fmt: skip
def test_broadcast(first: symbolic.Size, second: symbolic.Size, expected: symbolic.Size) -> None:
    assert symbolic.broadcast(first, second) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("s1*s0", "s0*s1"), ("batch", "batch"), ("2*s0", "2*s0"), ("s0 + 2*s1", "(s0 + 2·s1)")]
)
def test_names_of_dimensions(name: str, expected: str) -> None:
    assert symbolic.canonical(name) == expected


def test_other_functions_equal_themselves_only() -> None:
    assert symbolic.add("S", 1) == symbolic.add("S", 1) != symbolic.add("S", 2)
    assert symbolic.add(2, 3) == 5
    assert symbolic.add("S", 0) == symbolic.add(0, "S") == "S"
    assert symbolic.multiply((symbolic.add("S", 1), 2)) == "2*(+ S 1)"


def with_all_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(
        onnx.ValueInfoProto(name=name)
        for node in model.graph.node
        for name in node.output
        if name and node.op_type != "SplitToSequence"
    )
    return copy


FAMILIES = ("sd15_unet_mini", "llama", "phi3", "gpt2", "bert", "vit", "t5v11_encoder", "clip_vision", "btb")


@pytest.mark.parametrize("key", corpus.families(*FAMILIES, size="tiny"))
def test_derived_shapes_are_those_of_a_run(key: str) -> None:
    """Every number is the run's size, and equal symbols are equal sizes."""
    model = corpus.materialize(key)
    graph, copy = Graph(load_model(model)), with_all_outputs(model)
    for index in (0, 1):
        arrays = run(copy, corpus.feed(key, index))
        atoms: dict[str, int] = {}
        products: list[tuple[str, int]] = []
        for output, array in zip(copy.graph.output, arrays, strict=True):
            shape = graph.shape(output.name)
            assert shape is None or len(shape) == array.ndim, output.name
            for size, actual in zip(shape or (), array.shape, strict=False):
                if isinstance(size, str) and "*" in size:
                    products.append((size, actual))
                elif isinstance(size, str):
                    assert atoms.setdefault(size, actual) == actual, (output.name, size)
                else:
                    assert size in (None, actual), (output.name, size)
        for size, actual in products:
            if all(text.isdecimal() or text in atoms for text in size.split("*")):
                assert value(size, atoms) == actual, size
