"""NVRTC on every architecture without a GPU: kernels keep to their registers; errors and the cache behave."""

from __future__ import annotations

import itertools
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from onnxfuse.device import ARCHITECTURES, PTX
from onnxfuse.errors import CompileError
from onnxfuse.ir.fusion import Step, acc_name
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.kernels.gemm import ENTRY
from onnxfuse.lowering import compile_kernels
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime import compile as compiler
from onnxfuse.runtime.compile import NVRTC_PACKAGE, compile_cached, compile_source, nvrtc_version
from onnxfuse.schedule.kernel_spec import Tile
from onnxfuse.schedule.portable import tiles_for
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec
from tests.helpers.thinning import Taken

ALIGNED = Size(504, 136, 248)
SMALL = 'extern "C" __global__ void small(int* out) { out[threadIdx.x] = blockIdx.x; }'
DEVICE = ARCHITECTURES["sm_90a"]


def sampled_kernels() -> list[tuple[str, TiledSpec]]:
    """Every dtype with every number of parts, each in one architecture, order and default tile in turn."""
    kernels = []
    every = itertools.product(("f16", "bf16", "tf32", "fp32", "3xtf32"), (1, 2, 3, 4))
    for turn, (math_mode, parts) in enumerate(every):
        arch = list(ARCHITECTURES)[turn % len(ARCHITECTURES)]
        order = ("kn", "nk")[(turn + turn // 4) % 2]
        tiles = tiles_for(math_mode, parts)
        kind, narrow = ("residual", "plain", "mixed")[turn % 3], turn % 4 == 0
        specs = [make_spec(math_mode, parts, order, tile, ALIGNED, kind, narrow=narrow) for tile in tiles]
        legal = [spec for spec in specs if spec.why_not(ARCHITECTURES[arch]) is None]
        kernels.append((arch, legal[turn % len(legal)]))
    return kernels


def test_default_tiles_need_no_local_memory(taken: Taken) -> None:
    sampled = sampled_kernels()
    assert {arch for arch, _ in sampled} == set(ARCHITECTURES)
    kernels = taken(sampled, 8)
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda kernel: compile_source(kernel[1].source(), ARCHITECTURES[kernel[0]]), kernels))
    for (arch, spec), image in zip(kernels, images, strict=True):
        if arch == PTX:
            assert f".entry {ENTRY}(".encode() in image.data
            continue
        assert image.data.startswith(b"\x7fELF")
        assert (image.spill_bytes, image.local_bytes) == (0, 0), (arch, spec)


def test_kernels_that_check_each_tensor_need_no_local_memory(taken: Taken) -> None:
    """Of every dtype, order and number of parts in turn, on the tile that a plan gives them."""
    specs = []
    for turn, (math_mode, parts) in enumerate(itertools.product(("f16", "bf16", "tf32", "fp32"), (1, 2, 3, 4))):
        order, kind = ("kn", "nk")[turn % 2], ("residual", "plain", "mixed", "masks", "masked")[turn % 5]
        spec = make_spec(math_mode, parts, order, tiles_for(math_mode, parts)[-1], ALIGNED, kind)
        specs.append(replace(spec, checked=True))
    specs = taken(specs, 12)
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda spec: compile_source(spec.source(), ARCHITECTURES["sm_80"]), specs))
    for spec, image in zip(specs, images, strict=True):
        assert (image.spill_bytes, image.local_bytes) == (0, 0), spec


def test_kernels_of_rows_that_begin_anywhere_need_no_local_memory(taken: Taken) -> None:
    """The largest tile, with every order of both operands and every number of parts."""
    specs = [
        make_spec("f16", parts, order, tiles_for("f16", parts)[0], ALIGNED, kind, narrow=True, lhs_order=lhs_order)
        for parts, order in itertools.product((1, 2, 3, 4), ("kn", "nk"))
        for lhs_order, kind in (("mk", "mixed"), ("km", "masks"))
    ]
    specs = taken(specs, 12)
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(lambda spec: compile_source(spec.source(), DEVICE), specs))
    for spec, image in zip(specs, images, strict=True):
        assert (image.spill_bytes, image.local_bytes) == (0, 0), spec


def test_angles_of_any_size_need_no_local_memory() -> None:
    spec = make_spec("f16", 1, "kn", tiles_for("f16", 1)[0], ALIGNED, "plain")
    steps = (Step("t0", "sin", (acc_name(0),)), Step("t1", "cos", ("t0",)))
    image = compile_source(replace(spec, steps=steps, out_values=("t1",)).source(), DEVICE)
    assert (image.spill_bytes, image.local_bytes) == (0, 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_default_tile_has_a_fitting_device(arch: str) -> None:
    for math_mode in ("f16", "tf32", "fp32", "3xtf32"):
        for parts in (1, 2, 3, 4):
            specs = [make_spec(math_mode, parts, "kn", tile, ALIGNED) for tile in tiles_for(math_mode, parts)]
            assert any(spec.why_not(ARCHITECTURES[arch]) is None for spec in specs)


def test_image_is_a_whole_elf_file() -> None:
    data = compile_source(SMALL, DEVICE).data
    first, each, count = (int.from_bytes(data[at : at + size], "little") for at, size in ((32, 8), (54, 2), (56, 2)))
    assert len(data) >= first + each * count


def test_refused_source_is_kept_and_named() -> None:
    with pytest.raises(CompileError) as caught:
        compile_source("this is not CUDA", DEVICE)
    assert "error" in caught.value.log
    path = Path(str(caught.value).split("source in ")[1].splitlines()[0])
    assert path.read_text() == "this is not CUDA"
    path.unlink()


def test_missing_headers_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    compiler.header_folder.cache_clear()
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda _: None)
    with pytest.raises(CompileError, match="nvidia-cuda-runtime"):
        compile_source(SMALL, DEVICE)


class Programs:
    """NVRTC whose compilations fail as without its builtins; knows the programs that were not given back."""

    def __init__(self, nvrtc) -> None:
        self.nvrtc, self.alive = nvrtc, set[int]()

    def __getattr__(self, name: str):
        return getattr(self.nvrtc, name)

    def createProgram(self, *arguments) -> int:  # noqa: N802
        program = self.nvrtc.createProgram(*arguments)
        self.alive.add(program)
        return program

    def compileProgram(self, program: int, options) -> None:  # noqa: N802
        raise self.nvrtc.NVRTCError(7)

    def destroyProgram(self, program: int) -> None:  # noqa: N802
        self.alive.remove(program)
        self.nvrtc.destroyProgram(program)


@pytest.mark.parametrize("first", [nvrtc_version, lambda: compile_source(SMALL, DEVICE)])
def test_an_nvrtc_that_cannot_compile_says_what_to_install(monkeypatch: pytest.MonkeyPatch, first) -> None:
    import cupy.cuda

    broken = Programs(cupy.cuda.nvrtc)
    monkeypatch.setattr(cupy.cuda, "nvrtc", broken)
    compiler._first_nvrtc.cache_clear()
    for _ in range(2):
        with pytest.raises(CompileError, match=f"cannot compile: .*{re.escape(NVRTC_PACKAGE)}"):
            first()
    assert not broken.alive
    monkeypatch.undo()
    assert compile_source(SMALL, DEVICE).data, "nothing of it is remembered"


@pytest.fixture
def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compiled: list[str] = []
    original = compiler.compile_images

    def counted(source, devices):
        compiled.append(source)
        return original(source, devices)

    monkeypatch.setattr(compiler, "compile_images", counted)
    return compiled


@pytest.mark.parametrize("arch", ["sm_80", PTX])
def test_second_compilation_comes_from_the_cache(tmp_path: Path, count_compilations: list[str], arch: str) -> None:
    device = ARCHITECTURES[arch]
    first = compile_cached(SMALL, [device], tmp_path / "cache")
    assert compile_cached(SMALL, [device], tmp_path / "cache") == first
    assert len(count_compilations) == 1
    (entry,) = (tmp_path / "cache").iterdir()
    names = {"kernel.cu", "kernel.ptx" if arch == PTX else "kernel.cubin", "log.txt", "meta.json"}
    assert {path.name for path in entry.iterdir()} == names


def test_ptx_falls_off_on_the_way_to_machine_code(tmp_path: Path, count_compilations: list[str]) -> None:
    pair = [ARCHITECTURES["sm_80"], ARCHITECTURES[PTX]]
    assert [device.arch for device in ARCHITECTURES.values() if compiler.shares_compilation(device)] == ["sm_80"]
    together = compile_cached(SMALL, pair, tmp_path)
    assert len(count_compilations) == 1
    assert [compile_cached(SMALL, [device], tmp_path)[0] for device in pair] == together
    assert len(count_compilations) == 1, "each is an entry of its own"
    assert together == [compile_source(SMALL, device) for device in pair]


@pytest.mark.parametrize("name", ["kernel.cubin", "meta.json", "log.txt", "kernel.cu"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage"])
def test_damaged_entry_is_compiled_again(tmp_path: Path, count_compilations: list[str], name: str, damage: str) -> None:
    first = compile_cached(SMALL, [DEVICE], tmp_path)
    (entry,) = tmp_path.iterdir()
    path = entry / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "garbage": b"\xff\xfe" + data}[damage])
    assert compile_cached(SMALL, [DEVICE], tmp_path) == first
    assert compile_cached(SMALL, [DEVICE], tmp_path) == first
    assert len(count_compilations) == 2
    assert [child.name for child in tmp_path.iterdir()] == [entry.name], "nothing half-written stays"


def test_unwritable_cache_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert compile_cached(SMALL, [DEVICE], tmp_path / "file" / "cache") == [compile_source(SMALL, DEVICE)]


def test_no_cache_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compile_cached(SMALL, [DEVICE], None)
    assert not list(tmp_path.iterdir())


def test_many_writers_of_one_entry(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda _: compile_cached(SMALL, [DEVICE], tmp_path), range(16)))
    assert len({image.data for (image,) in images}) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_source_arch_and_version_make_the_key(tmp_path: Path) -> None:
    for source in (SMALL, SMALL + "\n"):
        for arch in ("sm_80", "sm_90a"):
            compile_cached(source, [ARCHITECTURES[arch]], tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("error", [CompileError("refused"), KeyboardInterrupt()])
@pytest.mark.parametrize("refused", [1, 3])
def test_what_has_not_begun_is_not_compiled_behind_an_error(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, refused: int
) -> None:
    """The others wait until one is refused, so that those before it are under way and most behind it are not."""
    begun, refusal = itertools.count(1), threading.Event()

    def compile_one(source, devices, folder):
        number = next(begun)
        if number == refused:
            refusal.set()
            raise error
        refusal.wait(10)
        time.sleep(0.2)
        return [compiler.image_of(b"", "") for _ in devices]

    monkeypatch.setenv("ONNXFUSE_COMPILE_JOBS", "4")
    monkeypatch.setattr(compile_kernels, "compile_cached", compile_one)
    model = onnx.load(Path(__file__).parents[2] / "models" / "unet_block.onnx")
    implementations = [site.implementation for site in analyse_model(model, list(ARCHITECTURES.values())).sites]
    kernels = {
        (kernel_source(variant, device), device.arch)
        for implementation in implementations
        for device, variant in implementation.variants
    }
    with pytest.raises(type(error)):
        compile_kernels.compile_implementations(implementations)
    assert next(begun) < len(kernels) / 4


def test_a_tile_without_stages_does_not_compile() -> None:
    """The kernel's own assertions hold where a spec went around `why_not`."""
    spec = make_spec("f16", 1, "kn", Tile(32, 32, 32, 1, 1, 1), ALIGNED)
    with pytest.raises(CompileError, match="two stages") as caught:
        compile_source(spec.source(), DEVICE)
    Path(str(caught.value).split("source in ")[1].splitlines()[0]).unlink()
