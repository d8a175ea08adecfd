"""Weights that are stored with zeros behind their rows: where they are, what they mean, and what reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxfuse
from onnxfuse.analysis.weight_order import BOUNDARIES, PADDED, padded_size
from onnxfuse.device import resolve
from onnxfuse.graph.padded_rows import PaddedRows, padded_rows_of, with_padding, without_padding
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.tune.search import EPILOGUE_ONLY as BEHIND
from onnxfuse.tune.search import LEFT_ALONE
from onnxfuse.tune.session_timer import ports, trial_models
from tests.end_to_end.test_weight_order import (
    DEVICES,
    EXTERNAL,
    arrays,
    check_bits,
    everywhere,
    outputs,
    silu,
    trial_of,
    weight,
)
from tests.end_to_end.test_whole_way_on_cpu import compute
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.helpers.padded_models import WAYS, Build, K, N, as_it_lies, built, gate_of_two, packed_gate, plain
from tests.helpers.reference_fusion import evaluate
from tests.tools.sweep import rewritten

__all__ = ["everywhere"]  # a fixture


def feed(dtype: int = FLOAT) -> dict[str, np.ndarray]:
    return {"x": draw(2, 5, K, seed=9).astype(np.float32 if dtype == FLOAT else np.float16)}


def padded(analysis: Analysis) -> dict[str, PaddedRows]:
    found = {name: order for site in analysis.sites for name, order in site.transposed.items()}
    assert found
    assert all(isinstance(order, PaddedRows) for order in found.values())
    return found  # type: ignore[return-value]


def as_stored(order: PaddedRows, value: np.ndarray) -> np.ndarray:
    rows = value.transpose(order.perm)
    return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, order.whole - order.row)])


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_rows_end_on_the_largest_boundary_that_is_near(element_bytes: int) -> None:
    for size in range(1, 6000):
        whole = padded_size(size, element_bytes)
        near = [end for end in range(size, size + size // PADDED + 1) if end * element_bytes % BOUNDARIES[-1] == 0]
        grades = [max(each for each in BOUNDARIES if end * element_bytes % each == 0) for end in near]
        assert whole == (near[grades.index(max(grades))] if near else size)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("build", WAYS)
def test_a_fused_file_has_the_originals_bits(build: Build, dtype: int) -> None:
    model = built(build, dtype)
    analysis = analyse_model(model, DEVICES)
    assert all((order.row, order.whole) == (K, 152) for order in padded(analysis).values())
    fused = rewritten(analysis, transposed=True)
    check_bits(model, fused, feed(dtype), dtype)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", WAYS)
def test_a_weight_is_stored_once_and_grows_by_its_zeros(build: Build) -> None:
    model = built(build)
    analysis = analyse_model(model, DEVICES)
    before, after = arrays(model), arrays(rewritten(analysis, transposed=True))
    for name, order in padded(analysis).items():
        np.testing.assert_array_equal(after[f"{name}.transposed"], as_stored(order, before[name]))
        assert name not in after
        assert after[f"{name}.transposed"].nbytes <= before[name].nbytes * (1 + 1 / PADDED)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", WAYS)
def test_the_fusion_means_the_same_of_the_stored_weight(build: Build) -> None:
    model = built(build)
    turned, kept = analyse_model(model, DEVICES), analyse_model(model, DEVICES, keep_weights=True)
    stored = arrays(model) | feed()
    for other, own in zip(turned.sites, kept.sites, strict=True):
        assert not own.transposed
        made = {tensor.name for tensor in own.fusion.inputs if tensor.name not in stored}
        inputs = stored | {name: draw(*(2, 5, K)[:3], seed=3).reshape(_rank(own, name)) for name in made}
        moved = inputs | {name: as_stored(order, inputs[name]) for name, order in padded(turned).items()}
        for expected, actual in zip(evaluate(own.fusion, inputs), evaluate(other.fusion, moved), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def _rank(site, name: str) -> tuple[int, ...]:
    sizes = [2 if size == "batch" else size for size in site.graph.shape(name)]
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("build", [plain, as_it_lies, packed_gate, gate_of_two])
def test_a_kernel_reads_it_through_the_bridge(build: Build, variant: int, tmp_path: Path) -> None:
    """The first kernel, which takes whole accesses to the end of a row, and the last, which looks at each tensor."""
    model = built(build)
    analysis = analyse_model(model, resolve("sm_80", list))
    (site,) = analysis.sites
    values = arrays(model) | feed()
    expected = evaluate(site.fusion, values | {n: as_stored(order, values[n]) for n, order in padded(analysis).items()})
    values |= {name: as_stored(order, values[name]) for name, order in padded(analysis).items()}
    values |= {tensor.name: feed()["x"].reshape(10, K) for tensor in site.fusion.inputs if tensor.name not in values}
    assert site.plans[0].variants[0].spec.rhs_width == 4
    for wanted, found in zip(expected, compute(site.one_kernel, values, tmp_path, variant), strict=True):
        np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("everywhere")
def test_external_weights_and_the_api(tmp_path: Path) -> None:
    model = built(plain)
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.ModelProto.FromString(model.SerializeToString()), source, **EXTERNAL)
    report = onnxfuse.optimize_file(source, target, arch="sm_80")
    assert (report.transposed, report.padding) == ({"w": 4 * K * N}, {"w": 4 * 2 * N})
    wanted = as_stored(PaddedRows((1, 0), K, 152), arrays(model)["w"])
    handed, _ = onnxfuse.optimize(source, arch="sm_80")
    for loaded in (onnx.load(target), handed):
        np.testing.assert_array_equal(arrays(loaded)["w.transposed"], wanted)
        assert not any(tensor.metadata_props for tensor in loaded.graph.initializer)
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    assert [each.tobytes() for each in session.run(None, feed())] == outputs(model, "ORT_ENABLE_ALL", feed())


def short_rows(b: Builder, x: str) -> list[str]:
    """Of 62 elements a 32nd are less than the two that are missing."""
    short = b("Slice", x, b.integers(0), b.integers(62), b.integers(-1))
    return [silu(b, b("MatMul", b("Tanh", short), weight(b, 62, N)))]


def whole_rows(b: Builder, x: str) -> list[str]:
    short = b("Slice", x, b.integers(0), b.integers(144), b.integers(-1))
    return [silu(b, b("MatMul", b("Tanh", short), weight(b, 144, N)))]


def read_elsewhere(b: Builder, x: str) -> list[str]:
    stored = weight(b, K, N)
    return [silu(b, b("MatMul", x, stored)), b("Neg", stored)]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", [short_rows, whole_rows, read_elsewhere])
def test_others_are_not(build: Build) -> None:
    orders = [order for site in analyse_model(built(build), DEVICES).sites for order in site.transposed.values()]
    assert not any(isinstance(order, PaddedRows) for order in orders)


@pytest.mark.usefixtures("everywhere")
def test_before_slices_had_inputs_there_is_none() -> None:
    b = Builder(FLOAT, opset=9)
    model = b.model(b("Relu", b("MatMul", b.input("x", ("rows", K)), weight(b, K, N))))
    orders = [order for site in analyse_model(model, DEVICES).sites for order in site.transposed.values()]
    assert not any(isinstance(order, PaddedRows) for order in orders)


@pytest.mark.parametrize(("k", "element"), [(2730, FLOAT), (1138, FLOAT), (2730, FLOAT16)])
def test_by_the_cost_model_no_kernel_copies_rows_of_weights(k: int, element: int) -> None:
    b = Builder(element)
    stored = b.raw(np.zeros((1024, k), b.numpy), "w")
    product = b("Gemm", b.input("x", ("rows", k)), stored, transB=1)
    analysis = analyse_model(b.model(b("Relu", product)), resolve("sm_90a", list))
    assert padded(analysis).keys() == {"w"}
    specs = [variant.spec for site in analysis.sites for plan in site.plans for variant in plan.variants]
    assert {spec.copied for spec in specs} == {(), ("lhs",)}


@pytest.mark.parametrize(("k", "element", "whole"), [(4304, FLOAT16, 4352), (3236, FLOAT, 3264), (4096, FLOAT16, 0)])
def test_rows_that_begin_on_no_line_are_estimated_slower(k: int, element: int, whole: int) -> None:
    """And are stored so that they do, where kernels read them as they lie; those that do stay."""
    b = Builder(element)
    stored = b.raw(np.zeros((1152, k), b.numpy), "w")
    model = b.model(b("Relu", b("Gemm", b.input("x", (2048, k)), stored, transB=1)))
    (site,), (kept,) = (
        analyse_model(model, resolve("sm_90a", list), keep_weights=kept).sites for kept in (False, True)
    )
    assert {name: order.whole for name, order in site.transposed.items()} == ({"w": whole} if whole else {})
    own, others = (each.plans[0].ranked[0].tiles[0][0] for each in (site, kept))
    assert own < others if whole else own == others


@pytest.mark.usefixtures("everywhere")
def test_tuning_times_the_models_own_shape() -> None:
    trial = trial_of(analyse_model(built(gate_of_two, FLOAT16), resolve("sm_80", list)))
    inputs, outs = ports(trial)
    for name, data in trial_models(trial, inputs, outs, 2).items():
        made = onnx.load_from_string(data)
        shapes = {port.name: [dim.dim_value for dim in port.type.tensor_type.shape.dim] for port in made.graph.input}
        as_model = name in (BEHIND, LEFT_ALONE)
        weights = [shapes[f"x{i}_0"] for i, t in enumerate(trial.site.fusion.inputs) if t.name in ("up", "gate")]
        assert weights == [[K, N] if as_model else [N, 152]] * 2


@pytest.mark.parametrize("shape", [(7, 30), (3, 7, 30), (600, 1)])
@pytest.mark.parametrize("element", [np.float16, np.float32, np.float64])
def test_rows_come_back_as_they_were(shape: tuple[int, ...], element: type) -> None:
    """By the nodes of the body, and the order by its text."""
    model = draw(*shape).astype(element)
    for perm in {tuple(range(len(shape))), (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)}:
        row = shape[perm[-1]]
        order = PaddedRows(perm, row, row + 5)
        assert padded_rows_of(str(order)) == order
        assert padded_rows_of("0,1") is None
        stored = order.stored_shape(shape)
        assert order.model_shape(stored) == shape
        data = b"".join(with_padding(order, stored, model.tobytes()))
        rows = np.frombuffer(data, element).reshape(stored)
        np.testing.assert_array_equal(rows, as_stored(order, model))
        nodes = without_padding(order, "stored", "w")
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(element))
        graph = onnx.helper.make_graph(
            nodes, "body", [onnx.helper.make_tensor_value_info("stored", kind, stored)],
            [onnx.helper.make_tensor_value_info("w", kind, shape)],
        )  # fmt: skip
        made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
        np.testing.assert_array_equal(run(made, {"stored": rows})[0], model)
