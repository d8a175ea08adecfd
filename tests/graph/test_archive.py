"""The archive: what is packed comes back, and nothing else is ever read."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.errors import ModelError
from onnxfuse.graph.archive import (
    ALIGNMENTS,
    TENSORS,
    Flavour,
    Library,
    Mapped,
    QuantizedRhs,
    Record,
    TensorMap,
    pack,
    unpack,
)
from onnxfuse.limits import QUANTIZED_BITS, QUANTIZED_BLOCKS
from tests.tools import fuzz_archive
from tests.tools.fuzz_archive import RECORD, flags

alignments = st.sampled_from(ALIGNMENTS)
low_and_high = st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)).map(sorted)


sides = st.integers(1, 256)
tensor_maps = st.builds(
    TensorMap, st.sampled_from(list(Mapped)), st.just(0), st.booleans(), st.sampled_from((0, 32, 64, 128)), sides, sides
)


quantized_forms = st.builds(
    QuantizedRhs,
    st.sampled_from(QUANTIZED_BITS),
    st.sampled_from(QUANTIZED_BLOCKS),
    alignments,
    st.sampled_from((0, *ALIGNMENTS)),
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    min_m, max_m = draw(low_and_high)
    product = draw(st.one_of(st.just((0, 0)), st.tuples(alignments, alignments)))
    loads = draw(st.lists(alignments, max_size=12))
    drawn = draw(st.lists(tensor_maps, max_size=9))
    missing = {*(() if product[0] else (Mapped.LHS, Mapped.RHS)), *(() if loads else (Mapped.LOAD,))}
    maps = [entry for entry in drawn if entry.tensor not in missing]
    outs = draw(st.lists(alignments, min_size=1, max_size=4))
    cluster = draw(st.integers(0, 16))
    library = draw(st.sampled_from(list(Library))) if product[0] and loads and not maps and not cluster else 0
    early_depth = draw(st.integers(0, 2**32 - 1))
    there = (*product, *loads, *[0] * (12 - len(loads)), *outs, *[0] * (4 - len(outs)))
    return Record(
        kernel=draw(st.text("0123456789abcdef", min_size=1, max_size=31)),
        entry=draw(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=63)),
        capability=draw(st.sampled_from((80, 86, 89, 90, 100, 120))),
        flavour=draw(st.sampled_from(list(Flavour))),
        min_m=min_m,
        max_m=max_m,
        block_m=draw(st.integers(1, 2**16)),
        block_n=draw(st.integers(1, 2**16)),
        threads=draw(st.integers(1, 1024)),
        shared_bytes=draw(st.integers(0, 2**20)),
        lhs_alignment=product[0],
        rhs_alignment=product[1],
        load_alignments=tuple(loads),
        out_alignments=tuple(outs),
        image=draw(st.binary(min_size=1, max_size=200)),
        cluster=cluster,
        early_depth=early_depth,
        full_early_depth=draw(st.integers(early_depth, 2**32 - 1)),
        maps=tuple(maps),
        flags=tuple(draw(st.integers(0, 15)) if alignment else 0 for alignment in there),
        library=library,
        quantized=draw(st.none() | quantized_forms) if product[0] and library == Library.NONE else None,
    )


@given(st.lists(records(), max_size=5))
def test_round_trip(given_records: list[Record]) -> None:
    assert unpack(pack(given_records)) == tuple(given_records)


def test_an_empty_archive_is_an_archive() -> None:
    assert unpack(pack([])) == ()


def test_packing_is_deterministic_and_stores_a_shared_image_once() -> None:
    image = bytes(range(256)) * 40
    one = dataclasses.replace(RECORD, image=image)
    many = [dataclasses.replace(one, min_m=index) for index in range(8)]
    assert pack(many) == pack(list(many))
    assert len(pack(many)) == len(pack([one])) + 7 * 283
    assert {record.image for record in unpack(pack(many))} == {image}


def test_every_truncation_is_found() -> None:
    data = pack([RECORD, dataclasses.replace(RECORD, image=b"second")])
    for size in range(len(data)):
        with pytest.raises(ModelError, match="optimize the original again"):
            unpack(data[:size])
    with pytest.raises(ModelError):
        unpack(data + b"\0")


def test_every_flipped_bit_is_found() -> None:
    data = pack([RECORD])
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            with pytest.raises(ModelError):
                unpack(bytes(altered))


@settings(max_examples=200)
@given(st.binary(max_size=600))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ModelError):
        unpack(data)


@settings(max_examples=500)
@given(st.lists(records(), min_size=1, max_size=2), st.data())
def test_an_altered_archive_is_refused_or_read_behind_a_right_checksum(given_records: list[Record], data) -> None:
    """What tests/tools/fuzz_archive.py does at length: fields overwritten, and the checksum mended."""
    altered = bytearray(pack(given_records))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(8, len(altered) - 1))
        altered[position : position + 1] = data.draw(st.sampled_from((b"\0", b"\1", b"\x80", b"\xff", b"", b"\0\0")))
    fuzz_archive.read(bytes(altered))


@pytest.mark.parametrize("data", fuzz_archive.seeds(), ids=len)
def test_mending_an_archive_brings_a_reader_behind_its_header(data: bytes) -> None:
    count = len(unpack(data))
    wrong = b"another " + bytes(4) + data[12:16] + bytes(16) + data[32:]
    with pytest.raises(ModelError, match="not an archive"):
        unpack(wrong)
    assert fuzz_archive.mended(wrong) == data
    assert len(fuzz_archive.read(wrong)) == count


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kernel": ""}, "kernel"),
        ({"kernel": "a" * 32}, "kernel"),
        ({"kernel": "xyz"}, "kernel"),
        ({"entry": "e" * 64}, "entry"),
        ({"capability": 9}, "capability"),
        ({"flavour": 3}, "flavour"),
        ({"min_m": 5, "max_m": 4}, "range of m"),
        ({"block_n": 0}, "block"),
        ({"threads": 1025}, "threads"),
        ({"shared_bytes": -1}, "shared_bytes"),
        ({"lhs_alignment": 3}, "alignment"),
        ({"out_alignments": (0,)}, "alignment"),
        ({"load_alignments": (4,) * 13}, "count of alignments"),
        ({"image": b""}, "image"),
        ({"flags": flags({0: 1}), "lhs_alignment": 0, "rhs_alignment": 0}, "flags of a tensor"),
        ({"flags": flags({2 + 11: 8})}, "flags of a tensor"),
        ({"flags": flags({2: 16})}, "copy"),
        ({"flags": flags({2: 32})}, "flags"),
        ({"flags": (0,) * (TENSORS - 1)}, "flags"),
    ],
)
def test_a_record_that_the_bridge_would_refuse_cannot_be_made(change: dict, what: str) -> None:
    with pytest.raises(ModelError, match=f"impossible {what}"):
        dataclasses.replace(RECORD, **change)
