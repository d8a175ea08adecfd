"""A pytest plugin for racecheck: where one lane arrives on an mbarrier for its warp, all 32 do.

racecheck does not see that what a warp did before `__syncwarp()` comes before what one of its lanes does after it: it
reports a kernel of ten lines in which a warp stores, meets, one lane arrives, and another warp waits and loads, and is
silent where all lanes arrive (`docs/kernel-notes.md`). `python -m tests.tools.memcheck --tool racecheck` uses this
plugin.
"""

from __future__ import annotations

import pytest

from onnxfuse.device import DeviceSpec
from onnxfuse.runtime.compile import CompiledImage, compile_source

# By the text that a kernel is known by: the arrival behind which generic loads and stores are ordered, and the count
# that its barrier expects. Those behind wgmma, TMA and st.async, which racecheck does not follow, stay.
ARRIVALS = {
    "// ---- hopper/block.cuh": (
        (
            "if (HAS_SLABS && leader) barrier_arrive(memory.slabs_empty",
            "if (HAS_SLABS) barrier_arrive(memory.slabs_empty",
        ),
        (
            "if (leader) barrier_arrive(slabs_empty",
            "barrier_arrive(slabs_empty",
        ),
        ("SLABS_EMPTY_OFFSET + slab * 8, SLAB_WARPS)", "SLABS_EMPTY_OFFSET + slab * 8, SLAB_WARPS * WARP_SIZE)"),
    ),
    "// ---- quantized_small_m/sums.cuh": (
        ("if (lane() == 0) mbarrier_arrive(barrier);", "mbarrier_arrive(barrier);"),
        ("barriers + i * BARRIER_BYTES, WARPS_K)", "barriers + i * BARRIER_BYTES, WARPS_K * WARP_SIZE)"),
    ),
}


def with_all_lanes(source: str) -> str:
    """A kernel with `ARRIVALS` of all lanes; other kernels as they are.

    Raises:
        ValueError: the kernel's text has changed.
    """
    for kernel, arrivals in ARRIVALS.items():
        if kernel not in source:
            continue
        for one, all_lanes in arrivals:
            if source.count(one) != 1:
                raise ValueError(f"no single {one!r} in {kernel!r}: tests/helpers/all_lanes_arrive.py is out of date")
            source = source.replace(one, all_lanes)
    return source


def _compile(source: str, device: DeviceSpec) -> CompiledImage:
    return compile_source(with_all_lanes(source), device)


def pytest_configure() -> None:
    """The kernels that tests launch by themselves are compiled with all lanes arriving."""
    pytest.MonkeyPatch().setattr("tests.gpu.kernels.compile_source", _compile)
