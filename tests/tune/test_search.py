"""Tuning without a GPU: made-up times decide strategies, tiles and ranges of m; budget, cache, timed models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.device import ARCHITECTURES, resolve, tuning_device
from onnxfuse.errors import DeviceError, SettingError
from onnxfuse.graph.archive import unpack
from onnxfuse.graph.extract import fused_nodes, site_model, stock_nodes
from onnxfuse.graph.fallback_body import opsets_of
from onnxfuse.limits import MAX_M
from onnxfuse.lowering.fused_node import replacement
from onnxfuse.pipeline import Analysis, analyse_model, optimize_model, tune_model
from onnxfuse.runtime.timing import ROUNDS, Port, copies_for, require_gpu, side_by_side, time_models
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.tune import session_timer as trial_module
from onnxfuse.tune.search import EPILOGUE_ONLY, FEW, LEFT_ALONE, LIBRARY, OWN, TUNED, Trial, contenders
from onnxfuse.tune.session_timer import SessionTimer, group_sites, ports, sizes_at, trial_models
from onnxfuse.tune.timing_cache import read_times, write_times
from tests.conftest import has_gpu
from tests.helpers.attention_graphs import model_of
from tests.helpers.onnx_build import FLOAT16, Builder, run

(DEVICE,) = resolve("sm_90a", list)


def gates(*names: str, dtype: int = FLOAT16, k: int = 320, n: int = 640, rows: object = "rows") -> ModelProto:
    """Gates of one input, a weight each; weights of one name are of one size."""
    b = Builder(dtype)
    x = b.input("x", (rows, k))
    outs = []
    for name in names:
        width = 2 * n * (2 if name.startswith("wide") else 1)
        rng = np.random.default_rng(len(outs))
        t = b("MatMul", x, b.array(rng.standard_normal((k, width)) / k, name))
        t = b("Add", t, b.array(rng.standard_normal(width), f"{name}.bias"))
        first, second = b("Split", t, outputs=2, axis=-1, num_outputs=2)
        outs.append(b("Mul", first, b("Gelu", second)))
    return b.model(*outs)


class Stopwatch:
    """A made-up timer: what every implementation takes, by name or by strategy; tiles take what they are told or 10."""

    def __init__(self, **times: float) -> None:
        self.times, self.trials = times, list[Trial]()

    def __call__(self, trial: Trial) -> Mapping[str, float]:
        self.trials.append(trial)
        return {name: self.microseconds(trial, name) for name in trial.implementations}

    def microseconds(self, trial: Trial, name: str) -> float:
        known = {EPILOGUE_ONLY: "epilogue_only", OWN: "own"}
        return self.times.get(known.get(name, name.split()[0]), 10.0)


def analysed(*names: str, arch: str = "sm_90a", fp32: str = "tf32", **model: object) -> Analysis:
    return analyse_model(gates(*(names or ("weight",)), **model), resolve(arch, list), fp32, keep_weights=True)


@pytest.mark.parametrize(
    ("epilogue_only", "left", "strategy"),
    [(20, 30, Strategy.ONE_KERNEL), (5, 30, Strategy.EPILOGUE_ONLY), (10, 10, Strategy.ONE_KERNEL)],
)
def test_the_fastest_strategy_is_taken(epilogue_only: float, left: float, strategy: Strategy) -> None:
    tuned = tune_model(analysed(), DEVICE, timer=Stopwatch(epilogue_only=epilogue_only, left=left))
    (site,) = tuned.sites
    assert site.strategy is strategy
    assert f"{strategy.value} {min(10.0, epilogue_only):.1f} us" in site.timings


def test_a_site_whose_own_nodes_are_faster_is_left_alone_with_the_figures() -> None:
    tuned = tune_model(analysed(rows=128), DEVICE, timer=Stopwatch(epilogue_only=8, left=7))
    assert not tuned.sites
    (skipped,) = tuned.skipped
    assert skipped.reason == "slower"
    assert skipped.detail == (
        "measured on sm_90a: m=128: one kernel 10.0 us, behind the product 8.0 us, left alone 7.0 us"
    )
    proto, report = optimize_model(tuned)
    assert report.fused == ()
    assert [node.op_type for node in proto.graph.node] == ["MatMul", "Add", "Split", "Gelu", "Mul"]


class SlowestOfThePlan(Stopwatch):
    """At each number of rows the tile that the cost model likes least of those that are timed takes 1 us."""

    def microseconds(self, trial: Trial, name: str) -> float:
        tiles = [name for name in trial.implementations if name not in (EPILOGUE_ONLY, LEFT_ALONE, LIBRARY)]
        return 1.0 if name == tiles[-1] else 10.0


def test_each_range_of_rows_gets_its_measured_tile() -> None:
    timer = SlowestOfThePlan()
    (site,) = tune_model(analysed(), DEVICE, timer=timer).sites
    assert site.strategy is Strategy.ONE_KERNEL
    (plan,) = site.plans
    fastest = {
        trial.size: [name for name in trial.implementations if name not in (EPILOGUE_ONLY, LEFT_ALONE, LIBRARY)][-1]
        for trial in timer.trials
    }
    assert sorted(fastest) == sorted(TUNED)
    for m, name in fastest.items():
        variant = next(variant for variant in plan.variants if variant.min_m <= m <= variant.max_m)
        assert str(variant.tile) == name
    ranged = [variant for variant in plan.variants if not variant.spec.checked]
    assert [variant.min_m for variant in ranged] == [0, *(variant.max_m + 1 for variant in ranged[:-1])]
    assert ranged[-1].max_m == MAX_M
    last = plan.variants[-1]
    assert (last.spec.checked, last.min_m, last.max_m) == (True, 0, MAX_M)


def test_few_implementations_are_timed_and_one_kernel_at_each_number_of_rows() -> None:
    timer = Stopwatch()
    tune_model(analysed(), DEVICE, timer=timer)
    for trial in timer.trials:
        assert len(trial.implementations) == FEW + 3
        for name, implementation in trial.implementations.items():
            assert (implementation is None) == (name == LEFT_ALONE)
            if implementation is not None and name != EPILOGUE_ONLY:
                chosen = [
                    variant for _, variant in implementation.variants if variant.min_m <= trial.size <= variant.max_m
                ]
                assert str(chosen[0].tile).startswith(name)
                assert (chosen[0].family.label == LIBRARY) == (name == LIBRARY)


def test_contenders_are_more_than_boxes_of_one_tile() -> None:
    """The first of each in the plan's order."""
    (site,) = analysed().sites
    (plan,) = (plan for plan in site.plans if plan.device == DEVICE)
    for entry in plan.ranked:
        ranked = [tile for _, tile in entry.tiles]
        tiles = contenders(entry)
        assert tiles[0] == ranked[0]
        assert sorted(tiles, key=ranked.index) == tiles
        shapes = [str(tile.tile).split(" lhs by")[0] for tile in tiles]
        assert len(set(shapes)) == len(shapes) == FEW
        passed_over = ranked[: ranked.index(tiles[-1])]
        assert {str(tile.tile).split(" lhs by")[0] for tile in passed_over} <= set(shapes)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
@pytest.mark.parametrize("dtype", [1, FLOAT16])
def test_tiles_differ_in_their_names(arch: str, dtype: int) -> None:
    for site in analysed(arch=arch, dtype=dtype).sites:
        for entry in site.plans[0].ranked:
            names = [str(tile.tile) for _, tile in entry.tiles]
            assert len(set(names)) == len(names)


def test_equal_sites_are_timed_once_and_differ_in_nothing() -> None:
    timer = Stopwatch(epilogue_only=5)
    tuned = tune_model(analysed("a", "b", "wide", "c", rows=64), DEVICE, timer=timer)
    assert len(timer.trials) == 2
    assert [site.strategy for site in tuned.sites] == [Strategy.EPILOGUE_ONLY] * 4
    assert sorted(map(len, group_sites(tuned.sites))) == [1, 3]


def test_other_architectures_have_a_say_by_their_estimates() -> None:
    close = Stopwatch(epilogue_only=9.9, left=30)
    assert tune_model(analysed(), DEVICE, timer=close).sites[0].strategy is Strategy.EPILOGUE_ONLY
    assert tune_model(analysed(arch="sm_90a,sm_80"), DEVICE, timer=close).sites[0].strategy is Strategy.ONE_KERNEL
    assert tune_model(analysed(arch="sm_90a,ptx"), DEVICE, timer=close).sites[0].strategy is Strategy.EPILOGUE_ONLY


def test_exact_products_are_compared_with_each_other_only() -> None:
    timer = Stopwatch(left=1.0)
    (site,) = tune_model(analysed(dtype=1, fp32="exact"), DEVICE, timer=timer).sites
    assert site.strategy is Strategy.ONE_KERNEL
    assert all({EPILOGUE_ONLY, LEFT_ALONE}.isdisjoint(trial.implementations) for trial in timer.trials)


def test_a_form_that_does_not_run_is_not_taken() -> None:
    def timer(trial: Trial) -> dict[str, float]:
        return {name: 5.0 for name, implementation in trial.implementations.items() if name == EPILOGUE_ONLY}

    assert tune_model(analysed(), DEVICE, timer=timer).sites[0].strategy is Strategy.EPILOGUE_ONLY
    assert_as_planned(tune_model(analysed(), DEVICE, timer=lambda trial: {}))


def assert_as_planned(tuned: Analysis) -> None:
    """What the cost model chose is still there."""
    for site, planned in zip(tuned.sites, analysed().sites, strict=True):
        assert (site.strategy, site.plans, site.timings) == (planned.strategy, planned.plans, "")


# ---- Budget and cache ------------------------------------------------------------------------------------------------


def test_a_budget_ends_measuring_and_keeps_what_was_measured() -> None:
    clock = itertools.count()  # a second passes between any two looks at it
    timer = Stopwatch(epilogue_only=5)
    told: list[tuple[str, int, int]] = []
    analysis = analysed("a", "b", "wide")
    from onnxfuse.tune.search import measure

    groups = group_sites(analysis.sites)
    times = measure(groups, DEVICE, timer, 4.0, lambda *state: told.append(state), lambda: float(next(clock)))
    assert [len(trial.site.fusion.axes) > 0 for trial in timer.trials] == [True] * 3
    assert {trial.site.fusion.size("n") for trial in timer.trials[:2]} == {640, 1280}, "every site before a second m"
    assert timer.trials[0].site.fusion.size("n") == 640, "the frequent site first"
    assert sum(map(len, times)) == 3
    assert [done for _, done, _ in told] == [1, 2, 3]
    assert told[-1] == ("timing sites, best 2.00x", 3, 2 * len(TUNED))


def test_no_budget_at_all_is_the_cost_models_choice() -> None:
    timer = Stopwatch(epilogue_only=1)
    assert_as_planned(tune_model(analysed(), DEVICE, timer=timer, budget=0.0))
    assert not timer.trials


KEY = {"gpu": "NVIDIA H200", "m": 16, "kernels": {"128x96": ["ab"]}}


def test_times_come_back_for_the_same_key_only(tmp_path: Path) -> None:
    write_times(tmp_path, KEY, {"one kernel": 22.5})
    assert read_times(tmp_path, dict(reversed(KEY.items()))) == {"one kernel": 22.5}
    for name in KEY:
        assert read_times(tmp_path, KEY | {name: "other"}) is None
    assert read_times(None, KEY) is None
    write_times(None, KEY, {})


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', '{"microseconds": {"a": 1.0}}'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, damage: str) -> None:
    write_times(tmp_path, KEY, {"one kernel": 22.5})
    (path,) = tmp_path.rglob("*.json")
    path.write_text(damage)
    assert read_times(tmp_path, KEY) is None
    entry = {"key": KEY, "microseconds": {"one kernel": -1.0}}
    path.write_text(json.dumps(entry))
    assert read_times(tmp_path, KEY) is None


def test_a_file_that_was_altered_is_measured_again(tmp_path: Path) -> None:
    """Any character of a time or of its name; 107.250 is as good as 107.25."""
    times = {"one kernel": 22.5, "left alone": 107.25}
    write_times(tmp_path, KEY, times)
    (path,) = tmp_path.rglob("*.json")
    text = path.read_text()
    first = text.index('"microseconds"')
    for place, letter in itertools.product(range(first, text.index("}", first)), "0.7"):
        path.write_text(text[:place] + letter + text[place + 1 :])
        assert read_times(tmp_path, KEY) in (None, times), path.read_text()
    for was, instead in (
        ("22.5", "2.25"),
        ("22.5", "-22.5"),
        ("left", "epilogue_only"),
        ("22.5", "null"),
        (": 22.5", ": [22.5]"),
    ):
        path.write_text(text.replace(was, instead))
        assert read_times(tmp_path, KEY) is None
    path.write_text(text)
    assert read_times(tmp_path, KEY) == times


def test_nothing_is_left_beside_the_files(tmp_path: Path) -> None:
    for _ in range(3):
        write_times(tmp_path, KEY, {"one kernel": 22.5})
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    blocked = tmp_path / "file"
    blocked.write_text("")
    write_times(blocked, KEY, {})  # costs time, not correctness


@pytest.mark.parametrize("failed", [{LEFT_ALONE}, {EPILOGUE_ONLY}, {LEFT_ALONE, EPILOGUE_ONLY}, None])
def test_a_failure_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: set[str] | None) -> None:
    """Of some implementations or of all: the next run times them again, and that alone is kept."""
    timer = Stopwatch()
    tune_model(analysed(rows=32, k=64, n=64), DEVICE, timer=timer)
    (made,) = timer.trials
    whole = dict.fromkeys(made.implementations, 10.0)
    answers = [{name: time for name, time in whole.items() if failed and name not in failed}, whole]
    monkeypatch.setattr(trial_module, "trial_models", lambda *_: {})
    monkeypatch.setattr(trial_module, "time_models", lambda *_: answers.pop(0))
    measured = [SessionTimer(tmp_path)(made) for _ in range(3)]
    assert measured[0] != whole
    assert measured[1:] == [whole, whole]
    assert not answers


# ---- The models that are timed ---------------------------------------------------------------------------------------


def trial_of(analysis: Analysis, m: int) -> Trial:
    (site,) = analysis.sites
    return Trial(site, m, {})


def as_tuples(made: list[Port]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(port.name, port.element, port.shape) for port in made]


def test_a_sites_own_model_computes_what_the_site_does() -> None:
    model = gates("weight", dtype=1)
    analysis = analyse_model(model, [DEVICE], keep_weights=True)
    inputs, outputs = ports(trial_of(analysis, 7))
    assert as_tuples(inputs) == [("x0", 1, (7, 320)), ("x1", 1, (320, 1280)), ("x2", 1, (1280,))]
    assert as_tuples(outputs) == [("y0", 1, (7, 640))]
    nodes = stock_nodes(replacement(analysis.sites[0].one_kernel, "ab"))
    data = site_model(opsets_of(analysis.graphs[0], nodes), nodes, as_tuples(inputs), as_tuples(outputs), 2)
    onnx.checker.check_model(onnx.load_from_string(data))
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((7, 320)).astype(np.float32) for _ in range(2)]
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    feed = {"x0_0": x[0], "x0_1": x[1]}
    for copy in range(2):
        feed |= {f"x1_{copy}": stored["weight"], f"x2_{copy}": stored["weight.bias"]}
    for copy, made in enumerate(run(onnx.load_from_string(data), feed)):
        np.testing.assert_allclose(made, run(model, {"x": x[copy]})[0], rtol=1e-3, atol=1e-5)  # prepacked weights


def test_implementations_differ_in_their_nodes_only() -> None:
    analysis = analysed(rows=16)
    (site,) = analysis.sites
    whole = replacement(site.implementation, "ab")
    (gemm,) = fused_nodes(whole, whole)
    assert (gemm.op_type, list(gemm.input), list(gemm.output)) == ("FusedGemm", ["kernels", "x0", "x1", "x2"], ["y0"])
    assert site.epilogue_only is not None
    product, pointwise = fused_nodes(whole, replacement(site.epilogue_only, "cd"))
    assert (product.op_type, list(product.input)) == ("MatMul", ["x0", "x1"])
    assert list(pointwise.input) == ["kernels", product.output[0], "x2"]
    assert (pointwise.op_type, list(pointwise.output)) == ("FusedPointwise", ["y0"])


def test_every_form_of_a_trial_is_a_model_with_its_kernels() -> None:
    timer = Stopwatch()
    tune_model(analysed(rows=32, k=64, n=64), DEVICE, timer=timer)
    (trial,) = timer.trials
    inputs, outputs = ports(trial)
    models = trial_models(trial, inputs, outputs, copies=2)
    assert list(models) == list(trial.implementations)
    for name, data in models.items():
        model = onnx.load_from_string(data)
        fused = [node for node in model.graph.node if node.domain == "onnxfuse"]
        assert [entry.name for entry in model.graph.output] == ["y0_0", "y0_1"]
        assert len(fused) == (0 if name == LEFT_ALONE else 2)
        if fused:
            (archive,) = model.graph.initializer
            records = unpack(archive.raw_data)
            kernel = next(a.s.decode() for a in fused[0].attribute if a.name == "kernel")
            assert any(r.kernel == kernel and r.min_m <= trial.size <= r.max_m for r in records)


@pytest.mark.parametrize(("m", "expected"), [(4096, (1, 4096)), (2, (1, 2))])
def test_unknown_rows_take_what_is_asked_for(m: int, expected: tuple[int, int]) -> None:
    b = Builder(FLOAT16)
    x = b.input("x", ("batch", "rows", 64))
    model = b.model(b("Gelu", b("MatMul", x, b.array(np.zeros((64, 64)), "weight"))))
    (site,) = analyse_model(model, [DEVICE]).sites
    sizes = sizes_at(site.fusion, site.mapping.m, m)
    assert (sizes["b"], sizes["m"], sizes["k"], sizes["n"]) == (*expected, 64, 64)


def test_copies_miss_the_cache_within_reason() -> None:
    assert copies_for([Port("x0", 10, (8, 8))]) == 24
    assert copies_for([Port("x0", 1, (4096, 4096))]) == 3
    assert copies_for([Port("x0", 10, (4096, 28672))]) == 2
    assert copies_for([Port("x0", 9, (4096, 16384))]) == 3


def test_models_are_timed_on_whatever_runs_them() -> None:
    analysis = analysed(dtype=1, k=64, n=64)
    inputs, outputs = ports(trial_of(analysis, 64))
    nodes = stock_nodes(replacement(analysis.sites[0].one_kernel, "ab"))
    whole = site_model(opsets_of(analysis.graphs[0], nodes), nodes, as_tuples(inputs), as_tuples(outputs), 3)
    times = time_models({"whole": whole, "broken": b"not a model"}, inputs, outputs, 3, device="cpu")
    assert set(times) == {"whole"}
    assert 0 < times["whole"] < 1e6


@pytest.mark.parametrize("dtype", [1, 10])
def test_masks_are_timed_as_the_bytes_that_they_are(dtype: int) -> None:
    b = Builder(dtype)
    t = b("MatMul", b.input("x", (64, 64)), b.array(np.ones((64, 48)), "weight"))
    mask = b("Not", b.input("mask", (64, 48), 9))
    model = b.model(b("Where", mask, b("Add", t, b.array(np.ones(48), "bias")), b.array(-np.inf)))
    analysis = analyse_model(model, [DEVICE], keep_weights=True)
    trial = trial_of(analysis, 64)
    inputs, outputs = ports(trial)
    assert [port.bytes for port in inputs if port.element == 9] == [64 * 48]
    nodes = stock_nodes(replacement(analysis.sites[0].one_kernel, "ab"))
    whole = site_model(opsets_of(analysis.graphs[0], nodes), nodes, as_tuples(inputs), as_tuples(outputs), 2)
    assert set(time_models({"whole": whole}, inputs, outputs, 2, device="cpu")) == {"whole"}
    epilogue_only = analysis.sites[0].epilogue_only
    assert epilogue_only is not None
    kept = fused_nodes(replacement(analysis.sites[0].one_kernel, "ab"), replacement(epilogue_only, "cd"))
    assert [node.op_type for node in kept] == ["MatMul", "FusedPointwise"]


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_what_does_not_fit_into_memory_is_not_measured(side: str) -> None:
    ports = {"inputs": [Port("x0", 1, (8,))], "outputs": [Port("y0", 1, (8,))]}
    ports[side] = [Port("huge", 1, (1 << 30, 1 << 30))]
    assert time_models({"a": b"not a model"}, **ports, copies=1, device="cpu") == {}


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_runner_that_fails_on_the_way_has_no_time(calls: int) -> None:
    """In its first replays or in a later round; the other's times are whole."""
    left = [calls]

    def fails(replays: int) -> None:
        if not left[0]:
            raise RuntimeError("out of memory")
        left[0] -= 1

    times = side_by_side({"fails": fails, "runs": lambda replays: None})
    assert times.keys() == {"runs"}
    assert len(times["runs"]) == ROUNDS


def test_runners_take_turns() -> None:
    now, order = [0.0], list[str]()

    def runner(name: str, seconds: float):
        def run(replays: int) -> None:
            order.append(name)
            now[0] += seconds * replays

        return run

    times = side_by_side({"a": runner("a", 1e-3), "b": runner("b", 3e-3)}, clock=lambda: now[0])
    assert order == ["a", "b"] * (len(order) // 2)
    np.testing.assert_allclose(times["a"], 1e-3)
    np.testing.assert_allclose(times["b"], 3e-3)


# ---- Without a GPU ---------------------------------------------------------------------------------------------------


def test_tuning_needs_the_gpu_and_its_architecture() -> None:
    with pytest.raises(DeviceError, match="there is none"):
        tuning_device([DEVICE], [])
    with pytest.raises(SettingError, match="sm_89"):
        tuning_device([DEVICE], ["sm_89"])
    assert tuning_device([DEVICE], ["sm_90a"]) is DEVICE


@pytest.mark.skipif(has_gpu(), reason="this machine has a CUDA device")
def test_nothing_is_measured_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        require_gpu()
    with pytest.raises(DeviceError, match="no CUDA device"):
        tune_model(analysed(), DEVICE)
    assert SessionTimer(tmp_path).cache == tmp_path


def attention_of(form: str = "masked_and_guarded") -> Analysis:
    return analyse_model(model_of(form), [DEVICE], attention=True)


def test_an_attention_is_measured_beside_its_own_nodes() -> None:
    timer = Stopwatch(own=5, left=30)
    (site,) = tune_model(attention_of(), DEVICE, timer=timer).sites
    assert [(set(trial.implementations), trial.size) for trial in timer.trials] == [
        ({OWN, LEFT_ALONE}, size) for size in (1024, 256, 4096, 64)
    ]
    assert site.whole is not None
    assert "m=64: one kernel 5.0 us, left alone 30.0 us" in site.timings


def test_an_attention_whose_own_nodes_are_faster_is_left_alone() -> None:
    analysis = tune_model(attention_of(), DEVICE, timer=Stopwatch(own=30, left=5))
    assert not [site for site in analysis.sites if site.whole]
    assert [(entry.reason, "measured on sm_90a" in entry.detail) for entry in analysis.skipped] == [("slower", True)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["masked_and_guarded", "grouped", "merged_batch"])
def test_what_an_attention_is_measured_beside_is_the_model(form: str) -> None:
    """Keys that only the run knows are as many as queries."""
    (site,) = attention_of(form).sites
    trial = Trial(site, 48, {OWN: site.whole, LEFT_ALONE: None})
    inputs, outputs = ports(trial)
    models = {name: onnx.load_from_string(data) for name, data in trial_models(trial, inputs, outputs, 1).items()}
    assert [node.op_type for node in models[OWN].graph.node if node.domain] == ["FusedAttention"]
    rng, feed, given = np.random.default_rng(0), {}, {}
    for value, tensor in zip(models[LEFT_ALONE].graph.input, site.fusion.inputs, strict=True):
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        numbers = rng.standard_normal(shape).astype(tensor.dtype.numpy)
        feed[value.name], given[tensor.name] = numbers, numbers
    for found, expected in zip(run(models[LEFT_ALONE], feed), run(model_of(form), given), strict=True):
        np.testing.assert_array_equal(found, expected.reshape(found.shape))


def test_an_operand_that_is_expanded_is_measured_as_the_model_has_it() -> None:
    """A bias along one half of the keys: the fused node's model expands it as well."""
    b = Builder(FLOAT16)
    query, key, value = (b.input(name, ("batch", 64, 16)) for name in ("query", "key", "value"))
    s = b("Reshape", b("MatMul", query, b("Transpose", key, perm=(0, 2, 1))), b.integers(-1, 64, 4, 16))
    s = b("Reshape", b("Add", s, b.input("bias", ("batch", 64, 4, 1))), b.integers(-1, 64, 64))
    outputs = [b("Identity", b("MatMul", b("Softmax", s, axis=-1), value))]
    (site,) = analyse_model(b.model(*outputs), [DEVICE]).sites
    trial = Trial(site, 64, {OWN: site.whole, LEFT_ALONE: None})
    inputs, made = ports(trial)
    batch = inputs[0].shape[0]
    assert inputs[-1].shape == (batch, 64, 4, 1)
    models = {name: onnx.load_from_string(data) for name, data in trial_models(trial, inputs, made, 1).items()}
    assert "Tile" not in [node.op_type for node in models[LEFT_ALONE].graph.node]
    graph = models[OWN].graph
    assert [node.op_type for node in graph.node] == ["Constant", "Tile", "FusedAttention"]
    assert numpy_helper.to_array(graph.node[0].attribute[0].t).tolist() == [1, 1, 1, 16]
    assert graph.node[1].output[0] in graph.node[2].input
