"""One token of each sequence over a cache, on the GPU: against float64, and nodes beside ONNX Runtime's op."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.bench.cuda_graph import capture, new_stream
from onnxfuse.device import ARCHITECTURES
from onnxfuse.kernels.cached_attention import ENTRY, emit
from onnxfuse.runtime.compile import compile_source
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.runtime.session import CPU, CUDA, onnxruntime, open_session
from onnxfuse.schedule.cached_attention_tile import CachedAttentionTile, shared_bytes
from tests.helpers.cached_attention import Tokens, make_tokens
from tests.helpers.cached_model import GROUPS, HEAD, HEADS, cached_feeds, cached_model
from tests.kernels.test_cached_attention_on_cpu import CASES

pytestmark = pytest.mark.gpu

ARCH = "sm_90a"
ROOM = 30
FORMS: dict[str, tuple[bool, tuple[int, int, int], dict[str, Any]]] = {
    "packed": (True, (HEADS, GROUPS, HEAD), {}),
    "apart": (False, (HEADS, GROUPS, HEAD), {}),
    "32 heads of 128": (True, (32, 8, 128), {"scale": 0.1}),
    "as many heads of keys": (True, (4, 4, 96), {}),
    "seven heads each": (True, (14, 2, 64), {}),
    "part of the columns turned": (True, (8, 2, 128), {"rotary": 64}),
    "not turned": (False, (8, 2, 64), {"rotary": 0}),
    "neighbours turned": (True, (8, 2, 64), {"rotary_interleaved": 1}),
    "bounded": (True, (8, 2, 256), {"softcap": 20.0}),
    "window": (True, (8, 2, 64), {"local_window_size": 9}),
    "norms": (False, (32, 8, 128), {"norms": True, "qk_norm_epsilon": 0.001}),
    "a sink": (True, (16, 2, 64), {"sink": True, "local_window_size": 16}),
    "norms and a sink": (False, (8, 8, 256), {"norms": True, "sink": True}),
}


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if ARCH not in local_architectures():
        pytest.skip("the kernel is for sm_90a alone")


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_the_attention(name: str, splits: int, tmp_path: Path) -> None:
    import cupy

    case, tile = CASES[name], CachedAttentionTile(8, splits, 1)
    problem = make_tokens(case.spec, Tokens(case.lengths, case.room, case.packed))
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compile_source(emit(case.spec, tile), ARCHITECTURES[ARCH]).data)
    function, shared = cupy.RawModule(path=str(path)).get_function(ENTRY), shared_bytes(case.spec, tile)
    function.max_dynamic_shared_size_bytes = shared
    memory = [cupy.asarray(tensor.view(np.uint8)) for tensor in problem.tensors]
    arguments = problem.arguments([each.data.ptr for each in memory]).reshape(1)
    function((problem.tiles * splits,), (tile.threads,), (arguments,), shared_mem=shared)
    for tensor, each in zip(problem.tensors, memory, strict=True):
        tensor.view(np.uint8)[...] = each.get()
    problem.check()


def opened(path: Path, keys: int, stream: Any = None) -> Any:
    """A session whose number of keys is known, so that it tells no node on the host."""
    options = {} if stream is None else {"user_compute_stream": str(stream.ptr)}
    settings = onnxruntime().SessionOptions()
    settings.add_free_dimension_override_by_name("total", keys)
    return open_session(path, [(CUDA, options), CPU], settings)


class Bound:
    """Inputs and outputs on the GPU; the present is the past."""

    def __init__(self, session: Any, feeds: dict[str, np.ndarray], shared: bool = True) -> None:
        self.session, on_device = session, onnxruntime().OrtValue.ortvalue_from_numpy
        self.values = {name: on_device(value, "cuda", 0) for name, value in feeds.items()}
        shape = [*feeds["query"].shape[:2], self.columns()]
        self.values["out"] = onnxruntime().OrtValue.ortvalue_from_shape_and_type(shape, np.float16, "cuda", 0)
        self.binding = self.session.io_binding()
        for name in feeds:
            self.binding.bind_ortvalue_input(name, self.values[name])
        self.binding.bind_ortvalue_output("out", self.values["out"])
        for each in ("key", "value"):
            if shared:
                self.binding.bind_ortvalue_output(f"present_{each}", self.values[f"past_{each}"])
            else:
                self.binding.bind_output(f"present_{each}", "cuda")

    def columns(self) -> int:
        return int(self.session.get_outputs()[0].shape[-1])

    def run(self) -> np.ndarray:
        self.session.run_with_iobinding(self.binding)
        return self.values["out"].numpy()

    def submit(self) -> None:
        quick = onnxruntime().RunOptions()
        quick.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.session.run_with_iobinding(self.binding, quick)


def both(form: str, folder: Path) -> tuple[Path, Path]:
    packed, sizes, attributes = FORMS[form]
    stock, fused = folder / "stock.onnx", folder / "fused.onnx"
    onnx.save(cached_model(packed, sizes, **attributes), stock)
    report = onnxfuse.optimize_file(stock, fused, arch=ARCH)
    assert [site.pattern for site in report.fused] == ["cached_attention"]
    return stock, fused


def feeds_of(form: str, tokens: int, past: int, batch: int = 3) -> dict[str, np.ndarray]:
    packed, sizes, _ = FORMS[form]
    return cached_feeds(packed, tokens, past, ROOM, sizes, batch)


def assert_near(found: np.ndarray, wanted: np.ndarray) -> None:
    """Both round a probability and a result of 16 bits once; the op may keep its sums in 16 bits."""
    scale = np.abs(wanted.astype(np.float64)).max()
    assert np.abs(found.astype(np.float64) - wanted).max() < 2**-7 * scale


@pytest.mark.parametrize("form", FORMS)
def test_a_token_beside_the_runtimes_op(form: str, tmp_path: Path) -> None:
    """Several tokens in turn, of sequences of their own lengths; then the caches are equal but for roundings."""
    stock, fused = both(form, tmp_path)
    runs = None
    for past in (0, 1, 11, 12, 20):
        feeds = feeds_of(form, 1, past)
        feeds["lengths"] = np.maximum(np.array([past, past // 2, past - 3], np.int32), 0)
        runs = [Bound(opened(path, past + 1), feeds) for path in (stock, fused)]
        wanted, found = (run.run() for run in runs)
        assert_near(found, wanted)
        for each in ("past_key", "past_value"):
            before, first, second = feeds[each], *(run.values[each].numpy() for run in runs)
            assert_near(second, first)
            assert not np.array_equal(second, before)
    assert runs is not None


@pytest.mark.parametrize("form", ["packed", "apart", "not turned", "norms", "a sink", "norms and a sink"])
def test_a_prompt_and_a_growing_cache_are_the_runtimes(form: str, tmp_path: Path) -> None:
    """To the same bits: the node invokes the op."""
    paths = both(form, tmp_path)
    for feeds, shared in ((feeds_of(form, 7, 0), True), (feeds_of(form, 3, 9, 1), True), (feeds_of(form, 1, 9), False)):
        keys = feeds["mask"].shape[1]
        wanted, found = (Bound(opened(path, keys), feeds, shared).run() for path in paths)
        np.testing.assert_array_equal(found, wanted)


def test_a_captured_graph_follows_the_lengths(tmp_path: Path) -> None:
    """What is captured is one kernel that reads the lengths from memory, as each replay finds them."""
    stock, fused = both("packed", tmp_path)
    feeds, stream = feeds_of("packed", 1, 20), new_stream()
    run = Bound(opened(fused, 21, stream), feeds)
    run.run()
    graph = capture(stream, run.submit)
    assert graph.launches == 1
    for past in (3, 17, 20):
        lengths = np.array([past, past - 1, past - 2], np.int32)
        for each in ("past_key", "past_value"):
            run.values[each].update_inplace(feeds[each])
        run.values["lengths"].update_inplace(lengths)
        graph.seconds()
        assert_near(run.values["out"].numpy(), Bound(opened(stock, 21), feeds | {"lengths": lengths}).run())


def test_threads_share_a_session(tmp_path: Path) -> None:
    """Each with a cache of its own."""
    stock, fused = both("32 heads of 128", tmp_path)
    many = [feeds_of("32 heads of 128", 1, past) for past in (4, 9, 14, 19)]
    for feeds in many:
        feeds["mask"] = np.ones((3, 20), np.int64)
    session = opened(fused, 20)
    runs = [Bound(session, feeds) for feeds in many]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda run: run.run(), runs))
    for feeds, result in zip(many, found, strict=True):
        assert_near(result, Bound(opened(stock, 20), feeds).run())
