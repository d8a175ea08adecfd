"""Weights of rotated heads, stored half by half: where they are, what they mean, and what the kernels make of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.graph.rows_in_turn import RowsInTurn, part_by_part, rows_in_turn_of, taking_turns
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.strategy import Strategy
from tests.end_to_end.test_quantized_models import any_family as any_family
from tests.end_to_end.test_weight_order import arrays, check_bits
from tests.end_to_end.test_whole_way_on_cpu import compute
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, run
from tests.helpers.quantized import Form, quantized_model
from tests.helpers.reference_fusion import evaluate
from tests.helpers.rotary_models import (
    HEAD,
    HEADS,
    ROTATIONS,
    K,
    Rotate,
    by_matrices,
    feed,
    in_pairs,
    rotary,
    sliced,
    unbound,
)
from tests.tools.sweep import rewritten

SM_80 = resolve("sm_80", list)
PAIRS = (in_pairs, unbound, by_matrices)


def turned(site: Site) -> dict[str, RowsInTurn]:
    found = dict(site.implementation.transposed)
    assert all(isinstance(order, RowsInTurn) for order in found.values())
    return found  # type: ignore[return-value]


def stored(order: RowsInTurn, value: np.ndarray) -> np.ndarray:
    """By the definition: rows of k, those of the first halves of all heads before those of the second ones."""
    rows = value.T if order.turned else value
    heads = rows.reshape(-1, order.parts, order.run, rows.shape[-1])
    return np.concatenate([heads[:, part].reshape(-1, rows.shape[-1]) for part in range(order.parts)])


@pytest.mark.parametrize("element", [np.uint8, np.float16, np.float32])
@pytest.mark.parametrize(("parts", "run_", "turns", "k"), [(2, 8, 4, 5), (3, 1, 7, 2), (2, 3, 1, 1), (4, 2, 3, 6)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_an_order_moves_bytes_and_back(is_turned: bool, parts: int, run_: int, turns: int, k: int, element) -> None:
    rows = parts * run_ * turns
    value = np.arange(rows * k).reshape((k, rows) if is_turned else (rows, k)).astype(element)
    order = RowsInTurn(parts, run_, rows, (rows, k), is_turned)
    assert rows_in_turn_of(str(order)) == order
    moved = np.frombuffer(part_by_part(order, value.tobytes()), element).reshape(rows, k)
    np.testing.assert_array_equal(moved, stored(order, value))
    b = Builder()
    number = helper.np_dtype_to_tensor_dtype(np.dtype(element))
    graph = helper.make_graph(
        taking_turns(order, "stored", "model"), "g", [helper.make_tensor_value_info("stored", number, (rows, k))],
        [helper.make_tensor_value_info("model", number, value.shape)],
    )  # fmt: skip
    restoring = helper.make_model(graph, opset_imports=[helper.make_opsetid("", b.opset)], ir_version=9)
    np.testing.assert_array_equal(run(restoring, {"stored": moved})[0], value)


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_fused_file_has_the_originals_bits_and_size(rotate: Rotate, order: str, dtype: int) -> None:
    model = rotary(rotate, order, dtype=dtype)
    analysis = analyse_model(model, SM_80)
    (site,) = analysis.sites
    before = arrays(model)
    fused = rewritten(analysis, transposed=True)
    check_bits(model, fused, feed(model, 5), dtype)
    after = arrays(fused)
    for name in site.implementation.transposed:
        assert name not in after
        assert after[f"{name}.transposed"].nbytes == before[name].nbytes
    for name, own in turned(site).items() if rotate not in PAIRS else ():
        np.testing.assert_array_equal(after[f"{name}.transposed"], stored(own, before[name]))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_kernel_computes_it_through_the_bridge(rotate: Rotate, order: str, variant: int, tmp_path: Path) -> None:
    """Of both parts of each head, two of which are neighbours in a tile of columns."""
    model = rotary(rotate, order)
    (site,) = analyse_model(model, SM_80).sites
    values = arrays(model) | feed(model, 5)
    own = {name: as_stored(site, name, values[name]) for name in site.implementation.transposed}
    values |= own | {"v0_0": values["x"].reshape(-1, K)}
    (expected,) = run(model, feed(model, 5))
    (wanted,) = evaluate(site.fusion, values)
    np.testing.assert_allclose(wanted.reshape(expected.shape), expected, rtol=2e-5, atol=2e-5)
    (found,) = compute(site.one_kernel, values, tmp_path, variant)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=2e-2, atol=2e-2)


LONG = 20  # heads, whose bias is no small tensor


@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize("rotate", [rotate for rotate in ROTATIONS if rotate not in PAIRS])
def test_a_bias_is_stored_part_by_part_as_its_weight_is(rotate: Rotate, order: str, tmp_path: Path) -> None:
    model = rotary(rotate, order, heads=LONG)
    analysis = analyse_model(model, SM_80)
    (site,) = analysis.sites
    assert set(site.implementation.transposed) == {"weight", "bias"}
    fused = rewritten(analysis, transposed=True)
    check_bits(model, fused, feed(model, 5), FLOAT)
    values = arrays(model) | feed(model, 5)
    own = {name: as_stored(site, name, values[name]) for name in site.implementation.transposed}
    np.testing.assert_array_equal(arrays(fused)["bias.transposed"], own["bias"])
    values |= own | {"v0_0": values["x"].reshape(-1, K)}
    (expected,) = run(model, feed(model, 5))
    (found,) = compute(site.one_kernel, values, tmp_path)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=2e-2, atol=2e-2)


def test_with_its_bias_part_by_part_a_rotated_product_has_kernels_of_sm_90a() -> None:
    """They walk a row by one stride, and a bias whose parts have their columns in turn takes two."""
    families = {}
    for heads in (LONG, HEADS):
        (site,) = analyse_model(
            rotary(sliced, k=256, head=64, heads=heads, dtype=FLOAT16), resolve("sm_90a", list)
        ).sites
        families[heads] = {variant.family for variant in site.one_kernel.plans[0].variants}
    assert HOPPER in families[LONG]
    assert HOPPER not in families[HEADS]


@pytest.mark.parametrize("why", ["an output", "read twice", "--keep-weights"])
def test_a_bias_that_somebody_else_reads_stays(why: str) -> None:
    model = rotary(sliced, heads=LONG)
    if why == "an output":
        model.graph.output.append(helper.make_tensor_value_info("bias", FLOAT, [LONG * HEAD]))
    if why == "read twice":
        model.graph.node.append(helper.make_node("Add", ["bias", "bias"], ["twice"]))
        model.graph.output.append(helper.make_tensor_value_info("twice", FLOAT, [LONG * HEAD]))
    analysis = analyse_model(model, SM_80, keep_weights=why == "--keep-weights")
    assert "bias" not in analysis.transposed
    check_bits(model, rewritten(analysis, transposed=True), feed(model, 5), FLOAT)


def as_stored(site: Site, name: str, value: np.ndarray) -> np.ndarray:
    order = site.implementation.transposed[name]
    if value.ndim == 1:
        return as_stored(site, name, value[:, None])[:, 0]
    return stored(order, value) if isinstance(order, RowsInTurn) else value.transpose(order)  # type: ignore[arg-type]


@pytest.mark.parametrize("rotate", ROTATIONS)
def test_of_a_weight_that_stays_the_product_stays(rotate: Rotate, tmp_path: Path) -> None:
    """One kernel does what follows it, and stores both halves of each head."""
    model = rotary(rotate)
    analysis = analyse_model(model, SM_80, keep_weights=True)
    (site,) = analysis.sites
    assert site.strategy is Strategy.EPILOGUE_ONLY
    check_bits(model, rewritten(analysis, epilogue_only=True), feed(model, 5), FLOAT)
    values = arrays(model) | feed(model, 5)
    product = values["x"].reshape(-1, K) @ values["weight"]
    implementation = site.implementation
    made = next(tensor for tensor in implementation.fusion.inputs if tensor.name not in values)
    (found,) = compute(implementation, values | {made.name: product.reshape(2, 5, -1)}, tmp_path)
    np.testing.assert_allclose(found, run(model, feed(model, 5))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("any_family")
@pytest.mark.parametrize("form", [Form(4, 16), Form(4, 16, True, flat=True), Form(8, 16, True)], ids=str)
def test_quantised_weights_are_stored_half_by_half_as_well(form: Form) -> None:
    model = quantized_model(rotary(sliced, bias=False, dtype=FLOAT16), form)
    analysis = analyse_model(model, resolve("sm_90a", list))
    (site,) = analysis.sites
    assert (site.fusion.pattern, site.strategy) == ("rotary_gemm", Strategy.ONE_KERNEL)
    assert len(turned(site)) == 2 + form.zero_points
    for before, after in zip(
        run(model, feed(model, 5)), run(rewritten(analysis, transposed=True), feed(model, 5)), strict=True
    ):
        assert before.tobytes() == after.tobytes()


def test_external_weights_and_the_api(tmp_path: Path) -> None:
    model = rotary(sliced)
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(onnx.ModelProto.FromString(model.SerializeToString()), source, save_as_external_data=True, location="w")
    report = onnxfuse.optimize_file(source, target, arch="sm_80")
    n = HEADS * HEAD
    assert (report.transposed, report.padding) == ({"weight": 4 * K * n}, {})
    wanted = stored(RowsInTurn(2, HEAD // 2, n, (n, K), True), arrays(model)["weight"])
    handed, _ = onnxfuse.optimize(source, arch="sm_80")
    for loaded in (onnx.load(target), handed):
        np.testing.assert_array_equal(arrays(loaded)["weight.transposed"], wanted)
        assert not any(tensor.metadata_props for tensor in loaded.graph.initializer)
    assert run(onnx.load(target), feed(model, 5))[0].tobytes() == run(model, feed(model, 5))[0].tobytes()


def test_a_weight_of_two_rotations_is_stored_once() -> None:
    """Tied projections agree on its order, or it stays."""
    b = Builder()
    x = b.input("x", ("batch", "rows", K))
    weight = b.array(draw(K, HEADS * HEAD) / K**0.5, "weight")
    tables = {name: b.input(name, (1, 1, "rows", HEAD)) for name in ("cos", "sin")}
    outs = []
    for each in (x, b("Tanh", x)):
        y = b("Transpose", b("Reshape", b("MatMul", each, weight), b.integers(0, 0, HEADS, HEAD)), perm=[0, 2, 1, 3])
        first, second = b("Split", y, outputs=2, axis=-1, num_outputs=2)
        other = b("Concat", b("Neg", second), first, axis=-1)
        outs.append(b("Add", b("Mul", y, tables["cos"]), b("Mul", other, tables["sin"])))
    model = b.model(*outs)
    analysis = analyse_model(model, SM_80)
    assert [site.fusion.pattern for site in analysis.sites] == ["rotary_gemm"] * 2
    fused = rewritten(analysis, transposed=True)
    check_bits(model, fused, feed(model, 5), FLOAT)
    assert sum(numpy_helper.to_array(tensor).size == K * HEADS * HEAD for tensor in fused.graph.initializer) == 1
