"""A spec and a tile -> the full text of the CUDA source of the sm_90a kernel for a quantized weight.

The kernel takes two arguments, as `kernels/hopper.py` says; the maps are those of `hopper_quantized_tile.map_rules`.
"""

from __future__ import annotations

from onnxfuse.kernels.epilogue import functor
from onnxfuse.kernels.hopper import block_numbers, cluster_attribute, wants_the_models_bits
from onnxfuse.kernels.source import GENERATED_USES, access_tables, assembled, constants, flag
from onnxfuse.schedule.hopper_quantized_tile import QuantizedTile, footprint, swapped
from onnxfuse.schedule.hopper_tile import HopperFootprint
from onnxfuse.schedule.kernel_spec import KernelSpec


def emit(spec: KernelSpec, tile: QuantizedTile, shared_limit: int) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: what to compute.
        tile: a legal tile: `hopper_quantized_tile.why_not(spec, tile, shared_limit)` is None.
        shared_limit: shared memory of one block, in bytes.
    """
    text = _generated(swapped(spec), tile, footprint(spec, tile, shared_limit))
    return assembled(text, "hopper/quantized.cuh", (*GENERATED_USES, "hopper/fast_math.cuh"))


def _generated(spec: KernelSpec, tile: QuantizedTile, layout: HopperFootprint) -> str:
    """Of a spec as the kernel sees it."""
    not_stored = "static constexpr bool TMA_STORED = false; "
    outs = access_tables(spec.loads, layout.load_offsets, spec.outs, layout.out_offsets, lambda out: not_stored)
    return f"""\
// ---- generated
#define ONNXFUSE_CLUSTER {cluster_attribute(tile.splits)}
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

using Element = {spec.dtype.cuda};
[[maybe_unused]] constexpr bool LHS_K_CONTIGUOUS = true;
[[maybe_unused]] constexpr bool RHS_K_CONTIGUOUS = true;
constexpr bool SWAPPED = true;
constexpr bool APART = {flag(tile.apart)};
constexpr bool PINGPONG = false;
constexpr bool OPERANDS_AHEAD = false;
constexpr bool LAST_ROWS_FULL = false;
constexpr bool LAST_COLUMNS_FULL = false;
{constants(_numbers(spec, tile, layout))}

{outs}

{functor(spec, fast=not wants_the_models_bits(spec))}
{_multiplications(spec, tile)}
}}  // namespace onnxfuse
"""


def _numbers(spec: KernelSpec, tile: QuantizedTile, layout: HopperFootprint) -> dict[str, int]:
    own = tile.swapped
    return {
        "TMA_STORED_OUTS": 0,
        "BLOCK_M": tile.block_n,
        "BLOCK_N": own.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": own.group_m,
        "CLUSTER_M": 1,
        "CLUSTER_N": 1,
        "RHS_COLUMNS": own.block_n,
        "RHS_PIECES": 1,
        **block_numbers(spec, tile, layout),
    }


def _multiplications(spec: KernelSpec, tile: QuantizedTile) -> str:
    """The function `multiply<FIRST>` for each part."""
    registers = spec.parts * tile.swapped.block_n // 2
    parameters = f"(float (&acc)[{registers}], const unsigned (&lhs)[4], unsigned long long rhs, int accumulate)"
    kind = f"m64n{tile.block_m}k16.f32.{spec.math}.{spec.math}"
    firsts = range(0, registers, tile.block_m // 2)
    functions = "".join(_wgmma(kind, parameters, first, tile.block_m) for first in firsts)
    return f"""\
// acc[64, BLOCK_N], registers from FIRST on, (+)= lhs[64, step] * rhs[step, BLOCK_N], lhs in registers.
// Where not `accumulate`, the old accumulators are not read.
template <int FIRST>
__device__ void multiply{parameters};
{functions}"""


def _wgmma(kind: str, parameters: str, first: int, width: int) -> str:
    count = width // 2
    names = ", ".join(f"%{index}" for index in range(count))
    sums = ", ".join(f'"+f"(acc[{first + index}])' for index in range(count))
    lhs = ", ".join(f"%{count + index}" for index in range(4))
    return f"""\
template <>
__device__ __forceinline__ void multiply<{first}>{parameters} {{
  asm volatile("{{ .reg .pred p; setp.ne.s32 p, %{count + 5}, 0; wgmma.mma_async.sync.aligned.{kind} "
               "{{{names}}}, {{{lhs}}}, %{count + 4}, p, 1, 1, 0; }}"
               : {sums}
               : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "l"(rhs), "r"(accumulate));
}}
"""
