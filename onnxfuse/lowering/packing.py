"""Plans -> what ships: the source and launch rule of every kernel, the archive of machine code, a node's attributes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from onnxfuse.device import PTX, DeviceSpec
from onnxfuse.graph.archive import BATCH_LEVEL, FACTOR_BATCH_LEVELS, Mapped, Record, TensorMap, pack
from onnxfuse.graph.rewrite import Replacement
from onnxfuse.ir.fusion import Fusion, Pointwise, part_text
from onnxfuse.kernels.emit import kernel_entry, kernel_source
from onnxfuse.limits import MAX_LOADS
from onnxfuse.lowering.site import Form
from onnxfuse.progress import Progress
from onnxfuse.runtime.compile import CompiledImage, compile_cached, shares_compilation
from onnxfuse.schedule.kernel_family import MapRule
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.pointwise_tile import PointwiseSpec
from onnxfuse.schedule.variant import AnyVariant
from onnxfuse.settings import cache_dir, compile_jobs


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels by source and architecture."""

    images: dict[tuple[str, str], CompiledImage]


def compile_forms(forms: Iterable[Form], progress: Progress | None = None) -> Kernels:
    """Compile each distinct kernel once, and PTX beside the architecture whose compilation makes it anyway.

    An error, or Ctrl-C, waits for the compilations that have begun, and no other begins.

    Raises:
        CompileError: NVRTC refused a kernel.
    """
    variants = [pair for form in forms for pair in form.variants]
    wanted = {(kernel_source(variant, device), device.arch): device for device, variant in variants}
    groups = _groups(wanted)
    images: dict[tuple[str, str], CompiledImage] = {}
    folder = cache_dir()
    pool = ThreadPoolExecutor(compile_jobs())
    try:
        jobs = {pool.submit(compile_cached, source, devices, folder): (source, devices) for source, devices in groups}
        for job in as_completed(jobs):
            source, devices = jobs[job]
            images |= {(source, device.arch): image for device, image in zip(devices, job.result(), strict=True)}
            if progress is not None:
                progress("compiling kernels", len(images), len(wanted))
    finally:
        pool.shutdown(cancel_futures=True)
    return Kernels(images)


def _groups(wanted: Mapping[tuple[str, str], DeviceSpec]) -> list[tuple[str, tuple[DeviceSpec, ...]]]:
    """What to compile at once: each kernel for each architecture, PTX with another one where that makes it."""
    found: list[tuple[str, tuple[DeviceSpec, ...]]] = []
    beside = {source for (source, _), device in wanted.items() if shares_compilation(device)}
    for (source, arch), device in wanted.items():
        ptx = wanted.get((source, PTX)) if shares_compilation(device) else None
        if arch != PTX or source not in beside:
            found.append((source, (device,) if ptx is None else (device, ptx)))
    return found


def pack_forms(forms: Sequence[Form], kernels: Kernels) -> tuple[bytes, list[str]]:
    """The archive, and the kernel id of each form: those with equal launch rules share one."""
    names = [_kernel_name(form) for form in forms]
    records: dict[str, list[Record]] = {}
    for form, name in zip(forms, names, strict=True):
        if name not in records:
            records[name] = [_record(name, device, variant, kernels) for device, variant in form.variants]
    return pack([record for group in records.values() for record in group]), names


def _kernel_name(form: Form) -> str:
    parts = [
        (device.arch, kernel_source(variant, device), str(variant.min_m), str(variant.max_m))
        for device, variant in form.variants
    ]
    return hashlib.sha256("\0".join(text for part in parts for text in part).encode()).hexdigest()[:16]


def _record(name: str, device: DeviceSpec, variant: AnyVariant, kernels: Kernels) -> Record:
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
    return sum(1 << tensor for tensor, access in _tensors(spec) if access.turned)


def _tensor_map(rule: MapRule | None) -> TensorMap:
    if rule is None:
        return TensorMap(Mapped.NOTHING)
    tensor = Mapped[rule.tensor.upper()]
    return TensorMap(tensor, rule.index, rule.rows_contiguous, rule.swizzle, rule.box_inner, rule.box_outer)


def replacement(form: Form, kernel: str) -> Replacement:
    """How a form is written into the model."""
    fusion = form.fusion
    return Replacement(
        graph=form.graph,
        nodes=form.match.nodes,
        copied=form.match.copied,
        place=form.match.place,
        folded=form.match.folded,
        constants=form.match.constants,
        kept=form.kept,
        inputs=tuple(tensor.name for tensor in fusion.inputs),
        outputs=tuple(tensor.name for tensor in fusion.outputs),
        name=f"{fusion.anchor}/{form.kind}",
        attributes=node_attributes(form, kernel),
        kind=form.kind,
        shapes=form.match.shapes,
    )


def node_attributes(form: Form, kernel: str) -> dict[str, str]:
    """The fused node's attributes; their grammar is in artifact.py."""
    fusion = form.fusion
    held = {axis for tensor in (*fusion.inputs, *fusion.outputs) for axis in tensor.axes}
    known = [axis for axis in fusion.axes if axis.size is not None and axis.name in held]
    return {
        "kernel": kernel,
        "axes": fusion.einops,
        "sizes": " ".join(f"{axis.name}={axis.size}" for axis in known),
        "problem": str(form.mapping),
        "arguments": _arguments(fusion),
        "in_types": ",".join(tensor.dtype.name for tensor in fusion.inputs),
        "out_types": ",".join(tensor.dtype.name for tensor in fusion.outputs),
        **_math(form),
        "fusion": str(fusion),
    }


def _math(form: Form) -> dict[str, str]:
    """How the kernels multiply, those of each architecture."""
    found = ",".join(sorted({variant.spec.math for _, variant in form.variants}))
    return {"math": found} if found else {}


def _arguments(fusion: Pointwise) -> str:
    """Which input is what: `lhs=0 rhs=1[p=0],1[p=1] loads=2[p=0],2[p=1] outs=0`."""
    parts = fusion.parts if isinstance(fusion, Fusion) else ()
    first_operand = len(fusion.inputs) - len(fusion.operands)
    groups = {
        "lhs": ["0"] if parts else [],
        "rhs": [_indexed(1 + part.tensor, part.part, part.start) for part in parts],
        "loads": [_indexed(first_operand + load.operand, load.part, load.start) for load in fusion.loads],
        "outs": [_indexed(fusion.outputs.index(out.tensor), out.part) for out in fusion.outs],
    }
    return " ".join(f"{name}={','.join(entries)}" for name, entries in groups.items() if entries)


def _indexed(index: int, part: int | None, start: int | None = None) -> str:
    return f"{index}{part_text(part, start)}"
