"""Sessions of ONNX Runtime on the CPU whose kernels read a copy of lhs; each case in a process of its own.

    python -m tests.helpers.copied_rows_session CASE BRIDGE

The stand-in for the driver copies floats. The kernel behind the copy multiplies both parts with each other and adds its
loads; the one that takes over from it adds to 1 what it loads alone: results tell which of them has run.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from onnxfuse.graph.archive import Mapped, Record, TensorFlag, TensorMap, pack
from tests.helpers import bridge_session
from tests.helpers.bridge_hooks import Arguments
from tests.helpers.bridge_session import BIAS, RECORD, N, driver, in_threads, model, on_cpu, sample, session
from tests.helpers.many_commands import end_with
from tests.tools.fuzz_archive import flags

K = 7  # of which no row but the first begins on 16 bytes
WEIGHT = np.random.default_rng(8).standard_normal((K, 2 * N)).astype(np.float32)
OTHER = Record(**(vars(RECORD) | {"entry": "fake_p0_l2", "lhs_alignment": 4, "rhs_alignment": 4}))
COPYING = Record(**(vars(RECORD) | {
    "flags": flags({0: TensorFlag.COPIED}), "maps": (TensorMap(Mapped.LHS, 0, False, 128, 32, 16),), "max_m": 1000,
    "early_depth": 2**32 - 1, "full_early_depth": 2**32 - 1,
}))  # fmt: skip
ARCHIVE = pack([COPYING, OTHER])


def copied(x: np.ndarray) -> np.ndarray:
    product = x @ WEIGHT
    return product[..., :N] * product[..., N:] + BIAS[:N] + BIAS[N:]


def other(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(1 + BIAS[:N] + BIAS[N:], (*x.shape[:-1], N))


def narrow(nodes: int = 1, archive: bytes = ARCHIVE, dims: tuple = ("B", "M", K), **attributes: str) -> bytes:
    """`bridge_session.model` of the odd depth."""
    proto = onnx.load_from_string(
        model(nodes=nodes, archive=archive, dims=dims, sizes=f"p=2 n={N} k={K}", **attributes)
    )
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(WEIGHT, "w"))
    return proto.SerializeToString()


def check(made, expected, *dims: int) -> None:
    x = sample(*dims)
    for y in made.run(None, {"x": x}):
        np.testing.assert_allclose(y, expected(x), rtol=1e-4, atol=1e-4)


def last() -> Arguments:
    arguments = Arguments()
    driver().fake_last_launch((ctypes.c_uint * 6)(), (ctypes.c_uint * 1)(), ctypes.byref(arguments))
    return arguments


# ---- Cases -----------------------------------------------------------------------------------------------------------


def copies() -> None:
    """In its range of rows; the copy lies on cache lines, and both launches may start early."""
    on_cpu()
    made = session(narrow(nodes=3))
    for count, dims in enumerate(((2, 3), (1, 1), (5, 64), (4, 250)), 1):
        check(made, copied, *dims, K)
        assert driver().fake_copies() == 3 * count
        lhs = last().lhs
        assert (lhs.pointer % 128, 4 * lhs.row_stride, lhs.column_stride) == (0, 128, 1)
        assert last().rhs_ready
    check(made, other, 7, 200, K)
    assert driver().fake_copies() == 12, "beyond its range the other kernel runs"


def batches() -> None:
    """Each with rows of its own; one that all share is copied once."""
    on_cpu()
    problem = {"problem": "batch=b m=m n=n k=k"}
    check(session(narrow(**problem)), copied, 3, 5, K)
    assert (last().batch, last().lhs.batch_stride) == (3, 5 * 32)


def both() -> None:
    """Rows of a weight [n, k], each part by itself, behind those of lhs; or theirs alone."""
    on_cpu()
    turned = {"axes": "b m k, (p n) k, (p n) -> b m n"}
    rhs_alone = flags({1: TensorFlag.COPIED | TensorFlag.TRANSPOSED})
    for chosen, count in ((flags({0: TensorFlag.COPIED}), 3), (flags({}), 2)):
        wanted = tuple(map(max, chosen, rhs_alone))
        maps = tuple(TensorMap(Mapped.RHS, part, True, 128, 32, 16) for part in range(2))
        copying = replace(COPYING, flags=wanted, maps=maps, lhs_alignment=16 if chosen[0] else 4)
        proto = onnx.load_from_string(narrow(archive=pack([copying, OTHER]), **turned))
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(WEIGHT.T), "w"))
        before = driver().fake_copies()
        check(session(proto.SerializeToString()), copied, 2, 3, K)
        assert driver().fake_copies() == before + count
        parts = last().rhs
        assert [(part.row_stride, 4 * part.column_stride) for part in parts[:2]] == [(1, 128)] * 2
        assert parts[1].pointer - parts[0].pointer == 128 * N
        assert parts[0].pointer % 128 == 0
        assert not last().rhs_ready, "the kernel before makes it"


def along_n() -> None:
    """Rows of rhs [k, n], of each part its own columns; batches lie behind each other."""
    on_cpu()
    maps = tuple(TensorMap(Mapped.RHS, part, False, 128, 32, 16) for part in range(2))
    copying = replace(COPYING, flags=flags({1: TensorFlag.COPIED}), maps=maps, lhs_alignment=4)
    check(session(narrow(archive=pack([copying, OTHER]))), copied, 2, 3, K)
    assert driver().fake_copies() == 2
    parts, line = last().rhs, -(-4 * N // 128) * 128
    assert [(4 * part.row_stride, part.column_stride) for part in parts[:2]] == [(line, 1)] * 2
    assert parts[1].pointer - parts[0].pointer == line * K
    assert parts[0].pointer % 128 == 0


def threads() -> None:
    """Runs at the same time have no copy in common."""
    on_cpu()
    bridge_session.K = K
    in_threads(session(narrow(nodes=2)), copied)


def no_memory() -> None:
    """Where there is none for the copy, the kernel behind it runs."""
    on_cpu()
    archive, rows = (
        pack([replace(COPYING, max_m=2**31 - 1), OTHER]),
        1 << 20,
    )  # a copy larger than what an allocator keeps
    made = session(narrow(archive=archive, dims=(None, None, None)), arena=False)
    check(made, copied, 1, 3, K)
    x, before = np.ones((1, rows, K), np.float32), driver().fake_copies()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + 9 * 4 * rows * N // 4  # the output and what Python gets of it, but not 128 bytes of each row beside
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    (y,) = made.run(None, {"x": x})
    assert driver().fake_copies() == before
    assert (y == other(x)).all()


def main() -> None:
    """One case."""
    bridge_session.LIBRARY = sys.argv[2]
    end_with(globals()[sys.argv[1]])


if __name__ == "__main__":
    main()
