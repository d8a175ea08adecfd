"""Whole corpus models, fused and verified against float64 on the best provider of this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

import onnxfuse
from onnxfuse.pipeline import FP32_MODES
from onnxfuse.verify.verify import VerifyResult, verify
from tests.helpers import corpus

TRANSFORMERS = ("bert", "bert_relu", "gpt2", "vit", "clip_vision", "llama", "phi3", "t5v11_encoder")
DIFFUSERS = (
    "btb", "btb_320", "btb_640", "btb_1280", "ff_geglu", "ff_geglu_approximate", "ff_gelu", "ff_gelu_approximate",
    "ff_linear_silu", "ff_swiglu", "ff2d_geglu",
)  # fmt: skip
KEYS = corpus.families(*TRANSFORMERS, *DIFFUSERS)
SHUFFLED = {"vit": 8}
"""Further runs of models whose outputs have so few elements that one run says little of them."""
DEFAULT = FP32_MODES[0]
RUNS = [(key, mode) for key in KEYS for mode in (FP32_MODES if ".fp32." in key else (DEFAULT,))]


def verified(key: str, folder: Path, arch: str, fp32: str = DEFAULT) -> VerifyResult:
    """Fuse a model with its weights, run it with each of its feeds, and judge it.

    Args:
        key: the model's file in the corpus.
        folder: for the model before and after.
        arch: to compile for, `native` for the GPU at hand.
        fp32: how fp32 products are computed.
    """
    feeds = [corpus.feed(key, index) for index in range(corpus.feeds(key))]
    feeds += [_shuffled(feeds[0], seed) for seed in range(SHUFFLED.get(key.split("/")[-1].split(".")[0], 0))]
    return judged(corpus.materialize(key), feeds, folder, arch, fp32)


def _shuffled(feed: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The same with the elements of float inputs in another order."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.permuted(array.ravel()).reshape(array.shape) if array.dtype.kind == "f" else array
        for name, array in feed.items()
    }


def judged(
    model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]], folder: Path, arch: str, fp32: str = DEFAULT
) -> VerifyResult:
    """The same of any model of which something is fused."""
    original, fused = folder / "original.onnx", folder / "fused.onnx"
    onnx.save(model, original)
    made, report = onnxfuse.optimize(original, arch=arch, fp32=fp32)
    assert report.fused, "nothing is fused"
    onnx.save(made, fused)
    del made
    return verify(original, fused, inputs=feeds)
