"""One implementation -> the fused node that is written into the model, with its attributes.

They are half of the contract with the bridge; the other half, the archive of kernels, is in `graph/archive.py`. They
are strings that a person can read in any viewer:

    kernel      id of its records, 1 to 31 hexadecimal digits
    axes        `b m k, k (p n), (p n) -> b m n`: an einops item for each input after the archive, then for each output.
                `1` (or `()`) is a dimension of size 1; an empty item is a tensor without dimensions. `k n:6144` has
                6144 columns of which n, whose size is among `sizes`, is a window; one dimension of an input may be so
    sizes       `p=2 n=1280 k=320`: axes known when the model was optimized. The inputs' shapes tell the others at run
                time: a group tells the one axis of it that is still unknown. May be missing or empty
    problem     `m=b*m n=n k=k` or `batch=b*h m=m n=n k=k`: axes of the kernel's loops, outermost first. A loop without
                axes has size 1 and may be missing. `batch=b heads=h m=m n=n k=k o=o` of an attention, whose lhs is the
                query [batch heads, m, k] and whose rhs are keys [k, n] and values [n, o]; its out is [m, o]
    arguments   `lhs=0 rhs=1[p=0],1[p=1] loads=2[p=0],2[p=1] outs=0`: tensors by position; lhs, rhs and loads count the
                inputs after the archive, outs the outputs. `[p=1]` is index 1 along axis p, `[+4096]` the window that
                begins at element 4096: an offset, nothing is copied. `loads` is missing when there are none; lhs and
                rhs are missing, and `problem` has no k, in a node that follows a product and does not compute one. A
                quantized rhs is the packed integers; `scales=2 zero_points=3` are those of each of its parts, and the
                axes of all three that are no columns are walked in their order
    out_types   `f16`, `f32` or `bf16` for each output, comma separated
    in_types    the same for each input (integers and `bool` as well: `i64`, `u8`); may be missing. With it, a tool that
                changed the model's types afterwards is found when the session loads
    math        how the kernels compute products, as `KernelSpec.math` names it: `tf32`, or `3xtf32,fp32` where
                architectures differ. Missing in a node that computes no product. By `tf32` `onnxfuse verify` knows what
                to allow; the bridge ignores it
    original    `num_heads=32 scale:0.088388`: attributes of the op that a node over a cache of keys and values stands
                for, integers and real numbers; the bridge runs it where the kernel does not. Only such a node has it.
                Its `problem` means nothing, and its loads are the query, the caches of keys and values, the token's own
                two where they do not lie behind the query, the place of each sequence's last key, cosines and sines
                where it turns by them, and a tensor with a column for each key
    fusion      the fusion as `onnxfuse explain` prints it; for people, the bridge ignores it

An axis is a letter or `_`, then letters, digits or `_`. lhs is walked as [batch, m, k], rhs as [batch, k, n], loads and
outs as [batch, m, n]. The axes of a loop must lie one behind the other in a tensor, or all be missing: then it is
broadcast along the loop. Where a record says that its kernel walks a loop of a tensor in two levels, the axes may lie
in two such groups.
"""

from __future__ import annotations

from onnxfuse.graph.fallback_body import Replacement
from onnxfuse.ir.cached_attention import CachedAttention
from onnxfuse.ir.fusion import Fusion, Pointwise, part_text
from onnxfuse.lowering.site import Implementation


def replacement(implementation: Implementation, kernel: str) -> Replacement:
    """How an implementation is written into the model."""
    fusion = implementation.fusion
    return Replacement(
        graph=implementation.graph,
        nodes=implementation.match.nodes,
        copied=implementation.match.copied,
        insertion_point=implementation.match.insertion_point,
        folded=implementation.match.folded,
        constants=implementation.match.constants,
        retained=implementation.retained,
        inputs=tuple(tensor.name for tensor in fusion.inputs),
        outputs=tuple(tensor.name for tensor in fusion.outputs),
        name=f"{fusion.anchor}/{implementation.kind}",
        attributes=node_attributes(implementation, kernel),
        kind=implementation.kind,
        shapes=implementation.match.shapes,
        expanded=implementation.match.expanded,
        told=implementation.match.told,
        transposed=implementation.transposed,
    )


def node_attributes(implementation: Implementation, kernel: str) -> dict[str, str]:
    """The fused node's attributes."""
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
        **_original(fusion),
        "fusion": str(fusion),
    }


def _math(implementation: Implementation) -> dict[str, str]:
    """How the kernels multiply, those of each architecture."""
    found = ",".join(sorted({variant.spec.math for _, variant in implementation.variants}))
    return {"math": found} if found else {}


def _original(fusion: Pointwise) -> dict[str, str]:
    """The attributes of the op that a node over a cache stands for."""
    if not isinstance(fusion, CachedAttention):
        return {}
    texts = (f"{name}={value}" if isinstance(value, int) else f"{name}:{value!r}" for name, value in fusion.original)
    return {"original": " ".join(texts)}


def _arguments(fusion: Pointwise) -> str:
    """Which input is what: `lhs=0 rhs=1[p=0],1[p=1] loads=2[p=0],2[p=1] outs=0`."""
    parts = fusion.parts if isinstance(fusion, Fusion) else ()
    first_operand = len(fusion.inputs) - len(fusion.operands)
    groups = {
        "lhs": ["0"] if parts else [],
        **(_stored_rhs(fusion) if isinstance(fusion, Fusion) else {}),
        "loads": [_indexed(first_operand + load.operand, load.part, load.start) for load in fusion.loads],
        "outs": [_indexed(fusion.outputs.index(out.tensor), out.part) for out in fusion.outs],
    }
    return " ".join(f"{name}={','.join(entries)}" for name, entries in groups.items() if entries)


def _stored_rhs(fusion: Fusion) -> dict[str, list[str]]:
    """Where each part begins in what holds it: of a quantized one in its integers, its scales and its zero points."""
    groups, first = {}, 1
    for name, tensors in zip(("rhs", "scales", "zero_points"), fusion.stored_rhs, strict=False):
        groups[name] = [
            _indexed(first + part.tensor, part.part, fusion.start(part, tensors[part.tensor])) for part in fusion.parts
        ]
        first += len(tensors)
    return groups


def _indexed(index: int, part: int | None, start: int | None = None) -> str:
    return f"{index}{part_text(part, start)}"
