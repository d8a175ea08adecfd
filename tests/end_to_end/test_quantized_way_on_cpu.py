"""Weights of few bits from a graph to the numbers, without a GPU: plan, bridge, tensor maps, the kernel emulated."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxfuse.device import ARCHITECTURES
from onnxfuse.graph.archive import pack
from onnxfuse.graph.packed_data import Packing, packed
from onnxfuse.graph.rows_in_turn import RowsInTurn, part_by_part
from onnxfuse.kernels.emit import kernel_entry, kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.lowering.launch_record import launch_record
from onnxfuse.lowering.site import Implementation
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.variant import AnyVariant
from tests.helpers.bridge_hooks import Arguments, Box, Node, bridge
from tests.helpers.kernel_problem import READY
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT16, Builder
from tests.helpers.quantized import Form, quantized_model
from tests.helpers.reference_fusion import evaluate
from tests.helpers.tensor_maps import MAP_BYTES
from tests.kernels.test_hopper_on_cpu import HostMap, build
from tests.kernels.test_portable_on_cpu import Range, build_source

SM_90A = ARCHITECTURES["sm_90a"]
M, K, N = 20, 288, 160
HALF = 2.0**-10  # a unit in the last place of what is near 1


def dual_gate(b: Builder, x: str) -> str:
    up, active = (b("MatMul", x, b.array(draw(K, N, seed=seed) / K**0.5, f"w{seed}")) for seed in range(2))
    return b("Mul", up, b("Relu", active))


def packed_gate(b: Builder, x: str) -> str:
    t = b("MatMul", x, b.array(draw(K, 2 * N) / K**0.5, "w"))
    up, active = b("Split", t, outputs=2, axis=1, num_outputs=2)
    return b("Mul", up, b("Relu", active))


def gate_in_turn(b: Builder, x: str) -> str:
    """gpt-oss's: the rows of its integers, scales and zero points are stored part by part, its bias is not."""
    t = b("Add", b("MatMul", x, b.array(draw(K, 2 * N) / K**0.5, "w")), b.array(draw(2 * N), "bias"))
    up, active = (b("Slice", t, *map(b.integers, (first, 2 * N, 1, 2))) for first in range(2))
    return b("Mul", up, b("Relu", active))


def residual(b: Builder, x: str) -> str:
    return b("Add", b("MatMul", x, b.array(draw(K, N) / K**0.5, "w")), b.input("skip", (M, N)))


def window(b: Builder, x: str) -> str:
    """Columns that are no equal part of a wider weight."""
    t = b("MatMul", x, b.array(draw(K, N + 72) / K**0.5, "w"))
    return b("Relu", b("Slice", t, b.integers(72), b.integers(N + 72), b.integers(1)))


def dequantized(b: Builder, x: str) -> str:
    """Signed integers with n innermost."""
    numbers = np.random.default_rng(0).integers(-8, 8, (K, N))
    b.initializers.append(helper.make_tensor("q", TensorProto.INT4, (K, N), numbers.reshape(-1)))
    made = b("DequantizeLinear", "q", b.array(draw(K // 32, N) / K), axis=0, block_size=32)
    return b("Relu", b("MatMul", x, made))


CASES = [
    (dual_gate, Form(8, 64, True)), (packed_gate, Form(4, 16, True)), (packed_gate, Form(4, 128, True, flat=True)),
    (gate_in_turn, Form(4, 32, True, flat=True)), (residual, Form(4, 32)), (window, Form(4, 32, True, flat=True)),
    (dequantized, None),
]  # fmt: skip


def model_of(graph: Callable[[Builder, str], str], form: Form | None) -> ModelProto:
    b = Builder(FLOAT16, opset=21)
    model = b.model(graph(b, b.input("x", (M, K))), ir_version=10)
    return model if form is None else quantized_model(model, form)


def values_of(model: ModelProto, implementation: Implementation) -> dict[str, np.ndarray]:
    """What the kernel is given: the model's weights, as they are to be stored, and random inputs."""
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    raw = {each.name: numpy_helper.from_array(numpy_helper.to_array(each)).raw_data for each in model.graph.initializer}
    for name, order in implementation.transposed.items():
        if isinstance(order, RowsInTurn):
            data = np.frombuffer(part_by_part(order, raw[name]), values[name].dtype)
            values[name] = data.reshape(values[name].shape)
        elif isinstance(order, Packing):
            values[name] = np.frombuffer(packed(order, raw[name]), np.uint8).reshape(order.dims)
        else:
            values[name] = values[name].transpose(order)
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        values[value.name] = draw(*shape, seed=len(value.name)).astype(np.float16)
    return values


def aligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 256, np.uint8)
    copy = memory[-memory.ctypes.data % 256 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def host_maps(boxes: list[Box | None]) -> tuple[np.ndarray, int, list[HostMap]]:
    """The kernel's second argument in host memory, where it begins, and what it points to."""
    memory = np.zeros(MAP_BYTES * len(boxes) + 64, np.uint8)
    start, kept = -memory.ctypes.data % 64, []
    for place, box in enumerate(boxes):
        if box is None:
            continue
        unused = [0] * (5 - len(box.extents))
        strides = (box.element_bytes, *box.strides, *unused)
        kept.append(HostMap(box.pointer, box.element_bytes, len(box.extents), box.swizzle,
                            (*box.extents, *unused), strides, (*box.box, *unused)))  # fmt: skip
        memory[start + place * MAP_BYTES :][:8].view(np.uint64)[0] = ctypes.addressof(kept[-1])
    return memory, memory.ctypes.data + start, kept


def record_of(variant: AnyVariant) -> bytes:
    """The archive of one kernel; what its code is means nothing."""
    image = SimpleNamespace(data=b"\x7fELF")
    kernels = Kernels({(kernel_source(variant, SM_90A), SM_90A.arch): image})  # type: ignore[dict-item]
    return pack([launch_record("ab12", SM_90A, variant, kernels)])


def compute(
    implementation: Implementation, values: dict[str, np.ndarray], folder: Path, variant: AnyVariant
) -> list[np.ndarray]:
    """What the bridge and a kernel make of inputs."""
    attributes = node_attributes(implementation, "ab12")
    fields = ("axes", "problem", "arguments", "sizes", "out_types", "in_types")
    node = Node(**{name: attributes[name] for name in fields})
    fusion = implementation.fusion
    arrays = [aligned(values[tensor.name]) for tensor in fusion.inputs]
    shapes = [array.shape for array in arrays]
    outs = [aligned(np.full(shape, np.nan, np.float16)) for shape in bridge().arguments(node, shapes)[1]]
    sizes = [array.itemsize for array in arrays]
    addresses = [[array.ctypes.data for array in group] for group in (arrays, outs)]
    arguments: Arguments = bridge().arguments(
        node, shapes, element_bytes=sizes, inputs=addresses[0], outputs=addresses[1]
    )[0]
    archive, rule = record_of(variant), variant.family.launch(variant.spec, variant.tile, SM_90A)
    assert bridge().choose(archive, node, arguments, element_bytes=sizes) == 0
    boxes = iter(bridge().maps(archive, node, arguments, 0, element_bytes=sizes))
    every, weights = [*arrays, *outs], {tensor.name for group in fusion.stored_rhs for tensor in group}
    uses = [READY if tensor.name in weights else 0 for tensor in fusion.inputs] + [1] * len(outs)
    ranges = (Range * len(every))(
        *(Range(each.ctypes.data, each.nbytes, use) for each, use in zip(every, uses, strict=True))
    )
    source = kernel_source(variant, SM_90A)
    tiles = math.ceil(arguments.m / rule.block_m) * math.ceil(arguments.n / rule.block_n)
    if not rule.maps:
        few_rows = build_source(source, kernel_entry(variant), folder)
        conflicts = ctypes.byref(ctypes.c_int())
        failed = few_rows.emulate(ctypes.byref(arguments), tiles, 1, rule.threads, 0, ranges, len(every), conflicts)
        assert failed == b""
        return outs
    memory, maps, kept = host_maps([None if each is None else next(boxes) for each in rule.maps])
    library = build(SimpleNamespace(source=source, launch=rule), folder)  # type: ignore[arg-type]
    blocks = min(2, tiles) * rule.cluster
    failed = library.emulate(
        ctypes.byref(arguments), ctypes.c_void_p(maps), blocks, rule.threads, 0, ranges, len(every)
    )
    assert (failed, bool(memory.size), bool(kept)) == (b"", True, True)
    return outs


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("graph", "form"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_kernel_computes_what_the_graph_computes(
    graph: Callable[[Builder, str], str], form: Form | None, tmp_path: Path
) -> None:
    model = model_of(graph, form)
    found = analyse_model(model, [SM_90A])
    (site,) = found.sites
    implementation = site.one_kernel
    values = values_of(model, implementation)
    (expected,) = evaluate(site.fusion, values)
    # Sums of K products of about 1 / sqrt(K), factors rounded to fp16 as their product and what is stored are.
    bound = 4 * HALF * max(np.abs(expected).max(), 1.0)
    tried = {variant.family.name: variant for variant in reversed(list(kernels_of(implementation)))}
    assert len(tried) == 2
    for name, variant in tried.items():
        (tmp_path / name).mkdir()
        (actual,) = compute(implementation, values, tmp_path / name, variant)
        assert np.abs(actual.astype(np.float64) - expected).max() <= bound, name


def kernels_of(implementation: Implementation) -> Iterator[AnyVariant]:
    """Those of a plan, and for each tile that ranked behind them."""
    (plan,) = implementation.plans
    first = plan.variants[0]
    yield first
    for _, entry in plan.ranked[0].tiles:
        yield replace(first, family=entry.family, tile=entry.tile)
