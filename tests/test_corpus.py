"""Real exports: exactly the sites of the manifest, and the same bits on the CPU with no library registered."""

from __future__ import annotations

import pytest

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from tests import corpus
from tests.onnx_build import run

EXACT = (
    "btb", "btb_320", "btb_640", "btb_1280", "ff_geglu", "ff_geglu_approximate", "ff2d_geglu", "ff_swiglu", "ff_gelu",
    "ff_gelu_approximate", "ff_linear_silu", "sd15_unet_mini", "sd15_unet", "bert", "bert_relu", "vit", "clip_vision",
    "linear_glu", "lstm_gates", "phi3",
)  # fmt: skip
RUNNABLE = (
    "btb",
    "ff_geglu",
    "ff2d_geglu",
    "ff_swiglu",
    "ff_gelu",
    "sd15_unet_mini",
    "bert",
    "vit",
    "phi3",
    "lstm_gates",
)


@pytest.mark.parametrize("key", corpus.families(*EXACT))
def test_sites_are_those_of_the_manifest(key: str) -> None:
    analysis = analyse_model(corpus.folder() / key, resolve("sm_80", list))
    patterns = [site.fusion.pattern for site in analysis.sites]
    expected = corpus.manifest()[key]
    assert patterns.count("split_gemm") == expected["packed_gates"]
    assert patterns.count("gemm_epilogue") == expected["activations"]
    assert len(analysis.sites) + len(analysis.skipped) == sum(
        node.op in ("MatMul", "Gemm") for node in analysis.graph.nodes
    )


@pytest.mark.parametrize("key", corpus.families(*RUNNABLE, size="tiny"))
def test_bits_are_the_same_on_the_cpu(key: str) -> None:
    original = corpus.materialize(key)
    fused, report = onnxfuse.optimize(original, arch="sm_80")
    assert report.nodes_after == len(fused.graph.node)
    for index in (0, 1):
        feed = corpus.feed(key, index)
        for expected, actual in zip(run(original, feed), run(fused, feed), strict=True):
            assert expected.tobytes() == actual.tobytes()
