"""A spec and a tile -> the text of the kernel of one token over a cache of keys and values."""

from __future__ import annotations

from onnxfuse.kernels.hopper import cluster_attribute
from onnxfuse.kernels.source import assembled, constants, flag
from onnxfuse.schedule.cached_attention_tile import CachedAttentionSpec, CachedAttentionTile, shared_bytes

ENTRY = "onnxfuse_cached_attention"
USES = ("common/arguments.cuh", "common/cluster_ptx.cuh")


def emit(spec: CachedAttentionSpec, tile: CachedAttentionTile) -> str:
    """The CUDA source of a kernel."""
    numbers = {
        "HEADS": spec.heads,
        "KV_HEADS": spec.kv_heads,
        "HEAD": spec.head,
        "ROTARY": spec.rotary,
        "WINDOW": spec.window,
        "WARPS": tile.warps,
        "SPLITS": tile.splits,
        "RESIDENTS": tile.residents,
        "THREADS": tile.threads,
        "SHARED_BYTES": shared_bytes(spec, tile),
    }
    generated = f"""\
// ---- generated
namespace onnxfuse {{

using Element = {spec.dtype.cuda};
constexpr bool INTERLEAVED = {flag(spec.interleaved)};
constexpr bool SOFTCAPPED = {flag(spec.softcap > 0)};
constexpr float SCALE = {spec.scale!r}f;
constexpr bool NORMED = {flag(spec.epsilon > 0)};
constexpr bool SINK = {flag(spec.sink)};
constexpr float EPSILON = {spec.epsilon!r}f;
constexpr float SOFTCAP = {spec.softcap or 1.0!r}f;
{constants(numbers)}

}}  // namespace onnxfuse
#define ONNXFUSE_CLUSTER {cluster_attribute(tile.splits)}
"""
    return assembled(generated, "cached_attention/kernel.cuh", USES)
