"""Real exports: exactly the sites of the manifest, and the same bits on the CPU with no library registered."""

from __future__ import annotations

import pytest

from onnxfuse.device import resolve
from onnxfuse.pipeline import analyse_model
from tests import corpus, sweep

EXACT = (
    "btb", "btb_320", "btb_640", "btb_1280", "ff_geglu", "ff_geglu_approximate", "ff2d_geglu", "ff_swiglu", "ff_gelu",
    "ff_gelu_approximate", "ff_linear_silu", "sd15_unet_mini", "sd15_unet", "bert", "bert_relu", "vit", "clip_vision",
    "linear_glu", "lstm_gates", "phi3",
)  # fmt: skip


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


@pytest.mark.parametrize("key", [key for key in corpus.manifest() if key.startswith("tiny/")])
def test_bits_are_the_same_on_the_cpu(key: str) -> None:
    assert not sweep.sweep_model(corpus.folder() / key, None).faults
