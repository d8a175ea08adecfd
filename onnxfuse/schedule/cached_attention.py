"""The kernel of one token over a cache among the families: which blocks it has, and its way to each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxfuse.analysis.axis_mapping import AxisMapping
from onnxfuse.analysis.vector_width import EpilogueWidths, Width
from onnxfuse.device import DeviceSpec
from onnxfuse.errors import NotFusable
from onnxfuse.ir.cached_attention import CachedAttention
from onnxfuse.ir.fusion import Tensor
from onnxfuse.limits import MAX_M
from onnxfuse.schedule.cached_attention_tile import WIDTH, CachedAttentionSpec, CachedAttentionTile, shared_bytes
from onnxfuse.schedule.kernel_family import KernelFamily, Launch, any_depth
from onnxfuse.schedule.kernel_spec import Access
from onnxfuse.schedule.variant import CachedPlan, CachedVariant

WARPS = 8
# Clusters of so many blocks, while all of them have a multiprocessor each at once: of four blocks 30 do on an H200, and
# of groups of heads that are more each keeps one.
CLUSTERS = ((8, 15), (4, 30), (2, 64), (1, None))
ONLY = "sm_90a"  # the kernel was measured there alone; elsewhere the model's op runs


class CachedAttentionFamily(KernelFamily):
    """One token of each sequence over a cache."""

    name = "cached_attention"
    label = "attention over a cache"
    tile_type = CachedAttentionTile

    def launch(self, spec: CachedAttentionSpec, tile: CachedAttentionTile, device: DeviceSpec) -> Launch:
        """A cluster for each group of heads of each sequence."""
        cluster = tile.splits if tile.splits > 1 else 0
        shared = shared_bytes(spec, tile)
        return Launch(tile.block_m, tile.block_n, tile.threads, shared, cluster, early_depth=any_depth(device))

    def access_path(self, role: str, access: Access) -> str:
        """Rows of heads go by vectors, all else by elements."""
        if role == "out":
            return "direct store of vectors"
        return "direct loads along the head" if access.width > 1 else "element by element"


CACHED_ATTENTION = CachedAttentionFamily()


def make_cached_plan(fusion: CachedAttention, device: DeviceSpec) -> CachedPlan:
    """The kernels of an attention over a cache, each for some numbers of sequences.

    Raises:
        NotFusable: the architecture has none.
    """
    if device.arch != ONLY:
        raise NotFusable("no_attention_kernel", fusion.anchor, f"there is one for {ONLY} alone")
    spec = CachedAttentionSpec(
        fusion.outs[0].tensor.dtype, fusion.heads, fusion.kv_heads, fusion.head, fusion.rotary, fusion.interleaved,
        fusion.scale, fusion.softcap, fusion.window, fusion.epsilon, fusion.sink,
        loads=_loads(fusion), outs=_outs(fusion),
    )  # fmt: skip
    return CachedPlan(device, tuple(_variants(spec)), _widths(fusion))


def _variants(spec: CachedAttentionSpec) -> Iterator[CachedVariant]:
    first = 1
    for splits, most in CLUSTERS:
        last = MAX_M if most is None else most // spec.kv_heads
        if last >= first:
            tile = CachedAttentionTile(WARPS, splits, 1)
            yield CachedVariant(CACHED_ATTENTION, spec, tile, first, last)
            first = last + 1


def _is_row(tensor: Tensor) -> bool:
    return "h" in tensor.axes and len(tensor.dims) > 1


def _loads(fusion: CachedAttention) -> tuple[Access, ...]:
    return tuple(
        Access("tile", tensor.dtype, WIDTH) if _is_row(tensor) else Access("row", tensor.dtype, 1)
        for tensor in fusion.operands
    )


def _outs(fusion: CachedAttention) -> tuple[Access, ...]:
    return tuple(Access("tile", out.tensor.dtype, WIDTH) for out in fusion.outs)


def _widths(fusion: CachedAttention) -> EpilogueWidths:
    """Rows of heads are whole vectors; angles, norms, lengths and counts are read one by one."""
    return EpilogueWidths(_each(fusion.operands), _each([out.tensor for out in fusion.outs]))


def _each(tensors: Sequence[Tensor]) -> tuple[Width, ...]:
    return tuple(Width(WIDTH, "") if _is_row(tensor) else Width(1, "read once") for tensor in tensors)


def mapping_of() -> AxisMapping:
    """Heads of keys of all sequences, and the columns of a head."""
    return AxisMapping(("b",), ("g",), ("h",), (), (), ())
