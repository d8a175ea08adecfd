"""One implementation -> the fused node that is written into the model, with its attributes."""

from __future__ import annotations

from onnxfuse.graph.fallback_body import Replacement
from onnxfuse.ir.fusion import Fusion, Pointwise, part_text
from onnxfuse.lowering.site import Implementation


def replacement(implementation: Implementation, kernel: str) -> Replacement:
    """How an implementation is written into the model."""
    fusion = implementation.fusion
    return Replacement(
        graph=implementation.graph,
        nodes=implementation.match.nodes,
        copied=implementation.match.copied,
        place=implementation.match.insertion_point,
        folded=implementation.match.folded,
        constants=implementation.match.constants,
        retained=implementation.retained,
        inputs=tuple(tensor.name for tensor in fusion.inputs),
        outputs=tuple(tensor.name for tensor in fusion.outputs),
        name=f"{fusion.anchor}/{implementation.kind}",
        attributes=node_attributes(implementation, kernel),
        kind=implementation.kind,
        shapes=implementation.match.shapes,
    )


def node_attributes(implementation: Implementation, kernel: str) -> dict[str, str]:
    """The fused node's attributes; their grammar is in graph/archive.py."""
    fusion = implementation.fusion
    held = {axis for tensor in (*fusion.inputs, *fusion.outputs) for axis in tensor.axes}
    known = [axis for axis in fusion.axes if axis.size is not None and axis.name in held]
    return {
        "kernel": kernel,
        "axes": fusion.einops,
        "sizes": " ".join(f"{axis.name}={axis.size}" for axis in known),
        "problem": str(implementation.mapping),
        "arguments": _arguments(fusion),
        "in_types": ",".join(tensor.dtype.name for tensor in fusion.inputs),
        "out_types": ",".join(tensor.dtype.name for tensor in fusion.outputs),
        **_math(implementation),
        "fusion": str(fusion),
    }


def _math(implementation: Implementation) -> dict[str, str]:
    """How the kernels multiply, those of each architecture."""
    found = ",".join(sorted({variant.spec.math for _, variant in implementation.variants}))
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
