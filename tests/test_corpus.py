"""Real exports: exactly the sites of the manifest, and the same bits on the CPU with no library registered."""

from __future__ import annotations

import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.fusion import Fusion
from onnxfuse.pipeline import analyse_model
from tests import corpus
from tests.onnx_build import run

RUNNABLE = (
    "btb", "ff_geglu", "ff2d_geglu", "ff_swiglu", "ff_gelu", "sd15_unet_mini", "bert", "vit", "phi3", "lstm_gates",
    "llama", "t5v11_encoder", "glu_last_used_twice", "linear_glu", "clip_vision",
)  # fmt: skip
# Reshapes stand between its products and what follows.
BEHIND_VIEWS = ("gpt2",)
KINDS = ("packed_gates", "dual_gates", "activations", "residuals")


def kinds(fusion: Fusion) -> dict[str, bool]:
    """What the manifest would count a fusion as."""
    return {
        "packed_gates": fusion.pattern == "split_gemm",
        "dual_gates": fusion.pattern == "dual_gemm",
        "activations": fusion.pattern == "gemm_epilogue" and "activation" in fusion.features,
        "residuals": "residual" in fusion.features,
    }


def count(fusions: list[Fusion]) -> dict[str, int]:
    return {kind: sum(kinds(fusion)[kind] for fusion in fusions) for kind in KINDS}


@pytest.mark.parametrize("key", sorted(corpus.manifest()))
def test_sites_are_those_of_the_manifest(key: str) -> None:
    analysis = analyse_model(corpus.folder() / key, resolve("sm_80", list))
    expected = corpus.manifest()[key]
    found = count([site.fusion for site in analysis.sites])
    if expected["model"] in BEHIND_VIEWS:
        assert all(found[kind] <= expected[kind] for kind in KINDS)
    else:
        assert {kind: found[kind] for kind in KINDS[:3]} == {kind: expected[kind] for kind in KINDS[:3]}
        assert found["residuals"] <= expected["residuals"]


@pytest.mark.parametrize("key", sorted(corpus.manifest()))
def test_every_product_is_fused_once_or_listed(key: str) -> None:
    analysis = analyse_model(corpus.folder() / key, resolve("sm_80", list))
    anchors = sum(node.op in ("MatMul", "Gemm") for node in analysis.graph.nodes)
    assert sum(len(site.match.products) for site in analysis.sites) + len(analysis.skipped) == anchors
    taken = [index for site in analysis.sites for index in site.match.nodes]
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize("key", corpus.families(*RUNNABLE, size="tiny"))
def test_bits_are_the_same_on_the_cpu(key: str) -> None:
    original = corpus.materialize(key)
    fused, report = onnxfuse.optimize(original, arch="sm_80")
    assert report.nodes_after == len(fused.graph.node)
    for index in (0, 1):
        feed = corpus.feed(key, index)
        for expected, actual in zip(run(original, feed), run(fused, feed), strict=True):
            assert expected.tobytes() == actual.tobytes()
