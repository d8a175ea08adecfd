"""`--dump`: every stage of one site, a numbered file each."""

from __future__ import annotations

from pathlib import Path

from onnxfuse.errors import OutputError
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.lowering.site import Site
from onnxfuse.report.site_report import FusedSite
from onnxfuse.runtime.disassemble import sass


def write_stages(site: Site, report: FusedSite, name: str, kernels: Kernels, folder: Path) -> None:
    """Write the stages of a site into a folder, which is made: from the matched nodes to the machine code.

    Raises:
        CompileError: there is no disassembler.
        OutputError: the disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in decisions(site, report, name).items():
            (folder / file).write_text(text + "\n")
        _write_kernels(site, kernels, folder)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error


def decisions(site: Site, report: FusedSite, name: str) -> dict[str, str]:
    """The files that need no compiler, by name."""
    return {
        "0-match.txt": "\n".join((*report.nodes, *(f"-> {out.name}" for out in site.match.live_outs))),
        "1-fusion.txt": str(site.fusion),
        "2-axes.txt": f"{report.axes}\n{site.mapping}",
        "3-widths.txt": "\n".join(map(str, report.operands)),
        "4-plan.txt": "\n".join((site.strategy.value, *(plan.details for plan in site.implementation.plans))),
        "5-node.txt": "\n".join(f"{key}: {value}" for key, value in node_attributes(site.implementation, name).items()),
    }


def _write_kernels(site: Site, kernels: Kernels, folder: Path) -> None:
    """Each distinct source, and its machine code on each architecture; PTX has none."""
    sources: dict[str, str] = {}
    for device, variant in site.implementation.variants:
        source = kernel_source(variant, device)
        suffix = sources.setdefault(source, f"-{len(sources)}" if sources else "")
        (folder / f"6-kernel{suffix}.cu").write_text(source)
        code = sass(kernels.images[source, device.arch].data)
        if code:
            (folder / f"7-kernel{suffix}-{device.arch}.sass").write_text(code)
