"""From a graph to the numbers, without a GPU: match, plan and emit; the bridge's arguments; the kernel on the CPU."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.device import ARCHITECTURES
from onnxfuse.graph.archive import Library
from onnxfuse.graph.transposed_data import put_in_order, transpose
from onnxfuse.kernels.emit import kernel_entry, kernel_source
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.lowering.site import Implementation, Site
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.kernel_spec import Tile
from onnxfuse.schedule.library import LIBRARY
from onnxfuse.schedule.library_tile import LibraryTile
from onnxfuse.schedule.norm import NORM
from onnxfuse.schedule.pointwise import POINTWISE
from onnxfuse.schedule.pointwise_tile import PointwiseTile
from onnxfuse.schedule.portable import PORTABLE
from onnxfuse.schedule.variant import AnyVariant
from tests.helpers.adaptive_models import PLACES, RANGES, Ranges, adaptive
from tests.helpers.bridge_hooks import Arguments, Node, bridge
from tests.helpers.matching import K, N, draw, gate, linear, run_inputs, run_values, silu, split_num_outputs
from tests.helpers.onnx_build import BOOL, FLOAT, Builder
from tests.helpers.rotary_models import (
    NORMS,
    ROTATIONS,
    Rotate,
    Turning,
    as_it_lies,
    beside_others,
    in_rows,
    normalised,
    of_a_split,
    transposed,
    turning,
)
from tests.ir.test_epilogue_only import REPEATED
from tests.kernels.test_portable_on_cpu import Range, build_source
from tests.patterns.test_behind_rows import BEHIND, drawn
from tests.patterns.test_column_ranges import (
    HEAD,
    Parts,
    attended,
    attended_feed,
    attended_of_each_head,
    of_each_head_split,
    sliced,
    split,
)
from tests.patterns.test_products import feed_of
from tests.patterns.test_scattered import assigned, of_a_value, of_normalised_heads, of_normalised_rows
from tests.runtime.test_library_product import strided

SM_80 = ARCHITECTURES["sm_80"]
TILES = {4: Tile(16, 16, 16, 1, 1, 2), 2: Tile(16, 16, 32, 1, 1, 2)}  # by the size of an element


def packed_gate_read_elsewhere(b: Builder) -> list[str]:
    """Stores the gate, its first half and, range by range, the whole product."""
    t = linear(b)
    first, second = split_num_outputs(b, t)
    return [b("Concat", gate(b, first, second), first, t, axis=2)]


def dual_gate(b: Builder) -> list[str]:
    x = b.input("x", ("batch", "rows", K))
    halves = [b("MatMul", x, b.array(draw(K, N, seed=seed), f"weight{seed}")) for seed in range(2)]
    return [b("Mul", silu(b, halves[0]), halves[1])]


def dual_gate_of_gemms(b: Builder) -> list[str]:
    x = b.input("x", ("rows", K))
    halves = [
        b("Gemm", x, b.array(draw(N, K, seed=seed), f"w{seed}"), b.array(draw(N, seed=seed), f"b{seed}"), transB=1)
        for seed in range(2)
    ]
    return [b("Mul", b("Gelu", halves[0]), halves[1]), halves[1]]


def two_residuals(b: Builder) -> list[str]:
    t = b("Mul", linear(b), b.array(draw(N, seed=3), "scale"))
    first, second = b.input("first", ("batch", "rows", N)), b.input("second", ("rows", N))
    return [b("Add", second, b("Add", t, first))]


def adaptive_scale(b: Builder) -> list[str]:
    t, scale = linear(b), b.input("scale", ("batch", 1, N))
    return [b("Add", b("Mul", scale, t), b.input("residual", ("batch", "rows", N)))]


def third_of_a_wider_split(b: Builder) -> list[str]:
    qkv, packed = b("Split", linear(b, n=12), b.integers(4, 8), outputs=2, axis=-1)
    return [b("Softmax", qkv), gate(b, *b("Split", packed, outputs=2, axis=-1, num_outputs=2))]


def four_outputs(b: Builder) -> list[str]:
    values = [linear(b)]
    for _ in range(3):
        values.append(b("Tanh", values[-1]))
    return values


def masked_scores(b: Builder) -> list[str]:
    """Attention's scores: rhs of each batch and head, a mask that the heads of a batch share."""
    q, k = b.input("q", ("batch", 3, "rows", K)), b.input("keys", ("batch", 3, "rows", K))
    scores = b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2)))
    return [b("Add", b("Mul", scores, b.array(0.5)), b.input("mask", ("batch", 1, "rows", "rows")))]


def padded_scores(b: Builder) -> list[str]:
    q, k = b.input("q", ("batch", 3, "rows", K)), b.input("keys", ("batch", 3, K, "rows"))
    return [b("Add", b("MatMul", q, k), b.input("mask", ("batch", 1, 1, "rows")))]


def merged_heads(b: Builder) -> list[str]:
    """P times V with the heads behind the rows; k is as dynamic as m."""
    p, v = b.input("p", ("batch", 3, "rows", "rows")), b.input("values", ("batch", 3, "rows", K))
    t = b("Transpose", b("MatMul", p, v), perm=(0, 2, 1, 3))
    return [b("Reshape", t, b.integers(0, 0, 3 * K))]


def grouped_scores(b: Builder) -> list[str]:
    """Two heads of queries for each head of keys."""
    q, k = b.input("q", ("batch", 6, "rows", K)), b.input("keys", ("batch", 3, "rows", K))
    sizes = [b("Gather", b("Shape", k), b.integers(index)) for index in (0, 2)]
    wide = b("Concat", sizes[0], b.integers(3, 2), sizes[1], b.integers(K), axis=0)
    whole = b("Concat", sizes[0], b.integers(6), sizes[1], b.integers(K), axis=0)
    repeated = b("Reshape", b("Expand", b("Unsqueeze", k, b.integers(2)), wide), whole)
    scores = b("MatMul", q, b("Transpose", repeated, perm=(0, 1, 3, 2)))
    return [b("Add", scores, b.input("mask", ("batch", 1, "rows", "rows")))]


def constant_left(b: Builder) -> list[str]:
    t = b("MatMul", b.array(draw(N, K), "weight"), b.input("x", ("batch", K, "rows")))
    t = b("Relu", b("Add", t, b.array(draw(N, 1, seed=1), "bias")))
    return [b("Transpose", t, perm=(0, 2, 1))]


def image(b: Builder) -> list[str]:
    """A pointwise convolution of images: the weight is the lhs, its bias a column."""
    x, weight = b.input("x", ("batch", K, "rows", 4)), b.array(draw(N, K, 1, 1), "weight")
    t = b("Conv", x, weight, b.array(draw(N, seed=1), "bias"), kernel_shape=[1, 1])
    return [b("Add", b("Relu", t), b.input("residual", ("batch", N, "rows", 4)))]


def image_from_rows(b: Builder) -> list[str]:
    x = b("Transpose", b.input("x", ("batch", "rows", 4, K)), perm=(0, 3, 1, 2))
    t = b("Conv", x, b.array(draw(N, K, 1, 1), "weight"), b.array(draw(N, seed=1), "bias"), kernel_shape=[1, 1])
    return [b("Reshape", b("Transpose", b("Relu", t), perm=(0, 2, 3, 1)), b.integers(0, -1, N))]


def causal_scores(b: Builder) -> list[str]:
    q, k = b.input("q", ("batch", 3, "rows", K)), b.input("keys", ("batch", 3, "rows", K))
    scores = b("Mul", b("MatMul", q, b("Transpose", k, perm=(0, 1, 3, 2))), b.array(0.5))
    return [b("Where", b.input("mask", ("batch", 1, "rows", "rows"), BOOL), scores, b.array(-np.inf))]


def padding_fills_scores(b: Builder) -> list[str]:
    q, k = b.input("q", ("batch", 3, "rows", K)), b.input("keys", ("batch", 3, K, "rows"))
    lowest = b.array(np.finfo(np.float32).min)
    return [b("Where", b.input("padding", ("batch", 1, 1, "rows"), BOOL), lowest, b("MatMul", q, k))]


def masks_of_every_kind(b: Builder) -> list[str]:
    """A stored row, a column, a scalar and a tile choose among the value, a tensor and numbers."""
    t = linear(b)
    t = b("Where", b.mask(draw(N, seed=5) > 0, "stored"), t, b("Tanh", t))
    t = b("Where", b.input("column", ("rows", 1), BOOL), b.array(-65504.0), t)
    t = b("Where", b.input("scalar", (), BOOL), t, b.input("other", ("batch", "rows", N)))
    return [b("Where", b.input("tile", ("rows", N), BOOL), b("Neg", t), t)]


def transposed_mask(b: Builder) -> list[str]:
    """Masks that lie as the transposed product does."""
    t = b("Transpose", linear(b), perm=(0, 2, 1))
    t = b("Where", b.input("mask", ("batch", N, "rows"), BOOL), t, b.array(0.0))
    return [b("Where", b.mask(draw(N, 1, seed=6) > 0, "stored"), b.array(-np.inf), t)]


def masked_gate(b: Builder) -> list[str]:
    t = gate(b, *split_num_outputs(b, b("Where", b.mask(draw(N, seed=7) > 0, "stored"), linear(b), b.array(0.25))))
    return [b("Where", b.input("mask", ("batch", 1, 1), BOOL), t, b.array(-1.0))]


def heads_of_siblings(b: Builder) -> list[str]:
    """q, k and v of one input; k lies with its rows contiguous."""
    x, heads = b.input("x", ("batch", "rows", K)), []
    for seed, perm in enumerate(((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))):
        t = b(
            "Add", b("MatMul", x, b.array(draw(K, N, seed=seed), f"w{seed}")), b.array(draw(N, seed=seed), f"b{seed}")
        )
        heads.append(b("Transpose", b("Reshape", t, b.integers(0, 0, 2, N // 2)), perm=perm))
    heads[0] = b("Mul", heads[0], b.input("scale", (1,)))
    return heads


def window(b: Builder) -> list[str]:
    """Columns that are no part of the product: q of grouped queries."""
    t = b("Slice", linear(b, n=14), *map(b.integers, (3, 3 + N, 2)))
    return [b("Transpose", b("Reshape", t, b.integers(0, 0, 2, N // 2)), perm=(0, 2, 1, 3))]


def window_of_rows(b: Builder) -> list[str]:
    """The same of a weight [n, k], and of a tile."""
    x, residual = b.input("x", ("rows", K)), b.input("residual", ("rows", 14))
    t = b("Add", b("Gemm", x, b.array(draw(14, K), "weight"), transB=1), residual)
    return [b("Tanh", b("Slice", t, *map(b.integers, (5, 5 + N, 1))))]


def gate_of_windows(b: Builder) -> list[str]:
    """Value and gate are no parts of the product, and a residual has its columns."""
    both = b("Add", linear(b, n=21), b.input("residual", ("rows", 21)))
    return [gate(b, *(b("Slice", both, *map(b.integers, (start, start + N, 2))) for start in (3, 13)))]


def gate_of_windows_of_rows(b: Builder) -> list[str]:
    """The same of a weight [n, k]."""
    t = b("Gemm", b.input("x", ("rows", K)), b.array(draw(21, K), "weight"), b.array(draw(21), "c"), transB=1)
    return [gate(b, *(b("Slice", t, *map(b.integers, (start, start + N, 1))) for start in (0, 9)))]


def halves_in_turn(b: Builder) -> list[str]:
    """gpt-oss's gate of a weight [n, k]: a step from column to column of a half passes one of the other."""
    t = b("Gemm", b.input("x", ("rows", K)), b.array(draw(2 * N, K), "weight"), b.array(draw(2 * N), "c"), transB=1)
    t = b("Mul", t, b.input("scale", ("rows", 2 * N)))
    return [gate(b, *(b("Slice", t, *map(b.integers, (first, 2 * N, 1, 2))) for first in range(2)))]


def experts_in_turn(b: Builder) -> list[str]:
    """Three parts, of each expert's own weight and bias."""
    weight = b("Transpose", b.array(draw(3, 3 * N, K), "weight"), perm=(0, 2, 1))
    t = b("Add", b("MatMul", b.input("x", (3, "rows", K)), weight), b.array(draw(3, 1, 3 * N), "bias"))
    parts = b("Split", b("Reshape", t, b.integers(0, 0, N, 3)), outputs=3, axis=-1, num_outputs=3)
    first, second, third = (b("Squeeze", part, b.integers(-1)) for part in parts)
    return [gate(b, first, second), b("Tanh", third)]


def one_input_of_experts_in_turn(b: Builder) -> list[str]:
    """Every expert reads the same rows: experts and columns are one loop, of which a step passes the other half."""
    weight = b("Transpose", b.array(draw(3, 2 * N, K), "weight"), perm=(0, 2, 1))
    t = b("Add", b("MatMul", b.input("x", ("rows", K)), weight), b.array(draw(3, 1, 2 * N), "bias"))
    return [gate(b, *(b("Slice", t, *map(b.integers, (first, 2 * N, 2, 2))) for first in range(2)))]


GRAPHS = [
    packed_gate_read_elsewhere, dual_gate, dual_gate_of_gemms, two_residuals, adaptive_scale, third_of_a_wider_split,
    four_outputs, masked_scores, padded_scores, merged_heads, grouped_scores, constant_left, image, image_from_rows,
    causal_scores, padding_fills_scores, masks_of_every_kind, transposed_mask, masked_gate, heads_of_siblings,
    window, window_of_rows, gate_of_windows, gate_of_windows_of_rows, halves_in_turn, experts_in_turn,
    one_input_of_experts_in_turn,
]  # fmt: skip


def feeds(model: ModelProto) -> dict[str, np.ndarray]:
    sizes = {"batch": 2, "rows": 5}
    made = {}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        numbers = draw(*shape, seed=len(value.name))
        is_mask = value.type.tensor_type.elem_type == BOOL
        made[value.name] = np.asarray(numbers > 0 if is_mask else numbers, np.bool_ if is_mask else np.float32)
    return made


def small(variant: AnyVariant) -> AnyVariant:
    """The planned kernel with a tile that these sizes fill more than once."""
    if variant.family is POINTWISE:
        span = variant.tile.span
        return replace(variant, tile=PointwiseTile(8, 32 * span, span))
    if variant.family is LIBRARY:
        span = variant.tile.pointwise.span
        return replace(variant, tile=LibraryTile(PointwiseTile(8, 32 * span, span)))
    if variant.family is NORM:
        return variant
    variant = replace(variant, family=PORTABLE, tile=TILES[variant.spec.dtype.bytes])
    assert PORTABLE.why_not(variant.spec, variant.tile, ARCHITECTURES["sm_90a"]) is None
    return variant


def launch(variant: AnyVariant, arguments: Arguments, arrays: list[np.ndarray], inputs: int, folder: Path) -> None:
    ranges = (Range * len(arrays))(
        *(Range(array.ctypes.data, array.nbytes, index >= inputs) for index, array in enumerate(arrays))
    )
    tile = variant.tile
    tiles = math.ceil(arguments.m / tile.block_m) * math.ceil(arguments.n / tile.block_n)
    conflicts = ctypes.c_int()
    library = build_source(kernel_source(variant, SM_80), kernel_entry(variant), folder)
    failure = library.emulate(
        ctypes.byref(arguments), tiles, arguments.batch, tile.threads, 0, ranges, len(arrays), ctypes.byref(conflicts)
    )
    assert failure == b""


def misaligned(array: np.ndarray) -> np.ndarray:
    """A copy one element behind a 16-byte boundary: only accesses of single elements reach it."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + array.itemsize
    copy = memory[start:][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class Bound:
    """A node with its tensors as the bridge has bound them."""

    node: Node
    arrays: list[np.ndarray]
    outs: list[np.ndarray]
    arguments: Arguments
    element_bytes: list[int]


def bound(implementation: Implementation, values: dict[str, np.ndarray], lie=misaligned) -> Bound:
    attributes = node_attributes(implementation, "ab12")
    fields = ("axes", "problem", "arguments", "sizes", "out_types", "in_types")
    node = Node(**{name: attributes[name] for name in fields})
    arrays = [lie(values[tensor.name]) for tensor in implementation.fusion.inputs]
    shapes = [array.shape for array in arrays]
    made = zip(implementation.fusion.outputs, bridge().arguments(node, shapes)[1], strict=True)
    outs = [lie(np.full(shape, np.nan, tensor.dtype.numpy)) for tensor, shape in made]
    element_bytes = [tensor.dtype.bytes for tensor in implementation.fusion.inputs]
    arguments, _ = bridge().arguments(
        node,
        shapes,
        element_bytes=element_bytes,
        inputs=[array.ctypes.data for array in arrays],
        outputs=[out.ctypes.data for out in outs],
    )
    return Bound(node, arrays, outs, arguments, element_bytes)


def compute(
    implementation: Implementation, values: dict[str, np.ndarray], folder: Path, variant: int = -1
) -> list[np.ndarray]:
    """What the bridge and the kernel make of inputs; by default the last kernel, of misaligned tensors."""
    given = bound(implementation, values, misaligned if variant == -1 else np.ascontiguousarray)
    kernel = small(implementation.plans[0].variants[variant])
    launch(kernel, given.arguments, [*given.arrays, *given.outs], len(given.arrays), folder)
    return given.outs


def compute_behind_library(
    implementation: Implementation, values: dict[str, np.ndarray], folder: Path
) -> list[np.ndarray] | None:
    """The same with a product as the library is asked for it, by numpy; None where it is not asked."""
    (plan,) = implementation.plans
    given = bound(implementation, values)
    size, products, behind = bridge().library(
        given.node, given.arguments, Library.TF32, element_bytes=given.element_bytes
    )
    if not products:
        return None
    scratch = np.full(size // 4, np.nan, np.float32)
    for product in products:
        batch, m, n, k = product.batch, product.m, product.n, product.k
        lhs = strided(*memory_at(given.arrays, product.lhs_pointer), product.lhs, (batch, m, k))
        rhs = strided(*memory_at(given.arrays, product.rhs_pointer), product.rhs, (batch, k, n))
        strided(scratch, product.out_offset // 4, product.out, (batch, m, n))[...] = lhs @ rhs
    for part in range(plan.variants[0].spec.parts):
        behind.loads[part].pointer += scratch.ctypes.data
    arrays = [*given.arrays, scratch]
    launch(small(plan.library[-1]), behind, [*arrays, *given.outs], len(arrays), folder)
    return given.outs


def memory_at(arrays: list[np.ndarray], pointer: int) -> tuple[np.ndarray, int]:
    """The array that a pointer lies in, flat, and the element that it points to."""
    (array,) = (each for each in arrays if each.ctypes.data <= pointer < each.ctypes.data + each.nbytes)
    return array.reshape(-1), (pointer - array.ctypes.data) // array.itemsize


@pytest.mark.one_in(30)
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_kernel_behind_the_library_computes_what_the_graph_computes(graph, tmp_path: Path) -> None:
    b = Builder()
    model = b.model(*graph(b))
    (site,) = analyse_model(model, [SM_80]).sites
    feed = feeds(model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = stored | feed | run_inputs(model, site.fusion, feed)
    taken = bool(site.plans[0].library)
    actual = compute_behind_library(site.one_kernel, values, tmp_path) if taken else None
    if actual is None:
        pytest.skip("in two levels")
    expected = run_values(model, [tensor.name for tensor in site.fusion.outputs], feed)
    for wanted, found in zip(expected, actual, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("epilogue_only", [False, True])
def test_the_kernel_computes_what_the_graph_computes(graph, epilogue_only: bool, tmp_path: Path) -> None:
    b = Builder()
    model = b.model(*graph(b))
    (site,) = analyse_model(model, [SM_80], fp32="tf32" if epilogue_only else "exact").sites
    implementation = site.epilogue_only if epilogue_only else site.one_kernel
    if implementation is None:
        pytest.skip("no epilogue alone")
    feed = feeds(model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = stored | feed | run_inputs(model, implementation.fusion, feed)
    actual = compute(implementation, values, tmp_path)
    expected = run_values(model, [tensor.name for tensor in implementation.fusion.outputs], feed)
    for wanted, found in zip(expected, actual, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_normalised_heads_turn(rotate: Rotate, norm: Rotate, together: bool, variant: int, tmp_path: Path) -> None:
    check_rows(normalised(rotate, norm, together=together), variant, tmp_path)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("head", [16, 20])
@pytest.mark.parametrize("value", [transposed, as_it_lies, beside_others, of_a_split])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_values_turn_by_themselves(rotate: Rotate, value: Turning, head: int, variant: int, tmp_path: Path) -> None:
    check_rows(turning(value, rotate, head=head), variant, tmp_path)


@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("value", [of_a_value, of_normalised_rows, of_normalised_heads])
def test_values_turn_that_are_assigned_to_slices(value, variant: int, tmp_path: Path) -> None:
    b = Builder(FLOAT, opset=18)
    check_rows(b.model(assigned(b, value(b))), variant, tmp_path)


@pytest.mark.parametrize("variant", [0, -1])
def test_heads_turn_beside_each_other(variant: int, tmp_path: Path) -> None:
    check_rows(in_rows(), variant, tmp_path)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("behind", BEHIND)
def test_rows_are_normalised_with_what_is_behind(behind, variant: int, tmp_path: Path) -> None:
    b = Builder(FLOAT, opset=18)
    check_rows(b.model(behind(b)), variant, tmp_path)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("rows", [("batch", "rows"), (7, 3)])
@pytest.mark.parametrize("ranges", [*RANGES, *PLACES])
def test_ranges_of_a_condition_are_read_where_they_lie(
    ranges: Ranges, rows: tuple[int | str, int | str], variant: int, tmp_path: Path
) -> None:
    model = adaptive(ranges, rows=rows)
    for index, site in enumerate(analyse_model(model, [SM_80], fp32="exact").sites):
        (tmp_path / str(index)).mkdir()
        check_site(model, site, variant, tmp_path / str(index))


def check_rows(model: ModelProto, variant: int, folder: Path) -> None:
    (site,) = analyse_model(model, [SM_80]).sites
    check_site(model, site, variant, folder)


def check_site(model: ModelProto, site: Site, variant: int, folder: Path) -> None:
    feed = drawn(model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = stored | feed | run_inputs(model, site.fusion, feed)
    expected = run_values(model, [tensor.name for tensor in site.fusion.outputs], feed)
    for wanted, found in zip(expected, compute(site.implementation, values, folder, variant), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("graph", REPEATED, ids=lambda graph: graph.__name__)
@pytest.mark.parametrize("variant", [0, -1])
def test_a_kernel_repeats_a_product(graph, variant: int, tmp_path: Path) -> None:
    b = Builder()
    model = b.model(graph(b))
    (site,) = analyse_model(model, [SM_80]).sites
    feed = feed_of(model, batch=2, height=3, width=4, length=8)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values = stored | feed | run_inputs(model, site.implementation.fusion, feed)
    (actual,) = compute(site.implementation, values, tmp_path, variant)
    (expected,) = run_values(model, [site.fusion.outputs[0].name], feed)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("order", ["kn", "nk"])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 8), (8, 1), (2, 3), (4, 8), (1, 12)])
def test_the_widest_kernel_reads_sizes_of_one(order: str, k: int, n: int, tmp_path: Path) -> None:
    """An axis of size 1 is contiguous in any layout: width and order of the weight must mean the same axis."""
    b = Builder()
    x, weight = b.input("x", ("rows", k)), draw(k, 2 * n, seed=k)
    t = b("MatMul", x, b.array(weight)) if order == "kn" else b("Gemm", x, b.array(weight.T.copy()), transB=1)
    first, second = b("Split", t, outputs=2, axis=-1, num_outputs=2)
    model = b.model(b("Mul", first, b("Sigmoid", second)))
    (site,) = analyse_model(model, [SM_80], fp32="exact").sites
    feed = {"x": draw(8, k, seed=n).astype(np.float32)}
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (actual,) = compute(site.one_kernel, stored | feed, tmp_path, variant=0)
    (expected,) = run_values(model, [site.fusion.outputs[0].name], feed)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("shape", [(32, 48), (1, 48), (32, 1), (1, 1), (2, 32, 48), (2, 1, 48)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("epilogue_only", [False, True])
def test_the_widest_kernel_reads_masks(
    shape: tuple[int, ...], transposed: bool, epilogue_only: bool, tmp_path: Path
) -> None:
    """16 elements at a time, also where rows are contiguous; other tensors of the epilogue by fours."""
    b = Builder()
    t = b("MatMul", b.input("x", (2, 32, 8)), b.array(draw(8, 48), "weight"))
    if transposed:
        t, shape = b("Transpose", t, perm=(0, 2, 1)), (*shape[:-2], *shape[-2:][::-1])
    mask = b.input("mask", shape, BOOL)
    model = b.model(
        b("Where", mask, b("Add", t, b.input("residual", (2, 48, 32) if transposed else (2, 32, 48))), b.array(-np.inf))
    )
    (site,) = analyse_model(model, [SM_80], fp32="tf32" if epilogue_only else "exact").sites
    implementation = site.epilogue_only if epilogue_only else site.one_kernel
    assert implementation is not None
    feed = feeds(model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    (actual,) = compute(
        implementation, stored | feed | run_inputs(model, implementation.fusion, feed), tmp_path, variant=0
    )
    (expected,) = run_values(model, [implementation.fusion.outputs[0].name], feed)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("parts", [split, sliced])
@pytest.mark.parametrize("of_values", [HEAD, 2 * HEAD])
def test_kernels_of_column_ranges_compute_what_an_attention_reads(parts: Parts, of_values: int, tmp_path: Path) -> None:
    """Also of a range as the product makes it, stored beside its neighbour's or alone."""
    b = Builder()
    model = b.model(*attended(b, parts, of_values=of_values))
    sites = [site for site in analyse_model(model, [SM_80], fp32="exact").sites if site.match.shared]
    assert [len(site.fusion.outputs) for site in sites] == ([1, 2] if of_values == HEAD else [1, 1, 1])
    feed = attended_feed(FLOAT)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for index, site in enumerate(sites):
        values = stored | feed | run_inputs(model, site.fusion, feed)
        expected = run_values(model, [tensor.name for tensor in site.fusion.outputs], feed)
        for variant in (0, -1):
            folder = tmp_path / f"{index}_{variant}"
            folder.mkdir()
            actual = compute(site.one_kernel, values, folder, variant)
            for wanted, found in zip(expected, actual, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("variant", [0, -1])
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_store_a_query_a_key_and_a_value_of_each_head_apart(bias: bool, variant: int, tmp_path: Path) -> None:
    """Of a weight that is stored part by part, with a bias that is not."""
    model = attended_of_each_head(of_each_head_split, bias, FLOAT)
    site = next(site for site in analyse_model(model, [SM_80], fp32="exact").sites if site.match.products)
    assert [len(site.fusion.outputs), *site.transposed] == [3, "weight"]
    feed = {"x": draw(2, 8, K).astype(np.float32)}  # the first kernel stores four keys at once
    expected = run_values(model, [tensor.name for tensor in site.fusion.outputs], feed)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    transpose(stored["weight"], site.transposed["weight"])
    put_in_order(model)
    values = feed | {name: numpy_helper.to_array(tensor).copy() for name, tensor in stored.items()}
    for wanted, found in zip(expected, compute(site.one_kernel, values, tmp_path, variant), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
