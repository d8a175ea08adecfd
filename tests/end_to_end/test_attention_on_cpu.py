"""An attention from the graph to the numbers, without a GPU: the match, the plan, the bridge, the kernel on the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.graph.archive import pack
from onnxfuse.graph.op_names import FUSED_ATTENTION, kind_of
from onnxfuse.graph.rewrite import rewrite
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.lowering.fused_node import replacement
from onnxfuse.lowering.inspection import inspect
from onnxfuse.lowering.launch_record import launch_record
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime.compile import CompiledImage
from onnxfuse.schedule.attention import ATTENTION, PORTABLE_ATTENTION
from onnxfuse.schedule.attention_tile import AttentionTile, PortableAttentionTile
from onnxfuse.verify.verify import verify
from tests.end_to_end.test_whole_way_on_cpu import Bound, bound, misaligned
from tests.helpers.attention_graphs import FORMS, SIZES, feeds, merged, model_of, number, scores
from tests.helpers.bridge_hooks import BridgeError, bridge
from tests.helpers.host_build import build_library
from tests.helpers.matching import run_inputs
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder, of_sizes, run
from tests.helpers.tensor_maps import MAP_BYTES
from tests.kernels.test_attention_on_cpu import build_portable, host_source, portable_grid
from tests.kernels.test_hopper_on_cpu import HostMap
from tests.kernels.test_portable_on_cpu import Range

SM_90A = ARCHITECTURES["sm_90a"]
SMALL = {ATTENTION: AttentionTile(2, 48), PORTABLE_ATTENTION: PortableAttentionTile(2, 32)}
NUMBERS = (
    "scaled_before", "scaled_by_the_run", "masked_and_guarded", "values_in_fp32", "two_biases", "filled",
    "grouped", "by_einsum", "without_heads", "values_first", "channels_by_einsum",
)  # fmt: skip
IMAGE = CompiledImage(b"machine code", "", 0, 0, 0)


def site_of(model):
    (site,) = analyse_model(model, [SM_90A], attention=True).sites
    assert site.implementation.kind == FUSED_ATTENTION
    return site


def memory_of(array: np.ndarray) -> np.ndarray:
    """A copy at an address of 16 bytes."""
    memory = np.zeros(array.nbytes + 16, np.uint8)
    copy = memory[-memory.ctypes.data % 16 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def small(variant):
    """A tile of which a few make a small problem, split as that of a variant."""
    tile, splits = SMALL[variant.family], variant.tile.splits
    if variant.family is ATTENTION and variant.tile.landed:  # whole atoms of fp32 keys
        return replace(tile, block_n=32, landed=variant.tile.landed)
    if splits == 1:
        return tile
    if variant.family is PORTABLE_ATTENTION:
        return replace(tile, block_n=16, splits=tile.warps * variant.tile.cluster)
    return replace(tile, consumers=1, splits=splits)


def launch(implementation, given: Bound, folder: Path) -> int:
    """Choose a record as the bridge does and run it on the CPU; its index."""
    variants = [replace(variant, tile=small(variant)) for _, variant in implementation.variants]
    images = Kernels({(kernel_source(variant, SM_90A), SM_90A.arch): IMAGE for variant in variants})
    archive = pack([launch_record("ab12", SM_90A, variant, images) for variant in variants])
    chosen = bridge().choose(archive, given.node, given.arguments, element_bytes=given.element_bytes)
    boxes = bridge().maps(archive, given.node, given.arguments, chosen, element_bytes=given.element_bytes)
    memory = np.zeros(MAP_BYTES * (len(boxes) + 1) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    kept = []
    for place, box in enumerate(boxes):
        assert all(stride % 16 == 0 and stride > 0 for stride in box.strides)
        strides = (box.element_bytes, *box.strides, 0)
        kept.append(
            HostMap(
                box.pointer, box.element_bytes, len(box.extents), box.swizzle, (*box.extents, 0), strides, (*box.box, 0)
            )
        )
        memory[start + place * MAP_BYTES :][:8].view(np.uint64)[0] = ctypes.addressof(kept[-1])
    arrays, folder = [*given.arrays, *given.outs], folder / str(chosen)
    folder.mkdir(exist_ok=True)
    if variants[chosen].family is PORTABLE_ATTENTION:
        assert not boxes
        launch_portable(variants[chosen], given.arguments, arrays, len(given.arrays), folder)
        return chosen
    ranges = (Range * len(arrays))(
        *(Range(each.ctypes.data, each.nbytes, index >= len(given.arrays), 0) for index, each in enumerate(arrays))
    )
    source = kernel_source(variants[chosen], SM_90A)
    splits = variants[chosen].tile.splits
    library = build_library(host_source(source), folder, f"-DEMULATED_BLOCKS={splits}")
    library.emulate.restype = ctypes.c_char_p
    failure = library.emulate(
        ctypes.byref(given.arguments), ctypes.c_void_p(memory.ctypes.data + start), 2 * splits,
        variants[chosen].tile.threads, 0, ranges, len(arrays),
    )  # fmt: skip
    assert failure == b"", failure
    return chosen


def launch_portable(variant, arguments, arrays: list[np.ndarray], inputs: int, folder: Path) -> None:
    ranges = (Range * len(arrays))(
        *(Range(each.ctypes.data, each.nbytes, index >= inputs, 0) for index, each in enumerate(arrays))
    )
    library = build_portable(variant.spec, variant.tile, folder)
    library.emulate.restype = ctypes.c_char_p
    grid = portable_grid(arguments.m, arguments.batch, variant.tile, fewer=False)
    failure = library.emulate(
        ctypes.byref(arguments), *grid, variant.tile.threads, 1, ranges, len(arrays), ctypes.byref(ctypes.c_int())
    )
    assert failure == b"", failure


def check(model, form: str, sizes: dict[str, int], folder: Path, lie=memory_of) -> int:
    implementation = site_of(model).implementation
    feed = feeds(model, sizes)
    values = feed | run_inputs(model, implementation.fusion, feed)
    given = bound(implementation, values, lie)
    index = launch(implementation, given, folder)
    (expected,) = run(model, feed)
    (actual,) = given.outs
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert np.isnan(expected).any() == (form == "grouped")
    # ONNX Runtime rounds scores and probabilities to fp16 as well; TF32 has as many digits.
    np.testing.assert_allclose(actual, expected, atol=8e-3, rtol=0)
    return index


@pytest.mark.one_in(12)
@pytest.mark.parametrize("form", NUMBERS)
def test_the_kernel_computes_what_the_graph_computes(form: str, tmp_path: Path) -> None:
    model = model_of(form)
    assert check(model, form, SIZES, tmp_path) == first_of(model)


def first_of(model) -> int:
    """The first kernel for as many rows as there are."""
    ranges = [(each.min_m, each.max_m) for _, each in site_of(model).implementation.variants]
    return next(index for index, (low, high) in enumerate(ranges) if low <= SIZES["rows"] <= high)


@pytest.mark.parametrize("form", ["scaled_before", "two_biases"])
def test_blocks_share_the_keys_of_few_rows(form: str, tmp_path: Path) -> None:
    model = model_of(form)
    _, few = next(iter(site_of(model).implementation.variants))
    assert few.tile.splits > 1
    assert check(model, form, {**SIZES, "rows": 5}, tmp_path) == 0


def test_masks_of_odd_length_go_to_the_kernel_that_reads_them_anyhow(tmp_path: Path) -> None:
    assert check(model_of("two_biases"), "two_biases", {**SIZES, "keys": 71}, tmp_path) > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["masked_and_guarded", "two_biases", "grouped"])
def test_fp32_is_multiplied_in_tf32(form: str, tmp_path: Path) -> None:
    model = model_of(form, FLOAT)
    assert check(model, form, SIZES, tmp_path) == first_of(model)
    assert check(model, form, {**SIZES, "rows": 5}, tmp_path) == 0


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT], ids=["f16", "f32"])
def test_tensors_that_lie_anyhow_go_to_the_last_kernel(dtype: int, tmp_path: Path) -> None:
    model = model_of("two_biases", dtype)
    variants = list(site_of(model).implementation.variants)
    assert check(model, "two_biases", {**SIZES, "keys": 71}, tmp_path, misaligned) == len(variants) - 1


def test_no_keys_and_other_heads_are_told() -> None:
    site = site_of(model_of("grouped"))
    feed = feeds(model_of("grouped"))
    feed["key"] = feed["key"][..., :16]
    with pytest.raises(BridgeError, match="dimension 2 of input 1"):
        bound(site.implementation, feed, memory_of)


def test_a_mask_of_one_number_for_all_keys_is_told() -> None:
    """Nothing says that it has one for each, and the kernel takes it for that."""
    b = Builder(FLOAT16)
    s = b("Add", b("Mul", scores(b), number(b, 0.25)), b.input("bias", ("batch", 1, "rows", "numbers")))
    model = b.model(*merged(b, b("Softmax", s, axis=-1)))
    implementation = site_of(model).implementation
    bound(implementation, feeds(model, {**SIZES, "numbers": SIZES["keys"]}), memory_of)
    with pytest.raises(BridgeError, match="dimension 3 of input 3 is 1 but axes n make 72"):
        bound(implementation, feeds(model, {**SIZES, "numbers": 1}), memory_of)


@pytest.mark.parametrize("form", FORMS)
def test_the_fallback_has_the_bits_of_the_original(form: str) -> None:
    model = model_of(form)
    implementation = site_of(model).implementation
    fused = onnx.ModelProto()
    fused.CopyFrom(model)
    rewrite(fused, [replacement(implementation, "ab12")], b"")
    assert [kind_of(node.op_type) for node in fused.graph.node if node.domain == "onnxfuse"] == [FUSED_ATTENTION]
    assert not [node for node in fused.graph.node if node.op_type == "Softmax"]
    onnx.checker.check_model(fused)
    for sizes in (SIZES, {"batch": 1, "rows": 3, "keys": 5}):
        feed = feeds(model, sizes)
        for wanted, found in zip(run(model, feed), run(fused, feed), strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_without_the_option_nothing_changes() -> None:
    sites = analyse_model(model_of("plain"), [SM_90A], attention=False).sites
    assert "attention" not in {site.fusion.pattern for site in sites}


def test_a_fused_model_passes_the_checks_of_a_file(tmp_path: Path) -> None:
    """The bridge reads kernels, launch rules and attributes, and the nodes of the body agree with the original."""
    model = of_sizes(model_of("masked_and_guarded"), SIZES)  # for which fewer kernels are compiled, here and by inspect
    onnx.save(model, tmp_path / "original.onnx")
    report = onnxfuse.optimize_file(tmp_path / "original.onnx", tmp_path / "fused.onnx", arch="sm_90a", attention=True)
    assert [site.pattern for site in report.fused] == ["attention"]
    assert verify(tmp_path / "original.onnx", tmp_path / "fused.onnx", inputs=[feeds(model)]).passed
    made_again = inspect(tmp_path / "fused.onnx", True, lambda what, done, all_of_it: None)
    assert made_again.passed
    assert made_again.rebuilt == len(made_again.code)
