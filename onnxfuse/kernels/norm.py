"""A normalisation's spec -> the full text of the CUDA source of its kernel."""

from __future__ import annotations

from onnxfuse.kernels.epilogue import constant, norm_functor
from onnxfuse.kernels.source import access_tables, assembled, constants, flag
from onnxfuse.schedule.norm_tile import NormSpec, NormTile

ENTRY = "onnxfuse_norm"


def emit(spec: NormSpec, tile: NormTile) -> str:
    """The CUDA source of a kernel."""
    return assembled(_generated(spec, tile), "norm/kernel.cuh")


def _generated(spec: NormSpec, tile: NormTile) -> str:
    numbers = {
        "LOADS": len(spec.loads),
        "OUTS": len(spec.outs),
        "BLOCK_M": tile.block_m,
        "ROW_THREADS": tile.row_threads,
        "SPAN": tile.span,
        "SPANS": tile.spans,
        "THREADS": tile.threads,
    }
    tables = access_tables(spec.loads, (0,) * len(spec.loads), spec.outs, (0,) * len(spec.outs))
    return f"""\
// ---- generated
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

{constants(numbers)}
constexpr bool CENTRED = {flag(spec.centred)};
constexpr float EPSILON = {constant(spec.epsilon)};
constexpr bool CHECKED = {flag(spec.checked)};

{tables}

{norm_functor(spec)}
}}  // namespace onnxfuse
"""
