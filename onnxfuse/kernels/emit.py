"""A kernel's spec -> the full text of its CUDA source: constants, one generated functor, hand-written templates.

The result is self-contained but for `cuda_fp16.h` and `cuda_bf16.h`: `--dump` shows it and NVRTC compiles it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from onnxfuse.kernels.epilogue import functor
from onnxfuse.plan import Access, KernelSpec
from onnxfuse.tile_footprint import Footprint, copy_width, footprint

ENTRY = "onnxfuse_gemm"
TEMPLATES = Path(__file__).parent / "cuda"

# What the generated text uses, and what uses the generated text.
_BEFORE = ("arguments.cuh", "element.cuh", "ptx.cuh", "pointwise.cuh")
_AFTER = ("epilogue.cuh", "portable_gemm.cuh")
_MATH = {"f16": "half", "bf16": "half", "tf32": "tf32", "fp32": "fp32"}
_OWN_INCLUDE = re.compile(r'^#(?:pragma once|include ".*")\n', re.MULTILINE)


def emit(spec: KernelSpec) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: a legal spec: `tile_footprint.why_not(spec, ...)` is None.
    """
    before = "\n".join(_template(name) for name in _BEFORE)
    after = "\n".join(_template(name) for name in _AFTER)
    return f"{before}\n{_generated(spec)}\n{after}"


@cache
def _template(name: str) -> str:
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    return f"// ---- {name}\n{_OWN_INCLUDE.sub('', text)}"


def _generated(spec: KernelSpec) -> str:
    layout = footprint(spec)
    loads = [
        _access("Load", index, load, layout.load_offsets[index], f"static constexpr Kind KIND = Kind::{load.kind}; ")
        for index, load in enumerate(spec.loads)
    ]
    outs = [_access("Out", index, out, layout.out_offsets[index]) for index, out in enumerate(spec.outs)]
    tables = "\n".join(["template <int INDEX> struct Load;", *loads, "template <int INDEX> struct Out;", *outs])
    return f"""\
// ---- generated
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};
enum class Math {{ half, tf32, fp32 }};

using Element = {spec.dtype.cuda};
constexpr Math MATH = Math::{_MATH[spec.math]};
constexpr bool RHS_K_CONTIGUOUS = {"true" if spec.rhs_order == "nk" else "false"};
{_constants(spec, layout)}

{tables}

{functor(spec)}
}}  // namespace onnxfuse
"""


def _constants(spec: KernelSpec, layout: Footprint) -> str:
    tile = spec.tile
    constants = {
        "PARTS": spec.parts,
        "LOADS": len(spec.loads),
        "OUTS": len(spec.outs),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "WARPS_M": tile.warps_m,
        "WARPS_N": tile.warps_n,
        "THREADS": tile.threads,
        "STAGES": tile.stages,
        "LHS_WIDTH": copy_width(spec.lhs_width, spec.dtype.bytes),
        "RHS_WIDTH": copy_width(spec.rhs_width, spec.dtype.bytes),
        "SLABS": layout.slabs,
        "STAGING_BYTES": layout.staging,
        "VECTORS_OFFSET": layout.vectors_offset,
        "VECTORS_BYTES": layout.vectors,
        "SHARED_BYTES": layout.total,
    }
    return "\n".join(f"constexpr int {name} = {value};" for name, value in constants.items())


def _access(table: str, index: int, access: Access, offset: int, extra: str = "") -> str:
    width = copy_width(access.width, access.dtype.bytes)
    return (
        f"template <> struct {table}<{index}> {{ using Type = {access.dtype.cuda}; {extra}"
        f"static constexpr int WIDTH = {width}; static constexpr int OFFSET = {offset}; }};"
    )
