"""Copies of factors for a kernel that cannot read their rows as they lie: which runs take it; sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from onnxfuse.errors import ModelError
from onnxfuse.graph.archive import (
    FIRST_LOAD,
    FIRST_OUT,
    Library,
    Mapped,
    QuantizedRhs,
    Record,
    TensorFlag,
    TensorMap,
    pack,
)
from tests.helpers.bridge_build import bridge_library, fake_driver_folder
from tests.helpers.bridge_hooks import BridgeError, Node, bridge
from tests.helpers.many_commands import run_helper
from tests.tools.fuzz_archive import RECORD, flags

LHS, RHS, OPERAND, OUT = ((1 << 20) * place for place in range(1, 5))
PLAIN = dataclasses.replace(
    RECORD, flavour=2, capability=80, min_m=0, max_m=2**31 - 1, lhs_alignment=16, rhs_alignment=16,
    load_alignments=(2,), out_alignments=(2,), flags=flags({}), maps=(), cluster=0,
)  # fmt: skip
COPYING = dataclasses.replace(
    PLAIN, flags=flags({0: TensorFlag.COPIED}), maps=(TensorMap(Mapped.LHS, 0, False, 128, 64, 64),)
)
LAST = dataclasses.replace(PLAIN, lhs_alignment=2, rhs_alignment=2)
ARGUMENTS, KERNEL = "lhs=0 rhs=1 loads=2 outs=0", "0123abcd"
HEADS = Node("b h m d, n (h d), m n -> b m n", "batch=b m=m n=n k=h*d", ARGUMENTS, "h=4 n=40", KERNEL)


def rows(lhs: str) -> Node:
    return Node(f"{lhs}, k n, m n -> m n", "m=m n=n k=k", ARGUMENTS, "n=40", KERNEL)


def chosen(records: Sequence[Record], node: Node, shapes: Sequence[Sequence[int]], lhs: int = LHS) -> int:
    inputs = (lhs, RHS, OPERAND)
    arguments = bridge().arguments(node, shapes, element_bytes=2, inputs=inputs, outputs=(OUT,))[0]
    return int(bridge().choose(pack(list(records)), node, arguments))


@pytest.mark.parametrize("k", [1, 7, 8, 66, 331])
@pytest.mark.parametrize("address", [LHS, LHS + 2, LHS + 4])
def test_a_copy_fits_rows_on_any_boundary(k: int, address: int) -> None:
    shapes = ((6, k), (k, 40), (6, 40))
    assert chosen([COPYING, LAST], rows("m k"), shapes, address) == 0
    reads_it = address == LHS and k % 8 == 0
    assert chosen([PLAIN, LAST], rows("m k"), shapes, address) == (0 if reads_it else 1)
    assert chosen([dataclasses.replace(COPYING, max_m=5), LAST], rows("m k"), shapes, address) == 1


def test_the_kernel_without_a_copy_stands_behind_it() -> None:
    """There may be no memory for it, so it makes no other record superfluous."""
    same = dataclasses.replace(PLAIN, maps=COPYING.maps)
    assert chosen([dataclasses.replace(COPYING, max_m=5), same, LAST], rows("m k"), ((6, 8), (8, 40), (6, 40))) == 1


@pytest.mark.parametrize("n", [1, 7, 49, 64])
def test_a_copy_of_rhs_fits_rows_along_either_axis(n: int) -> None:
    """Whichever is contiguous; of the other order it fits none of more than one."""
    along_n = dataclasses.replace(PLAIN, flags=flags({1: TensorFlag.COPIED}), lhs_alignment=2)
    along_k = dataclasses.replace(along_n, flags=flags({1: TensorFlag.COPIED | TensorFlag.TRANSPOSED}))
    for rhs, shape in (("k n", (65, n)), ("n k", (n, 65))):
        node = Node(f"m k, {rhs}, m n -> m n", "m=m n=n k=k", ARGUMENTS, f"n={n}", KERNEL)
        fitting = {"k n": 0, "n k": 1}[rhs]
        assert chosen([along_n, along_k, LAST], node, ((6, 65), shape, (6, n))) == (0 if n == 1 else fitting)


@pytest.mark.parametrize("k", [65, 66, 70, 72])
def test_zeros_behind_a_row_may_be_read(k: int) -> None:
    """Of a weight whose rows are a window of k; of one without, whole accesses end with k."""
    whole = dataclasses.replace(PLAIN, flags=flags({1: TensorFlag.TRANSPOSED}), lhs_alignment=2)
    last = dataclasses.replace(LAST, flags=flags({1: TensorFlag.TRANSPOSED}))
    for rhs, row, fits in (("n k:72", 72, True), ("n k", k, k == 72), ("n k:74", 74, False)):
        node = Node(f"m k, {rhs}, m n -> m n", "m=m n=n k=k", ARGUMENTS, f"n=40 k={k}", KERNEL)
        assert chosen([whole, last], node, ((6, k), (40, row), (6, 40))) == (0 if fits else 1)


def test_columns_apart_and_levels_are_not_copied() -> None:
    assert chosen([COPYING, LAST], rows("k m"), ((331, 6), (331, 40), (6, 40))) == 1
    last = dataclasses.replace(LAST, flags=flags({0: TensorFlag.COLUMNS_IN_RUNS, 1: TensorFlag.TRANSPOSED}))
    copying = dataclasses.replace(COPYING, flags=flags({0: TensorFlag.COPIED, 1: TensorFlag.TRANSPOSED}))
    assert chosen([copying, last], HEADS, ((2, 4, 3, 9), (40, 36), (3, 40))) == 1
    with pytest.raises(BridgeError, match="no kernel"):
        chosen([copying], HEADS, ((2, 4, 3, 9), (40, 36), (3, 40)))


IMPOSSIBLE = {
    "of rhs in runs": {"flags": flags({1: TensorFlag.COPIED | TensorFlag.BATCHES_IN_RUNS})},
    "of a load": {"flags": flags({FIRST_LOAD: TensorFlag.COPIED})},
    "of an output": {"flags": flags({FIRST_OUT: TensorFlag.COPIED})},
    "in runs": {"flags": flags({0: TensorFlag.COPIED | TensorFlag.COLUMNS_IN_RUNS})},
    "transposed": {"flags": flags({0: TensorFlag.COPIED | TensorFlag.TRANSPOSED})},
    "for the library": {"library": Library.F16, "maps": ()},
    "beside integers": {"quantized": QuantizedRhs(4, 32, 2, 0)},
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_both_sides_refuse_an_impossible_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="impossible copy"):
        dataclasses.replace(COPYING, **IMPOSSIBLE[name])
    monkeypatch.setattr("onnxfuse.graph.archive._check", lambda record: None)
    with pytest.raises(BridgeError, match=r"impossible (copy|quantized|product)"):
        bridge().archive(pack([dataclasses.replace(COPYING, **IMPOSSIBLE[name])]))


@pytest.mark.parametrize("name", ["copies", "batches", "both", "along_n", "threads", "no_memory"])
def test_session(name: str) -> None:
    """A real session of ONNX Runtime over the stand-in for the driver."""
    folder = str(fake_driver_folder())
    done = run_helper("tests.helpers.copied_rows_session", name, bridge_library(), LD_LIBRARY_PATH=folder)
    assert done.returncode == 0, done.stdout + done.stderr
