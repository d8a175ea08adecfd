"""bench without a GPU: who runs when, what the figures are made of, and that page, table and JSON tell the same."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import onnxfuse
from onnxfuse.bench import bench as bench_module
from onnxfuse.bench import contender, sites
from onnxfuse.bench.bench import BenchResult, Comparison, Latency, alternate, bench, interleave, latency_of
from onnxfuse.bench.chart import png
from onnxfuse.bench.html import html
from onnxfuse.bench.sites import SiteTimes
from onnxfuse.device import ARCHITECTURES
from onnxfuse.errors import DeviceError, ModelError
from onnxfuse.graph.fused_nodes import AFTER, BEFORE, SHAPE_OF, flops_of, read_sites, site_models, write_with_shapes
from onnxfuse.graph.graph import load_model
from onnxfuse.pipeline import analyse_model, optimize_model
from onnxfuse.runtime.session import CPU, open_session
from onnxfuse.runtime.timing import time_models
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.terminal import print_sites
from tests.helpers.matching import linear, silu
from tests.helpers.onnx_build import FLOAT16, Builder, run

MODEL = Path(__file__).parents[2] / "models" / "unet_block.onnx"
SHAPES = {"hidden_states": (2, 7, 96), "encoder_hidden_states": (2, 5, 64)}


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "fused.onnx"
    onnx.save(onnxfuse.optimize(MODEL, arch="ptx")[0], path)
    return path


@pytest.fixture(scope="module")
def measured(fused: Path) -> BenchResult:
    return bench(MODEL, fused, shapes=SHAPES, device="cpu", runs=4, warmup=1, per_site=True)


def test_it_says_that_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "cuda_usable", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA device"):
        bench(MODEL, MODEL)
    with pytest.raises(ModelError, match="at least one run"):
        bench(MODEL, MODEL, runs=0, device="cpu")


def test_runs_are_interleaved_and_warm_up_is_not_timed() -> None:
    calls: list[str] = []
    ticks = itertools.count()
    times = interleave(
        lambda: calls.append("a"), lambda: calls.append("b"), runs=3, warmup=2, clock=lambda: float(next(ticks))
    )
    assert calls == ["a", "b"] * 5
    assert times == ([1.0] * 3, [1.0] * 3)


def test_alternate_keeps_what_timers_say_and_tells_its_progress() -> None:
    counts = [itertools.count(), itertools.count(100)]
    told: list[int] = []
    times = alternate([lambda each=each: float(next(each)) for each in counts], 3, 2, told.append)
    assert times == [[2.0, 3.0, 4.0], [102.0, 103.0, 104.0]]
    assert told == [1, 2, 3, 4, 5]


def test_the_hosts_part_ends_before_the_results_are_there() -> None:
    """A contender whose call takes 1 second and whose results take 10 more."""
    now = [0.0]

    class Slow:
        class Binding:
            def synchronize_outputs(self) -> None:
                now[0] += 10.0

        binding = Binding()

        def submit(self) -> None:
            now[0] += 1.0

        def run(self) -> None:
            self.submit()
            self.binding.synchronize_outputs()

    assert contender.host_part(Slow(), lambda: now[0])() == 1.0
    assert contender.timed(Slow().run, lambda: now[0])() == 11.0


def test_percentiles_are_of_the_runs_in_milliseconds() -> None:
    seconds = np.random.default_rng(0).permutation(np.arange(101)) / 1e3
    assert latency_of(list(seconds)) == Latency(50.0, 10.0, 90.0, 99.0)


def test_the_cpu_times_runs_and_nothing_that_needs_a_gpu(measured: BenchResult) -> None:
    assert [comparison.name for comparison in measured.comparisons] == ["latency"]
    assert measured.launches == (None, None)
    for latency in (measured.comparisons[0].original, measured.comparisons[0].optimized):
        assert 0 < latency.p10 <= latency.median <= latency.p90 <= latency.p99
    assert measured.device == "CPU"
    assert "ONNX Runtime" in measured.versions
    assert {name: tuple(shape) for name, shape in measured.shapes.items()} == SHAPES


def test_every_fused_node_is_timed_once_a_kind(measured: BenchResult, fused: Path) -> None:
    nodes = [node for node in onnx.load(fused).graph.node if node.domain == "onnxfuse"]
    assert sum(site.count for site in measured.sites) == len(nodes)
    assert {site.name for site in measured.sites} <= {node.name for node in nodes}
    for site in measured.sites:
        assert site.before > 0
        assert site.after > 0
        assert site.floor > 0
        assert ("MatMul" in site.replaces) == site.name.endswith(("FusedGemm", "FusedAttention"))


def test_the_floor_counts_every_byte_and_operation_once(measured: BenchResult) -> None:
    """The gate: 14 rows, k 96, twice 384 columns, a bias; the shapes of the run, not those of the model."""
    gate = next(site for site in measured.sites if "ff/net.0" in site.name)
    assert gate.flops == 2 * 14 * 96 * 768
    assert gate.bytes == 2 * (14 * 96 + 96 * 768 + 768 + 14 * 384)
    down = next(site for site in measured.sites if "ff/net.2" in site.name)
    assert down.flops == 2 * 14 * 384 * 96
    assert down.bytes == 2 * (14 * 384 + 384 * 96 + 96 + 2 * 14 * 96)


@pytest.mark.parametrize(
    ("axes", "arguments", "sizes", "shapes", "expected"),
    [
        ("b m k, k (p n), (p n) -> b m n", "lhs=0 rhs=1[p=0],1[p=1] loads=2", "p=2 n=3 k=5", [(7, 2, 5), (5, 6), (6,)],
         2 * 14 * 5 * 6),
        ("m k, k n, k n -> m n", "lhs=0 rhs=1,2 outs=0", "n=3 k=5", [(4, 5), (5, 3), (5, 3)], 2 * 2 * 4 * 5 * 3),
        ("b h m (d1 d2), b h (d1 d2) n -> b h m n", "lhs=0 rhs=1", "d1=2", [(2, 3, 4, 6), (2, 3, 6, 5)],
         2 * 2 * 3 * 4 * 6 * 5),
        ("1 m k, k n -> 1 m n", "lhs=0 rhs=1", "", [(1, 4, 5), (5, 3)], 2 * 4 * 5 * 3),
        ("m n, n -> m n", "loads=0,1 outs=0", "n=3", [(4, 3), (3,)], 0),
    ],
)  # fmt: skip
def test_operations_are_counted_from_axes(axes, arguments, sizes, shapes, expected) -> None:
    attributes = {"axes": axes, "arguments": arguments, "sizes": sizes, "problem": "m=m n=n k=k"}
    assert flops_of(attributes, shapes) == expected


def test_operations_of_an_attention_are_those_of_its_two_products() -> None:
    axes = "b m (h k), b n h k, b h n o -> b m (h o)"
    attributes = {"axes": axes, "arguments": "lhs=0 rhs=1,2", "problem": "batch=b heads=h m=m n=n k=k o=o"}
    b, m, h, k, n, o = 2, 7, 3, 8, 11, 16
    assert flops_of(attributes, [(b, m, h * k), (b, n, h, k), (b, h, n, o)]) == 2 * b * h * m * n * (k + o)


def test_shapes_are_those_of_the_run(fused: Path, tmp_path: Path) -> None:
    names = write_with_shapes(fused, tmp_path / "shapes.onnx")
    proto = onnx.load(tmp_path / "shapes.onnx")
    feed = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}
    shapes = dict(zip(names, run(proto, feed), strict=True))
    assert [value.name for value in proto.graph.output] == [f"{SHAPE_OF}{name}" for name in names]
    assert shapes["/block/ff/net.0/Mul_4_output_0"].tolist() == [2, 7, 384]
    assert shapes["hidden_states"].tolist() == [2, 7, 96]


@pytest.mark.parametrize("strategy", ["one kernel", "behind the product"])
def test_a_sites_two_models_compute_the_same(strategy: str, tmp_path: Path) -> None:
    """On the CPU the fused node is its fallback function; each copy computes what the whole model does."""
    b = Builder(FLOAT16)
    model = b.model(silu(b, linear(b)))
    analysis = analyse_model(model, [ARCHITECTURES["sm_80"]])
    sites = tuple(replace(site, strategy=Strategy(strategy)) for site in analysis.sites)
    proto, _ = optimize_model(replace(analysis, sites=sites))
    onnx.save(proto, tmp_path / "fused.onnx")
    x = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float16)
    names = write_with_shapes(tmp_path / "fused.onnx", tmp_path / "shapes.onnx")
    shapes = {
        name: tuple(shape.tolist())
        for name, shape in zip(names, run(onnx.load(tmp_path / "shapes.onnx"), {"x": x}), strict=True)
    }
    (site,) = read_sites(tmp_path / "fused.onnx", shapes)
    assert site.flops == (0 if strategy == "behind the product" else 2 * 10 * 6 * 8)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in load_model(model).proto.graph.initializer}
    fused_node = next(node for node in proto.graph.node if node.domain == "onnxfuse")
    product = next((node.output[0] for node in proto.graph.node if node.op_type == "MatMul"), "")
    known = stored | {"x": x} | ({product: x @ stored["weight"]} if product else {})
    feed = {
        f"{port}_{copy}": known[name]
        for (port, _, _), name in zip(site.inputs, fused_node.input[1:], strict=True)
        for copy in range(2)
    }
    results = {name: run(onnx.load_from_string(data), feed) for name, data in site_models(site, 2).items()}
    for first, second in zip(results[BEFORE], results[AFTER], strict=True):
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(*results[AFTER])
    np.testing.assert_allclose(results[AFTER][0], run(model, {"x": x})[0], rtol=2e-3, atol=2e-3)


def test_a_model_without_fused_nodes_has_no_sites(tmp_path: Path) -> None:
    result = bench(MODEL, MODEL, shapes=SHAPES, device="cpu", runs=1, warmup=0, per_site=True)
    assert result.sites == ()
    assert "<h2>Sites" not in html(result, "none")


class Page(HTMLParser):
    """Tables as rows of cells, the widths of bars, and every tag; fails on a tag that is closed out of turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.widths: list[float] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "i":
            self.widths.append(float(re.search(r"width:([\d.]+)%", dict(attributes)["style"])[1]))
        if tag in ("meta", "br"):
            return
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data


def test_the_page_has_the_figures_of_the_json(measured: BenchResult) -> None:
    page = Page(html(measured, "before & after <b>"))
    plain = json.loads(json.dumps(measured.to_dict()))
    models, sites = page.tables
    (latency,) = plain["measures"]
    for row, which in zip(models[1:], ("original", "optimized"), strict=True):
        assert row[2:6] == [f"{latency[which][name]:.3f}" for name in ("median", "p10", "p90", "p99")]
    assert models[2][6] == f"{plain['ratio']:.2f}x"
    assert len(sites) == 1 + 2 * len(plain["sites"])
    longest = max(site[name] for site in plain["sites"] for name in ("before", "after", "floor"))
    widths = iter(page.widths)
    for row, drawn, site in zip(sites[1::2], sites[2::2], plain["sites"], strict=True):
        times = [site[name] for name in ("before", "after", "floor")]
        assert row[:7] == [
            site["name"], str(site["count"]), *(f"{time:.1f}" for time in times), site["bound_by"],
            f"{site['ratio']:.2f}x",
        ]  # fmt: skip
        for time in times:
            assert next(widths) == pytest.approx(100 * time / longest, abs=0.01)
        assert drawn == [
            "".join(f"{name} {time:.1f}" for name, time in zip(("before", "after", "floor"), times, strict=True))
        ]
    assert next(widths, None) is None


def test_the_page_needs_nothing_but_itself(measured: BenchResult) -> None:
    page = Page(html(replace(measured, warnings=("it is <hot>",)), "a <script> & more"))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [value for _, attributes in page.tags for value in attributes.values() if value and "//" in value]


def test_the_terminal_shows_the_same_table(measured: BenchResult) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_sites(measured.sites)
    text = shown.getvalue()
    for site in measured.sites:
        line = next(line for line in text.splitlines() if site.name in line)
        assert re.findall(r"\d+\.\d", line.replace(site.name, ""))[:3] == [
            f"{time:.1f}" for time in (site.before, site.after, site.floor)
        ]


def test_what_fails_is_said_and_not_drawn(measured: BenchResult) -> None:
    site = SiteTimes("site", 1, ("MatMul",), None, 5.0, 2.0, "bytes", 10, 20)
    missing = Comparison("graph", None, Latency(1, 1, 1, 1), "model.onnx: no capture")
    result = replace(measured, sites=(site,), comparisons=(*measured.comparisons, missing), launches=(None, 7))
    page = html(result, "title")
    assert "no capture" in page
    assert Page(page).tables[1][1][2:5] == ["fails", "5.0", "2.0"]
    assert len(Page(page).widths) == 2
    assert "not measured: model.onnx: no capture" in str(result)
    assert "? -> 7 kernels" in str(result)
    assert site.to_dict()["ratio"] is None


@pytest.mark.parametrize("which", ["copies", "products", "everything"])
def test_a_rate_that_cannot_be_measured_costs_the_floor_alone(
    fused: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Where the probes, or the sites as well, find no memory; every report is still made."""
    failing = {"copies": {"Neg"}, "products": {"MatMul"}}

    def out_of_memory(models, *rest) -> dict[str, float]:
        probed = {node.op_type for data in models.values() for node in onnx.load_from_string(data).graph.node}
        if which == "everything" or ("" in models and probed <= failing[which]):
            return {}
        return time_models(models, *rest)

    monkeypatch.setattr(sites, "time_models", out_of_memory)
    result = bench(MODEL, fused, shapes=SHAPES, device="cpu", runs=1, warmup=0, per_site=True)
    with_products = [site for site in result.sites if site.flops]
    assert with_products
    for site in with_products:
        assert (site.floor, site.bound_by) == (None, "")
        assert (site.before is None) == (which == "everything")
    written = json.loads(json.dumps(result.to_dict()))["sites"]
    assert {site["floor"] for site in written if site["flops"]} == {None}
    rows = [row for row in Page(html(result, "title")).tables[1] if row[0] in {site.name for site in with_products}]
    assert [row[4:6] for row in rows] == [["fails", ""]] * len(with_products)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_sites(result.sites)
    assert "fails" in shown.getvalue()
    assert png(result, "title")


def test_inputs_of_bfloat16_are_bound_by_their_bits(tmp_path: Path) -> None:
    b = Builder(TensorProto.BFLOAT16)
    path = tmp_path / "bf16.onnx"
    onnx.save(b.model(b("Cast", b.input("x", (2, 3)), to=TensorProto.BFLOAT16)), path)
    session = open_session(path, [CPU])
    assert session.get_inputs()[0].type == "tensor(bfloat16)"
    one = contender.Contender(path, {"x": np.float32([[1, 2, 3], [4, 5, 6]])}, "cpu")
    one.run()
    (value,) = one.outputs().values()
    assert value.element_type() == TensorProto.BFLOAT16
    assert value.shape() == [2, 3]


def test_every_measure_is_asked_of_both_models(fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for a GPU: ONNX Runtime cannot capture the second model, and the first takes a second."""

    class Captured:
        def __init__(self, path: Path) -> None:
            self.launches = 9 if path == MODEL else 4

        def seconds(self) -> float:
            return self.launches / 9

    def graph_run(path: Path, feeds, device: str, options: object) -> contender.Timed:
        if path == fused:
            raise RuntimeError("no capture")
        return contender.graph_run(path, feeds, device, options)

    monkeypatch.setitem(bench_module.DEVICES, "cpu", tuple(bench_module.MEASURES))
    monkeypatch.setattr(bench_module, "captured", lambda path, feeds, device, options: Captured(path))
    monkeypatch.setattr(bench_module, "graph_run", graph_run)
    result = bench(MODEL, fused, shapes=SHAPES, device="cpu", runs=3, warmup=1)
    latency, host, graph, gpu = result.comparisons
    assert [each.name for each in result.comparisons] == ["latency", "host", "graph", "gpu"]
    assert latency.ratio == result.ratio
    assert host.original.median > 0
    assert (graph.original is None, graph.optimized) == (False, None)
    assert graph.why_not == "fused.onnx: no capture"
    assert gpu.original == Latency(1e3, 1e3, 1e3, 1e3)
    assert gpu.ratio == pytest.approx(9 / 4)
    assert result.launches == (9, 4)
    assert "9 -> 4 kernels" in str(result)
    only = bench(MODEL, fused, shapes=SHAPES, device="cpu", runs=1, warmup=0, measures=("gpu",))
    assert [each.name for each in only.comparisons] == ["latency", "gpu"]


def test_a_model_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    b = Builder()
    path = tmp_path / "seven.onnx"
    onnx.save(b.model(b("Reshape", b.input("x", ("m", 4)), b.integers(7, 4))), path)
    with pytest.raises(ModelError, match="--shape gives other sizes"):
        bench(path, path, device="cpu")
    result = bench(path, path, shapes={"x": (7, 4)}, device="cpu", runs=1, warmup=0)
    assert result.ratio > 0


def test_a_graphs_outputs_are_where_they_were() -> None:
    feed = {name: np.ones(shape, np.float16) for name, shape in SHAPES.items()}
    one, two = (contender.Contender(MODEL, feed, "cpu") for _ in range(2))
    one.run()
    (first,) = one.outputs().values()
    expected = first.numpy().copy()
    two.write_to(one.outputs())
    for _ in range(2):
        two.run()
        (second,) = two.outputs().values()
        assert second.data_ptr() == first.data_ptr()
        np.testing.assert_array_equal(second.numpy(), expected)


def test_a_warm_model_is_captured_where_its_outputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for stream and graph: the captured run writes what a run writes, where the last one did."""

    class Stream:
        ptr = 7

    feed = {name: np.ones(shape, np.float16) for name, shape in SHAPES.items()}
    monkeypatch.setattr(contender, "new_stream", Stream)
    monkeypatch.setattr(contender, "capture", lambda stream, submit: (stream, submit))
    made, stream = contender.warm(MODEL, feed, "cpu")
    assert isinstance(stream, Stream)
    (before,) = made.outputs().values()
    expected, place = before.numpy().copy(), before.data_ptr()
    made.submit()
    (behind,) = made.outputs().values()
    assert behind.data_ptr() == place
    np.testing.assert_array_equal(behind.numpy(), expected)
    captured_on, submit = contender.captured(MODEL, feed, "cpu")
    assert isinstance(captured_on, Stream)
    submit()
