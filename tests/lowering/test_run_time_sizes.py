"""The sizes that only a run knows: what the bridge makes of a fused node is what ONNX Runtime makes of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxfuse.device import resolve
from onnxfuse.lowering import plan_site
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.lowering.site import Implementation
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.schedule.strategy import Strategy
from tests.helpers.bridge_hooks import Node, bridge
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder, run
from tests.tools.sweep import rewritten

FIELDS = ("axes", "problem", "arguments", "sizes", "out_types", "in_types")


def analysed(model: onnx.ModelProto, arch: str = "sm_80,sm_90a") -> Analysis:
    return analyse_model(model, resolve(arch, list))


def shapes_of(implementation: Implementation, inputs: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes that the bridge gives the outputs of a fused node."""
    attributes = node_attributes(implementation, "ab12")
    shapes = [inputs[tensor.name] for tensor in implementation.fusion.inputs]
    return bridge().arguments(Node(**{field: attributes[field] for field in FIELDS}), shapes)[1]


def by_a_vector(b: Builder) -> str:
    return b("MatMul", b.input("x", ("b", "m", 6)), b.array(draw(6), "w"))


def to_rows_alone(b: Builder) -> str:
    return b("Einsum", b.input("x", ("m", 6)), b.array(draw(8, 6), "w"), equation="mk,nk->nm")


def of_numbered_names(b: Builder) -> str:
    return b("Gemm", b("Reshape", b.input("x", ("0", "1", 6)), b.integers(-1, 6)), b.array(draw(6, 8), "w"))


def of_dots(b: Builder) -> str:
    y = b.input("y", ("b", 3, 4, 6, 6))
    product = b("Einsum", b.input("x", ("b", 3, 4, "i", 6)), y, equation="...ij,...jk->...ik")
    return b("MatMul", product, b.array(draw(6, 8), "w"))


def of_no_depth(b: Builder) -> str:
    return b("Einsum", b.input("x", ("m", 2, "a", 3)), b.input("y", (2, "a", 3, "n")), equation="mabc,abcn->mn")


FORMS: list[tuple[Callable[[Builder], str], dict[str, tuple[int, ...]]]] = [
    (by_a_vector, {"x": (2, 3, 6)}),
    (by_a_vector, {"x": (1, 1, 6)}),
    (to_rows_alone, {"x": (3, 6)}),
    (of_numbered_names, {"x": (2, 3, 6)}),
    (of_dots, {"x": (2, 3, 4, 5, 6), "y": (2, 3, 4, 6, 6)}),
    (of_no_depth, {"x": (5, 2, 3, 3), "y": (2, 3, 3, 4)}),
    (of_no_depth, {"x": (5, 2, 0, 3), "y": (2, 0, 3, 4)}),
]


@pytest.mark.parametrize(("form", "shapes"), FORMS)
def test_the_bridge_makes_the_shapes_of_the_run(
    form, shapes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_site, "choose", lambda *_: Strategy.ONE_KERNEL)  # whatever so small a product costs
    b = Builder()
    model = b.model(b("Relu", form(b)))
    feed = {name: np.float32(draw(*shape)) for name, shape in shapes.items()}
    (expected,) = run(model, feed)
    (site,) = analysed(model).sites
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    read = {tensor.name for tensor in site.implementation.fusion.inputs} - {*weights, *shapes}
    values = {name: tuple(value.shape) for name, value in zip(read, made(model, sorted(read), feed), strict=True)}
    assert shapes_of(site.implementation, shapes | weights | values) == [expected.shape]
    assert run(rewritten(analysed(model)), feed)[0].tobytes() == expected.tobytes()


def made(model: onnx.ModelProto, names: list[str], feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in names)
    return run(copy, feed) if names else []


def test_rows_that_a_product_flattened_are_not_taken_apart_behind_it() -> None:
    """The epilogue-only kernel reads its result alone, whose rows nobody can tell apart."""
    b = Builder()
    flat = b("Reshape", b.input("x", ("a", "b", 1024)), b.integers(-1, 1024))
    t = b("Gemm", flat, b.array(draw(1024, 1024), "w"), b.array(draw(1024), "c"))
    model = b.model(b("Mul", t, b("Sigmoid", t)))
    for site in analysed(model, "sm_90a").sites:
        implementations = [site.one_kernel, site.epilogue_only]
        for implementation in (implementation for implementation in implementations if implementation is not None):
            assert not implementation.fusion.unresolved
        assert site.strategy is not Strategy.EPILOGUE_ONLY or site.epilogue_only is not None


@pytest.mark.parametrize("shape", [("m2", 8), (None, 8), (None,)])
@pytest.mark.parametrize("op", ["Gemm", "Conv"])
def test_a_bias_that_may_not_fit_leaves_its_product_alone_and_no_other(op: str, shape) -> None:
    b = Builder()
    if op == "Conv":
        shape = (None,)
        product = b("Conv", b.input("x", ("m", 6, 3, 3)), b.array(draw(8, 6, 1, 1), "w"), b.input("c", shape))
    else:
        product = b("Gemm", b.input("x", ("m", 6)), b.array(draw(6, 8), "w"), b.input("c", shape))
    other = b("Tanh", b("MatMul", b.input("z", ("m", 6)), b.array(draw(6, 8), "v")))
    found = analysed(b.model(b("Relu", product), other))
    assert len(found.sites) == 1
    (left,) = found.skipped
    assert left.anchor == f"{op}_0"
    assert left.reason == "unknown_broadcast"


def test_a_size_that_a_policy_changes_is_not_the_one_that_is_asked_for() -> None:
    b = Builder()
    x = b.input("x", ("b", 6, "h", "w"))
    sizes = b("Concat", b("Slice", b("Shape", x), b.integers(0), b.integers(2)), b.integers(8, 8), axis=0)
    resized = b("Resize", x, "", "", sizes, keep_aspect_ratio_policy="not_larger", mode="nearest")
    t = b("Relu", b("Conv", resized, b.array(draw(8, 6, 1, 1), "w")))
    model = b.model(t, b("Cast", b("Gather", b("Shape", t), b.integers(2)), to=1))
    feed = {"x": np.float32(draw(2, 6, 2, 4))}
    for expected, actual in zip(run(model, feed), run(rewritten(analysed(model)), feed), strict=True):
        assert expected.tobytes() == actual.tobytes()


@pytest.mark.parametrize("name", ["0", "7", "2*3", "1 + 2"])
def test_a_name_that_looks_like_a_number_is_none(name: str) -> None:
    b = Builder()
    t = b("Relu", b("MatMul", b.input("x", (name, 6)), b.array(draw(6, 8), "w")))
    model = b.model(t, b("Cast", b("Gather", b("Shape", t), b.integers(0)), to=1))
    feed = {"x": np.float32(draw(5, 6))}
    for expected, actual in zip(run(model, feed), run(rewritten(analysed(model)), feed), strict=True):
        assert expected.tobytes() == actual.tobytes()


def test_a_contracted_label_that_may_be_one_is_left_alone() -> None:
    """Einsum broadcasts it, where a product would read beyond the shorter input."""
    b = Builder()
    x, y = b.input("x", ("i", "k1")), b.input("y", ("k2", "j"))
    found = analysed(b.model(b("Relu", b("Einsum", x, y, equation="ik,kj->ij"))))
    assert [site.reason for site in found.skipped] == ["unknown_broadcast"]


def test_unnamed_columns_of_two_weights_are_not_one_size() -> None:
    b = Builder()
    x = b.input("x", ("b", 6))
    first, second = (b("MatMul", x, b.input(name, (6, None))) for name in ("w1", "w2"))
    found = analysed(b.model(b("Mul", first, b("Sigmoid", second))))
    assert all(len(site.fusion.parts) == 1 for site in found.sites)


@pytest.mark.parametrize("equation", ["ik,kj->ij", "kij,kjl->kil"])
def test_sizes_of_nothing_and_something_do_not_agree(equation: str) -> None:
    b = Builder()
    sizes = {"i": 2, "j": 3, "l": 4}
    first, second = equation.split("->")[0].split(",")
    x = b.input("x", tuple(sizes.get(label, 0) for label in first))
    y = b.input("y", tuple(sizes.get(label, 5) for label in second))
    out = helper.make_tensor_value_info("out", 1, None)
    nodes = [helper.make_node("Einsum", [x, y], ["t"], equation=equation), helper.make_node("Relu", ["t"], ["out"])]
    out.type.tensor_type.ClearField("shape")
    graph = helper.make_graph(nodes, "test", b.inputs, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    assert [site.reason for site in analysed(model).skipped] == ["unknown_broadcast"]
