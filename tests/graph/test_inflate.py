"""The bridge's own reader of deflate streams is that of zlib: the same bytes, and the same streams refused."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.errors import ModelError
from onnxfuse.graph import archive
from onnxfuse.graph.archive import Flavour, Record, pack, unpack
from tests.helpers.bridge_hooks import BridgeError, bridge
from tests.runtime.test_bridge import fnv1a
from tests.tools.fuzz_archive import RECORD, mended

TABLE_END = 32 + 283
MOST = 1 << 26  # bytes of one image

strategies = st.sampled_from((zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED))
words = st.lists(st.sampled_from([b"ld.global ", b"st.shared ", b"%r12, ", b"\0" * 300, b"\x7f\x83"]), max_size=300)
images = st.one_of(st.binary(min_size=1, max_size=3000), words.map(b"".join).filter(len))


def deflate(data: bytes, level: int = 6, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -15, 8, strategy)
    return packer.compress(data) + packer.flush()


def archive_of(stream: bytes, size: int) -> bytes:
    """One record whose image is a given stream, said to decompress to so many bytes."""
    return mended(pack([RECORD])[: TABLE_END - 8] + struct.pack("<II", len(stream), size) + stream)


def by_python(archive: bytes) -> tuple[int, int] | None:
    """Bytes and hash of the image; None where the archive is refused."""
    try:
        (record,) = unpack(archive)
    except ModelError:
        return None
    return len(record.image), fnv1a(record.image)


def by_bridge(archive: bytes) -> tuple[int, int] | None:
    try:
        ((*_, size, value),) = bridge().archive(archive)
    except BridgeError:
        return None
    return int(size), int(value)


@given(images, st.integers(0, 9), strategies)
def test_every_way_to_compress_is_read(image: bytes, level: int, strategy: int) -> None:
    archive = archive_of(deflate(image, level, strategy), len(image))
    assert by_bridge(archive) == by_python(archive) == (len(image), fnv1a(image))


@settings(max_examples=300)
@given(images, st.integers(0, 9), strategies, st.data())
def test_altered_streams_are_read_or_refused_as_by_zlib(
    image: bytes, level: int, strategy: int, data: st.DataObject
) -> None:
    stream = bytearray(deflate(image, level, strategy))
    for _ in range(data.draw(st.integers(1, 3))):
        # Most of what can go wrong lies in the first bytes: the lengths of a block's codes.
        last = data.draw(st.sampled_from((min(80, len(stream)), len(stream)))) - 1
        stream[data.draw(st.integers(0, last))] ^= 1 << data.draw(st.integers(0, 7))
    del stream[data.draw(st.one_of(st.just(len(stream)), st.integers(1, len(stream)))) :]
    made = zlib.decompressobj(-15)
    try:
        size = len(made.decompress(bytes(stream), 1 << 20)) or 1
    except zlib.error:
        size = len(image)
    archive = archive_of(bytes(stream), size)
    assert by_bridge(archive) == by_python(archive)


def test_random_bits_are_read_or_refused_as_by_zlib() -> None:
    """Short blocks of each type: what hypothesis hardly ever draws, codes that are not quite complete among it."""
    source, accepted = random.Random(3), 0
    for _ in range(20_000):
        stream = bytearray(source.randbytes(source.randint(1, 24)))
        stream[0] = stream[0] & 0xF8 | 1 | source.randrange(4) << 1
        made = zlib.decompressobj(-15)
        try:
            image = made.decompress(bytes(stream), 1 << 20)
        except zlib.error:
            image = b""
        used = bytes(stream[: len(stream) - len(made.unused_data)]) if made.eof else bytes(stream)
        archive = archive_of(used, len(image) or 1)
        assert by_bridge(archive) == by_python(archive)
        accepted += bool(made.eof and image)
    assert accepted > 100


def test_any_other_size_is_refused() -> None:
    image = b"ld.global %r1;" * 40
    stream = deflate(image)
    for size in (*range(2000), MOST, MOST + 1, 2**32 - 1):
        archive = archive_of(stream, size)
        assert (by_bridge(archive) is not None) == (by_python(archive) is not None) == (size == len(image))


def test_what_follows_a_stream_is_refused() -> None:
    archive = archive_of(deflate(b"abc") + b"\0", 3)
    assert by_bridge(archive) is None
    assert by_python(archive) is None


@pytest.mark.parametrize("size", [1000, MOST + 1, 1 << 27])
def test_a_bomb_is_refused_before_it_has_taken_memory(size: int) -> None:
    archive = archive_of(deflate(bytes(1 << 27), 9), size)
    tracemalloc.start()
    try:
        assert by_python(archive) is None
        assert tracemalloc.get_traced_memory()[1] < 4 * len(archive)
    finally:
        tracemalloc.stop()
    with pytest.raises(BridgeError, match=r"impossible size|longer than it says"):
        bridge().archive(archive)


def test_the_largest_image_is_read() -> None:
    archive = archive_of(deflate(bytes(MOST), 9), MOST)
    assert by_bridge(archive) is not None
    assert [len(record.image) for record in unpack(archive)] == [MOST]


def test_all_images_of_an_archive_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams may overlap: a small archive of many records could hold any number of large images."""
    images = [Record(**{**vars(RECORD), "image": bytes([index]) * 600, "flavour": Flavour.PTX}) for index in range(3)]
    packed = pack(images)
    monkeypatch.setattr(archive, "_MAX_ALL_BYTES", 1799)
    with pytest.raises(ModelError, match="impossible size"):
        unpack(packed)
    with pytest.raises(ModelError, match="more than 1799 bytes"):
        pack(images)
    monkeypatch.setattr(archive, "_MAX_ALL_BYTES", 1800)
    assert unpack(packed) == tuple(images)
    assert pack(images) == packed
