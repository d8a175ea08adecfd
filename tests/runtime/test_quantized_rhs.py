"""A quantized rhs as the bridge sees it: where its columns, scales and zero points lie, and which records read them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnxfuse.graph.archive import Mapped, QuantizedRhs, TensorFlag, TensorMap, pack
from tests.graph.test_archive import RECORD
from tests.helpers.bridge_hooks import Arguments, BridgeError, Node, bridge
from tests.tools.fuzz_archive import flags

K, N, BITS, BLOCK = 320, 24, 4, 128
BLOCKS, BYTES, ZEROS = 3, 64, 2
PACKED = Node(
    axes="b m k, (p n) kb kq, (p n) kb, (p n) kz -> b m n",
    sizes=f"p=2 n={N} k={K} kb={BLOCKS} kq={BYTES} kz={ZEROS}",
    problem="m=b*m n=n k=k",
    arguments="lhs=0 rhs=1[p=0],1[p=1] scales=2[p=0],2[p=1] zero_points=3[p=0],3[p=1] outs=0",
    out_types="f16",
    kernel=RECORD.kernel,
)
SHAPES = ((2, 7, K), (2 * N, BLOCKS, BYTES), (2 * N, BLOCKS), (2 * N, ZEROS))
FLAT = dataclasses.replace(PACKED, axes="b m k, (p n) kb kq, (p n kb), (p n kz) -> b m n")
TWO = dataclasses.replace(
    PACKED,
    axes="b m k, n kb kq, n kb kq, n kb, n kb -> b m n",
    sizes=f"n={N} k={K} kb={BLOCKS} kq={BYTES}",
    arguments="lhs=0 rhs=1,2 scales=3,4 outs=0",
)
TWO_SHAPES = ((2, 7, K), (N, BLOCKS, BYTES), (N, BLOCKS, BYTES), (N, BLOCKS), (N, BLOCKS))
WINDOW = dataclasses.replace(
    PACKED,
    sizes=f"n={N} k={K} kb={BLOCKS} kq={BYTES} kz={ZEROS}",
    axes="b m k, n:100 kb kq, n:100 kb, (n kz):200 -> b m n",
    arguments="lhs=0 rhs=1[+10] scales=2[+10] zero_points=3[+20] outs=0",
)
ADDRESSES = (4096, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
READS = dataclasses.replace(
    RECORD, load_alignments=(), quantized=QuantizedRhs(BITS, BLOCK, 2, 1), lhs_alignment=2, rhs_alignment=8,
    out_alignments=(2,), flags=flags({1: TensorFlag.TRANSPOSED}), maps=(), cluster=0, max_m=2**31 - 1,
)  # fmt: skip


def arguments_of(node: Node, shapes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> Arguments:
    inputs = ADDRESSES[: len(shapes)]
    return bridge().arguments(node, shapes, element_bytes=sizes, inputs=inputs, outputs=(1 << 40,))[0]


@pytest.mark.parametrize("node", [PACKED, FLAT], ids=["rows", "flat"])
def test_each_part_begins_at_its_first_column(node: Node) -> None:
    shapes = SHAPES if node is PACKED else (*SHAPES[:2], *((int(np.prod(shape)),) for shape in SHAPES[2:]))
    found = arguments_of(node, shapes, (2, 1, 2, 1))
    assert (found.m, found.n, found.k) == (14, N, K)
    for part in range(2):
        rhs, scales = found.rhs[part], found.scales[part]
        first = part * N
        assert (rhs.pointer, rhs.column_stride, rhs.row_stride) == (ADDRESSES[1] + first * 192, 192, 1)
        assert (scales.scales, scales.scales_pitch) == (ADDRESSES[2] + first * BLOCKS * 2, BLOCKS)
        assert (scales.zero_points, scales.zero_points_pitch) == (ADDRESSES[3] + first * ZEROS, ZEROS)


def test_parts_may_be_weights_of_their_own() -> None:
    found = arguments_of(TWO, TWO_SHAPES, (2, 1, 1, 2, 2))
    assert [found.rhs[part].pointer for part in range(2)] == list(ADDRESSES[1:3])
    assert [found.scales[part].scales for part in range(2)] == list(ADDRESSES[3:5])
    assert [found.scales[part].zero_points for part in range(3)] == [None] * 3


def test_a_window_begins_at_its_first_column() -> None:
    found = arguments_of(WINDOW, ((2, 7, K), (100, 3, 64), (100, 3), (200,)), (2, 1, 2, 1))
    assert found.rhs[0].pointer == ADDRESSES[1] + 10 * 192
    assert found.scales[0].scales == ADDRESSES[2] + 10 * BLOCKS * 2
    assert found.scales[0].zero_points == ADDRESSES[3] + 10 * ZEROS


def test_one_column_has_pitches_too() -> None:
    one = dataclasses.replace(PACKED, sizes=PACKED.sizes.replace(f"n={N}", "n=1"))
    found = arguments_of(one, (SHAPES[0], (2, 3, 64), (2, 3), (2, 2)), (2, 1, 2, 1))
    assert (found.rhs[0].column_stride, found.scales[0].scales_pitch, found.scales[0].zero_points_pitch) == (192, 3, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arguments": "lhs=0 rhs=1[p=0],1[p=1] scales=2[p=0] outs=0"}, "scales and zero points of each rhs"),
        ({"arguments": "lhs=0 rhs=1[p=0] zero_points=3[p=0] outs=0"}, "scales and zero points of each rhs"),
        ({"axes": "b m k, kb (p n) kq, (p n) kb, (p n) kz -> b m n"}, "one"),
        ({"axes": "b m k, (p n) kb kq, kb (p n), (p n) kz -> b m n"}, "one column behind the other"),
    ],
)
def test_what_lies_otherwise_is_refused(changes: dict[str, str], words: str) -> None:
    node = dataclasses.replace(PACKED, **changes)
    shapes = {"kb (p n) kq": (BLOCKS, 2 * N, BYTES), "kb (p n)": (BLOCKS, 2 * N)}
    items = [item.strip() for item in node.axes.split("->")[0].split(",")]
    given = tuple(shapes.get(item, shape) for item, shape in zip(items, SHAPES, strict=True))
    with pytest.raises(BridgeError, match=words):
        arguments_of(node, given, (2, 1, 2, 1))


def test_a_record_reads_the_form_that_it_was_compiled_for() -> None:
    found = arguments_of(PACKED, SHAPES, (2, 1, 2, 1))

    def choose(**changes: object) -> int:
        record = dataclasses.replace(READS, **changes)  # type: ignore[arg-type]
        return bridge().choose(pack([record]), PACKED, found, element_bytes=(2, 1, 2, 1))

    assert choose() == 0
    for wrong in (None, QuantizedRhs(BITS, BLOCK, 2, 0)):
        with pytest.raises(BridgeError, match="of another form than the node's"):
            choose(quantized=wrong)
    for wrong in (QuantizedRhs(8, BLOCK, 2, 1), QuantizedRhs(BITS, 64, 2, 1), QuantizedRhs(BITS, 32, 2, 1)):
        with pytest.raises(BridgeError, match="does not hold k=320 in blocks of"):
            choose(quantized=wrong)
    shifted = arguments_of(PACKED, SHAPES, (2, 1, 2, 1))
    shifted.scales[1].scales += 2
    shifted.scales[0].zero_points += 1
    wide = dataclasses.replace(READS, quantized=QuantizedRhs(BITS, BLOCK, 16, 1))
    for scales, zeros in ((4, 1), (2, 2)):
        wide = dataclasses.replace(READS, quantized=QuantizedRhs(BITS, BLOCK, scales, zeros))
        assert bridge().choose(pack([wide, READS]), PACKED, found, element_bytes=(2, 1, 2, 1)) == 0
        assert bridge().choose(pack([wide, READS]), PACKED, shifted, element_bytes=(2, 1, 2, 1)) == 1


def test_a_tensor_map_of_it_is_of_bytes() -> None:
    found = arguments_of(PACKED, SHAPES, (2, 1, 2, 1))
    mapped = dataclasses.replace(READS, maps=(TensorMap(Mapped.RHS, 1, True, 64, 64, 8),), cluster=1)
    (box,) = bridge().maps(pack([mapped]), PACKED, found, 0, element_bytes=(2, 1, 2, 1))
    assert (box.pointer, box.element_bytes) == (ADDRESSES[1] + N * 192, 1)
    assert (box.extents[:2], box.strides[0]) == ([192, N], 192)
