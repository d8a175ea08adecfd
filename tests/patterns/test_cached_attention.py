"""GroupQueryAttention over a cache: which forms a kernel computes, and the same bits where its nodes run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

import onnxfuse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.cached_attention import CachedAttention
from onnxfuse.pipeline import analyse_model
from tests.helpers.cached_model import GROUPS, HEAD, HEADS, cached_feeds, cached_model
from tests.helpers.genai_decoder import COUNT, decoder
from tests.helpers.onnx_build import FLOAT, FLOAT16

ARCH = "sm_90a"
SIZES = (HEADS, GROUPS, HEAD)
FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "apart": {"packed": False},
    "scaled": {"scale": 0.5},
    "bounded": {"softcap": 20.0},
    "window": {"local_window_size": 9},
    "neighbours turned": {"rotary_interleaved": 1},
    "a part turned": {"rotary": 32},
    "not turned": {"rotary": 0, "packed": False},
    "a sink": {"sink": True},
    "columns of the cache by name": {"cached": "kv_cache_dim"},
}


def fusions(model: ModelProto, arch: str = ARCH, **options: Any) -> list[CachedAttention]:
    sites = analyse_model(model, (ARCHITECTURES[arch],), **options).sites
    return [site.fusion for site in sites if isinstance(site.fusion, CachedAttention)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
def test_fused_models_compute_the_same_bits(form: str, tmp_path: Path) -> None:
    """A prompt, tokens behind it, and a cache that grows, by the nodes that the fused node stands for."""
    attributes = dict(FORMS[form])
    packed = attributes.pop("packed", True)
    stock, fused = tmp_path / "stock.onnx", tmp_path / "fused.onnx"
    onnx.save(cached_model(packed, **attributes), stock)
    report = onnxfuse.optimize_file(stock, fused, arch=ARCH)
    assert [site.pattern for site in report.fused] == ["cached_attention"]
    before, after = (onnxruntime.InferenceSession(path) for path in (stock, fused))
    for tokens, past, room, batch in ((6, 0, 20, 2), (1, 9, 20, 2), (1, 5, 5, 2), (3, 4, 20, 1)):
        feeds = cached_feeds(packed, tokens, past, room, batch=batch)
        (result, *caches), (expected, *theirs) = (session.run(None, feeds) for session in (after, before))
        np.testing.assert_array_equal(result, expected)
        for cache, other in zip(caches, theirs, strict=True):
            np.testing.assert_array_equal(cache[:, :, : past + tokens], other[:, :, : past + tokens])


def test_the_ir_says_what_the_op_says() -> None:
    """Every attribute and size."""
    (fusion,) = fusions(cached_model(sizes=(14, 2, 96), rotary=64, scale=0.25, softcap=30.0, local_window_size=7))
    assert (fusion.heads, fusion.kv_heads, fusion.head, fusion.rotary) == (14, 2, 96, 64)
    assert (fusion.scale, fusion.softcap, fusion.window, fusion.packed) == (0.25, 30.0, 7, True)
    assert dict(fusion.original)["num_heads"] == 14
    assert "64 columns turned; attended = softmax(query * keys * 0.25, bounded by 30) * values, the last 7" in str(
        fusion
    )
    assert fusion.einops.startswith("b s (w h), b g c h, b g c h, b, x r, x r, y t -> b s (q h), b g c h")


def test_norms_and_a_sink_are_the_kernels() -> None:
    """As GenAI's builder has them of Qwen 3 and Gemma 3, and of gpt-oss."""
    (normalised,) = fusions(cached_model(packed=False, norms=True, qk_norm_epsilon=0.25))
    assert (normalised.epsilon, normalised.sink, normalised.features) == (0.25, False, ("norm", "rotary"))
    assert dict(normalised.original)["qk_norm_epsilon"] == 0.25
    assert "heads normalised, epsilon 0.25; 64 columns turned; attended" in str(normalised)
    assert "g c h, b, x r, x r, h, h, y t -> " in normalised.einops.replace("b s (g h), ", "")
    (fusion,) = fusions(cached_model(rotary=0, sink=True))
    assert (fusion.epsilon, fusion.sink, fusion.features) == (0.0, True, ("sink",))
    assert "* 0.125 beside a sink)" in str(fusion)
    (both,) = fusions(cached_model(norms=True, sink=True))
    assert both.epsilon == pytest.approx(1e-6)
    assert both.sink


def without_one_norm(model: ModelProto) -> None:
    (node,) = attentions(model)
    node.input[15] = ""


def with_a_short_sink(model: ModelProto) -> None:
    (node,) = attentions(model)
    model.graph.input.append(helper.make_tensor_value_info("short", TensorProto.FLOAT16, (HEADS - 1,)))
    node.input.extend([""] * (12 - len(node.input)))
    node.input[11] = "short"


def test_genais_decoders_have_one_in_every_layer() -> None:
    """Their caches have a name for the columns of a head."""
    assert len(fusions(decoder(FLOAT16))) == COUNT


def shape_of(model: ModelProto, **attributes: int) -> ModelProto:
    """The model whose number of keys is told by a Shape of some dimensions."""
    (shape,) = (node for node in model.graph.node if node.op_type == "Shape")
    shape.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return model


def test_a_shape_may_say_that_it_starts_at_the_first_dimension() -> None:
    """As ONNX Runtime's optimiser writes it out."""
    assert len(fusions(shape_of(cached_model(), start=0))) == 1


def reading_a_bias(model: ModelProto) -> None:
    (node,) = attentions(model)
    model.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT16, (1, 1, "s", "t")))
    node.input.extend([""] * (10 - len(node.input)) + ["bias"])


def told_by_an_input(model: ModelProto) -> None:
    (node,) = attentions(model)
    model.graph.input.append(helper.make_tensor_value_info("total", TensorProto.INT32, ()))
    node.input[6] = "total"


def attentions(model: ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]


ALTERED: dict[str, Callable[[ModelProto], None]] = {
    "a bias": reading_a_bias,
    "lengths": told_by_an_input,
    "one norm": without_one_norm,
    "a short sink": with_a_short_sink,
}
LEFT = {
    "fp32": cached_model(element=FLOAT),
    "nine heads each": cached_model(sizes=(18, 2, 64)),
    "columns": cached_model(sizes=(8, 2, 264)),
    "an attribute": cached_model(smooth_softmax=1),
    "one norm": cached_model(norms=True),
    "another dimension": shape_of(cached_model(), start=-1),
    "dimensions up to one": shape_of(cached_model(), end=2),
    "a window's cache": cached_model(sliding_window_cache=1, local_window_size=16),
}


@pytest.mark.parametrize("name", [*LEFT, *ALTERED])
def test_other_forms_are_left_to_the_runtime(name: str) -> None:
    model = LEFT.get(name, cached_model())
    ALTERED.get(name, lambda model: None)(model)
    assert fusions(model) == []
    (left,) = (
        site for site in analyse_model(model, (ARCHITECTURES[ARCH],)).skipped if site.reason == "no_attention_kernel"
    )
    assert name != "a window's cache" or "sliding_window_cache=1" in left.detail


@pytest.mark.parametrize("options", [{"attention": False}, {"rounding": "onnx"}, {"arch": "sm_80"}], ids=str)
def test_what_a_user_asks_for_leaves_it_alone(options: dict[str, Any]) -> None:
    assert fusions(cached_model(), **options) == []


def test_other_architectures_run_the_op() -> None:
    """The kernel is in the file for one; the node's name is known to the bridge there alone."""
    model, report = onnxfuse.optimize(cached_model(), arch="sm_80,sm_90a")
    assert [site.pattern for site in report.fused] == ["cached_attention"]
    assert [node.op_type for node in model.graph.node] == ["FusedCache90_0"]
    assert "sm_80" not in report.fused[0].kernel
