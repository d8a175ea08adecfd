"""What GPU code a fused file carries; and whether it is what this onnxfuse makes, by compiling it again. Runs none."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from onnxfuse.device import DeviceSpec
from onnxfuse.errors import CompileError, ModelError
from onnxfuse.graph.archive import Record, unpack
from onnxfuse.graph.fused_nodes import FusedNode, descriptions_of, fused_nodes
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.lowering.kernel_description import Described, read_description
from onnxfuse.lowering.launch_record import launch_record
from onnxfuse.progress import Progress, counted
from onnxfuse.runtime.compile import CompiledImage, compile_source, kernel_pool, nvrtc_version


@dataclass(frozen=True)
class Code:
    """One record of an archive: machine code, or PTX, and the rows that it is for."""

    kernel: str
    record: Record

    @property
    def digest(self) -> str:
        """Of the code, decompressed."""
        return hashlib.sha256(self.record.image).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        record = self.record
        sizes = {"bytes": len(record.image), "threads": record.threads, "shared_bytes": record.shared_bytes}
        rows = {"min_m": record.min_m, "max_m": record.max_m}
        return {"kernel": self.kernel, "architecture": record.architecture, **rows, **sizes, "sha256": self.digest}


@dataclass(frozen=True)
class Inspection:
    """What a fused file carries.

    Attributes:
        model: its path.
        nodes: the fused nodes, at any depth.
        code: every record of every archive, in their order.
        archive_bytes: of all archives.
        rebuilt: how many records were compiled again and compared; None where that was not asked for.
        faults: a sentence for each that differs.
    """

    model: Path
    nodes: tuple[FusedNode, ...]
    code: tuple[Code, ...]
    archive_bytes: int
    rebuilt: int | None = None
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.faults

    @property
    def architectures(self) -> tuple[str, ...]:
        """What the code is for."""
        return tuple(sorted({each.record.architecture for each in self.code}))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        nodes = [{"name": node.name, "kernel": node.attributes.get("kernel", "")} for node in self.nodes]
        verdict = {"passed": self.passed, "rebuilt": self.rebuilt, "faults": list(self.faults)}
        code = [each.to_dict() for each in self.code]
        return {"archive_bytes": self.archive_bytes, "nodes": nodes, "code": code, **verdict}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        images = {each.record.image for each in self.code}
        yield (
            f"{self.model}: {len(self.nodes)} fused nodes, {len(images)} kernels for "
            f"{', '.join(self.architectures) or 'no architecture'}, {self.archive_bytes} bytes in the file"
        )
        uses = Counter(node.attributes.get("kernel", "") for node in self.nodes)
        first = {node.attributes.get("kernel", ""): node for node in reversed(self.nodes)}
        for kernel, count in uses.items():
            more = f" and {count - 1} more" if count > 1 else ""
            yield f"kernel {kernel}  {first[kernel].name}{more}"
            for code in (each for each in self.code if each.kernel == kernel):
                record = code.record
                rows = f"{record.min_m}..{record.max_m}"
                yield f"  {record.architecture:<7} {len(record.image):>7} bytes  sha256 {code.digest[:16]}  {rows}"
        if self.rebuilt is not None and self.passed:
            yield f"rebuilt: all {self.rebuilt} are what this onnxfuse compiles, byte for byte"
        yield from (f"FAILED: {fault}" for fault in self.faults)


def inspect(model: Path, rebuild: bool, progress: Progress) -> Inspection:
    """List the GPU code of a fused model, and with `rebuild` make it again and compare.

    Args:
        model: the file; no code of it is run.
        rebuild: compile every kernel from what the file says of it, without the cache.
        progress: called after each kernel.

    Raises:
        ModelError: the model, or its kernels, cannot be read; with `rebuild`, the file does not say what its kernels
            are, or another compiler made them.
        CompileError: NVRTC is not installed.
    """
    nodes, archives = fused_nodes(model)
    records = {name: _unpacked(model, data) for name, data in archives.items()}
    code = tuple(Code(record.kernel, record) for own in records.values() for record in own)
    found = Inspection(model, tuple(nodes), code, sum(map(len, archives.values())))
    if not rebuild:
        return found
    texts = descriptions_of(model)
    faults: list[str] = []
    for name, own in records.items():
        faults += _differences(own, _described(texts.get(name, "")), progress)
    faults += _nodes_without_code(nodes, code)
    return replace(found, rebuilt=len(code), faults=tuple(faults))


def _unpacked(model: Path, data: bytes) -> tuple[Record, ...]:
    try:
        return unpack(data)
    except ModelError as error:
        raise ModelError(f"{model}: {error}") from error


def _described(text: str) -> Mapping[str, Sequence[Described]]:
    if not text:
        raise ModelError("the file does not say what its kernels are: an older version wrote it, or a tool cut that")
    description = read_description(text)
    if description.nvrtc != nvrtc_version():
        made, here = (".".join(map(str, each)) for each in (description.nvrtc, nvrtc_version()))
        raise ModelError(f"NVRTC {made} made the kernels and {here} is here; install nvidia-cuda-nvrtc=={made}.*")
    return description.kernels


def _nodes_without_code(nodes: Sequence[FusedNode], code: Sequence[Code]) -> Iterator[str]:
    known = {each.kernel for each in code}
    for node in nodes:
        kernel = node.attributes.get("kernel", "")
        if kernel not in known:
            yield f"node {node.name!r} names kernel {kernel!r}, which the file does not have"


def _differences(
    records: Sequence[Record], described: Mapping[str, Sequence[Described]], progress: Progress
) -> Iterator[str]:
    """What of an archive is not what its description makes."""
    by_kernel: dict[str, list[Record]] = {}
    for record in records:
        by_kernel.setdefault(record.kernel, []).append(record)
    pairs: list[tuple[Record, Described]] = []
    wanted: dict[tuple[str, str], DeviceSpec] = {}
    for kernel, own in by_kernel.items():
        variants = described.get(kernel, ())
        if len(variants) != len(own):
            yield f"kernel {kernel} has {len(own)} pieces of code, and the file describes {len(variants)}"
            continue
        pairs += zip(own, variants, strict=True)
        wanted |= {(_source(each), each[0].arch): each[0] for each in variants}
    with kernel_pool() as pool:
        jobs = [pool.submit(_compiled, source, device) for (source, _), device in wanted.items()]
        images = [job.result() for job in counted("compiling kernels", jobs, progress)]
    kernels = Kernels(dict(zip(wanted, images, strict=True)))
    for record, each in pairs:
        with _no_plan():
            made = launch_record(record.kernel, *each, kernels)
        yield from _difference(record, made)


def _source(described: Described) -> str:
    device, variant = described
    with _no_plan():
        return kernel_source(variant, device)


@contextmanager
def _no_plan() -> Iterator[None]:
    """What a file describes may be nothing that a plan would have made."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"what the file says of a kernel is none of this version: {error!r}") from error


def _compiled(source: str, device: DeviceSpec) -> CompiledImage:
    try:
        return compile_source(source, device)
    except CompileError as error:
        summary = str(error).splitlines()[0]  # behind it comes all that the compiler says; the source is kept
        raise ModelError(f"what the file says of a kernel does not compile: {summary}") from error


def _difference(record: Record, made: Record) -> Iterator[str]:
    """How a record differs from the one that was made again: its first byte, or its launch rule."""
    label = f"the {record.architecture} code of kernel {record.kernel}, sizes {record.min_m}..{record.max_m}"
    if record.image != made.image:
        pairs = enumerate(zip(record.image, made.image, strict=False))
        place = next((at for at, (one, other) in pairs if one != other), min(len(record.image), len(made.image)))
        sizes = f"{len(record.image)} bytes, and {len(made.image)} made again"
        yield f"{label} differs from byte {place} on ({sizes})"
    rules = [
        each.name
        for each in fields(record)
        if each.name != "image" and getattr(record, each.name) != getattr(made, each.name)
    ]
    if rules:
        yield f"{label} is launched otherwise than it should be: {', '.join(rules)}"
