"""Models of few-bit weights from end to end on the CPU: fused, the same bits as before, verified, described, timed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

import onnxfuse
from onnxfuse.device import ARCHITECTURES, WITHOUT_GPU
from onnxfuse.graph.fused_nodes import flops_of
from onnxfuse.graph.op_names import FUSED_GEMM_ON, kind_of
from onnxfuse.kernels import emit, portable
from onnxfuse.lowering import plan_site
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.pipeline import analyse_model, make_report
from onnxfuse.schedule import cost_model, plan, portable_tile
from onnxfuse.schedule.kernel_family import Problem
from onnxfuse.schedule.kernel_spec import KernelSpec, Tile
from onnxfuse.schedule.plan import make_plan
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.tune.search import measure
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, cpu_session, of_sizes
from tests.helpers.optimized_layers import Sizes, layers
from tests.helpers.quantized import Form, quantized_model
from tests.patterns.test_quantized import dual_gate, model_of

SM_90A = ARCHITECTURES["sm_90a"]
FORMS = [Form(4, 32), Form(4, 128, True), Form(8, 16, True, flat=True), Form(8, 64)]
RESIDUALS = ["MatMul_3", "MatMul_10", "MatMul_14", "MatMul_21"]


@pytest.fixture
def any_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel takes a quantised rhs: what it computes is nonsense, which nothing here runs."""
    why_not = portable_tile.why_not

    def plain(spec: KernelSpec) -> KernelSpec:
        return replace(spec, quantization=None, rhs_width=1)

    def reads_it(spec: KernelSpec, tile: Tile, limit: int) -> str | None:
        return why_not(plain(spec), tile, limit)

    def text(spec: KernelSpec, tile: Tile, device: Any) -> str:
        return portable.emit(plain(spec), tile)

    # Neither takes other tests' plans nor leaves its own.
    monkeypatch.setattr(plan_site, "kept_plan", make_plan)
    monkeypatch.setattr(plan, "kept_reason", plan.kept_reason.__wrapped__)
    monkeypatch.setattr(portable_tile, "why_not", reads_it)
    monkeypatch.setitem(emit.TEXTS, "portable", emit.Text(emit.TEXTS["portable"].entry, text))


def llama(form: Form, dtype: int = FLOAT16) -> ModelProto:
    return quantized_model(layers("llama", Sizes(64, 160, 4, 2), (1, 8), 2, dtype), form)


def feed(dtype: int) -> dict[str, np.ndarray]:
    element = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    return {"x": np.random.default_rng(0).standard_normal((1, 8, 64)).astype(element)}


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("any_family")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_fused_model_has_the_same_bits_and_verifies(form: Form, tmp_path: Path) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "fused.onnx"
    model = llama(form)
    onnx.save(model, source)
    # A residual takes a SkipSimplifiedLayerNormalization apart, which keeps its sum in fp32 where it is whole.
    report = onnxfuse.optimize_file(str(source), str(target), arch="sm_90a", skip=RESIDUALS)
    gates = [site for site in report.fused if site.pattern == "split_gemm"]
    assert len(gates) == 2
    written = onnx.load(target)
    held = {tensor.name: tensor.SerializeToString() for tensor in written.graph.initializer}
    for tensor in model.graph.initializer:  # every weight lies as it lay
        assert held[tensor.name] == tensor.SerializeToString()
    before, after = (cpu_session(each).run(None, feed(FLOAT16)) for each in (model, written))
    assert all(map(np.array_equal, before, after))
    if form.zero_points:
        assert command("verify", source, target).returncode == 0


@pytest.mark.usefixtures("any_family")
def test_every_site_is_priced_beside_stock() -> None:
    """Of one kernel and stock the model has what takes less time, whatever follows the product."""
    for site in analyse_model(llama(Form(4, 32)), [SM_90A]).sites:
        for times in site.estimates[SM_90A]:
            assert {Strategy.ONE_KERNEL, Strategy.LEFT_ALONE} <= times.keys()
        assert site.strategy is not Strategy.LEFT_ALONE


@pytest.mark.usefixtures("any_family")
def test_reports_name_what_holds_a_weight(tmp_path: Path) -> None:
    onnx.save(llama(Form(4, 32, True)), tmp_path / "m.onnx")
    report = json.loads(json.dumps(make_report(analyse_model(tmp_path / "m.onnx", [SM_90A])).to_dict()))
    gate = next(site for site in report["fused"] if site["pattern"] == "split_gemm")
    kinds = [(row["kind"], row["width"], row["bytes"]) for row in gate["operands"]]
    assert kinds[0][0] == "lhs"
    assert kinds[1:7] == [("rhs", 16, 16)] * 2 + [("scales", 2, 4)] * 2 + [("zeros", 1, 1)] * 2


@pytest.mark.usefixtures("any_family")
def test_operations_and_bytes_are_those_of_the_stored_weight() -> None:
    form = Form(4, 32)
    sites = analyse_model(llama(form), [SM_90A]).sites
    site = next(site for site in sites if site.fusion.pattern == "split_gemm")
    attributes = node_attributes(site.one_kernel, "ab12")
    shapes = [(1, 8, 64), (160, 2, 16), (160, 2, 16), (160, 2), (160, 2)]
    assert flops_of(attributes, shapes) == 2 * 2 * 8 * 64 * 160
    spec = site.plans[0].variants[0].spec
    read = cost_model.moving(spec, Problem(1, 160, 64), SM_90A)
    moved = 64 * 2 + 2 * 160 * (64 // 2 + 2 * 2) + 160 * 2  # x, both weights with their scales, the result
    assert read == pytest.approx(cost_model.from_memory(moved, SM_90A))


@pytest.mark.parametrize(("fp32", "arch"), [("tf32", "sm_90a"), ("exact", "sm_90a"), ("tf32", "sm_80")])
def test_activations_of_float_have_the_same_bits_and_verify(fp32: str, arch: str, tmp_path: Path) -> None:
    """Every product that sm_80 or sm_90a has, in TF32 or exact, is what the model's own nodes are on the CPU."""
    model = llama(Form(4, 32), FLOAT)
    source, target = tmp_path / "m.onnx", tmp_path / "fused.onnx"
    onnx.save(model, source)
    report = onnxfuse.optimize_file(str(source), str(target), arch=arch, fp32=fp32, skip=RESIDUALS)
    assert {"split_gemm", "gemm_epilogue"} <= {site.pattern for site in report.fused}
    before, after = (cpu_session(each).run(None, feed(FLOAT)) for each in (model, onnx.load(target)))
    assert all(map(np.array_equal, before, after))
    assert command("verify", source, target).returncode == 0


@pytest.mark.parametrize(("fp32", "terms"), [("tf32", {1, 2}), ("exact", {3})])
def test_activations_of_float_are_sums_of_terms(fp32: str, terms: set[int]) -> None:
    """Few rows in two terms of 8 bits, or three where all 24 bits are asked for; many rows as TF32, not exact."""
    sites = analyse_model(llama(Form(4, 32), FLOAT), [SM_90A], fp32).sites
    tiles = [variant.tile for site in sites if site.mapping for plan in site.plans for variant in plan.variants]
    assert {getattr(tile, "terms", 1) for tile in tiles} == terms


def test_a_kernel_that_is_faster_on_one_architecture_is_of_that_alone(tmp_path: Path) -> None:
    """Without a GPU at hand a model is made for several. Where the others' GPUs are, the bridge knows no such node."""
    b = Builder(FLOAT16)
    x, weight = b.input("x", ("batch", "rows", 512)), b.array(np.random.default_rng(0).standard_normal((512, 1024)))
    model = quantized_model(b.model(b("MatMul", x, weight)), Form(4, 32))
    (site,) = analyse_model(model, [ARCHITECTURES[arch] for arch in WITHOUT_GPU]).sites
    assert (site.only, site.strategy) == ("sm_90a", Strategy.ONE_KERNEL)
    measured = []
    for arch in ("sm_80", "sm_90a"):  # only Hopper has kernels to measure
        measured.append(measure([[site]], ARCHITECTURES[arch], lambda trial: dict.fromkeys(trial.implementations, 1.0)))
    assert measured[0] == [{}]
    assert measured[1][0]
    source, target = tmp_path / "m.onnx", tmp_path / "fused.onnx"
    onnx.save(of_sizes(model, {"batch": 2, "rows": 300}), source)  # where sm_80 loses as well
    report = onnxfuse.optimize_file(str(source), str(target), arch=",".join(WITHOUT_GPU))
    assert "sm_80" not in report.fused[0].kernel
    assert (report.fused[0].to_dict()["tier"], report.fused[0].to_dict()["only"]) == ("one kernel", "sm_90a")
    for more in ((), ("--all",)):
        shown = " ".join(command("explain", source, "--arch", ",".join(WITHOUT_GPU), *more).stdout.split())
        assert "one kernel on sm_90a, left alone elsewhere" in shown
    written = onnx.load(target)
    (node,) = written.graph.node
    assert kind_of(node.op_type) == FUSED_GEMM_ON["sm_90a"]
    assert [each.op_type for each in written.functions[0].node] == [each.op_type for each in model.graph.node]
    assert json.loads(command("inspect", target, "--json").stdout)["architectures"] == ["sm_90a"]
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 300, 512)).astype(np.float16)}
    before, after = (cpu_session(each).run(None, feeds)[0] for each in (model, written))
    assert np.array_equal(before, after)
    assert command("verify", source, target).returncode == 0


def test_what_is_left_alone_for_one_architecture_is_fused_for_the_other() -> None:
    """A body that unpacks integers would be slower than the model's nodes; what the report says to do helps."""
    b = Builder(FLOAT16, opset=21)
    b.initializers.append(onnx.helper.make_tensor("q", onnx.TensorProto.INT4, (512, 1024), np.ones(1 << 19, np.int64)))
    weight = b("DequantizeLinear", "q", b.array(np.ones((16, 1024))), axis=0, block_size=32)
    model = b.model(b("MatMul", b.input("x", ("batch", "rows", 512)), weight), ir_version=10)
    analysis = analyse_model(model, [ARCHITECTURES[arch] for arch in WITHOUT_GPU])
    (left,) = analysis.skipped
    assert left.reason == "slower_elsewhere"
    (arch,) = re.findall(r"faster on sm_80; --arch (\w+) fuses it", left.detail)
    assert not analyse_model(model, [ARCHITECTURES[arch]]).skipped


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", [Form(4, 32), Form(8, 16, True)], ids=str)
def test_scales_of_any_kind_are_computed_as_before(form: Form, tmp_path: Path) -> None:
    """0, negative, infinite and NaN: by the original nodes to the bit, and verify judges such outputs."""
    model = of_sizes(model_of(dual_gate, form, FLOAT16), {"batch": 2, "rows": 3})
    for tensor in model.graph.initializer:
        if tensor.name.endswith(".scales"):
            scales = onnx.numpy_helper.to_array(tensor).copy()
            scales[:2] *= np.array([[0], [-1]], scales.dtype)
            scales[2:5, 1] = [np.inf, -np.inf, np.nan]
            tensor.CopyFrom(onnx.numpy_helper.from_array(scales, tensor.name))
    source, target = tmp_path / "m.onnx", tmp_path / "fused.onnx"
    onnx.save(model, source)
    assert len(onnxfuse.optimize_file(str(source), str(target), arch="sm_90a").fused) == 1
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 72)).astype(np.float16)}
    (before,), (after,) = (cpu_session(onnx.load(each)).run(None, x) for each in (source, target))
    finite = np.isfinite(before).all(axis=(0, 1))
    assert not finite[2:5].any()
    assert finite[[0, 1, *range(5, len(finite))]].all()
    assert np.array_equal(before, after, equal_nan=True)
    assert command("verify", source, target, "--shape", "x=2,3,72").returncode == 0
