"""A kernel's spec and tile -> the full text of the CUDA source of the sm_90a kernel.

The kernel takes two arguments: the `OnnxfuseArguments` of every kernel, and the tensor maps that
`hopper_tile.map_rules` lists, each 128 bytes, one behind the other.
"""

from __future__ import annotations

from dataclasses import replace

from onnxfuse.fusion import Value
from onnxfuse.hopper_tile import TILE_BYTES, HopperFootprint, HopperTile, boxed, footprint, rhs_atom, rhs_box
from onnxfuse.kernels import emit as portable
from onnxfuse.kernels.epilogue import functor
from onnxfuse.plan import KernelSpec

_BEFORE = ("arguments.cuh", "element.cuh", "ptx.cuh", "pointwise.cuh", "pointwise_fast.cuh")
_AFTER = ("hopper_ptx.cuh", "hopper_epilogue.cuh", "hopper_gemm.cuh")


def emit(spec: KernelSpec, tile: HopperTile, shared_limit: int) -> str:
    """The CUDA source of a kernel.

    Args:
        spec: what to compute; its own tile is that of the portable kernel and not looked at.
        tile: a legal tile: `hopper_tile.why_not(spec, tile, shared_limit)` is None.
        shared_limit: shared memory of one block, in bytes.
    """
    before = "\n".join(portable._template(name) for name in _BEFORE)
    after = "\n".join(portable._template(name) for name in _AFTER)
    return f"{before}\n{_generated(spec, tile, footprint(spec, tile, shared_limit))}\n{after}"


def _generated(spec: KernelSpec, tile: HopperTile, layout: HopperFootprint) -> str:
    preloads = preloaded(spec)
    cluster = tile.cluster_m * tile.cluster_n
    attribute = f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else ""
    return f"""\
// ---- generated
#define ONNXFUSE_CLUSTER {attribute}
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

using Element = {spec.dtype.cuda};
constexpr bool RHS_K_CONTIGUOUS = {_flag(spec.rhs_order == "nk")};
constexpr bool PINGPONG = {_flag(tile.pingpong)};
constexpr bool PRELOADED = {_flag(bool(preloads))};
constexpr bool OPERANDS_AHEAD = {_flag(tile.operands_ahead)};
{_constants(spec, tile, layout)}

{_tables(spec, layout, preloads)}

{_fast(functor(_without_preloads(spec, preloads)))}
{wgmma(spec, spec.parts * tile.block_n)}
}}  // namespace onnxfuse
"""


def preloaded(spec: KernelSpec) -> dict[int, int]:
    """Part -> load of the row operand that is only ever added to that part's product: a bias.

    It becomes the first value of the accumulators, which spares the epilogue an addition for each product.
    """
    uses = [value for step in spec.steps for value in step.inputs] + list(spec.out_values)
    found = {}
    for step in spec.steps:
        names = sorted(map(str, step.inputs))
        if step.op != "add" or not (names[0].startswith("acc") and names[1].startswith("op")):
            continue
        load = int(names[1][2:])
        if spec.loads[load].kind == "row" and uses.count(names[0]) == uses.count(names[1]) == 1:
            found[int(names[0][3:])] = load
    return found


def _without_preloads(spec: KernelSpec, preloads: dict[int, int]) -> KernelSpec:
    """The spec whose accumulators come with their biases: `a0 = acc0 + op0` is then `acc0`."""
    names: dict[Value, str] = {}
    steps = []
    for step in spec.steps:
        biased = [part for part in preloads if f"acc{part}" in step.inputs]
        if biased:
            names[step.result] = f"acc{biased[0]}"
        else:
            steps.append(replace(step, inputs=tuple(names.get(value, value) for value in step.inputs)))
    return replace(spec, steps=tuple(steps), out_values=tuple(names.get(value, value) for value in spec.out_values))


# Accurate functions of the functor and those that are accurate enough for 16-bit operands.
_FAST = {
    "pointwise::gelu(": "pointwise::fast_gelu(",
    "pointwise::gelu_tanh(": "pointwise::fast_gelu_tanh(",
    "pointwise::sigmoid(": "pointwise::fast_sigmoid(",
}


def _fast(source: str) -> str:
    for accurate, fast in _FAST.items():
        source = source.replace(accurate, fast)
    return source


def _tables(spec: KernelSpec, layout: HopperFootprint, preloads: dict[int, int]) -> str:
    loads = [
        portable._access("Load", index, load, layout.load_offsets[index], _load_members(load.kind, index in early))
        for early in (preloads.values(),)
        for index, load in enumerate(spec.loads)
    ]
    outs = [
        portable._access("Out", index, out, layout.out_offsets[index], f"static constexpr bool BOXED = {_flag(boxed(out))}; ")
        for index, out in enumerate(spec.outs)
    ]
    parts = [
        f"template <> struct Part<{part}> {{ static constexpr int PRELOAD = {preloads.get(part, -1)}; }};"
        for part in range(spec.parts)
    ]
    heads = [f"template <int INDEX> struct {name};" for name in ("Load", "Out", "Part")]
    return "\n".join([*heads, *loads, *outs, *parts])


def _load_members(kind: str, is_preloaded: bool) -> str:
    return f"static constexpr Kind KIND = Kind::{kind}; static constexpr bool PRELOADED = {_flag(is_preloaded)}; "


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _constants(spec: KernelSpec, tile: HopperTile, layout: HopperFootprint) -> str:
    constants = {
        "PARTS": spec.parts,
        "LOADS": len(spec.loads),
        "TILE_LOADS": sum(load.kind == "tile" for load in spec.loads),
        "OUTS": len(spec.outs),
        "BOXED_OUTS": sum(map(boxed, spec.outs)),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "CLUSTER_M": tile.cluster_m,
        "CLUSTER_N": tile.cluster_n,
        "GROUP_ROWS": tile.group_rows,
        "RHS_ATOM": rhs_atom(spec, tile),
        "RHS_BOX_ROWS": rhs_box(spec, tile)[1],
        "STAGES": layout.stages,
        "SLAB_COLUMNS": layout.slab_columns,
        "OUT_BUFFERS": layout.out_buffers,
        "LOAD_BUFFERS": layout.load_buffers,
        "STAGING_BYTES": layout.staging,
        "VECTORS_OFFSET": layout.vectors_offset,
        "VECTORS_BYTES": layout.vectors,
        "TILE_BYTES": TILE_BYTES,
        "SHARED_BYTES": layout.total,
    }
    return "\n".join(f"constexpr int {name} = {value};" for name, value in constants.items())


def wgmma(spec: KernelSpec, width: int) -> str:
    """The function `multiply`: acc[64, width] (+)= lhs[64, 16] * rhs[16, width], operands by descriptor."""
    registers = width // 2
    names = ", ".join(f"%{index}" for index in range(registers))
    operands = ", ".join(f'"+f"(acc[{index}])' for index in range(registers))
    lhs, rhs, accumulate = (f"%{registers + index}" for index in range(3))
    kind = f"m64n{width}k16.f32.{spec.dtype}.{spec.dtype}"
    transposed = 0 if spec.rhs_order == "nk" else 1
    return f"""\
// Where not `accumulate`, the old accumulators are not read.
__device__ __forceinline__ void multiply(float (&acc)[{registers}], unsigned long long lhs, unsigned long long rhs,
                                         int accumulate) {{
  asm volatile("{{ .reg .pred p; setp.ne.s32 p, {accumulate}, 0; "
               "wgmma.mma_async.sync.aligned.{kind} "
               "{{{names}}}, "
               "{lhs}, {rhs}, p, 1, 1, 0, {transposed}; }}"
               : {operands}
               : "l"(lhs), "l"(rhs), "r"(accumulate));
}}
"""
