"""Weights that only fused nodes read lie in the written model as kernels like them, and mean what they meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.analysis.weight_order import with_k_innermost
from onnxfuse.device import resolve
from onnxfuse.graph import save
from onnxfuse.graph.fused_nodes import BEFORE, read_sites, site_models, write_with_shapes
from onnxfuse.graph.graph import load_model
from onnxfuse.graph.rewrite import KERNELS
from onnxfuse.lowering import plan_site
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import Analysis, analyse_model, tune_model
from onnxfuse.runtime.timing import time_models
from onnxfuse.schedule.strategy import Strategy, is_faster
from onnxfuse.tune.search import EPILOGUE_ONLY as BEHIND
from onnxfuse.tune.search import LEFT_ALONE, Trial
from onnxfuse.tune.session_timer import ports, trial_models
from tests.helpers.matching import draw
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder, run
from tests.helpers.reference_fusion import evaluate
from tests.helpers.thinning import case_id, each_with_one
from tests.tools.sweep import rewritten

DEVICES = resolve("sm_90a,sm_80", list)
K, N = 48, 64
SHALLOW = 36  # whose rows begin at no sector, in 16 bits and in 32
LEVELS = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels like every weight better with k innermost."""
    monkeypatch.setattr(plan_site, "is_faster", lambda other, kept: True)


def weight(b: Builder, *shape: int, name: str = "w") -> str:
    return b.array(draw(*shape, seed=len(b.initializers)) * 0.1, name)


def silu(b: Builder, x: str) -> str:
    return b("Mul", x, b("Sigmoid", x))


def plain(b: Builder, x: str) -> list[str]:
    return [silu(b, b("Add", b("MatMul", x, weight(b, K, N)), b.array(draw(N))))]


def gemm(b: Builder, x: str) -> list[str]:
    flat = b("Reshape", x, b.integers(-1, K))
    return [b("Relu", b("Gemm", flat, weight(b, K, N), b.array(draw(N))))]


def packed_gate(b: Builder, x: str) -> list[str]:
    value, gate = b("Split", b("MatMul", x, weight(b, K, 2 * N)), outputs=2, axis=-1, num_outputs=2)
    return [b("Mul", value, b("Gelu", gate))]


def gate_of_two(b: Builder, x: str) -> list[str]:
    value, gate = (b("MatMul", x, weight(b, K, N, name=name)) for name in ("up", "gate"))
    return [b("Mul", value, silu(b, gate))]


def siblings(b: Builder, x: str) -> list[str]:
    biases = [b.array(draw(N, seed=seed)) for seed in range(3)]
    return [
        b("Add", b("MatMul", x, weight(b, K, N, name=name)), bias) for name, bias in zip("qkv", biases, strict=True)
    ]


def windows(b: Builder, x: str) -> list[str]:
    parts = b("Split", b("MatMul", x, weight(b, K, 96)), b.integers(64, 16, 16), outputs=3, axis=-1)
    return [b("Relu", part) for part in parts]


def batched(b: Builder, x: str) -> list[str]:
    return [b("Relu", b("MatMul", b("Unsqueeze", x, b.integers(1)), weight(b, 3, K, N)))]


def behind_identity(b: Builder, x: str) -> list[str]:
    return [b("Relu", b("MatMul", x, b("Identity", weight(b, K, N))))]


def twice(b: Builder, x: str) -> list[str]:
    stored = weight(b, K, K)
    return [b("Relu", b("MatMul", b("Relu", b("MatMul", x, stored)), stored))]


def einsum(b: Builder, x: str) -> list[str]:
    return [b("Relu", b("Einsum", x, weight(b, K, 4, 16), equation="bmk,khd->bmhd"))]


def in_a_branch(b: Builder, x: str) -> list[str]:
    """The weight is the main graph's, and the product a branch's."""
    stored = weight(b, K, N)
    branches = {}
    for name, op in (("then_branch", "Relu"), ("else_branch", "Tanh")):
        nodes = [helper.make_node("MatMul", [x, stored], ["p"]), helper.make_node(op, ["p"], ["r"])]
        branches[name] = helper.make_graph(nodes, name, [], [helper.make_tensor_value_info("r", b.dtype, None)])
    condition = b("ReduceMax", b("Cast", b("Greater", b("Size", x), b.scalar(0)), to=6), keepdims=0)
    return [b("If", b("Cast", condition, to=9), **branches)]


def in_turn(b: Builder, t: str) -> list[str]:
    """gpt-oss's gate: the columns of gate and up take turns."""
    top, last, two = b.integers(2**63 - 1), b.integers(-1), b.integers(2)
    gate, up = (b("Slice", t, b.integers(first), top, last, two) for first in range(2))
    gate, up = b("Clip", gate, "", b.array(0.5)), b("Clip", up, b.array(-0.5), b.array(0.5))
    glu = b("Mul", gate, b("Sigmoid", b("Mul", gate, b.array(1.702))))
    return [b("Mul", b("Add", up, b.array(1.0)), glu)]


def gate_in_turn(b: Builder, x: str) -> list[str]:
    return in_turn(b, b("Add", b("MatMul", x, weight(b, K, 2 * N)), b.array(draw(2 * N))))


def experts_in_turn(b: Builder, x: str) -> list[str]:
    """Every expert of a layer, each with a weight and a bias of its own."""
    stored, bias = weight(b, 3, K, 2 * N), b.array(draw(3, 2 * N))
    product = b("MatMul", b("Unsqueeze", x, b.integers(1)), stored)
    return in_turn(b, b("Add", product, b("Unsqueeze", bias, b.integers(1))))


def thirds_in_turn(b: Builder, x: str) -> list[str]:
    thirds = b("Reshape", b("MatMul", x, weight(b, K, 3 * N)), b.integers(0, 0, N, 3))
    first, second, third = (b("Gather", thirds, b.scalar(index), axis=-1) for index in range(3))
    return [b("Mul", first, b("Sigmoid", second)), b("Tanh", third)]


def shallow(b: Builder, x: str) -> str:
    return b("Tanh", b("Slice", x, b.integers(0), b.integers(SHALLOW), b.integers(-1)))


def shallow_product(b: Builder, x: str) -> list[str]:
    product = b("MatMul", shallow(b, x), b("Transpose", weight(b, N, SHALLOW), perm=[1, 0]))
    return [silu(b, b("Add", product, b.array(draw(N))))]


def shallow_gemm(b: Builder, x: str) -> list[str]:
    flat = b("Reshape", shallow(b, x), b.integers(-1, SHALLOW))
    return [b("Relu", b("Gemm", flat, weight(b, N, SHALLOW), b.array(draw(N)), transB=1))]


def shallow_packed_gate(b: Builder, x: str) -> list[str]:
    flat = b("Reshape", shallow(b, x), b.integers(-1, SHALLOW))
    both = b("Gemm", flat, weight(b, 2 * N, SHALLOW), b.array(draw(2 * N)), transB=1)
    value, gate = b("Split", both, outputs=2, axis=-1, num_outputs=2)
    return [b("Mul", value, b("Gelu", gate))]


def shallow_gate_of_two(b: Builder, x: str) -> list[str]:
    lhs = shallow(b, x)
    weights = (weight(b, N, SHALLOW, name=name) for name in ("up", "gate"))
    value, gate = (b("MatMul", lhs, b("Transpose", each, perm=[1, 0])) for each in weights)
    return [b("Mul", value, silu(b, gate))]


def shallow_batched(b: Builder, x: str) -> list[str]:
    lhs = b("Unsqueeze", shallow(b, x), b.integers(1))
    return [b("Relu", b("MatMul", lhs, b("Transpose", weight(b, 3, N, SHALLOW), perm=[0, 2, 1])))]


def siblings_in_two_orders(b: Builder, x: str) -> list[str]:
    """As onnxslim writes Whisper's q, k and v: k has no bias and stays a MatMul, and the others become Gemms."""
    flat = b("Reshape", x, b.integers(-1, K))
    q, v = (b("Gemm", flat, weight(b, N, K, name=name), b.array(draw(N)), transB=1) for name in "qv")
    k = b("MatMul", x, weight(b, K, N, name="k"))
    return [b("Relu", q), silu(b, k), b("Tanh", v)]


def gate_in_two_orders(b: Builder, x: str) -> list[str]:
    flat = b("Reshape", x, b.integers(-1, K))
    value = b("Gemm", flat, weight(b, N, K, name="up"), b.array(draw(N)), transB=1)
    return [b("Mul", value, silu(b, b("MatMul", flat, weight(b, K, N, name="gate"))))]


IN_TURN = [gate_in_turn, experts_in_turn, thirds_in_turn]
REVERSED = [shallow_product, shallow_gemm, shallow_packed_gate, shallow_gate_of_two, shallow_batched]
WAYS = [
    plain, gemm, packed_gate, gate_of_two, siblings, windows, batched, behind_identity, twice, einsum, in_a_branch,
    *IN_TURN, *REVERSED,
]  # fmt: skip
IN_TWO_ORDERS = {siblings_in_two_orders: 3, gate_in_two_orders: 2}
"""Of weights that a kernel reads in one order alone, and how many there are."""


def built(build: Callable[[Builder, str], list[str]], dtype: int = FLOAT, **options: int) -> onnx.ModelProto:
    b = Builder(dtype)
    return b.model(*build(b, b.input("x", ("batch", "rows", K))), **options)


def feed(dtype: int = FLOAT) -> dict[str, np.ndarray]:
    return {"x": draw(2, 5, K, seed=9).astype(helper.tensor_dtype_to_np_dtype(dtype))}


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def outputs(model: onnx.ModelProto, level: str, values: Mapping[str, np.ndarray]) -> list[bytes]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [value.tobytes() for value in session.run(None, dict(values))]


def check_bits(model: onnx.ModelProto, fused: onnx.ModelProto, values: Mapping[str, np.ndarray], dtype: int) -> None:
    """The same bits at every level of ONNX Runtime, and near ones where nothing is folded."""
    for level in LEVELS:
        assert outputs(fused, level, values) == outputs(model, level, values), level
    for expected, actual in zip(run(model, dict(values)), run(fused, dict(values)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3 if dtype == FLOAT16 else 2e-6, atol=2e-6)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(("build", "dtype"), each_with_one([*WAYS, *IN_TWO_ORDERS], [FLOAT, FLOAT16]), ids=case_id)
def test_a_fused_file_has_the_originals_bits(build: Callable[[Builder, str], list[str]], dtype: int) -> None:
    model = built(build, dtype)
    analysis = analyse_model(model, DEVICES)
    assert analysis.transposed
    fused = rewritten(analysis, transposed=True)
    check_bits(model, fused, feed(dtype), dtype)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", [*WAYS, *IN_TWO_ORDERS])
def test_a_weight_is_stored_once_and_no_file_grows_by_it(build: Callable[[Builder, str], list[str]]) -> None:
    model = built(build)
    analysis = analyse_model(model, DEVICES)
    before, after = arrays(model), arrays(rewritten(analysis, transposed=True))
    for name in analysis.transposed:
        perms = {site.transposed[name] for site in analysis.sites if name in site.transposed}
        assert len(perms) == 1
        np.testing.assert_array_equal(after[f"{name}.transposed"], before[name].transpose(perms.pop()))
        assert name not in after
    archive = after.pop(KERNELS)
    assert archive.dtype == np.uint8
    assert sum(value.nbytes for value in after.values()) <= sum(value.nbytes for value in before.values())


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", WAYS)
def test_the_fusion_means_the_same_of_the_stored_weight(build: Callable[[Builder, str], list[str]]) -> None:
    model = built(build)
    turned, kept = analyse_model(model, DEVICES), analyse_model(model, DEVICES, keep_weights=True)
    stored = arrays(model) | feed()
    for other, own in zip(turned.sites, kept.sites, strict=True):
        assert other.transposed
        assert not own.transposed
        assert all(rhs.axes[-1] == ("n" if build in REVERSED else "k") for rhs in other.fusion.rhs)
        inputs = {name: draw(*_shape(own, name), seed=3) for name in _made(own, stored)} | stored
        moved = inputs | {name: inputs[name].transpose(perm) for name, perm in other.transposed.items()}
        for expected, actual in zip(evaluate(own.fusion, inputs), evaluate(other.fusion, moved), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)  # of the order of sums in float64


def _made(site: Site, stored: Mapping[str, np.ndarray]) -> list[str]:
    return [tensor.name for tensor in site.fusion.inputs if tensor.name not in stored]


def _shape(site: Site, name: str) -> list[int]:
    sizes = {"batch": 2, "rows": 5}
    return [sizes.get(str(size), size) for size in site.graph.shape(name)]  # type: ignore[misc]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", [*WAYS, *IN_TWO_ORDERS])
def test_keep_weights_leaves_them(build: Callable[[Builder, str], list[str]]) -> None:
    model = built(build)
    analysis = analyse_model(model, DEVICES, keep_weights=True)
    assert not analysis.transposed
    before, after = arrays(model), arrays(rewritten(analysis, transposed=True))
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items() if value.ndim > 1)


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize(("build", "products"), IN_TWO_ORDERS.items())
def test_weights_in_two_orders_share_a_kernel_where_one_may_lie_otherwise(
    build: Callable[[Builder, str], list[str]], products: int, dtype: int
) -> None:
    """Where none may, or somebody reads one as it lies, no kernel reads both, and all products are fused."""
    b = Builder(dtype)
    outs = build(b, b.input("x", ("batch", "rows", K)))
    model = b.model(*outs)
    turned = {name for name, value in arrays(model).items() if value.shape == (K, N)}
    (site,) = analyse_model(model, DEVICES).sites
    assert len(site.match.products) == products
    assert site.transposed.keys() == turned
    assert len({rhs.axes for rhs in site.fusion.rhs}) == 1

    kept = analyse_model(model, DEVICES, keep_weights=True)
    other = b("Softmax", b("MatMul", b("Sin", "x"), *turned))
    read = analyse_model(b.model(*outs, other), DEVICES)
    for analysis in (kept, read):
        assert sum(len(each.match.products) for each in analysis.sites) == products
        assert len(analysis.sites) > 1
        assert all(len({rhs.axes for rhs in each.fusion.rhs}) == 1 for each in analysis.sites)
        assert not analysis.transposed & turned


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("who", ["a node", "an output", "an input", "another product", "transposed", "an operand"])
def test_a_weight_that_somebody_reads_as_it_was_stays(who: str) -> None:
    b = Builder()
    x = b.input("x", (K, K))
    stored = weight(b, K, K)
    outs = [b("Relu", b("MatMul", x, stored))]
    if who == "a node":
        outs.append(b("ReduceSum", stored, b.integers(0)))
    elif who == "another product":
        outs.append(b("Softmax", b("MatMul", b("Sin", x), stored)))
    elif who == "transposed":
        outs.append(b("Relu", b("MatMul", b("Sin", x), b("Transpose", stored, perm=[1, 0]))))
    elif who == "an operand":
        outs.append(b("Add", b("MatMul", b("Sin", x), weight(b, K, K, name="other")), stored))
    model = b.model(*outs)
    if who == "an input":
        model.graph.input.append(helper.make_tensor_value_info("w", FLOAT, (K, K)))
    elif who == "an output":
        model.graph.output.append(helper.make_tensor_value_info("w", FLOAT, (K, K)))
    analysis = analyse_model(model, DEVICES)
    assert analysis.sites
    assert "w" not in analysis.transposed
    fused = rewritten(analysis, transposed=True)
    np.testing.assert_array_equal(arrays(fused)["w"], arrays(model)["w"])
    values = {"x": draw(K, K).astype(np.float32)}
    assert [each.tobytes() for each in run(fused, values)] == [each.tobytes() for each in run(model, values)]


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("why", ["--keep-weights", "a node", "an input"])
def test_parts_in_turn_of_a_weight_that_stays_follow_the_library(why: str, dtype: int) -> None:
    """No kernel reads every second column of a row; of fp32 that is to be exact the bias alone is fused."""
    b = Builder(dtype)
    x = b.input("x", ("batch", "rows", K))
    stored = b.input("w", (K, 2 * N)) if why == "an input" else weight(b, K, 2 * N)
    outs = in_turn(b, b("Add", b("MatMul", x, stored), b.array(draw(2 * N))))
    outs += [b("ReduceSum", stored, b.integers(0))] if why == "a node" else []
    model = b.model(*outs)
    analysis = analyse_model(model, DEVICES, keep_weights=why == "--keep-weights")
    assert [site.strategy for site in analysis.sites] == [Strategy.EPILOGUE_ONLY]
    assert not analysis.transposed
    values = feed(dtype) | ({"w": draw(K, 2 * N).astype(b.numpy) / 8} if why == "an input" else {})
    assert outputs(rewritten(analysis), "ORT_ENABLE_ALL", values) == outputs(model, "ORT_ENABLE_ALL", values)
    exact = analyse_model(model, DEVICES, fp32="exact", keep_weights=True)
    stops = [site.match.stop and site.match.stop.reason for site in exact.sites]
    assert stops == [None if dtype == FLOAT16 else "strided_slice"]


def test_parts_in_turn_are_read_with_k_innermost_whatever_the_architecture() -> None:
    for arch in ("sm_80", "sm_90a", "ptx"):
        (site,) = analyse_model(built(gate_in_turn, FLOAT16), resolve(arch, list)).sites
        assert site.fusion.pattern == "split_gemm"
        assert site.fusion.einops == "b m k, (n p) k, (n p) -> b m n"
        assert site.transposed == {"w": (1, 0)}


@pytest.mark.usefixtures("everywhere")
def test_what_several_fusions_share_follows_the_one_that_is_left_out() -> None:
    """Of two products of one weight one is not selected: it reads the weight as it was, and so do both."""
    model = built(twice)
    first = next(node.name for node in model.graph.node if node.op_type == "MatMul")
    analysis = analyse_model(model, DEVICES, selection=onnxfuse.make_selection(skip=first))
    assert len(analysis.sites) == 1
    assert not analysis.transposed


@pytest.mark.usefixtures("everywhere")
def test_before_inputs_could_be_overridden_a_listed_weight_is_a_weight() -> None:
    model = built(plain, ir_version=3)
    model.graph.input.extend(
        helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in model.graph.initializer
    )
    fused = rewritten(analyse_model(model, DEVICES), transposed=True)
    assert [value.name for value in fused.graph.input] == ["x"]
    assert outputs(fused, "ORT_ENABLE_ALL", feed()) == outputs(model, "ORT_ENABLE_ALL", feed() | {})


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("field", ["raw_data", "typed"])
def test_every_way_to_store_numbers_is_transposed(dtype: int, field: str) -> None:
    model = built(plain, dtype)
    (stored,) = (tensor for tensor in model.graph.initializer if tensor.name == "w")
    if field == "typed":
        value = numpy_helper.to_array(stored)
        bits = value.view(np.uint16).ravel() if dtype != FLOAT else value.ravel()
        stored.ClearField("raw_data")
        (stored.float_data if dtype == FLOAT else stored.int32_data).extend(bits.tolist())
    fused = arrays(rewritten(analyse_model(model, DEVICES), transposed=True))
    assert fused["w.transposed"].tobytes() == numpy_helper.to_array(stored).T.tobytes()


@pytest.mark.usefixtures("everywhere")
def test_a_fused_file_is_fused_again_with_its_weights_where_they_are() -> None:
    once = rewritten(analyse_model(built(siblings), DEVICES), transposed=True)
    again = analyse_model(once, DEVICES)
    assert not again.sites
    assert rewritten(again) == once


@pytest.mark.usefixtures("everywhere")
def test_a_product_that_stays_a_node_reads_its_weight_as_it_was() -> None:
    """Written behind the product, whatever was planned."""
    model = built(plain)
    analysis = analyse_model(model, DEVICES)
    sites = [replace(site, strategy=Strategy.EPILOGUE_ONLY) for site in analysis.sites if site.epilogue_only]
    assert sites
    assert not replace(analysis, sites=tuple(sites)).transposed
    fused = rewritten(analysis, epilogue_only=True, transposed=True)
    np.testing.assert_array_equal(arrays(fused)["w"], arrays(model)["w"])


EXTERNAL = {"save_as_external_data": True, "location": "all.bin", "size_threshold": 64}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("same_folder", [True, False])
def test_external_weights_are_written_anew_and_none_twice(tmp_path: Path, same_folder: bool) -> None:
    """One weight of the file is transposed and one is not: the new file holds both, and the old one is not needed."""
    b = Builder()
    x = b.input("x", ("rows", K))
    hidden = b("Relu", b("MatMul", x, weight(b, K, N)))
    other = weight(b, 100, N, name="table")
    model = b.model(b("Add", hidden, b("Gather", other, b.integers(7))))
    source = tmp_path / "a" / "in.onnx"
    source.parent.mkdir()
    target = (tmp_path / "a" if same_folder else tmp_path / "b") / "out.onnx"
    target.parent.mkdir(exist_ok=True)
    onnx.save(onnx.ModelProto.FromString(model.SerializeToString()), source, **EXTERNAL)
    report = onnxfuse.optimize_file(source, target, arch="sm_90a")
    assert report.transposed == {"w": 4 * K * N}
    data = target.with_name("out.onnx.data")
    assert data.stat().st_size <= 4 * N * (K + 100) + 2 * 64
    if same_folder:
        (source.parent / "all.bin").rename(tmp_path / "all.bin")
    loaded = arrays(onnx.load(target))
    np.testing.assert_array_equal(loaded["w.transposed"], arrays(model)["w"].T)
    np.testing.assert_array_equal(loaded["table"], arrays(model)["table"])
    stored = onnx.load(target, load_external_data=False)
    assert not any(tensor.metadata_props for tensor in stored.graph.initializer)
    values = {"x": draw(5, K).astype(np.float32)}
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    assert [each.tobytes() for each in session.run(None, values)] == outputs(model, "ORT_ENABLE_ALL", values)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("largest", [2**31, 5_000])
def test_a_model_of_one_file_is_written_in_order(tmp_path: Path, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the message, or in a file beside it where that is too large; as large as with weights as they were."""
    monkeypatch.setattr(save, "LARGEST_MESSAGE", largest)
    onnx.save(built(siblings), tmp_path / "in.onnx")
    sizes = []
    for keep in (True, False):
        target = tmp_path / f"{keep}.onnx"
        report = onnxfuse.optimize_file(tmp_path / "in.onnx", target, arch="sm_80", keep_weights=keep)
        assert bool(report.transposed) != keep
        data = target.with_name(f"{target.name}.data")
        assert data.exists() == (largest == 5_000)
        sizes.append(target.stat().st_size + (data.stat().st_size if data.exists() else 0))
    loaded = onnx.load(target)
    for name in "qkv":
        np.testing.assert_array_equal(arrays(loaded)[f"{name}.transposed"], arrays(built(siblings))[name].T)
    assert not any(tensor.metadata_props for tensor in loaded.graph.initializer)
    assert sizes[1] <= sizes[0] + 30_000  # other kernels, and as many bytes of weights


@pytest.mark.usefixtures("everywhere")
def test_the_api_hands_out_external_weights_in_their_order(tmp_path: Path) -> None:
    model = built(plain)
    onnx.save(onnx.ModelProto.FromString(model.SerializeToString()), tmp_path / "in.onnx", **EXTERNAL)
    fused, _ = onnxfuse.optimize(tmp_path / "in.onnx", arch="sm_90a")
    np.testing.assert_array_equal(arrays(fused)["w.transposed"], arrays(model)["w"].T)
    assert not any(tensor.metadata_props for tensor in fused.graph.initializer)


@pytest.mark.usefixtures("everywhere")
def test_weights_in_files_of_a_model_without_a_place_stay(tmp_path: Path) -> None:
    onnx.save(built(plain), tmp_path / "in.onnx", **EXTERNAL)
    assert not analyse_model(onnx.load(tmp_path / "in.onnx", load_external_data=False), DEVICES).transposed
    assert analyse_model(load_model(tmp_path / "in.onnx"), DEVICES).transposed


def test_tf32_on_sm_90a_has_its_weights_k_innermost() -> None:
    """By the cost model alone; on sm_80 both orders are as fast, and nothing moves."""
    b = Builder()
    x = b.input("x", (2048, 640))
    value, gate = b("Split", b("MatMul", x, weight(b, 640, 5120)), outputs=2, axis=-1, num_outputs=2)
    model = b.model(b("Mul", value, b("Gelu", gate)))
    for chips, expected in (("sm_90a", {"w"}), ("sm_80", set()), ("sm_90a,sm_80,ptx", {"w"})):
        assert analyse_model(model, resolve(chips, list)).transposed == expected
    assert analyse_model(model, resolve("sm_90a", list), fp32="exact").transposed <= {"w"}


@pytest.mark.parametrize(("k", "n", "expected"), [(122, 5120, True), (128, 5120, False), (122, 5121, False)])
def test_rows_that_begin_at_no_sector_lie_the_other_way_round(k: int, n: int, expected: bool) -> None:
    """By the cost model alone, where zeros behind them would be too many; not where rows of n are no better."""
    b = Builder(FLOAT16)
    product = b("Gemm", b.input("x", (1296, k)), b.raw(np.zeros((n, k), np.float16), "w"), transB=1)
    analysis = analyse_model(b.model(b("Relu", product)), resolve("sm_90a", list))
    assert analysis.transposed == ({"w"} if expected else set())


def test_one_architecture_that_would_lose_keeps_the_order() -> None:
    first, second = DEVICES
    kept = {first: [10.0, 10.0], second: [10.0, 10.0]}
    assert is_faster({first: [5.0, 9.0], second: [10.0, 10.0]}, kept)
    assert not is_faster({first: [5.0, 9.0], second: [10.0, 10.1]}, kept)
    assert not is_faster(kept, kept)


def test_nothing_is_transposed_twice() -> None:
    site = analyse_model(built(gate_of_two), DEVICES, keep_weights=True).sites[0]
    fusion, perms = with_k_innermost(site.fusion, {"up", "gate"}) or pytest.fail("could not")
    assert perms == {"up": (1, 0), "gate": (1, 0)}
    assert with_k_innermost(fusion, {"up", "gate"}) is None
    assert with_k_innermost(site.fusion, {"up"}) is None


def trial_of(analysis: Analysis) -> Trial:
    timer: list[Trial] = []

    def remember(trial: Trial) -> dict[str, float]:
        timer.append(trial)
        return {}

    tune_model(analysis, analysis.devices[0], timer=remember)
    return timer[0]


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", [gate_in_turn, gate_of_two, batched, *IN_TWO_ORDERS])
def test_tuning_times_every_form_with_the_weight_in_its_own_order(build: Callable[[Builder, str], list[str]]) -> None:
    """The nodes as they were read the weight as it was, and nothing transposes it as it is timed."""
    model = built(build, FLOAT16)
    trial = trial_of(analyse_model(model, DEVICES))
    inputs, outs = ports(trial)
    models = {name: onnx.load_from_string(data) for name, data in trial_models(trial, inputs, outs, 2).items()}
    weights = [index for index, tensor in enumerate(trial.site.fusion.inputs) if tensor.name in trial.site.transposed]
    before = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for name, made in models.items():
        is_kernel = all(node.op_type == "FusedGemm" for node in made.graph.node)
        assert is_kernel == (name not in (BEHIND, LEFT_ALONE))
        assert not any(node.doc_string for node in made.graph.node)
        shapes = {port.name: [dim.dim_value for dim in port.type.tensor_type.shape.dim] for port in made.graph.input}
        for index in weights:
            tensor = trial.site.fusion.inputs[index]
            perm, own = trial.site.transposed[tensor.name], before[tensor.name]
            assert shapes[f"x{index}_0"] == ([own[place] for place in perm] if is_kernel else own)
    stock = {LEFT_ALONE: models[LEFT_ALONE].SerializeToString()}
    assert set(time_models(stock, inputs, outs, 2, device="cpu")) == {LEFT_ALONE}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("build", [plain, gate_of_two, batched, gate_in_turn, *IN_TWO_ORDERS])
def test_bench_times_the_original_nodes_without_restoring(
    build: Callable[[Builder, str], list[str]], tmp_path: Path
) -> None:
    model = built(build)
    fused = rewritten(analyse_model(model, DEVICES), transposed=True)
    onnx.save(fused, tmp_path / "fused.onnx")
    names = write_with_shapes(tmp_path / "fused.onnx", tmp_path / "shapes.onnx")
    found = run(onnx.load(tmp_path / "shapes.onnx"), feed())
    shapes = {name: tuple(shape.tolist()) for name, shape in zip(names, found, strict=True)}
    (site,) = read_sites(tmp_path / "fused.onnx", shapes)
    assert "Transpose" not in site.replaces
    models = {name: onnx.load_from_string(data) for name, data in site_models(site, 1).items()}
    own = Counter(tuple(tensor.dims) for tensor in model.graph.initializer)
    for name, made in models.items():
        inputs = {each.name: tuple(d.dim_value for d in each.type.tensor_type.shape.dim) for each in made.graph.input}
        assert (own >= Counter(inputs[f"x{index}_0"] for index in site.weights)) == (name == BEFORE)
    assert not any(node.op_type == "Transpose" for node in models[BEFORE].graph.node)
