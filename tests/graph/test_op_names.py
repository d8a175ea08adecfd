"""Fused nodes with different bodies have different names, so that no runtime can take one body for another."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import onnxfuse
from onnxfuse.device import ARCHITECTURES, resolve
from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.op_names import FUSED_ATTENTION, FUSED_CACHE, FUSED_GEMM, FUSED_GEMM_ON, FUSED_POINTWISE, POOL_SIZE
from onnxfuse.pipeline import Analysis, analyse_model, make_report
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder, run
from tests.tools.sweep import rewritten

K = 8
FEED = {"x": draw(3, K).astype(np.float32)}
GEMM = ("Gemm",)  # a chain of nothing behind a product that adds a bias


def products(*chains: tuple[str, ...], ir_version: int = 9) -> onnx.ModelProto:
    """A product for each chain of activations, one behind the other, with a Softmax between them."""
    b = Builder()
    value = b.input("x", ("rows", K))
    for index, chain in enumerate(chains):
        weight = b.array(draw(K, K, seed=index), f"weight{index}")
        is_gemm = chain == GEMM
        value = b("Gemm", value, weight, b.array(draw(K))) if is_gemm else b("MatMul", value, weight)
        for op in () if is_gemm else chain:
            value = b(op, value)
        value = b("Softmax", value)
    return b.model(value, ir_version=ir_version)


def analysed(model: onnx.ModelProto) -> Analysis:
    return analyse_model(model, resolve("sm_90a", list), attention=False)


def fused_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == DOMAIN]


def check_same_bits(original: onnx.ModelProto, fused: onnx.ModelProto) -> None:
    for expected, actual in zip(run(original, FEED), run(fused, FEED), strict=True):
        assert expected.tobytes() == actual.tobytes()


def test_a_name_has_one_body() -> None:
    model = products(("Relu",), ("Tanh",), ("Relu",), ("Tanh", "Relu"))
    fused = rewritten(analysed(model))
    nodes = fused_nodes(fused)
    assert [node.op_type for node in nodes] == ["FusedGemm_0", "FusedGemm_1", "FusedGemm_0", "FusedGemm_2"]
    keys = [(function.domain, function.name) for function in fused.functions]
    assert sorted(keys) == [(DOMAIN, f"FusedGemm_{number}") for number in range(3)]
    assert not any(each.overload for each in (*nodes, *fused.functions))
    check_same_bits(model, fused)


def test_a_runtime_that_knows_functions_by_domain_and_name_computes_the_same() -> None:
    model = products(("Relu",), ("Tanh",), ("Sigmoid", "Neg"))
    (expected,), (actual,) = (
        ReferenceEvaluator(each).run(None, FEED) for each in (model, rewritten(analysed(model)))
    )  # fmt: skip
    assert expected.tobytes() == actual.tobytes()


def scaled(*factors: float) -> onnx.ModelProto:
    b = Builder()
    value = b.input("x", ("rows", K))
    for index, factor in enumerate(factors):
        product = b("MatMul", value, b.array(draw(K, K, seed=index), f"weight{index}"))
        value = b("Softmax", b("Tanh", b("Mul", product, b.array(factor))))
    return b.model(value)


def test_constants_are_the_nodes_and_not_the_bodys() -> None:
    model = scaled(0.5, 2.0, 3.0)
    fused = rewritten(analysed(model))
    assert [node.op_type for node in fused_nodes(fused)] == ["FusedGemm_0"] * 3
    check_same_bits(model, fused)
    onnx.checker.check_model(fused)
    (expected,), (actual,) = (ReferenceEvaluator(each).run(None, FEED) for each in (model, fused))
    assert expected.tobytes() == actual.tobytes()


@pytest.mark.parametrize("ir_version", range(3, 13))
def test_the_ir_version_stays_where_it_has_functions(ir_version: int) -> None:
    model = products(("Relu",), ("Tanh",), ir_version=ir_version)
    fused = rewritten(analysed(model))
    assert fused.ir_version == max(ir_version, 8)
    assert [opset for opset in fused.opset_import if opset.domain != DOMAIN] == list(model.opset_import)


def test_a_fused_model_can_be_fused_again() -> None:
    model = products(("Relu",), ("Tanh",), ("Sigmoid",))
    first = analysed(model)
    once = rewritten(replace(first, sites=first.sites[1:]))
    twice = rewritten(analysed(once))
    assert [node.op_type for node in fused_nodes(twice)] == ["FusedGemm_2", "FusedGemm_0", "FusedGemm_1"]
    check_same_bits(model, twice)


def more_than_names() -> list[tuple[str, ...]]:
    ops = ("Relu", "Tanh", "Sigmoid", "Neg")
    chains = [chain for length in (1, 2, 3) for chain in itertools.product(ops, repeat=length)][: POOL_SIZE + 7]
    assert len(chains) == POOL_SIZE + 7
    return chains


def test_where_names_run_out_the_rest_stays_as_it_is() -> None:
    chains = more_than_names()
    model = products(*chains, chains[-1], chains[-1])
    analysis = analysed(model)
    report = make_report(analysis)
    left = [entry for entry in report.skipped if entry.reason == "too_many_bodies"]
    assert (len(report.fused), len(left)) == (POOL_SIZE + 2, 7)
    fused = rewritten(analysis)
    nodes = fused_nodes(fused)
    assert len({node.op_type for node in nodes}) == len(fused.functions) == POOL_SIZE
    assert len({node.op_type for node in nodes[-3:]}) == 1, "the body that most nodes have comes first"
    check_same_bits(model, fused)


def test_what_ends_at_a_gemm_gets_a_name_last() -> None:
    """However many there are: other fusions save more."""
    few = more_than_names()[: POOL_SIZE - 1]
    assert [len(analysed(products(*[GEMM] * 5, *chains)).sites) for chains in (few, more_than_names())] == [
        POOL_SIZE - 1 + 5, POOL_SIZE,
    ]  # fmt: skip


def test_the_bridge_registers_every_name() -> None:
    header = (Path(onnxfuse.__file__).parent / "runtime" / "bridge" / "fused_gemm.h").read_text()
    assert re.findall(r"kPoolSize = (\d+)", header) == [str(POOL_SIZE)]
    kinds = dict(re.findall(r'\{"(\w+)", (\d+)\}', header))
    alone = {name: str(ARCHITECTURES[arch].capability) for arch, name in FUSED_GEMM_ON.items()}
    alone |= {FUSED_CACHE: "90"}
    assert kinds == dict.fromkeys((FUSED_GEMM, FUSED_POINTWISE, FUSED_ATTENTION), "0") | alone
