"""A pointwise spec -> the full text of the CUDA source of the kernel behind a product."""

from __future__ import annotations

from onnxfuse.kernels.emit import access_tables, constants, flag, template
from onnxfuse.kernels.epilogue import pointwise_functor
from onnxfuse.pointwise_tile import PointwiseSpec

ENTRY = "onnxfuse_pointwise"

_BEFORE = ("arguments.cuh", "element.cuh", "walk.cuh", "ptx.cuh", "pointwise.cuh")
_AFTER = ("way.cuh", "fused_pointwise.cuh")


def emit(spec: PointwiseSpec) -> str:
    """The CUDA source of a kernel."""
    before = "\n".join(template(name) for name in _BEFORE)
    after = "\n".join(template(name) for name in _AFTER)
    return f"{before}\n{_generated(spec)}\n{after}"


def _generated(spec: PointwiseSpec) -> str:
    numbers = {
        "LOADS": len(spec.loads),
        "OUTS": len(spec.outs),
        "BLOCK_M": spec.tile.block_m,
        "BLOCK_N": spec.tile.block_n,
        "SPAN": spec.tile.span,
        "THREADS": spec.tile.threads,
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
