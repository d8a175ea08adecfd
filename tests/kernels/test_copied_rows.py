"""The kernel that copies a factor to rows that TMA reads, on the CPU: every element, and nothing beside."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import numpy as np
import pytest

import onnxfuse
from onnxfuse.device import CACHE_LINE, spec_of
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.kernels.hopper import COPY_ENTRY, copy_entry
from onnxfuse.kernels.source import assembled, template
from tests.helpers.host_build import build_library
from tests.helpers.kernel_problem import ARGUMENTS
from tests.kernels.test_portable_on_cpu import Range, host_source
from tests.perf.drawn import Drawn
from tests.perf.every_tile import plan_of

SM_90A = spec_of("sm_90a")
BRIDGE = Path(onnxfuse.__file__).parent / "runtime" / "bridge"
THREADS, CHUNK = 256, 16
BEHIND = 4  # bytes behind the copy that nobody may touch
# (m, k, batches, elements between rows beside k, elements before the first)
CASES = [
    *itertools.product((1, 5), (1, 7, 8, 9, 66, 331), (1,), (0, 1, 2), (0, 1, 2)),
    *itertools.product((3,), (34, 65), (2, 3), (0, 1), (0, 1)),
    (300, 21, 1, 0, 0), (129, 200, 2, 1, 2),
]  # fmt: skip


def test_the_bridge_launches_it_as_it_is_written() -> None:
    text = template("common/copied_rows.cuh")
    bridge = "".join((BRIDGE / f"copied_rows.{ending}").read_text() for ending in ("h", "cc"))
    for name, value in (("COPY_THREADS", THREADS), ("CHUNK_BYTES", CHUNK)):
        assert f"constexpr int {name} = {value};" in text
    assert f"kCopyThreads = {THREADS};" in bridge
    assert f"kLine = {CACHE_LINE}, kChunk = {CHUNK};" in bridge
    assert f'kCopyEntry[] = "{COPY_ENTRY}";' in bridge


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = plan_of(Drawn("bias", 4096, 1331, 1024, "kn", 10, False, 0), SM_90A)
    assert found is not None
    variant = next(each for each in found[1].variants if each.spec.copied)
    entry = copy_entry(variant.spec)
    assert entry in kernel_source(variant, SM_90A), "the kernel's own text has it"
    generated = "// ---- generated\nnamespace onnxfuse { using Element = __half; }\n"
    source = assembled(generated, "common/copied_rows.cuh") + entry
    folder = tmp_path_factory.mktemp("copied_rows")
    library = build_library(host_source(source), folder, f"-DONNXFUSE_ENTRY={COPY_ENTRY}")
    library.emulate.restype = ctypes.c_char_p
    return library


def test_it_copies_every_element_and_touches_nothing_else(library: ctypes.CDLL) -> None:
    """Rows on any boundary, of any length: of words of 4 bytes and of 2, whole chunks and not, batches, many blocks."""
    for m, k, batches, beside, before in CASES:
        pitch, line = k + beside, -(-2 * k // CACHE_LINE) * CACHE_LINE // 2
        memory = np.random.default_rng(k).integers(1, 2**16, before + batches * m * pitch + 2, np.uint16)
        lhs = memory[before : before + batches * m * pitch].reshape(batches, m, pitch)[:, :, :k]
        out = np.full(batches * m * line + BEHIND + 64, 0xABCD, np.uint16)
        first = -out.ctypes.data % CACHE_LINE // 2
        arguments = np.zeros(1, ARGUMENTS)
        arguments["lhs"][0] = (memory.ctypes.data + 2 * before, m * pitch, pitch, 1)
        arguments["outs"][0, 0] = (out.ctypes.data + 2 * first, m * line, line, 1)
        arguments["m"], arguments["k"], arguments["batch"] = m, k, batches
        blocks = -(-m * -(-2 * k // CHUNK) // THREADS)
        failure = library.emulate(
            ctypes.c_void_p(arguments.ctypes.data), blocks, min(batches, 2), THREADS, 0, (Range * 0)(), 0,
            ctypes.byref(ctypes.c_int()),
        )  # fmt: skip
        assert failure == b"", failure
        written = -(-2 * k // CHUNK) * CHUNK // 2
        expected = np.full((batches, m, line), 0xABCD, np.uint16)
        expected[:, :, :written] = 0
        expected[:, :, :k] = lhs
        found = out[first : first + batches * m * line].reshape(batches, m, line)
        np.testing.assert_array_equal(found, expected, err_msg=f"{m} {k} {batches} {beside} {before}")
        around = np.concatenate((out[:first], out[first + batches * m * line :]))
        assert (around == 0xABCD).all()
