"""A kernel's spec -> the full text of its CUDA source: constants, one generated functor, hand-written templates.

The result is self-contained but for `cuda_fp16.h` and `cuda_bf16.h`: `--dump` shows it and NVRTC compiles it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from onnxfuse.kernel_spec import Access, KernelSpec
from onnxfuse.kernels.epilogue import functor
from onnxfuse.small_m_tile import resident_blocks, sums_pitch
from onnxfuse.tile_footprint import copy_width, footprint, shared_bytes

ENTRY = "onnxfuse_gemm"
TEMPLATES = Path(__file__).parent / "cuda"

# What the generated text uses, and what uses the generated text.
_BEFORE = ("arguments.cuh", "element.cuh", "walk.cuh", "ptx.cuh", "pointwise.cuh")
_AFTER = {
    "portable": ("way.cuh", "exact.cuh", "small_copy.cuh", "epilogue.cuh", "portable_gemm.cuh"),
    "small_m": ("exact.cuh", "small_m_gemm.cuh"),
}
_MATH = {"f16": "half", "bf16": "half", "tf32": "tf32", "3xtf32": "split_fp32", "fp32": "fp32"}
_OWN_INCLUDE = re.compile(r'^#(?:pragma once|include ".*")\n', re.MULTILINE)


def emit(spec: KernelSpec) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: a legal spec: `tile_footprint.why_not(spec, ...)` is None.
    """
    before = "\n".join(template(name) for name in _BEFORE)
    after = "\n".join(template(name) for name in _AFTER[spec.tile.kernel])
    return f"{before}\n{_generated(spec)}\n{after}"


@cache
def template(name: str) -> str:
    """The text of a hand-written file, without its includes of our own files, which stand before it."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    return f"// ---- {name}\n{_OWN_INCLUDE.sub('', text)}"


def _generated(spec: KernelSpec) -> str:
    load_offsets, out_offsets = _offsets(spec)
    return f"""\
// ---- generated
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};
enum class Math {{ half, tf32, split_fp32, fp32 }};

using Element = {spec.dtype.cuda};
constexpr Math MATH = Math::{_MATH[spec.math]};
constexpr bool LHS_K_CONTIGUOUS = {flag(spec.lhs_order == "mk")};
constexpr bool RHS_K_CONTIGUOUS = {flag(spec.rhs_order == "nk")};
constexpr bool LHS_OUTER_COLUMNS = {flag(spec.lhs_run > 0)};
constexpr bool LHS_OUTER_BATCH = {flag(spec.lhs_batch_runs)};
constexpr bool RHS_OUTER_BATCH = {flag(spec.rhs_batch_runs)};
constexpr bool CHECKED = {flag(spec.checked)};
{constants(_numbers(spec))}

{access_tables(spec.loads, load_offsets, spec.outs, out_offsets)}

{functor(spec)}
}}  // namespace onnxfuse
"""


def _offsets(spec: KernelSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where loads and outputs lie in shared memory; the kernel for few rows stages none of them."""
    if spec.tile.kernel == "small_m":
        return (0,) * len(spec.loads), (0,) * len(spec.outs)
    layout = footprint(spec)
    return layout.load_offsets, layout.out_offsets


def _numbers(spec: KernelSpec) -> dict[str, int]:
    tile = spec.tile
    return {
        "PARTS": spec.parts,
        "LOADS": len(spec.loads),
        "OUTS": len(spec.outs),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "THREADS": tile.threads,
        "STAGES": tile.stages,
        "SHARED_BYTES": shared_bytes(spec),
        **_OWN_CONSTANTS[tile.kernel](spec),
    }


def _portable_constants(spec: KernelSpec) -> dict[str, int]:
    layout = footprint(spec)
    return {
        "WARPS_M": spec.tile.warps_m,
        "WARPS_N": spec.tile.warps_n,
        "LHS_WIDTH": copy_width(spec.lhs_width, spec.dtype.bytes),
        "RHS_WIDTH": copy_width(spec.rhs_width, spec.dtype.bytes),
        "SLABS": layout.slabs,
        "STAGING_BYTES": layout.staging,
        "VECTORS_OFFSET": layout.vectors_offset,
        "VECTORS_BYTES": layout.vectors,
    }


def _small_m_constants(spec: KernelSpec) -> dict[str, int]:
    return {
        "WARPS_K": spec.tile.warps_k,
        "SUMS_PITCH": sums_pitch(spec),
        "RESIDENT_BLOCKS": resident_blocks(spec),
    }


_OWN_CONSTANTS = {"portable": _portable_constants, "small_m": _small_m_constants}


def constants(numbers: Mapping[str, int]) -> str:
    """A line of C++ for each number."""
    return "\n".join(f"constexpr int {name} = {value};" for name, value in numbers.items())


def access_tables(
    loads: Sequence[Access],
    load_offsets: Sequence[int],
    outs: Sequence[Access],
    out_offsets: Sequence[int],
    of_out: Callable[[Access], str] = lambda out: "",
) -> str:
    """The tables `Load<I>` and `Out<I>`; offsets are in bytes of shared memory, `of_out` gives an out's own members."""
    rows = ["template <int INDEX> struct Load;"]
    for index, (load, offset) in enumerate(zip(loads, load_offsets, strict=True)):
        rows.append(_row("Load", index, load, offset, f"static constexpr Kind KIND = Kind::{load.kind}; "))
    rows.append("template <int INDEX> struct Out;")
    for index, (out, offset) in enumerate(zip(outs, out_offsets, strict=True)):
        rows.append(_row("Out", index, out, offset, of_out(out)))
    return "\n".join(rows)


def _row(table: str, index: int, access: Access, offset: int, extra: str) -> str:
    """Type, how it is walked, width in elements, offset."""
    flags = {
        "TURNED": access.turned,
        "OUTER_ROWS": "m" in access.two_levels,
        "OUTER_COLUMNS": "n" in access.two_levels,
        "OUTER_BATCH": "batch" in access.two_levels,
    }
    numbers = {"WIDTH": copy_width(access.width, access.dtype.bytes), "OFFSET": offset}
    members = [f"static constexpr bool {name} = {flag(value)};" for name, value in flags.items()]
    members += [f"static constexpr int {name} = {value};" for name, value in numbers.items()]
    head = f"template <> struct {table}<{index}> {{ using Type = {access.dtype.cuda}; {extra}"
    return f"{head}{' '.join(members)} }};"


def flag(value: bool) -> str:
    """A C++ literal."""
    return "true" if value else "false"
