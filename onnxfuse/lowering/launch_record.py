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
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.variant import AnySpec, AnyVariant

_IN_RUNS = {"m": TensorFlag.ROWS_IN_RUNS, "n": TensorFlag.COLUMNS_IN_RUNS, "batch": TensorFlag.BATCHES_IN_RUNS}


def launch_record(name: str, device: DeviceSpec, variant: AnyVariant, kernels: Kernels) -> Record:
    """The record of a variant, which all implementations with the kernel id `name` share."""
    spec, launch = variant.spec, variant.family.launch(variant.spec, variant.tile, device)
    lhs, rhs = spec.factor_alignments
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
        load_alignments=tuple(load.alignment(spec.checked) for load in spec.loads),
        out_alignments=tuple(out.alignment(spec.checks_outs) for out in spec.outs),
        image=kernels.images[kernel_source(variant, device), device.arch].data,
        cluster=launch.cluster,
        early_depth=launch.early_depth,
        full_early_depth=max(launch.early_depth, launch.full_early_depth),
        maps=tuple(map(_tensor_map, launch.maps)),
        flags=_flags(spec),
        quantized=QuantizedRhs(*spec.quantized_access) if spec.quantized_access else None,
        library=Library[spec.library.upper()],
    )


def _flags(spec: AnySpec) -> tuple[int, ...]:
    """How the kernel reaches every tensor that a record may have."""
    loads = enumerate(spec.loads, FIRST_LOAD)
    outs = enumerate(spec.outs, FIRST_OUT)
    flags = {tensor: _flags_of(access) for tensor, access in (*enumerate(spec.factors), *loads, *outs)}
    return tuple(flags.get(tensor, 0) for tensor in range(TENSORS))


def _flags_of(access: Access) -> int:
    loops = sum(_IN_RUNS[loop] for loop in access.two_levels)
    return loops | access.transposed * TensorFlag.TRANSPOSED | access.copied * TensorFlag.COPIED


def _tensor_map(rule: MapRule | None) -> TensorMap:
    if rule is None:
        return TensorMap(Mapped.NOTHING)
    tensor = Mapped[rule.tensor.upper()]
    return TensorMap(tensor, rule.index, rule.rows_contiguous, rule.swizzle, rule.box_inner, rule.box_outer)
