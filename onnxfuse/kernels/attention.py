"""A spec and a tile -> the text of a kernel of two products joined by a softmax over rows.

The kernel takes the `OnnxfuseArguments` of every kernel; that of sm_90a also tensor maps of q, the keys, the values and
every load that is a tile, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from onnxfuse.dtypes import BF16, F32
from onnxfuse.kernels.epilogue import straight_line
from onnxfuse.kernels.hopper import cluster_attribute
from onnxfuse.kernels.source import access_tables, assembled, constants, flag
from onnxfuse.schedule.attention_tile import (
    AttentionSpec,
    AttentionTile,
    PortableAttentionTile,
    is_mapped,
    looks_again,
    mask_bytes,
    portable_shared_bytes,
    shared_bytes,
)
from onnxfuse.schedule.hopper_tile import WGMMA_STEPS

ENTRY = "onnxfuse_attention"
LOG2_E = math.log2(math.e)
# Blocks of few rows that a multiprocessor holds: without a number the compiler makes room for more, and spills.
RESIDENTS = 2
HUGE = 1e37  # as the lowest number in place of minus infinity is; no fp16 number


def emit(spec: AttentionSpec, tile: AttentionTile) -> str:
    """The CUDA source of the sm_90a kernel."""
    masks = mask_bytes(spec, tile)
    flags = {"TOGETHER": tile.together, "TURNS": tile.turns and tile.consumers > 1, "BY_TMA": True}
    offsets = [sum(masks[:index]) for index in range(len(masks))]
    generated = _generated(spec, tile, _wgmma_numbers(spec, tile), flags, offsets, _wgmma_products(spec, tile))
    return assembled(generated + _cluster(tile.splits), "hopper/attention.cuh")


def _wgmma_numbers(spec: AttentionSpec, tile: AttentionTile) -> dict[str, int]:
    return {
        "TILE_LOADS": sum(map(is_mapped, spec.loads)),
        "CONSUMERS": tile.consumers,
        "RESIDENTS": tile.residents,
        "STAGES": tile.stages,
        "LANDED_STAGES": tile.landed,
        "SPLITS": tile.splits,
        "RESCALE_ABOVE": tile.rescale_above,
        "MASK_BYTES": sum(mask_bytes(spec, tile)),
        "SHARED_BYTES": shared_bytes(spec, tile),
    }


def emit_portable(spec: AttentionSpec, tile: PortableAttentionTile) -> str:
    """The CUDA source of the kernel of sm_80 and later."""
    numbers = {
        "RESCALE_ABOVE": 0,
        "SPLITS": tile.splits,
        "CLUSTER": tile.cluster,
        "RESIDENTS": RESIDENTS if tile.splits > 1 else 0,
        "SHARED_BYTES": portable_shared_bytes(spec, tile),
    }
    flags = {"BY_TMA": False, "WIDE": not spec.checked}
    generated = _generated(spec, tile, numbers, flags, [0] * len(spec.loads), "")
    return assembled(generated + _cluster(tile.cluster), "portable/attention.cuh")


def _cluster(blocks: int) -> str:
    return f"#define ONNXFUSE_CLUSTER {cluster_attribute(blocks)}\n"


def _generated(
    spec: AttentionSpec,
    tile: AttentionTile | PortableAttentionTile,
    numbers: Mapping[str, int],
    flags: Mapping[str, bool],
    offsets: Sequence[int],
    products: str,
) -> str:
    """What stands before a kernel: its types, constants, tables and functors, and its own products."""
    shared = {
        "LOADS": len(spec.loads),
        "SCORE_STEPS": len(spec.score),
        "BLOCK_N": tile.block_n,
        "THREADS": tile.threads,
        "HEAD": spec.head,
        "VALUE_HEAD": spec.value_head,
        "OUT_WIDTH": spec.out_width,
        "DIAGONAL_OFFSET": 0 if spec.diagonal is None else spec.diagonal.offset,
        "WINDOW_OFFSET": 0 if spec.diagonal is None else spec.diagonal.first or 0,
    }
    known = {"GUARDED": spec.guarded, "HUGE_SCORES": _has_huge_scores(spec), **_flags_of_diagonal(spec), **flags}
    lines = "\n".join(f"[[maybe_unused]] constexpr bool {name} = {flag(value)};" for name, value in known.items())
    return f"""\
// ---- generated
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

using Element = {spec.dtype.cuda};
using Stored = {spec.outs[0].dtype.cuda};
[[maybe_unused]] constexpr bool LHS_K_CONTIGUOUS = true;
[[maybe_unused]] constexpr bool RHS_K_CONTIGUOUS = true;
[[maybe_unused]] constexpr bool APART = false;
constexpr float SCALE = {spec.scale * LOG2_E!r}f;
[[maybe_unused]] constexpr float LOW_SCORE = {_low_score(spec)!r}f;
{lines}
{constants({**shared, **numbers})}

{access_tables(spec.loads, offsets, (), ())}

{straight_line("Score", len(spec.loads), spec.score, spec.score_value)}
{straight_line("Result", 0, spec.result, spec.result_value)}
{products}
}}  // namespace onnxfuse
"""


def _flags_of_diagonal(spec: AttentionSpec) -> dict[str, bool]:
    is_from_end = spec.diagonal is not None and spec.diagonal.from_end
    is_window = spec.diagonal is not None and spec.diagonal.first is not None
    flags = {"DIAGONAL": spec.diagonal is not None, "WINDOW": is_window, "FROM_END": is_from_end}
    return flags | {"LOOKS_AGAIN": looks_again(spec)}


def _low_score(spec: AttentionSpec) -> float:
    """A row whose greatest score is below that has nothing but what a mask left."""
    return spec.diagonal.fill / 2 if spec.diagonal is not None and looks_again(spec) else 0.0


def _has_huge_scores(spec: AttentionSpec) -> bool:
    """Whether a score may be as low as no fp16 number is."""
    numbers = (abs(value) for step in spec.score for value in step.inputs if isinstance(value, float))
    return any(load.dtype in (BF16, F32) for load in spec.loads) or any(HUGE < each < math.inf for each in numbers)


def _wgmma_products(spec: AttentionSpec, tile: AttentionTile) -> str:
    return f"{_wgmma_scores(spec, tile)}\n{_wgmma_values(spec)}"


def _wgmma_scores(spec: AttentionSpec, tile: AttentionTile) -> str:
    comment = "// acc[64, BLOCK_N] (+)= lhs[64, STEP] * rhs[STEP, BLOCK_N], by descriptors, the depth contiguous."
    return _wgmma(comment, "multiply_scores", spec, tile.block_n, ["lhs"], ", 0, 0")


def _wgmma_values(spec: AttentionSpec) -> str:
    comment = "// acc[64, VALUE_HEAD] (+)= lhs[64, STEP] * rhs[STEP, VALUE_HEAD], lhs in registers."
    return _wgmma(comment, "multiply_values", spec, spec.value_head, [f"lhs[{index}]" for index in range(4)], ", 1")


def _wgmma(comment: str, name: str, spec: AttentionSpec, width: int, lhs: list[str], transposed: str) -> str:
    """One wgmma of so many columns; `lhs` is a descriptor, or what its four registers hold."""
    count = width // 2
    kind = f"m64n{width}k{WGMMA_STEPS[spec.math]}.f32.{spec.math}.{spec.math}"
    transposed = "" if spec.math == "tf32" else transposed  # 32-bit elements have their depth contiguous
    names = ", ".join(f"%{index}" for index in range(count))
    places = [f"%{count + index}" for index in range(len(lhs))]
    first = places[0] if len(places) == 1 else f"{{{', '.join(places)}}}"
    outs = ", ".join(f'"+f"(acc[{index}])' for index in range(count))
    inputs = ", ".join(f'"{"l" if len(lhs) == 1 else "r"}"({register})' for register in lhs)
    parameter = "unsigned long long lhs" if len(lhs) == 1 else "const unsigned* lhs"
    rhs, accumulate = (f"%{count + len(lhs) + index}" for index in range(2))
    return f"""\
{comment}
__device__ __forceinline__ void {name}(float (&acc)[{count}], {parameter}, unsigned long long rhs, int accumulate) {{
  asm volatile("{{ .reg .pred p; setp.ne.s32 p, {accumulate}, 0; "
               "wgmma.mma_async.sync.aligned.{kind} "
               "{{{names}}}, "
               "{first}, {rhs}, p, 1, 1{transposed}; }}"
               : {outs}
               : {inputs}, "l"(rhs), "r"(accumulate));
}}
"""
