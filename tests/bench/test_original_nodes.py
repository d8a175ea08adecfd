"""The original nodes of a site beside its fused node, where weights are stored otherwise than the original has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from onnxfuse.bench.bench import bench
from onnxfuse.device import resolve
from onnxfuse.graph.fallback_body import RESTORING
from onnxfuse.graph.functions import DOMAIN
from onnxfuse.graph.fused_nodes import AFTER, BEFORE, DistinctNode, read_sites, site_models, write_with_shapes
from onnxfuse.pipeline import analyse_model
from tests.end_to_end.test_dequantized_weights import model_of
from tests.end_to_end.test_quantized_models import any_family as any_family
from tests.end_to_end.test_weight_order import everywhere as everywhere
from tests.helpers.genai_decoder import decoder
from tests.helpers.matching import draw
from tests.helpers.onnx_build import of_sizes, run
from tests.helpers.padded_models import as_it_lies, batched, built, gate_of_two, plain
from tests.helpers.rotary_models import in_pairs, rotary, sliced
from tests.tools.sweep import rewritten

HEAD, HEADS = 64, 8  # a bias of more than 1024 bytes, which is stored part by part too
FORMS = [(sliced, "kn"), (sliced, "nk"), (in_pairs, "kn")]
IN_TURN = [rotary(rotate, order, heads=HEADS, head=HEAD, scaled=True) for rotate, order in FORMS]
PADDED = [built(build) for build in (plain, as_it_lies, gate_of_two, batched)]
SIZES = {"batch": 2, "rows": 3}


def site_of(model: ModelProto, fused: ModelProto, folder: Path) -> DistinctNode:
    onnx.save(fused, folder / "fused.onnx")
    names = write_with_shapes(folder / "fused.onnx", folder / "shapes.onnx")
    feed = {each.name: draw(*dims(each)) for each in model.graph.input}
    told = run(onnx.load(folder / "shapes.onnx"), {name: value.astype(np.float32) for name, value in feed.items()})
    shapes = {name: tuple(map(int, shape)) for name, shape in zip(names, told, strict=True)}
    return next(site for site in read_sites(folder / "fused.onnx", shapes) if restores(site))


def restores(site: DistinctNode) -> bool:
    return any(node.doc_string == RESTORING for node in site.body.node)


def dims(value: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def arrays(model: ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def computed(data: bytes, node: onnx.NodeProto, stored: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What a site's model makes of a model's weights; all else it reads is drawn."""
    model = onnx.load_from_string(data)
    read = [stored.get(name) for name in node.input[1:]]
    feed = {
        value.name: known if known is not None else draw(*dims(value), seed=index).astype(np.float32)
        for index, (value, known) in enumerate(zip(model.graph.input, read, strict=True))
    }
    return run(model, feed)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("model", [*IN_TURN, *PADDED])
def test_the_original_nodes_read_the_originals_weights(model: ModelProto, tmp_path: Path) -> None:
    """And make of them what the fused node makes of what is stored."""
    model = of_sizes(model, SIZES)
    fused = rewritten(analyse_model(model, resolve("sm_90a", list)), transposed=True)
    site = site_of(model, fused, tmp_path)
    models = site_models(site, 1)
    assert any(node.domain == DOMAIN for node in onnx.load_from_string(models[AFTER]).graph.node)
    own = {f"{name}{end}": value for name, value in arrays(model).items() for end in ("", ".transposed")}
    before, after = computed(models[BEFORE], site.node, own), computed(models[AFTER], site.node, arrays(fused))
    for first, second in zip(before, after, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("any_family")
@pytest.mark.parametrize("element", [TensorProto.INT4, TensorProto.INT8, TensorProto.UINT8])
@pytest.mark.parametrize("turned", [False, True])
def test_integers_that_no_run_is_given_have_no_original_nodes(element: int, turned: bool, tmp_path: Path) -> None:
    model = model_of(element, turned, zero_points=True)
    fused = rewritten(analyse_model(model, resolve("sm_90a", list)), transposed=True)
    assert set(site_models(site_of(model, fused, tmp_path), 1)) == {AFTER}


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.FLOAT])
def test_a_caches_lengths_are_those_of_its_keys(dtype: int, tmp_path: Path) -> None:
    """Drawn numbers are lengths that ONNX Runtime refuses, or that lie outside of the cache."""
    model = decoder(dtype)
    fused = rewritten(analyse_model(model, resolve("sm_90a", list)), transposed=True)
    onnx.save(model, tmp_path / "model.onnx")
    onnx.save(fused, tmp_path / "fused.onnx")
    result = bench(tmp_path / "model.onnx", tmp_path / "fused.onnx", device="cpu", runs=1, warmup=0, per_site=True)
    cached = [site for site in result.sites if "GroupQueryAttention" in site.replaces]
    assert bool(cached) == (dtype == TensorProto.FLOAT16)
    assert all(site.before and site.after for site in result.sites)
