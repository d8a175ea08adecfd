"""Real exports: exactly the sites of the manifest, and the same bits on the CPU with no library registered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from onnxfuse.device import resolve
from onnxfuse.graph.functions import reads
from onnxfuse.ir.fusion import Pointwise
from onnxfuse.patterns import is_anchor
from onnxfuse.pipeline import analyse_model
from onnxfuse.verify.verify import verify
from tests.helpers import corpus
from tests.perf.__main__ import MODELS
from tests.tools import sweep

# An add of two products, which the manifest counts for both.
LEFT = {"glu_last_used_twice": 1}


def count(fusions: list[Pointwise]) -> Counter[str]:
    return Counter(kind for fusion in fusions for kind in sweep.kinds_of(fusion))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("key", sorted(corpus.manifest()))
def test_sites_are_those_of_the_manifest(key: str) -> None:
    analysis = analyse_model(corpus.folder() / key, resolve("sm_80", list), attention=False)
    expected = corpus.manifest()[key]
    found = count([site.fusion for site in analysis.sites])
    found["residuals"] += LEFT.get(expected["model"], 0)
    assert {kind: found[kind] for kind in sweep.KINDS} == {kind: expected[kind] for kind in sweep.KINDS}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("key", sorted(corpus.manifest()))
def test_every_product_is_fused_once_or_listed(key: str) -> None:
    analysis = analyse_model(corpus.folder() / key, resolve("sm_80", list))
    anchors = sum(is_anchor(graph, node) for graph in analysis.graphs for node in graph.nodes)
    fused = {id(product.node): site.match.shared for site in analysis.sites for product in site.match.products}
    names = {product.node.name for site in analysis.sites for product in site.match.products}
    # An attention that is left for being slower says so beside its product, which may be fused by itself.
    left = [skipped for skipped in analysis.skipped if skipped.anchor == skipped.node or skipped.node not in names]
    assert len(fused) + len(left) == anchors
    alone = [site for site in analysis.sites if not site.match.shared]
    assert sum(len(site.match.products) for site in alone) == sum(not shared for shared in fused.values())
    taken = [(site.graph.scope.path, index) for site in analysis.sites for index in site.match.nodes]
    assert len(taken) == len(set(taken))


@pytest.mark.one_in(30)
@pytest.mark.parametrize("key", [key for key in corpus.manifest() if key.startswith("tiny/")])
def test_bits_are_the_same_on_the_cpu(key: str) -> None:
    assert not sweep.sweep_model(corpus.folder() / key, None).faults


@pytest.mark.one_in(18)
@pytest.mark.parametrize("key", [key for key in corpus.manifest() if key.startswith("real/")])
def test_every_attention_fuses_or_says_why(key: str) -> None:
    """Those of the tiny ones are counted where their bits are compared."""
    model = onnx.load(corpus.folder() / key)
    count = len(sweep.softmaxes_between_products(model))
    assert count == sum(node.op_type == "Softmax" for node in model.graph.node)  # the corpus has no other ones
    analysis = analyse_model(model, resolve("sm_90a", list), attention=True)
    fused, apart = sweep.attentions_of(analysis, model)
    assert fused + apart.total() == count
    assert "unknown_op" not in apart
    assert fused == count or ".fp32." in key


@pytest.mark.one_in(9)
@pytest.mark.parametrize("key", [key for key in corpus.manifest() if key.startswith("tiny/")])
def test_no_initializer_is_left_that_nothing_reads(key: str) -> None:
    original = corpus.with_weights(onnx.load(corpus.folder() / key))
    unread_before = unread(original)
    fused = sweep.rewritten(analyse_model(original, resolve("sm_80", list)))
    assert unread(fused) <= unread_before


def test_bert_has_as_many_positions_as_a_measurement_needs(tmp_path: Path) -> None:
    """`python -m tests.perf` times more tokens than the corpus has positions; the wider graph is as good."""
    (case,) = (case for case in MODELS if case.positions)
    (narrow,) = (other for other in MODELS if other.graph == case.graph and other is not case)
    tokens = case.shapes["input_ids"][1]
    assert case.positions == tokens
    paths = tmp_path / "bert.onnx", tmp_path / "bert.fused.onnx"
    model = case.build()
    onnx.save(model, paths[0])
    analysis, before = (analyse_model(each, resolve("sm_80", list)) for each in (model, narrow.build()))
    assert [str(site.fusion) for site in analysis.sites] == [str(site.fusion) for site in before.sites]
    onnx.save(sweep.rewritten(analysis), paths[1])
    result = verify(*paths, shapes=dict.fromkeys(case.shapes, (1, tokens)))
    assert all(run.passed for run in result.runs)  # a rewritten model has no kernels that could be right


def unread(model: onnx.ModelProto) -> set[str]:
    """Initializers of the main graph that no node reads, at any depth, and that are no output."""
    read = {name for node in model.graph.node for name in reads(node)} | {value.name for value in model.graph.output}
    return {tensor.name for tensor in model.graph.initializer} - read
