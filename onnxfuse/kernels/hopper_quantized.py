"""A spec and a tile -> the full text of the CUDA source of the sm_90a kernel for a quantized weight.

The kernel takes two arguments, as `kernels/hopper.py` says; the maps are those of `hopper_quantized_tile.map_rules`.
"""

from __future__ import annotations

from onnxfuse.kernels.hopper import block_numbers, generated_swapped
from onnxfuse.kernels.source import GENERATED_USES, assembled
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
    flags = {"LHS_K_CONTIGUOUS": True, "RHS_K_CONTIGUOUS": True, "APART": tile.apart}
    products = _multiplications(spec, tile)
    return generated_swapped(spec, tile.splits, layout, flags, _numbers(spec, tile, layout), products)


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
