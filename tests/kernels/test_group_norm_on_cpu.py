"""The kernel that normalises groups of channels, on the CPU: every access inside of its tensor, against float64."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32, DType
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.kernels.group_norm import ENTRY, emit
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime.compile import compile_source
from onnxfuse.schedule.group_norm import CLUSTERS, HELD, MOST_THREADS
from onnxfuse.schedule.group_norm_tile import GroupNormSpec, GroupNormTile
from tests.helpers.bridge_hooks import Node, bridge
from tests.helpers.group_models import group_model
from tests.helpers.group_norm import GroupProblem, Images, make_images, make_spec
from tests.helpers.host_build import build_library
from tests.helpers.thinning import Taken
from tests.kernels.test_attention_on_cpu import on_the_cpu
from tests.kernels.test_portable_on_cpu import Range, host_source

TILE = GroupNormTile(64, 2, 1)


@dataclass(frozen=True)
class Case:
    """A kernel and what it is given; clusters are fewer than groups where `clusters` says how many."""

    images: Images
    tile: GroupNormTile = TILE
    clusters: int = 0
    dtype: DType = F16
    out: DType = F16
    kinds: tuple[str, ...] = ("tile", "tile")

    @property
    def spec(self) -> GroupNormSpec:
        return make_spec(self.dtype, self.out, self.kinds)


CASES = {
    "f16": Case(Images(4, 3, 2, 64)),
    "two of a cluster, groups in turn": Case(Images(5, 2, 2, 320), GroupNormTile(32, 1, 2), 2),
    "four of a cluster": Case(Images(2, 4, 1, 200), GroupNormTile(32, 2, 4), 1),
    "bf16, one channel": Case(Images(6, 1, 1, 96), dtype=BF16, out=BF16),
    "f32": Case(Images(2, 2, 2, 52), GroupNormTile(32, 2, 2), dtype=F32, out=F32),
    "f16 to f32": Case(Images(2, 2, 1, 36), out=F32),
    "odd pixels": Case(Images(3, 5, 2, 49), GroupNormTile(64, 2, 2)),
    "pixels beside vectors": Case(Images(3, 2, 1, 12)),
    "one pixel": Case(Images(2, 7, 3, 1)),
    "one image": Case(Images(4, 3, 1, 64)),
    "one group": Case(Images(1, 6, 2, 40)),
    "an odd address": Case(Images(3, 2, 1, 64, offset=1)),
    "far from zero": Case(Images(2, 2, 1, 400, mean=100.0), dtype=F32, out=F32),
    "no parameters": Case(Images(2, 2, 1, 40), kinds=()),
    "one number for all channels": Case(Images(2, 3, 2, 40), kinds=("scalar", "scalar")),
    "one number beside those of channels": Case(Images(2, 3, 2, 40), kinds=("scalar", "tile")),
}


def build(spec: GroupNormSpec, tile: GroupNormTile, folder: Path) -> ctypes.CDLL:
    blocks = [f"-DEMULATED_BLOCKS={tile.splits}"] if tile.splits > 1 else []
    library = build_library(on_the_cpu(host_source(emit(spec, tile))), folder, f"-DONNXFUSE_ENTRY={ENTRY}", *blocks)
    library.emulate.restype = ctypes.c_char_p
    return library


def launch(library: ctypes.CDLL, problem: GroupProblem, case: Case, lazy: bool) -> None:
    """The problem's output."""
    tensors = problem.tensors
    arguments = problem.arguments([tensor.ctypes.data for tensor in tensors])
    ranges = (Range * len(tensors))(*(Range(each.ctypes.data, each.nbytes, each is problem.out, 0) for each in tensors))
    blocks, conflicts = (case.clusters or problem.rows) * case.tile.splits, ctypes.c_int()
    failure = library.emulate(
        ctypes.c_void_p(arguments.ctypes.data), blocks, 1, case.tile.threads, int(lazy), ranges, len(tensors),
        ctypes.byref(conflicts),
    )  # fmt: skip
    assert failure == b"", failure


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_kernel_normalises_groups(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    library = build(case.spec, case.tile, tmp_path)
    early, late = (make_images(case.spec, case.images) for _ in range(2))
    launch(library, early, case, lazy=False)
    launch(library, late, case, lazy=True)
    np.testing.assert_array_equal(early.out, late.out)
    early.check()


@pytest.mark.parametrize("sizes", [*itertools.product((1, 4), (1, 3), (1, 2), (1, 5))])
def test_the_bridge_walks_channels_as_these_tests_say(sizes: tuple[int, int, int, int]) -> None:
    """From its strides the kernel knows groups and channels, also where a run has one image, or images of one pixel."""
    images = Images(*sizes)
    channels = images.groups * images.channels
    known = f"g={images.groups} c={images.channels}"
    node = Node("b (g c) p, (g c) -> b (g c) p", "m=b*g n=c*p", "loads=0,1 outs=0", known)
    found, _ = bridge().arguments(node, [(images.count, channels, images.pixels), (channels,)])
    tensor, outer = found.loads[1], found.loads_outer[1]
    assert (tensor.row_stride, tensor.column_stride) == images.strides
    assert (outer.rows, outer.columns) == images.runs


def test_layers_of_other_widths_have_the_same_kernels() -> None:
    device = ARCHITECTURES["sm_90a"]
    layers = (group_model(sizes=("n", channels, "h", "w"), groups=groups) for channels, groups in ((64, 4), (96, 32)))
    sites = [site for model in layers for site in analyse_model(model, (device,)).sites]
    texts = {kernel_source(variant, device) for site in sites for _, variant in site.implementation.variants}
    assert (len(sites), len(texts)) == (2, 1 + len(CLUSTERS))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_kernels_need_no_local_memory(arch: str, taken: Taken) -> None:
    splits = (1, *(splits for splits, _ in CLUSTERS)) if arch == "sm_90a" else (1,)
    specs = (make_spec(), make_spec(F32), make_spec(BF16, F32, ()))
    for spec, each in taken([*itertools.product(specs, splits)], 3):
        image = compile_source(emit(spec, GroupNormTile(MOST_THREADS, HELD, each)), ARCHITECTURES[arch])
        assert (image.spill_bytes, image.local_bytes) == (0, 0), each
