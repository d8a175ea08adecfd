"""The kernels of a fused model, checked where none can run: what a machine without a GPU can tell.

Each archive is read, and each fused node held against it, by the library's own code, as a session does that loads the
model on a GPU: the checksum, the node's attributes, its kernel's launch rules. Every image must then be what its record
claims: machine code that disassembles, or PTX, for the record's architecture, with the record's function in it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxfuse.dtypes import FED_BY_ONNX
from onnxfuse.errors import CompileError, ModelError
from onnxfuse.graph.archive import Flavour, Record, unpack
from onnxfuse.graph.fused_nodes import FusedNode, fused_nodes
from onnxfuse.progress import Progress, counted
from onnxfuse.runtime.compile import kernel_pool
from onnxfuse.runtime.disassemble import TOOL_MISSING, sass
from onnxfuse.runtime.session import library_function

_ERROR_BYTES = 4096
# In the order of the library's NodeText.
_ATTRIBUTES = ("kernel", "axes", "sizes", "problem", "arguments", "out_types", "in_types", "original")
_TARGET = re.compile(r"\.target\s+sm_(\d+)(a?)")


@dataclass(frozen=True)
class KernelCheck:
    """What was found in a fused model's kernels; none was run.

    Attributes:
        nodes: fused nodes, at any depth.
        kernels: distinct images of machine code or PTX.
        architectures: that they are for, `sm_90a` or `ptx`.
        faults: a sentence for each thing that is wrong; the first of each archive, and of each image.
    """

    nodes: int
    kernels: int
    architectures: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        counts = {"nodes": self.nodes, "kernels": self.kernels, "architectures": list(self.architectures)}
        return {"passed": self.passed, "run": False, **counts, "faults": list(self.faults)}

    def __str__(self) -> str:
        if not self.passed:
            return "\n".join(f"kernels  FAILED: {fault}" for fault in self.faults)
        nodes, kernels = _counted(self.nodes, "fused node"), _counted(self.kernels, "kernel")
        return (
            f"kernels  {nodes} with {kernels} for {', '.join(self.architectures)}: all are in the file, "
            "checksums and launch rules are right, and code is of its architecture"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def check_kernels(optimized: Path, progress: Progress) -> KernelCheck | None:
    """Check the kernels of a fused model; None for a model without a fused node.

    Raises:
        ModelError: the model cannot be read.
        DeviceError: the library is not built, or of another version.
        CompileError: the disassembler is not installed.
    """
    nodes, archives = fused_nodes(optimized)
    if not nodes:
        return None
    faults = [fault for node in nodes for fault in _fault_of_types(node)][:1]
    records: list[Record] = []
    for name, data in archives.items():
        faults += _faults_of_nodes(data, [node for node in nodes if node.archive == name])
        try:
            records += unpack(data)
        except ModelError as error:
            faults.append(str(error))
    images = {(record.image, record.capability, record.flavour): record for record in records}
    with kernel_pool() as pool:
        jobs = [pool.submit(_fault_of_image, record) for record in images.values()]
        faults += [fault for job in counted("reading kernels", jobs, progress) if (fault := job.result())]
    names = sorted({_architecture(record) for record in records})
    return KernelCheck(len(nodes), len(images), tuple(names), tuple(dict.fromkeys(faults)))


def _faults_of_nodes(archive: bytes, nodes: Sequence[FusedNode]) -> Iterator[str]:
    """What the library says of an archive and the nodes that read it: the first fault."""
    check = library_function("onnxfuse_check_nodes")
    texts = [node.attributes.get(name, "").encode() for node in nodes for name in _ATTRIBUTES]
    ports = [count for node in nodes for count in (node.inputs, node.outputs)]
    error, fault = ctypes.create_string_buffer(_ERROR_BYTES), ctypes.c_int()
    wrong = check(
        archive,
        ctypes.c_uint64(len(archive)),
        (ctypes.c_char_p * len(texts))(*texts),
        (ctypes.c_int64 * len(ports))(*ports),
        len(nodes),
        ctypes.byref(fault),
        error,
        ctypes.c_size_t(_ERROR_BYTES),
    )
    if wrong:
        where = f"node {nodes[fault.value].name!r}: " if fault.value >= 0 else ""
        yield where + error.value.decode(errors="replace")


def _fault_of_types(node: FusedNode) -> Iterator[str]:
    """Where a tool that ran behind onnxfuse gave a weight or an input another type, which the library refuses."""
    for index, (found, made) in enumerate(
        zip(node.types, node.attributes.get("in_types", "").split(","), strict=False)
    ):
        name = FED_BY_ONNX[found].name if found in FED_BY_ONNX else f"of ONNX's type {found}"
        if made and found and name != made:
            yield (
                f"node {node.name!r}: input {index} is {name} and its kernel was compiled for {made}; another tool "
                "changed the model's types, let it run before onnxfuse"
            )


def _architecture(record: Record) -> str:
    if record.flavour == Flavour.PTX:
        return "ptx"
    return f"sm_{record.capability}{'a' * (record.flavour == Flavour.SPECIFIC)}"


def _fault_of_image(record: Record) -> str:
    """What is wrong with the code of a record; empty where it is what it claims to be."""
    label = f"the {_architecture(record)} code of kernel {record.kernel}"
    is_ptx = record.flavour == Flavour.PTX
    if is_ptx == record.image.startswith(b"\x7fELF"):
        return f"{label} is {'machine code' if is_ptx else 'no machine code'}"
    try:
        text = record.image.decode(errors="replace") if is_ptx else sass(record.image)
    except CompileError as error:
        if TOOL_MISSING in str(error):
            raise
        return f"{label} does not disassemble: {error}"
    fault = _fault_of_text(record, text)
    return f"{label} {fault}" if fault else ""


def _fault_of_text(record: Record, text: str) -> str:
    """What is wrong with PTX, or with disassembled machine code."""
    target = _TARGET.search(text)
    if target is None or (int(target[1]), bool(target[2])) != (record.capability, record.flavour == Flavour.SPECIFIC):
        return f"is for {target[0].split()[1] if target else 'no architecture'}"
    is_ptx = record.flavour == Flavour.PTX
    marks = (f".entry {record.entry}(",) if is_ptx else (f".text.{record.entry}", "EXIT")
    missing = [mark for mark in marks if mark not in text]
    return f"has no function {record.entry!r}" if missing else ""
