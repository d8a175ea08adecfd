"""A pointwise spec -> the full text of the CUDA source of the epilogue-only kernel."""

from __future__ import annotations

from onnxfuse.kernels.epilogue import pointwise_functor
from onnxfuse.kernels.source import access_tables, assembled, constants, flag
from onnxfuse.schedule.pointwise_tile import PointwiseSpec, PointwiseTile

ENTRY = "onnxfuse_pointwise"


def emit(spec: PointwiseSpec, tile: PointwiseTile) -> str:
    """The CUDA source of a kernel."""
    return assembled(_generated(spec, tile), "pointwise/kernel.cuh")


def _generated(spec: PointwiseSpec, tile: PointwiseTile) -> str:
    numbers = {
        "LOADS": len(spec.loads),
        "OUTS": len(spec.outs),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SPAN": tile.span,
        "THREADS": tile.threads,
    }
    tables = access_tables(spec.loads, (0,) * len(spec.loads), spec.outs, (0,) * len(spec.outs))
    return f"""\
// ---- generated
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

{constants(numbers)}
constexpr bool CHECKED = {flag(spec.checked)};

{tables}

{pointwise_functor(spec)}
}}  // namespace onnxfuse
"""
