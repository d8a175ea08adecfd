"""One variant of a kernel -> its record in the archive: its machine code, and which problems it takes."""

from __future__ import annotations

from onnxfuse.device import DeviceSpec
from onnxfuse.graph.archive import BATCH_LEVEL, FACTOR_BATCH_LEVELS, Mapped, Record, TensorMap
from onnxfuse.kernels.emit import kernel_entry, kernel_source
from onnxfuse.limits import MAX_LOADS
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.pointwise_tile import PointwiseSpec
from onnxfuse.schedule.variant import AnyVariant


def launch_record(name: str, device: DeviceSpec, variant: AnyVariant, kernels: Kernels) -> Record:
    """The record of a variant, which all implementations with the kernel id `name` share."""
    spec, launch = variant.spec, variant.family.launch(variant.spec, variant.tile, device)
    lhs, rhs = [_alignment(spec.checked, factor) for factor in spec.factors] or (0, 0)
    return Record(
        kernel=name,
        entry=kernel_entry(variant),
        capability=device.capability,
        flavour=device.flavour,
        min_m=variant.min_m,
        max_m=variant.max_m,
        block_m=launch.block_m,
        block_n=launch.block_n,
        threads=launch.threads,
        shared_bytes=launch.shared_bytes,
        lhs_alignment=lhs,
        rhs_alignment=rhs,
        load_alignments=tuple(_alignment(spec.checked, load) for load in spec.loads),
        out_alignments=tuple(_alignment(spec.checks_outs, out) for out in spec.outs),
        image=kernels.images[kernel_source(variant, device), device.arch].data,
        cluster=launch.cluster,
        maps=tuple(map(_tensor_map, launch.maps)),
        two_levels=_two_levels(spec),
        turned=_turned(spec),
    )


def _alignment(checked: bool, access: Access) -> int:
    """Bytes that the launch rule asks of an address and its pitches; a kernel that checks them itself takes any."""
    return access.dtype.bytes * (1 if checked else access.width)


def _tensors(spec: KernelSpec | PointwiseSpec) -> list[tuple[int, Access]]:
    """Every tensor with its place in the record's bits: lhs, rhs, loads, outs."""
    loads = ((2 + index, load) for index, load in enumerate(spec.loads))
    outs = ((2 + MAX_LOADS + index, out) for index, out in enumerate(spec.outs))
    return [*enumerate(spec.factors), *loads, *outs]


def _two_levels(spec: KernelSpec | PointwiseSpec) -> int:
    """The record's bits: which loops of which tensors the kernel walks in two levels."""
    walked = [(tensor, loop) for tensor, access in _tensors(spec) for loop in access.two_levels]
    return sum({_level_bit(tensor, loop) for tensor, loop in walked})


def _level_bit(tensor: int, loop: str) -> int:
    if loop != "batch":
        return 1 << 2 * tensor + "mn".index(loop)
    return FACTOR_BATCH_LEVELS[tensor] if tensor < len(FACTOR_BATCH_LEVELS) else BATCH_LEVEL


def _turned(spec: KernelSpec | PointwiseSpec) -> int:
    """The record's bits: which tensors are accessed down their rows."""
    return sum(1 << tensor for tensor, access in _tensors(spec) if access.transposed)


def _tensor_map(rule: MapRule | None) -> TensorMap:
    if rule is None:
        return TensorMap(Mapped.NOTHING)
    tensor = Mapped[rule.tensor.upper()]
    return TensorMap(tensor, rule.index, rule.rows_contiguous, rule.swizzle, rule.box_inner, rule.box_outer)
