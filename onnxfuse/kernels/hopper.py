"""A kernel's spec and tile -> the full text of the CUDA source of the sm_90a kernel.

The kernel takes two arguments: the `OnnxfuseArguments` of every kernel, and the tensor maps that
`hopper_tile.map_rules` lists, each 128 bytes, one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.kernels.epilogue import functor, halved_sums
from onnxfuse.kernels.source import GENERATED_USES, access_tables, assembled, constants, flag, quantized_numbers
from onnxfuse.schedule.hopper import RingTile
from onnxfuse.schedule.hopper_tile import (
    TILE_BYTES,
    WGMMA_STEPS,
    HopperFootprint,
    HopperTile,
    begins_at_any_column,
    begins_at_any_row,
    block_k,
    footprint,
    rhs_pieces,
    tma_stored,
)
from onnxfuse.schedule.kernel_spec import Access, KernelSpec

COPY_ENTRY = "onnxfuse_copy_rows"  # the bridge launches it by this name


def emit(spec: KernelSpec, tile: HopperTile, shared_limit: int) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: what to compute.
        tile: a legal tile: `hopper_tile.why_not(spec, tile, shared_limit)` is None.
        shared_limit: shared memory of one block, in bytes.
    """
    text = _generated(spec, tile, footprint(spec, tile, shared_limit))
    return assembled(text, "hopper/gemm.cuh", uses(spec))


def uses(spec: KernelSpec) -> tuple[str, ...]:
    """The files that the generated text of a kernel of sm_90a uses."""
    return (*GENERATED_USES, *(("common/copied_rows.cuh",) if spec.copied else ()))


def _generated(spec: KernelSpec, tile: HopperTile, layout: HopperFootprint) -> str:
    flags = {
        "LHS_K_CONTIGUOUS": spec.lhs_order == "mk",
        "RHS_K_CONTIGUOUS": spec.rhs_order == "nk",
        "SWAPPED": False,
        "APART": False,
        "PINGPONG": tile.pingpong,
        "LAST_WAVE_SPLIT": False,
        "LHS_OUTER_COLUMNS": spec.lhs_run > 0,
        "LHS_OUTER_BATCH": spec.lhs_batch_runs,
        "RHS_OUTER_BATCH": spec.rhs_batch_runs,
        "OPERANDS_AHEAD": tile.operands_ahead,
        "LAST_ROWS_FULL": begins_at_any_row(spec),
        "LAST_COLUMNS_FULL": begins_at_any_column(spec),
    }
    tables = access_tables(spec.loads, layout.load_offsets, spec.outs, layout.out_offsets, _tma_stored)
    products = multiplications(spec, [spec.parts * piece.columns for piece in rhs_pieces(spec, tile)])
    return generated(spec, tile.cluster, flags, _numbers(spec, tile, layout), tables, products)


def generated_swapped(
    spec: KernelSpec,
    cluster: int,
    layout: HopperFootprint,
    flags: Mapping[str, bool],
    numbers: Mapping[str, int],
    multiplications: str,
) -> str:
    """The same of a kernel whose rows are the columns of the output, which threads store.

    Args:
        spec: as the kernel sees it.
        cluster: blocks of a cluster.
        layout: its shared memory.
        flags: constants that are not those of every such kernel.
        numbers: constants.
        multiplications: its wgmma.
    """
    own = {
        "SWAPPED": True, "APART": False, "PINGPONG": False, "OPERANDS_AHEAD": False, "LAST_ROWS_FULL": False,
        "LAST_COLUMNS_FULL": False, "LAST_WAVE_SPLIT": False,
    }  # fmt: skip
    not_stored = "static constexpr bool TMA_STORED = false; "
    tables = access_tables(spec.loads, layout.load_offsets, spec.outs, layout.out_offsets, lambda out: not_stored)
    return generated(spec, cluster, {**own, **flags}, numbers, tables, multiplications)


def generated(
    spec: KernelSpec,
    cluster: int,
    flags: Mapping[str, bool],
    numbers: Mapping[str, int],
    tables: str,
    multiplications: str,
) -> str:
    """The text before the files of a kernel of sm_90a: constants, ways to tensors, the functor and the wgmma."""
    booleans = "\n".join(f"[[maybe_unused]] constexpr bool {name} = {flag(value)};" for name, value in flags.items())
    return f"""\
// ---- generated
#define ONNXFUSE_CLUSTER {cluster_attribute(cluster)}
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

using Element = {spec.dtype.cuda};
{booleans}
{constants(numbers)}

{tables}

{functor(spec, halves=True)}
{multiplications}
}}  // namespace onnxfuse
{copy_entry(spec)}"""


def copy_entry(spec: KernelSpec) -> str:
    """The kernel that copies factors before this one."""
    if not spec.copied:
        return ""
    return f"""
extern "C" __global__ void __launch_bounds__(onnxfuse::COPY_THREADS)
{COPY_ENTRY}(const __grid_constant__ OnnxfuseArguments args) {{
  onnxfuse::wait_for_kernel_before();
  onnxfuse::let_kernel_behind_start();
  onnxfuse::copy_rows<sizeof(onnxfuse::Element)>(args);
}}
"""


def cluster_attribute(blocks: int) -> str:
    """What a kernel says of its clusters of so many blocks."""
    return f"__cluster_dims__({blocks}, 1, 1)" if blocks > 1 else ""


def halved_loads(spec: KernelSpec) -> int:
    """A bit for each row operand of which half is staged."""
    return sum(1 << index for _, index in halved_sums(spec).values())


def _tma_stored(out: Access) -> str:
    return f"static constexpr bool TMA_STORED = {flag(tma_stored(out))}; "


def _numbers(spec: KernelSpec, tile: HopperTile, layout: HopperFootprint) -> dict[str, int]:
    pieces = rhs_pieces(spec, tile)
    return {
        "TMA_STORED_OUTS": sum(map(tma_stored, spec.outs)),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "CLUSTER_M": tile.cluster_m,
        "CLUSTER_N": tile.cluster_n,
        "LHS_BOX_ROWS": tile.lhs_rows or tile.block_m // tile.cluster_n,
        "RHS_COLUMNS": pieces[0].columns,
        "RHS_ATOM": pieces[0].atom,
        "REST_ATOM": pieces[-1].atom,
        "RHS_PIECES": len(pieces),
        "BLOCK_K": block_k(spec),
        **block_numbers(spec, tile, layout),
    }


def block_numbers(spec: KernelSpec, tile: RingTile, layout: HopperFootprint) -> dict[str, int]:
    """The constants of `hopper/block.cuh`, whatever its stages hold."""
    return {
        "PARTS": spec.parts,
        "LOADS": len(spec.loads),
        "TILE_LOADS": sum(load.kind == "tile" for load in spec.loads),
        "SERVED": int(layout.served),
        "IN_PLACE_LOAD": -1 if layout.in_place_load is None else layout.in_place_load,
        "HALVED_LOADS": halved_loads(spec),
        "OUTS": len(spec.outs),
        "THREADS": tile.threads,
        "CONSUMERS": layout.groups,
        "K_GROUPS": tile.k_groups,
        "SPLITS": layout.splits,
        "GROUP_ROWS": tile.group_rows,
        "STAGES": layout.stages,
        "STAGE_BYTES": layout.stage,
        "KEPT_BYTES": layout.kept,
        "SUMS_BYTES": layout.sums,
        "SLAB_COLUMNS": layout.slab_columns,
        "OUT_BUFFERS": layout.out_buffers,
        "LOAD_BUFFERS": max(layout.load_buffers, 1),
        "STAGING_BYTES": layout.staging,
        "VECTORS_OFFSET": layout.vectors_offset,
        "VECTORS_BYTES": layout.vectors,
        "TILE_BYTES": TILE_BYTES,
        "SHARED_BYTES": layout.total,
        **quantized_numbers(spec),
    }


def multiplications(spec: KernelSpec, widths: Sequence[int], lhs_in_registers: bool = False) -> str:
    """The function `multiply<FIRST, COLUMNS>` for each wgmma, of so many columns, one behind the other in registers."""
    lhs = "const unsigned (&lhs)[4]" if lhs_in_registers else "unsigned long long lhs"
    bound = [f'"r"(lhs[{index}])' for index in range(4)] if lhs_in_registers else ['"l"(lhs)']
    parameters = f"(float (&acc)[{sum(widths) // 2}], {lhs}, unsigned long long rhs, int accumulate)"
    firsts = [sum(widths[:index]) // 2 for index in range(len(widths))]
    functions = (
        f"template <>\n__device__ __forceinline__ void multiply<{first}, {width}>{parameters} {{\n"
        f"  {_wgmma(spec, first, width, bound)}\n}}\n"
        for first, width in zip(firsts, widths, strict=True)
    )
    return f"""\
// acc[64, COLUMNS], registers from FIRST on, (+)= lhs[64, step] * rhs[step, COLUMNS], by descriptors; lhs also in
// registers. Where not `accumulate`, the old accumulators are not read.
template <int FIRST, int COLUMNS>
__device__ void multiply{parameters};
{"".join(functions)}"""


def _wgmma(spec: KernelSpec, first: int, width: int, lhs: Sequence[str]) -> str:
    """A wgmma on `width` of all the columns, whose sums are registers from `first` on; `lhs` binds its operands."""
    count = width // 2
    names = [f"%{index}" for index in range(count + len(lhs) + 2)]
    sums = ", ".join(f'"+f"(acc[{first + index}])' for index in range(count))
    kind = f"m64n{width}k{WGMMA_STEPS[spec.math]}.f32.{spec.math}.{spec.math}"
    own, (rhs, accumulate) = names[count:-2], names[-2:]
    read = own[0] if len(own) == 1 else f"{{{', '.join(own)}}}"
    # Only 16-bit operands in shared memory may be transposed: the last immediates of their wgmma.
    orders = [spec.lhs_order == "km"] * (len(own) == 1) + [spec.rhs_order == "kn"]
    transposed = "".join(f", {int(order)}" for order in orders) if spec.dtype.bytes == 2 else ""
    return f"""\
asm volatile("{{ .reg .pred p; setp.ne.s32 p, {accumulate}, 0; wgmma.mma_async.sync.aligned.{kind} "
               "{{{", ".join(names[:count])}}}, {read}, {rhs}, p, 1, 1{transposed}; }}"
               : {sums} : {", ".join(lhs)}, "l"(rhs), "r"(accumulate));"""
