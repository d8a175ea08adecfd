"""verify: equal models pass, slightly wrong ones do not, and wrong inputs are named. On the CPU."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse.errors import ModelError, SettingError
from onnxfuse.graph.fused_nodes import uses_tf32
from onnxfuse.runtime import feeds
from onnxfuse.runtime.accuracy import (
    BY_NUMBER,
    BY_ORIGINAL,
    BY_TF32,
    BY_ULP,
    ENOUGH,
    OutputCheck,
    Value,
    check_output,
    check_together,
    ulp,
)
from onnxfuse.runtime.feeds import InputSpec, input_specs, load_npz, make_feeds
from onnxfuse.runtime.session import CPU
from onnxfuse.terminal import print_result
from onnxfuse.verify import verify
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, of_sizes
from tests.helpers.tf32 import to_tf32

MODELS = Path(__file__).parents[2] / "models"
SPECS = (
    InputSpec("x", "float16", ("batch", 77, None)),
    InputSpec("input_ids", "int64", ("batch", "text")),
    InputSpec("attention_mask", "int64", ("batch", "text")),
    InputSpec("flag", "bool", ()),
)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "default_providers", lambda: [CPU])


def scaled(source: Path, target: Path, factor: float) -> Path:
    """The model with one weight matrix scaled."""
    model = onnx.load(source)
    tensor = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array((array * factor).astype(array.dtype), tensor.name))
    onnx.save(model, target)
    return target


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def product(dtype: int, tail: str = "Identity") -> onnx.ModelProto:
    b = Builder(dtype)
    x = b.input("x", ["m", 8])
    return b.model(b(tail, b("MatMul", x, b.array(np.linspace(-1, 1, 40).reshape(8, 5)))))


@pytest.mark.parametrize("name", ["unet_block", "ff_geglu", "bert", "vit", "lstm_gates"])
def test_a_model_is_as_good_as_itself(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    result = verify.verify(path, path)
    assert result.passed
    assert result.provider == CPU
    assert all(0 < output.original.max < 0.01 for output in result.outputs)


@pytest.mark.parametrize("name", ["unet_block", "ff_geglu", "lstm_gates"])
def test_a_weight_that_is_one_percent_off_fails(name: str, tmp_path: Path) -> None:
    path = MODELS / f"{name}.onnx"
    result = verify.verify(path, scaled(path, tmp_path / "scaled.onnx", 1.01))
    assert not result.passed
    assert "FAILED" in str(result)
    assert result.to_dict()["passed"] is False


def test_nan_in_another_place_fails(tmp_path: Path) -> None:
    good, bad = (
        save(product(TensorProto.FLOAT, "Abs"), tmp_path / "a"),
        save(product(TensorProto.FLOAT, "Sqrt"), tmp_path / "b"),
    )
    result = verify.verify(good, bad)
    assert [output.reason for output in result.outputs] == ["NaN or infinity in other places than in the original"]


def strictly_parsed(text: str) -> object:
    """What a parser that knows JSON alone reads: `Infinity` and `NaN` are Python's."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_failed_comparison_is_json_with_null_for_what_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (save(product(TensorProto.FLOAT, tail), tmp_path / tail) for tail in ("Abs", "Sqrt"))
    result = verify.verify(good, bad)
    print_result(result, good, bad, as_json=True, quiet=False)
    (run,) = strictly_parsed(capsys.readouterr().out)["runs"]
    (check,) = run["outputs"]
    assert (check["passed"], check["original"], check["optimized"], check["tolerance"]) == (False, None, None, None)
    assert str(result.outputs[0]).endswith("FAILED: NaN or infinity in other places than in the original")


def test_every_verdict_is_json() -> None:
    """What cannot be compared, what overflows in ulp, and what is fine: null stands where no finite number does."""
    ones, zeros, ids = np.ones(3), np.zeros(3), np.arange(3)
    values = [Value(array.astype(dtype), dtype) for dtype in ("float32", "float64") for array in (ones, zeros)]
    values += [Value(ids, "int64"), Value(ids + 1, "int64"), Value(np.full(3, np.nan), "float64")]
    cases = [*itertools.product(values, repeat=3), (values[0], Value(np.ones(2, np.float32), "float32"), values[0])]
    checks = [check_output("y", *case) for case in cases]
    printed = strictly_parsed(json.dumps(verify.RunCheck({}, tuple(checks)).to_dict()))["outputs"]
    for check, entry in zip(checks, printed, strict=True):
        assert entry["passed"] == check.passed
        assert not check.passed or entry["optimized"]["max"] is not None
    assert any(entry["optimized"] and entry["optimized"]["ulp"] is None for entry in printed)


def drawn_checks(rng: np.random.Generator, elements: int, runs: int, factor: float) -> list[OutputCheck]:
    """Two models whose errors are independent, those of the second `factor` times as large."""
    values = []
    for _ in range(runs):
        exact = rng.standard_normal(elements)
        errors = rng.standard_normal((2, elements)) * np.array([[1e-3], [1e-3 * factor]])
        values.append([*(Value(array.astype(np.float32), "float32") for array in (*(exact + errors), exact)), None])
    checks = [check_output("y", *each) for each in values]
    return check_together(checks, *zip(*values, strict=True)) if runs > 1 else checks


def failures(elements: int, runs: int, factor: float = 1.0) -> float:
    rng = np.random.default_rng(0)
    return float(np.mean([not drawn_checks(rng, elements, runs, factor)[0].passed for _ in range(400)]))


def test_few_elements_are_judged_with_those_of_other_runs() -> None:
    """Four elements by themselves are refused one time in eight though both models are as good; together hardly."""
    assert failures(4, 1) > 0.07
    assert failures(4, ENOUGH // 4) < 0.02
    assert failures(4, ENOUGH // 4, 10.0) == 1.0, "what is wrong is found all the same"


@pytest.mark.parametrize("elements", range(1, 40))
def test_as_many_runs_as_give_enough_elements(elements: int) -> None:
    few = Value(np.zeros((1, elements), np.float32), "float32")
    others = {"ids": Value(np.zeros(1, np.int64), "int64"), "none": Value(np.zeros((0, 3), np.float32), "float32")}
    runs = verify._runs_wanted({"few": few, **others})
    assert runs * elements >= ENOUGH
    assert runs == 1 or (runs - 1) * elements < ENOUGH
    assert verify._runs_wanted(others) == 1


def test_the_runs_of_a_small_output_have_one_verdict(tmp_path: Path) -> None:
    path = save(product(TensorProto.FLOAT, "Abs"), tmp_path / "model.onnx")
    first, *others = verify.verify(path, path, shapes={"x": (2, 8)}, runs=3).runs
    assert all(run.outputs == first.outputs for run in others)
    assert first.passed


def test_nan_in_the_same_place_passes(tmp_path: Path) -> None:
    path = save(product(TensorProto.FLOAT, "Sqrt"), tmp_path / "model.onnx")
    assert verify.verify(path, path).passed


def test_bfloat16_inputs_and_outputs(tmp_path: Path) -> None:
    cast = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["s"], ["y"], to=TensorProto.BFLOAT16),
    ]
    nodes = [cast[0], helper.make_node("Sigmoid", ["f"], ["s"]), cast[1]]
    values = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["n", 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "bf16", values[:1], values[1:])
    path = save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx"
    )
    result = verify.verify(path, path, inputs={"x": np.linspace(-3, 3, 8, dtype=np.float32).reshape(2, 4)})
    assert result.passed
    assert result.outputs[0].dtype == "bfloat16"
    assert 0 < result.outputs[0].original.max < 2**-8


def test_a_symbol_that_the_default_does_not_fit_asks_for_a_shape(tmp_path: Path) -> None:
    b = Builder()
    x = b.input("x", ["n", 4])
    path = save(b.model(b("Add", x, b.array(np.ones((7, 4))))), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"--shape NAME=2,77,768 \(tried x \[16, 4\]\)"):
        verify.verify(path, path)
    assert verify.verify(path, path, shapes={"x": (7, 4)}).passed


def test_other_outputs_or_inputs_are_an_error(tmp_path: Path) -> None:
    model = product(TensorProto.FLOAT)
    original = save(model, tmp_path / "a.onnx")
    renamed = onnx.ModelProto.FromString(model.SerializeToString().replace(b"v1_0", b"v9_9"))
    with pytest.raises(ModelError, match="its outputs are v9_9; those of"):
        verify.verify(original, save(renamed, tmp_path / "b.onnx"))
    with pytest.raises(ModelError, match="the original's inputs do not fit"):
        verify.verify(original, MODELS / "vit.onnx")


def test_the_rule_is_twice_the_originals_error_or_four_ulp() -> None:
    exact = Value(np.full(100, 1.5), "float64")
    one_ulp = 2.0**-10

    def check(original: float, optimized: float) -> bool:
        values = (Value(np.full(100, 1.5 + error * one_ulp, np.float16), "float16") for error in (original, optimized))
        return check_output("y", *values, exact).passed

    assert check(0, 4)
    assert not check(0, 5)
    assert check(10, 20)
    assert check(10, -20)
    assert not check(10, 21)


def test_one_bad_element_of_many_fails_by_the_largest_error() -> None:
    exact = np.ones(1000)
    bad = exact.astype(np.float16)
    bad[500] += 8 * 2.0**-10
    check = check_output(
        "y", Value(exact.astype(np.float16), "float16"), Value(bad, "float16"), Value(exact, "float64")
    )
    assert check.reason == "the largest error is above what is allowed, 4 ulp"
    assert check.optimized.rms <= check.tolerance.rms


def to_bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_what_tf32_computes_is_allowed_where_fused_nodes_use_it_and_no_more() -> None:
    lhs, rhs = (np.random.default_rng(seed).standard_normal((90, 90)).astype(np.float32) for seed in range(2))
    double = lhs.astype(np.float64), rhs.astype(np.float64)
    original, exact = Value(lhs @ rhs, "float32"), Value(double[0] @ double[1], "float64")
    rounded = Value(to_tf32(lhs).astype(np.float64) @ to_tf32(rhs).astype(np.float64), "float64")

    def check(optimized: np.ndarray, in_tf32: Value | None = rounded) -> OutputCheck:
        return check_output("y", original, Value(optimized, "float32"), exact, in_tf32)

    computed = to_tf32(lhs) @ to_tf32(rhs)
    good = check(computed)
    assert good.passed
    assert "(twice the error of TF32)" in str(good)
    assert (good.tolerance.max_term, good.tolerance.rms_term) == (BY_TF32, BY_TF32)
    assert good.tolerance.max == 2 * np.abs(rounded.array - exact.array).max()
    assert not check(computed, None).passed
    assert not check(to_bf16(lhs) @ to_bf16(rhs)).passed
    wrong = computed.copy()
    wrong[7, 5] += 0.05
    assert check(wrong).reason == "the largest error is above what is allowed, twice the error of TF32"
    assert check(wrong).optimized.worst == (7, 5)


@pytest.mark.parametrize(
    ("own", "tf32", "term"), [(3, 0, BY_ULP), (3, 1, BY_ULP), (20, 3, BY_ORIGINAL), (3, 20, BY_TF32)]
)
def test_the_largest_term_is_the_bound_and_is_named(own: int, tf32: int, term: str) -> None:
    one_ulp = 2.0**-23
    exact = np.full(100, 1.5)
    before = Value((exact + own / 2 * one_ulp).astype(np.float32), "float32")
    rounded = Value(exact + tf32 * one_ulp, "float64")
    allowed = max(4, 2 * round(own / 2), 2 * tf32)
    for error, passes in ((allowed, True), (allowed + 1, False)):
        after = Value((exact + error * one_ulp).astype(np.float32), "float32")
        check = check_output("y", before, after, Value(exact, "float64"), rounded)
        assert check.passed == passes
        assert (check.tolerance.max_term, check.tolerance.rms_term) == (term, term)
        assert term in str(check)
        assert passes or check.reason.endswith(term)


def test_a_tf32_reference_that_is_not_finite_allows_nothing() -> None:
    exact, before = Value(np.ones(3), "float64"), Value(np.ones(3, np.float32), "float32")
    after = Value(np.array([1, 1.01, 1], np.float32), "float32")
    assert not check_output("y", before, after, exact, Value(np.array([1, np.nan, 1]), "float64")).passed


def masked(scores: np.ndarray, number: float) -> np.ndarray:
    """Every third element another number, as a mask writes it."""
    return np.where(np.arange(scores.size) % 3 == 0, number, scores)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_wrong_element_beside_the_lowest_number_is_found(dtype: str, sign: int) -> None:
    """The masks' numbers change nothing of how all others are judged, and are judged themselves."""
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    number = sign * float(ml_dtypes.finfo(kind).max)
    exact = np.random.default_rng(5).standard_normal(300)
    stored = exact.astype(kind).astype(np.float64)
    before = Value(masked(stored, number), dtype)

    def check(after: np.ndarray) -> OutputCheck:
        return check_output("y", before, Value(after, dtype), Value(masked(exact, number), "float64"))

    others = np.arange(300) % 3 != 0
    alone = check_output("y", *(Value(stored[others], dtype),) * 2, Value(exact[others], "float64"))
    good = check(before.array)
    assert good.passed
    assert (good.original.max, good.original.rms) == (alone.original.max, alone.original.rms)
    assert good.tolerance == alone.tolerance
    wrong = before.array.copy()
    wrong[1] += 0.1 if dtype != "bfloat16" else 0.5
    assert "largest error" in check(wrong).reason
    for instead in (0.0, number / 2, exact[0]):
        wrong = before.array.copy()
        wrong[3] = instead
        assert check(wrong).reason.startswith("near the type's largest number the largest error is above")
        assert check(wrong).optimized.worst == (3,)


def test_a_mask_that_is_added_in_16_bits_is_as_good_as_the_original() -> None:
    """There a score moves the lowest number by a few units: these count where the sums are, not where scores are."""
    lowest = float(np.finfo(np.float16).min)
    scores = np.random.default_rng(6).standard_normal(300) * 30
    exact = masked(np.zeros(300), lowest) + np.abs(scores)
    before = Value(exact.astype(np.float16), "float16")
    after = np.where(exact < -1000, before.array + np.float16(32), before.array).astype(np.float16)
    assert check_output("y", before, Value(after, "float16"), Value(exact, "float64")).passed
    after[1] += np.float16(1)
    assert not check_output("y", before, Value(after, "float16"), Value(exact, "float64")).passed


def two_products(dtype: int) -> onnx.ModelProto:
    b = Builder(dtype)
    weights = (np.random.default_rng(seed).standard_normal((64, 64)) / 8 for seed in range(2))
    first, second = (b.array(weight) for weight in weights)
    x = b.input("x", [77, 64])  # a known number of rows has one kernel where any would have up to ten
    return b.model(b("Tanh", b("MatMul", b("Gelu", b("MatMul", x, first)), second)))


def rounded_weights(model: onnx.ModelProto, rounding: Callable[[np.ndarray], np.ndarray], path: Path) -> Path:
    """The model with weights of another precision: what its kernels make of them, for nodes that run on the CPU."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for tensor in changed.graph.initializer:
        if len(tensor.dims) == 2:
            tensor.CopyFrom(numpy_helper.from_array(rounding(numpy_helper.to_array(tensor)), tensor.name))
    return save(changed, path)


def test_verify_allows_for_tf32_where_nodes_say_it_and_cuda_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = save(two_products(FLOAT), tmp_path / "original.onnx")
    tf32, exact = (onnxfuse.optimize(original, arch="sm_80", fp32=mode)[0] for mode in ("tf32", "exact"))
    cut = rounded_weights(tf32, to_tf32, tmp_path / "tf32.onnx")
    assert not verify.verify(original, cut).passed, "on the CPU nothing is computed in TF32"
    monkeypatch.setattr(verify, "CUDA", CPU)  # the provider whose nodes run kernels
    result = verify.verify(original, cut, runs=2, per_site=True)
    assert result.passed, str(result)
    checks = [check for run in result.runs for check in (*run.outputs, *run.sites)]
    assert {check.tolerance.max_term for check in checks} == {BY_TF32}
    assert result.to_dict()["runs"][0]["outputs"][0]["tolerance"]["max_term"] == BY_TF32
    assert not verify.verify(original, rounded_weights(tf32, to_bf16, tmp_path / "bf16.onnx")).passed
    assert not verify.verify(original, rounded_weights(exact, to_tf32, tmp_path / "exact.onnx")).passed


@pytest.mark.parametrize(
    ("dtype", "mode", "arch", "math"),
    [
        (FLOAT, "tf32", "sm_80", "tf32"),
        (FLOAT, "exact", "sm_80", "3xtf32"),
        (FLOAT, "exact", "sm_80,sm_86", "3xtf32,fp32"),
        (FLOAT16, "tf32", "sm_80", "f16"),
    ],
)
def test_a_fused_node_says_how_it_multiplies(dtype: int, mode: str, arch: str, math: str, tmp_path: Path) -> None:
    model, report = onnxfuse.optimize(two_products(dtype), arch=arch, fp32=mode)
    nodes = [node for node in model.graph.node if node.domain == "onnxfuse"]
    assert len(nodes) == len(report.fused) == 2
    for node in nodes:
        assert {each.name: each.s.decode() for each in node.attribute}["math"] == math
    path = save(model, tmp_path / "fused.onnx")
    assert uses_tf32(path) == (math == "tf32")
    for node in nodes:  # as in a file that was written before nodes said it
        kept = [each for each in node.attribute if each.name != "math"]
        del node.attribute[:]
        node.attribute.extend(kept)
    assert not uses_tf32(save(model, path))


def test_a_reference_that_is_not_finite_is_no_excuse() -> None:
    ones = Value(np.ones(3, np.float32), "float32")
    check = check_output("y", ones, Value(np.full(3, 9, np.float32), "float32"), Value(np.full(3, np.nan), "float64"))
    assert "reference is not finite" in check.reason


def test_the_infinity_of_a_mask_is_no_error() -> None:
    before, after, exact = (Value(np.array([value, -np.inf], np.float32), "float32") for value in (1, 1, 1))
    check = check_output("y", before, after, exact)
    assert (check.passed, check.optimized.max) == (True, 0.0)
    far = Value(np.array([2, -np.inf], np.float32), "float32")
    assert not check_output("y", before, far, exact).passed


def test_infinities_keep_their_sign() -> None:
    plus, minus = (Value(np.array([1, sign * np.inf], np.float32), "float32") for sign in (1, -1))
    exact = Value(np.array([1.0, 1e60]), "float64")
    assert check_output("y", plus, plus, exact).passed
    assert not check_output("y", plus, minus, exact).passed


def test_integers_must_be_equal_and_shapes_too() -> None:
    ids, others = Value(np.arange(3), "int64"), Value(np.arange(1, 4), "int64")
    assert check_output("y", ids, ids, ids).passed
    assert not check_output("y", ids, others, ids).passed
    assert "original's int64[3]" in check_output("y", ids, Value(np.arange(4), "int64"), ids).reason


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_rounding_one_large_number_is_no_error(dtype: type) -> None:
    """However near the original's roundings come to it by luck; what is refused beside it is reported."""
    exact = np.random.default_rng(0).standard_normal(500)
    exact[77] = 1000.49
    name, last_place = np.dtype(dtype).name, float(np.spacing(np.array(1000.49, dtype)))

    def check(large: float, other: float = 0.0) -> OutputCheck:
        before, after = exact.astype(dtype).astype(np.float64), exact.astype(dtype).astype(np.float64)
        before[77], after[77], after[78] = exact[77], large, exact[78] + other
        return check_output("y", Value(before, name), Value(after, name), Value(exact, "float64"))

    rounded = check(exact[77] + last_place)
    assert rounded.passed
    assert (rounded.optimized.worst, rounded.tolerance.max_term) == ((77,), BY_NUMBER)
    assert rounded.optimized.max <= rounded.tolerance.max == 2 * last_place
    assert not check(exact[77] + 2.5 * last_place).passed
    beside = check(exact[77] + last_place, other=last_place / 2)
    assert not beside.passed
    assert beside.optimized.worst == (78,)
    assert beside.optimized.max == pytest.approx(last_place / 2)
    assert beside.optimized.max > beside.tolerance.max


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_zero_has_no_place_of_its_own(dtype: str) -> None:
    """Nor has what is next to none: beside small numbers an error of it counts as any other's."""
    exact = np.full(1 << 16, 1e-5)
    exact[::2] = 0.0
    after = exact.copy()
    after[400] = 1e-4
    check = check_output("y", Value(exact, dtype), Value(after, dtype), Value(exact, "float64"))
    assert check.reason == f"the largest error is above what is allowed, {BY_ULP}"
    assert check.optimized.worst == (400,)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_ulp_is_numpys_spacing(dtype: str) -> None:
    for magnitude in (0.0, 1e-7, 0.3, 1.0, 1.999, 1000.0):
        assert ulp(float(np.dtype(dtype).type(magnitude)), dtype) == float(np.spacing(np.dtype(dtype).type(magnitude)))
    assert ulp(1.0, "bfloat16") == 2**-7


def test_the_errors_are_those_of_an_enumeration() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((7, 11, 13))
    original, optimized = (exact + rng.standard_normal(exact.shape) * 1e-3 for _ in range(2))
    check = check_output("y", *(Value(array.astype(np.float16), "float16") for array in (original, optimized)),
                         Value(exact, "float64"))  # fmt: skip
    for errors, values in ((check.original, original), (check.optimized, optimized)):
        found = {index: abs(float(np.float16(values[index])) - exact[index]) for index in np.ndindex(exact.shape)}
        sizes = sorted(found.values())
        assert errors.max == pytest.approx(sizes[-1])
        assert found[errors.worst] == sizes[-1]
        assert errors.mean == pytest.approx(sum(sizes) / len(sizes))
        assert errors.rms == pytest.approx((sum(size**2 for size in sizes) / len(sizes)) ** 0.5)
        assert sizes[-3] <= errors.p999 <= sizes[-1]
        assert errors.ulp == pytest.approx(sizes[-1] / 2.0**-11)


def test_each_run_has_its_sizes_and_its_seed(tmp_path: Path) -> None:
    path = save(product(TensorProto.FLOAT), tmp_path / "model.onnx")
    result = verify.verify(path, path, sizes={"m": [1, 5, 300]})
    assert [run.shapes["x"] for run in result.runs] == [(1, 8), (5, 8), (300, 8)]
    result = verify.verify(path, path, runs=3)
    assert len({check.original.max for check in result.outputs}) == 3
    with pytest.raises(SettingError, match="the model has no dynamic axis 'b'; it has m"):
        verify.verify(path, path, sizes={"b": [1]})


def test_a_folder_of_inputs_is_a_run_a_file(tmp_path: Path) -> None:
    path = save(product(TensorProto.FLOAT), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"no \.npz file"):
        feeds.load_inputs(tmp_path)
    for rows in (1, 2):
        np.savez(tmp_path / f"{rows}.npz", x=np.ones((rows, 8), np.float32))
    result = verify.verify(path, path, inputs=feeds.load_inputs(tmp_path))
    assert [run.shapes["x"][0] for run in result.runs] == [1, 2]


def test_per_site_tells_which_fusion_is_wrong(tmp_path: Path) -> None:
    model = of_sizes(onnx.load(MODELS / "bert.onnx"), {"batch": 2, "sequence": 7})
    source = save(model, tmp_path / "bert.onnx")
    fused, report = onnxfuse.optimize(source, arch="ptx")
    good = save(fused, tmp_path / "fused.onnx")
    result = verify.verify(source, good, per_site=True)
    made = [name for node in fused.graph.node if node.domain == "onnxfuse" for name in node.output]
    assert {check.name for check in result.runs[0].sites} == set(made)
    assert len(made) >= len(report.fused)
    assert result.passed
    weights = {tensor.name: tensor for tensor in fused.graph.initializer if len(tensor.dims) == 2}
    fused_nodes = [node for node in fused.graph.node if node.domain == "onnxfuse"]
    broken = next(node for node in fused_nodes if not weights.keys().isdisjoint(node.input))
    weight = next(weights[name] for name in broken.input if name in weights)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.1), weight.name))
    sites = verify.verify(source, save(fused, tmp_path / "bad.onnx"), per_site=True).runs[0].sites
    wrong = next(check for check in sites if not check.passed)
    assert wrong.name in broken.output, "the first wrong site is the one with the scaled weight"


def test_random_inputs_share_their_symbols() -> None:
    made = make_feeds(SPECS, shapes={"input_ids": (3, 5)})
    assert {name: array.shape for name, array in made.items()} == {
        "x": (3, 77, 16), "input_ids": (3, 5), "attention_mask": (3, 5), "flag": ()}  # fmt: skip
    assert made["x"].dtype == np.float16
    assert set(np.unique(made["input_ids"])) <= {0, 1}
    assert (made["attention_mask"] == 1).all()
    assert made["flag"]


def test_random_inputs_are_seeded() -> None:
    first, again, other = (make_feeds(SPECS, seed=seed)["x"] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.shape == (2, 77, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.zeros(1)}, "the model has no input 'y'; it has x, input_ids, attention_mask, flag"),
        ({"x": None}, r"input 'x': not among the given arrays; the model needs float16\[batch, 77, \?\]"),
        ({"x": np.zeros((2, 77, 4), np.float32)}, "input 'x': an array of float32; the model needs float16"),
        ({"x": np.zeros((2, 78, 4), np.float16)}, r"input 'x': shape \[2, 78, 4\] does not fit"),
        ({"x": np.zeros((2, 77), np.float16)}, r"input 'x': shape \[2, 77\] has rank 2"),
        ({"attention_mask": np.ones((2, 6), np.int64)}, r"input 'attention_mask': .* with text = 5"),
    ],
)
def test_wrong_inputs_are_named(change: dict, message: str) -> None:
    given = make_feeds(SPECS, shapes={"input_ids": (2, 5)}) | change
    with pytest.raises(ModelError, match=message):
        make_feeds(SPECS, {name: array for name, array in given.items() if array is not None})


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(SettingError, match="the model has no input 'z'"):
        make_feeds(SPECS, shapes={"z": (1,)})
    with pytest.raises(SettingError, match=r"input 'input_ids': shape \[3, 5\] does not fit.* with batch = 2"):
        make_feeds(SPECS, shapes={"x": (2, 77, 1), "input_ids": (3, 5)})
    with pytest.raises(SettingError, match="inputs were given"):
        make_feeds(SPECS, inputs={}, shapes={"x": (2, 77, 1)})
    with pytest.raises(ModelError, match=r"input 's': inputs of type seq\(tensor\(int64\)\) are not supported"):
        make_feeds([InputSpec("s", "seq(tensor(int64))", (1,))])


@pytest.mark.parametrize("kind", ["optional(tensor(float))", "seq(tensor(int64))", "sparse_tensor(float)"])
def test_a_type_that_is_not_supported_is_named_as_onnx_runtime_writes_it(kind: str) -> None:
    session = SimpleNamespace(get_inputs=lambda: [SimpleNamespace(name="s", type=kind, shape=[1])])
    with pytest.raises(ModelError, match=re.escape(f"input 's': inputs of type {kind} are not supported")):
        make_feeds(input_specs(session))


def test_npz_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "feed.npz", x=np.arange(3))
    assert load_npz(tmp_path / "feed.npz")["x"].tolist() == [0, 1, 2]
    np.save(tmp_path / "array.npy", np.arange(3))
    np.savez(tmp_path / "objects.npz", x=np.array([{}], object))
    (tmp_path / "text.npz").write_text("text")
    for name in ("array.npy", "objects.npz", "text.npz", "absent.npz"):
        with pytest.raises(ModelError, match=name):
            load_npz(tmp_path / name)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -2.5, 3e38, np.inf, np.nan], np.float32)
    rounded = feeds.from_bfloat16(feeds.to_bfloat16(values))
    assert rounded[:4].tolist() == [1.0, 1.0, 1.0 + 2**-6, -2.5]
    assert np.isfinite(rounded[4])
    assert np.isinf(rounded[5])
    assert np.isnan(rounded[6])


def test_a_refusal_of_what_per_site_adds_names_the_site_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = Builder()
    b("Tanh", b("MatMul", b.input("x", [2, 8]), b.array(np.ones((8, 8)))))
    inner = b.nodes[0].output[0]
    path = save(b.model(b.nodes[-1].output[0]), tmp_path / "model.onnx")
    probe = verify.Probe(inner, TensorProto.INT64, is_output=False)  # which it is not
    monkeypatch.setattr(verify, "fused_values", lambda *_: [probe])
    with pytest.raises(ModelError, match=rf"model\.onnx: ONNX Runtime refuses .*site {inner} makes") as refusal:
        verify.verify(path, path, per_site=True)
    assert "original.onnx" not in str(refusal.value)
