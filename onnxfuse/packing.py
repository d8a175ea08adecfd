"""Plans -> what ships: the source and launch rule of every kernel, the archive of machine code, a node's attributes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from onnxfuse import hopper_tile
from onnxfuse.artifact import BATCH_LEVEL, FACTOR_BATCH_LEVELS, MAX_LOADS, Mapped, Record, TensorMap, pack
from onnxfuse.device import PTX, DeviceSpec
from onnxfuse.dtypes import DType
from onnxfuse.fusion import Fusion, Pointwise, part_text
from onnxfuse.kernel_spec import KernelSpec
from onnxfuse.kernels import pointwise
from onnxfuse.kernels.emit import ENTRY, emit
from onnxfuse.kernels.hopper import emit as emit_hopper
from onnxfuse.plan import Variant
from onnxfuse.pointwise_plan import PointwiseVariant
from onnxfuse.pointwise_tile import PointwiseSpec
from onnxfuse.progress import Progress
from onnxfuse.report import axes_text
from onnxfuse.rewrite import Replacement
from onnxfuse.runtime.compile import CompiledImage, compile_cached, shares_compilation
from onnxfuse.settings import cache_dir, compile_jobs
from onnxfuse.site import AnyVariant, Form
from onnxfuse.tile_footprint import shared_bytes


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


def kernel_source(variant: AnyVariant, device: DeviceSpec) -> str:
    """The CUDA source of a variant."""
    if isinstance(variant, PointwiseVariant):
        return pointwise.emit(variant.spec)
    if variant.hopper is None:
        return emit(variant.spec)
    return emit_hopper(variant.spec, variant.hopper, device.shared_bytes)


def _record(name: str, device: DeviceSpec, variant: AnyVariant, kernels: Kernels) -> Record:
    spec = variant.spec
    return Record(
        kernel=name,
        capability=device.capability,
        flavour=device.flavour,
        min_m=variant.min_m,
        max_m=variant.max_m,
        load_alignments=tuple(_alignment(spec.checked, load.width, load.dtype) for load in spec.loads),
        out_alignments=tuple(_alignment(_checks_outs(spec), out.width, out.dtype) for out in spec.outs),
        image=kernels.images[kernel_source(variant, device), device.arch].data,
        two_levels=_two_levels(spec),
        turned=_turned(spec),
        **(_behind(variant) if isinstance(variant, PointwiseVariant) else _product(variant, device)),
    )


def _alignment(checked: bool, width: int, dtype: DType) -> int:
    """Bytes that the launch rule asks of an address and its pitches; a kernel that checks them itself takes any."""
    return dtype.bytes * (1 if checked else width)


def _checks_outs(spec: KernelSpec | PointwiseSpec) -> bool:
    return isinstance(spec, KernelSpec) and spec.checked


def _two_levels(spec: KernelSpec | PointwiseSpec) -> int:
    """The record's bits: which loops of which tensors the kernel walks in two levels."""
    lhs = {0: ("n",) if isinstance(spec, KernelSpec) and spec.lhs_run else ()}  # its columns are k
    loads = {2 + index: load.two_levels for index, load in enumerate(spec.loads)}
    outs = {2 + MAX_LOADS + index: out.two_levels for index, out in enumerate(spec.outs)}
    walked = (lhs | loads | outs).items()
    levels = sum(1 << 2 * tensor + "mn".index(loop) for tensor, loops in walked for loop in loops if loop != "batch")
    factors = (spec.lhs_batch_runs, spec.rhs_batch_runs) if isinstance(spec, KernelSpec) else ()
    batches = sum(bit for bit, runs in zip(FACTOR_BATCH_LEVELS, factors, strict=False) if runs)
    return levels | batches | (BATCH_LEVEL if any("batch" in loops for _, loops in walked) else 0)


def _turned(spec: KernelSpec | PointwiseSpec) -> int:
    """The record's bits: which tensors are accessed down their rows."""
    product = (spec.lhs_order == "km", spec.rhs_order == "nk") if isinstance(spec, KernelSpec) else ()
    factors = (index for index, rows in enumerate(product) if rows)
    loads = (2 + index for index, load in enumerate(spec.loads) if load.turned)
    outs = (2 + MAX_LOADS + index for index, out in enumerate(spec.outs) if out.turned)
    return sum(1 << tensor for tensor in (*factors, *loads, *outs))


def _behind(variant: PointwiseVariant) -> dict[str, Any]:
    tile = variant.tile
    sizes = {"block_m": tile.block_m, "block_n": tile.block_n, "threads": tile.threads, "shared_bytes": 0}
    return {"entry": pointwise.ENTRY, "lhs_alignment": 0, "rhs_alignment": 0, **sizes}


def _product(variant: Variant, device: DeviceSpec) -> dict[str, Any]:
    spec = variant.spec
    widths = {"lhs_alignment": spec.lhs_width, "rhs_alignment": spec.rhs_width}
    alignments = {name: _alignment(spec.checked, width, spec.dtype) for name, width in widths.items()}
    return {"entry": ENTRY, **alignments, **launch_rule(variant, device)}


def launch_rule(variant: Variant, device: DeviceSpec) -> dict[str, Any]:
    """The fields of a record that depend on which kernel a variant is of."""
    spec, hopper = variant.spec, variant.hopper
    if hopper is None:
        tile = spec.tile
        sizes = {"block_m": tile.block_m, "block_n": tile.block_n, "threads": tile.threads}
        return {**sizes, "shared_bytes": shared_bytes(spec)}
    return {
        "block_m": hopper.block_m * hopper.cluster_m,
        "block_n": hopper.block_n * hopper.cluster_n,
        "threads": hopper.threads,
        "shared_bytes": hopper_tile.footprint(spec, hopper, device.shared_bytes).total,
        "cluster": hopper.cluster,
        "maps": tuple(map(_tensor_map, hopper_tile.map_rules(spec, hopper, device.shared_bytes))),
    }


def _tensor_map(rule: hopper_tile.MapRule | None) -> TensorMap:
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
        "axes": axes_text(fusion),
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
    specs = (variant.spec for _, variant in form.variants)
    found = sorted({spec.math for spec in specs if isinstance(spec, KernelSpec)})
    return {"math": ",".join(found)} if found else {}


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
