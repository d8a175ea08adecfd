"""Which sums ONNX Runtime adds and normalises in one kernel: asked of the model that it makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto

from onnxfuse.device import ARCHITECTURES, resolve
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.skip_norms import is_added_and_normalised, is_bias_of_it
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.strategy import Strategy
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder

K, N = 32, 64
SHAPES = {"static": (2, 5), "batch": ("b", 5), "dynamic": ("b", "s"), "two axes": (5,), "four axes": (2, 3, 5)}


def decomposed(b: Builder, x: str) -> str:
    """As exporters write a LayerNormalization for operator sets without one."""
    centred = b("Sub", x, b("ReduceMean", x, axes=[-1]))
    variance = b("ReduceMean", b("Pow", centred, b.array(2.0)), axes=[-1])
    scaled = b("Div", centred, b("Sqrt", b("Add", variance, b.array(1e-5))))
    return b("Add", b("Mul", scaled, b.array(draw(N))), b.array(draw(N)))


def layer(
    rows: tuple, read: str = "", bias: bool = True, first: bool = True, op: bool = True, dtype: int = FLOAT, k: int = K
) -> ModelProto:
    """A product, what is added, and a normalisation; `read` says who else reads the sum."""
    b = Builder(dtype, opset=17)
    product = b("MatMul", b.input("x", (*rows, k)), b.array(draw(k, N)))
    product = b("Add", product, b.array(draw(N))) if bias else product
    skip = b.input("skip", (*rows, N))
    total = b("Add", *((product, skip) if first else (skip, product)))
    out = (
        b("LayerNormalization", total, b.array(np.ones(N)), b.array(np.zeros(N)), axis=-1)
        if op
        else decomposed(b, total)
    )
    return b.model(out, *{"": [], "node": [b("Tanh", total)] if read == "node" else [], "output": [total]}[read])


def as_the_runtime_has_it(model: ModelProto, folder: Path) -> list[onnx.NodeProto]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.optimized_model_filepath, options.log_severity_level = str(folder / "made.onnx"), 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(onnx.load(folder / "made.onnx").graph.node)


@pytest.mark.parametrize("op", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("read", ["", "node", "output"])
@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
def test_it_is_what_the_runtime_makes(
    rows: tuple, read: str, bias: bool, first: bool, op: bool, tmp_path: Path
) -> None:
    model = layer(rows, read, bias, first, op)
    made = [node for node in as_the_runtime_has_it(model, tmp_path) if node.op_type == "SkipLayerNormalization"]
    graph = Graph(load_model(model))
    assert any(is_added_and_normalised(graph, node) for node in graph.nodes) == bool(made)
    with_bias = any(len(node.input) == 5 for node in made)
    assert any(is_bias_of_it(graph, node) for node in graph.nodes) == with_bias


@pytest.mark.parametrize("op", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("read", ["", "node"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_the_sum_is_the_products_kernels_and_the_rest_one_of_its_own(
    read: str, dtype: int, op: bool, arch: str
) -> None:
    analysis = analyse_model(layer((8, 512), read, op=op, dtype=dtype, k=2048), resolve(arch, list))
    product, norm = sorted(analysis.sites, key=lambda site: -len(site.match.products))
    assert {"bias", "residual"} <= {*product.fusion.features}
    assert norm.fusion.pattern == "normalisation"
    assert not analysis.skipped


def test_an_estimate_counts_no_pass_for_it() -> None:
    """What a kernel saves by it is that the sum is not read as two tensors."""
    device, saved = ARCHITECTURES["sm_90a"], []
    for read in ("", "node"):
        (site, *_) = analyse_model(layer((8, 512), read, dtype=FLOAT16, k=2048), [device]).sites
        (each,) = site.estimates[device]
        saved.append(each[Strategy.LEFT_ALONE] - each[Strategy.ONE_KERNEL])
    assert saved[0] < saved[1] - calibration(device).launch
