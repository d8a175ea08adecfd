"""A spec and a tile -> the full text of the CUDA source of the sm_90a kernel whose M side is the weight.

The kernel takes two arguments, as `kernels/hopper.py` says; the maps are those of `hopper_swapped_tile.map_rules`.
"""

from __future__ import annotations

from onnxfuse.kernels.epilogue import functor
from onnxfuse.kernels.hopper import block_numbers, cluster_attribute, wants_the_models_bits, wgmma
from onnxfuse.kernels.source import GENERATED_USES, access_tables, assembled, constants, flag
from onnxfuse.schedule.hopper_swapped_tile import SwappedTile, footprint, seen
from onnxfuse.schedule.hopper_tile import HopperFootprint, begins_at_any_column, block_k
from onnxfuse.schedule.kernel_spec import KernelSpec


def emit(spec: KernelSpec, tile: SwappedTile, shared_limit: int) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: what to compute.
        tile: a legal tile: `hopper_swapped_tile.why_not(spec, tile, shared_limit)` is None.
        shared_limit: shared memory of one block, in bytes.
    """
    text = _generated(seen(spec), tile, footprint(spec, tile, shared_limit))
    return assembled(text, "hopper/swapped.cuh", (*GENERATED_USES, "hopper/fast_math.cuh"))


def _generated(spec: KernelSpec, tile: SwappedTile, layout: HopperFootprint) -> str:
    """Of a spec as the kernel sees it."""
    not_stored = "static constexpr bool TMA_STORED = false; "
    outs = access_tables(spec.loads, layout.load_offsets, spec.outs, layout.out_offsets, lambda out: not_stored)
    return f"""\
// ---- generated
#define ONNXFUSE_CLUSTER {cluster_attribute(tile.splits)}
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

using Element = {spec.dtype.cuda};
constexpr bool LHS_K_CONTIGUOUS = {flag(spec.lhs_order == "mk")};
[[maybe_unused]] constexpr bool RHS_K_CONTIGUOUS = true;
constexpr bool SWAPPED = true;
constexpr bool APART = false;
constexpr bool PINGPONG = false;
constexpr bool OPERANDS_AHEAD = false;
constexpr bool LAST_ROWS_FULL = false;
constexpr bool LAST_COLUMNS_FULL = {flag(begins_at_any_column(spec))};
{constants(_numbers(spec, tile, layout))}

{outs}

{functor(spec, fast=not wants_the_models_bits(spec))}
{_multiplications(spec, tile)}
}}  // namespace onnxfuse
"""


def _numbers(spec: KernelSpec, tile: SwappedTile, layout: HopperFootprint) -> dict[str, int]:
    return {
        "TMA_STORED_OUTS": 0,
        "BLOCK_M": tile.block_n,
        "BLOCK_N": tile.block_m,
        "BLOCK_K": block_k(spec),
        "GROUP_M": tile.swapped.group_m,
        "CLUSTER_M": 1,
        "CLUSTER_N": 1,
        "RHS_COLUMNS": tile.block_m,
        "RHS_PIECES": 1,
        **block_numbers(spec, tile, layout),
    }


def _multiplications(spec: KernelSpec, tile: SwappedTile) -> str:
    """The function `multiply<FIRST, COLUMNS>` for each part."""
    registers = spec.parts * tile.block_m // 2
    functions = (wgmma(spec, part * tile.block_m // 2, tile.block_m, registers) for part in range(spec.parts))
    return f"""\
// acc[64, COLUMNS], registers from FIRST on, (+)= lhs[64, step] * rhs[step, COLUMNS], operands by descriptor.
// Where not `accumulate`, the old accumulators are not read.
template <int FIRST, int COLUMNS>
__device__ void multiply(float (&acc)[{registers}], unsigned long long lhs, unsigned long long rhs, int accumulate);
{"".join(functions)}"""
