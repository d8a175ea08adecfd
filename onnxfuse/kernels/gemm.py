"""The generated text of the kernels that multiply without wgmma: the portable one and that for small M."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.kernels.epilogue import functor
from onnxfuse.kernels.source import access_tables, constants, flag, quantized_numbers
from onnxfuse.schedule.kernel_spec import KernelSpec, Tile
from onnxfuse.schedule.small_m_tile import SmallMTile

ENTRY = "onnxfuse_gemm"
_MATH = {"f16": "half", "bf16": "half", "tf32": "tf32", "3xtf32": "split_fp32", "fp32": "fp32"}


def generated(
    spec: KernelSpec, numbers: Mapping[str, int], load_offsets: Sequence[int], out_offsets: Sequence[int]
) -> str:
    """Types, constants, tables and the functor of a kernel.

    Args:
        spec: what to compute.
        numbers: the tile and what else the kernel's own text needs.
        load_offsets: where each load lies in shared memory, in bytes.
        out_offsets: the same of each output.
    """
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
{constants(_numbers(spec, numbers))}

{access_tables(spec.loads, load_offsets, spec.outs, out_offsets)}

{functor(spec)}
}}  // namespace onnxfuse
"""


def tile_numbers(tile: Tile | SmallMTile, shared_bytes: int) -> dict[str, int]:
    """The constants that every tile of these kernels has; `shared_bytes` of one block."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "THREADS": tile.threads,
        "STAGES": tile.stages,
        "SHARED_BYTES": shared_bytes,
    }


def _numbers(spec: KernelSpec, own: Mapping[str, int]) -> dict[str, int]:
    return {"PARTS": spec.parts, "LOADS": len(spec.loads), "OUTS": len(spec.outs), **quantized_numbers(spec), **own}
