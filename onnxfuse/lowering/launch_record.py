"""One variant of a kernel -> its record in the archive: its machine code, and which problems it takes."""

from __future__ import annotations

from onnxfuse.device import DeviceSpec
from onnxfuse.graph.archive import (
    FIRST_LOAD,
    FIRST_OUT,
    TENSORS,
    Library,
    Mapped,
    QuantizedRhs,
    Record,
    TensorFlag,
    TensorMap,
)
from onnxfuse.kernels.emit import kernel_entry, kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.schedule.attention_tile import AttentionSpec
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.library_tile import LibrarySpec
from onnxfuse.schedule.pointwise_tile import PointwiseSpec
from onnxfuse.schedule.variant import AnyVariant

_IN_RUNS = {"m": TensorFlag.ROWS_IN_RUNS, "n": TensorFlag.COLUMNS_IN_RUNS, "batch": TensorFlag.BATCHES_IN_RUNS}


def launch_record(name: str, device: DeviceSpec, variant: AnyVariant, kernels: Kernels) -> Record:
    """The record of a variant, which all implementations with the kernel id `name` share."""
    spec, launch = variant.spec, variant.family.launch(variant.spec, variant.tile, device)
    lhs, rhs = _factor_alignments(spec)
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
        flags=_flags(spec),
        quantized=_quantized(spec),
        library=Library[spec.math.upper()] if isinstance(spec, LibrarySpec) else Library.NONE,
    )


def _factor_alignments(spec: KernelSpec | PointwiseSpec | LibrarySpec | AttentionSpec) -> tuple[int, int]:
    """Of lhs and rhs; 0 without a product. The library takes any address of an element."""
    if isinstance(spec, LibrarySpec):
        return spec.product.dtype.bytes, spec.product.dtype.bytes
    lhs, rhs = [_alignment(spec.checked, factor) for factor in spec.factors] or (0, 0)
    if isinstance(spec, KernelSpec) and spec.quantization is not None:  # no kernel looks at how integers are aligned
        return lhs, spec.rhs_width
    return lhs, rhs


def _quantized(spec: KernelSpec | PointwiseSpec | LibrarySpec | AttentionSpec) -> QuantizedRhs | None:
    form = spec.quantization if isinstance(spec, KernelSpec) else None
    if form is None or not isinstance(spec, KernelSpec):
        return None
    zero_points = spec.zero_points_width if form.zero_points else 0
    return QuantizedRhs(form.bits, form.block, form.scale.bytes * spec.scales_width, zero_points)


def _alignment(checked: bool, access: Access) -> int:
    """Bytes that the launch rule asks of an address and its pitches; a kernel that checks them itself takes any."""
    return access.dtype.bytes * (1 if checked else access.width)


def _flags(spec: KernelSpec | PointwiseSpec | LibrarySpec | AttentionSpec) -> tuple[int, ...]:
    """How the kernel reaches every tensor that a record may have."""
    loads = enumerate(spec.loads, FIRST_LOAD)
    outs = enumerate(spec.outs, FIRST_OUT)
    flags = {tensor: _flags_of(access) for tensor, access in (*enumerate(spec.factors), *loads, *outs)}
    return tuple(flags.get(tensor, 0) for tensor in range(TENSORS))


def _flags_of(access: Access) -> int:
    loops = sum(_IN_RUNS[loop] for loop in access.two_levels)
    return loops | (TensorFlag.TRANSPOSED if access.transposed else 0)


def _tensor_map(rule: MapRule | None) -> TensorMap:
    if rule is None:
        return TensorMap(Mapped.NOTHING)
    tensor = Mapped[rule.tensor.upper()]
    return TensorMap(tensor, rule.index, rule.rows_contiguous, rule.swizzle, rule.box_inner, rule.box_outer)
