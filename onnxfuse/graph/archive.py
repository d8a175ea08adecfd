"""What ships inside a model: the archive of kernels, half of the contract with the bridge.

The other half, the attributes of a fused node, is in `lowering/fused_node.py`.

The archive is one uint8 initializer, input 0 of every fused node. Little-endian:

    header    magic `onnxfuse`, u32 version, u32 records, u64 bytes of the archive, u64 CRC-32 of all but these last 8
    records   283 bytes each: char[32] kernel, char[64] entry, u32 capability, u32 flavour, i64 min_m, i64
              max_m, u32 block_m, block_n, threads, shared_bytes, u8 alignments of lhs, rhs, loads[12], outs[4] (0: the
              kernel has no such tensor), u8 flags of the same 18 tensors (`TensorFlag`: the loops that the kernel walks
              in two levels, whether its accesses go down the rows, whether it reads a copy), u16 cluster, u32 early
              depth, u32 full early depth, u32 number of tensor maps, tensor maps[9] of 8 bytes each (u8 tensor, index,
              rows_contiguous, swizzle, u16 box_inner, box_outer), u32 library (`Library`), u8 bits and u16 block of a
              quantized rhs, u8 alignments of its scales and zero points (all 0: it is not quantized), u64 offset of the
              image from the start of the archive, u32 bytes of it there, u32 bytes of it decompressed
    images    each a deflate stream (RFC 1951) of its own, one behind the other; an image that several records share is
              stored once. Compressed they take less than a quarter; one is decompressed while the driver loads it

A record with cluster 0 gets one block for each tile of block_m x block_n, and grid.z counts the batch. With cluster c
its grid is persistent: as many blocks as the device has multiprocessors, at most c for each tile of any batch, and a
multiple of c. A kernel with an early depth waits by itself for the end of the kernel before it. It is launched beside
that where the device can do so (programmatic dependent launch) and the tiles of one block of a persistent grid, or all
tiles of another grid, have no more k together than the depth; whatever their number where the depth is 2^32 - 1. For a
persistent grid of three quarters of the clusters that the device has room for, or more, it is the full early depth.

Tensor maps are rank 3 (contiguous axis, other axis, batch; of batches in runs rank 4: a run's batches, the runs; of an
output in two levels rank 5: a run's columns, its rows, the runs of columns, those of rows, the batch), encoded at
launch and passed as the kernel's second parameter, 128 bytes each; tensor 0 is lhs, 1 rhs, 2 an output, 4 a load, and 3
a place of zeros that the kernel loads and stores nothing by. A record with tensor maps runs where k > 0.

A record whose library is not NONE belongs to a node with a product, and its kernel has none: cuBLASLt makes the product
in scratch memory, and the kernel's first loads are the parts of it, before those of the node. Such a record is passed
over where the process holds no cuBLASLt, or where that refuses; another one of the same rows stands behind it.

A record that copies lhs, rhs or both has a second function in its image, `onnxfuse_copy_rows`: rows of the contiguous
axis go to scratch memory first, each to the beginning of a cache line, and the kernel reads them there. What is copied
may lie on any boundary, with one stride for each loop. Such a record is passed over where there is no memory.

A node runs the first record of its kernel whose architecture, range of m and alignments fit, so the order of records is
the order of preference: cubins before PTX, wide accesses before narrow ones. The address of every tensor, and each of
its strides of more than one element, must be a multiple of the record's alignment. Where that is more than an element,
columns are neighbours in memory, or rows where accesses go down them: a size of 1 that only the run knows can make
another axis of the tensor look contiguous. A kernel that looks at all this by itself has alignments of one element.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from enum import IntEnum, IntFlag

from onnxfuse.errors import ModelError
from onnxfuse.limits import MAX_BLOCK, MAX_BOX, MAX_LOADS, MAX_MAPS, MAX_OUTS, QUANTIZED_BITS, QUANTIZED_BLOCKS

FIRST_LOAD = 2  # a record's tensors in order: lhs, rhs, the loads, the outputs
FIRST_OUT = FIRST_LOAD + MAX_LOADS
TENSORS = FIRST_OUT + MAX_OUTS
ALIGNMENTS = (1, 2, 4, 8, 16)

MAGIC = b"onnxfuse"
VERSION = 16
HEADER = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_RECORD = struct.Struct(f"<32s64sIIqqIIII{TENSORS}B{TENSORS}sHIII72sIBHBBQII")
_MAP = struct.Struct("<BBBBHH")
_TABLE_START = HEADER.size + _CHECKSUM.size
_RAW_DEFLATE = -zlib.MAX_WBITS  # without zlib's own header and checksum
_LEVEL = 6  # 9 saves 2 % more and takes six times as long
_MAX_IMAGE_BYTES = 1 << 26
_MAX_ALL_BYTES = 1 << 30  # of what one archive decompresses to
_MAX_RATIO = 1032  # that deflate can reach: 258 bytes for two bits
_REMEDY = "the model's kernels are damaged or from another version; optimize the original again"


class TensorFlag(IntFlag):
    """How a kernel reaches one tensor."""

    ROWS_IN_RUNS = 1  # it walks the rows in two levels
    COLUMNS_IN_RUNS = 2
    BATCHES_IN_RUNS = 4
    TRANSPOSED = 8  # accesses go down the rows
    COPIED = 16  # a factor: the launch copies it first, to rows along k that begin on 16-byte boundaries


class Mapped(IntEnum):
    """Which tensor a tensor map describes."""

    LHS = 0
    RHS = 1
    OUT = 2
    NOTHING = 3  # a place in the kernel's parameter that it loads and stores nothing by
    LOAD = 4


class Library(IntEnum):
    """How the library multiplies for a kernel that only does what follows the product."""

    NONE = 0  # the kernel multiplies by itself, or the node has no product
    F16 = 1
    BF16 = 2
    TF32 = 3


@dataclass(frozen=True)
class QuantizedRhs:
    """The form of the rhs that a kernel reads.

    Attributes:
        bits: of one element; 4 or 8.
        block: elements of k that share a scale; 16, 32, 64, 128 or 256.
        scales_alignment: bytes that the address of the scales is a multiple of; 1, 2, 4, 8 or 16.
        zero_points_alignment: the same of the zero points; 0 where there are none.
    """

    bits: int
    block: int
    scales_alignment: int
    zero_points_alignment: int


_ALL_FLAGS = max(TensorFlag) * 2 - 1


@dataclass(frozen=True)
class TensorMap:
    """How a launch describes one tensor to TMA.

    Attributes:
        tensor: which one.
        index: which part of rhs, which output or which load.
        rows_contiguous: the contiguous axis is the tensor's rows, not its columns.
        swizzle: bytes of the swizzle's span: 0, 32, 64 or 128.
        box_inner: elements of the box along the contiguous axis.
        box_outer: elements of the box along the other axis.
    """

    tensor: int
    index: int = 0
    rows_contiguous: bool = False
    swizzle: int = 0
    box_inner: int = 1
    box_outer: int = 1


class Flavour(IntEnum):
    """Which devices run a record."""

    CUBIN = 0  # same major version, same minor or a later one
    SPECIFIC = 1  # sm_90a: exactly this capability
    PTX = 2  # this capability and all later ones; the driver compiles it


@dataclass(frozen=True)
class Record:
    """One compiled kernel and its launch rule.

    Attributes:
        kernel: id that nodes name it by; 1 to 31 hexadecimal digits.
        entry: name of the function in the image; 1 to 63 printable ASCII characters.
        capability: compute capability as one number, 90 for sm_90a.
        flavour: which devices run it.
        min_m: smallest number of rows it is for: m, and of all batches together where they share rhs. In a node whose
            contract knows m and does not know n, numbers of columns, times the batches whose number it does not know.
        max_m: the largest.
        block_m: rows of one thread block's tile.
        block_n: columns of one thread block's tile.
        threads: threads of one block.
        shared_bytes: dynamic shared memory of one block, in bytes.
        lhs_alignment: bytes that the address and pitches of lhs are a multiple of; 1, 2, 4, 8 or 16, and 0 for a kernel
            without a product.
        rhs_alignment: the same of every part of rhs.
        load_alignments: the same of each load.
        out_alignments: the same of each output.
        image: cubin, or PTX without its final zero byte; decompressed.
        cluster: 0 for one block a tile; blocks of a cluster for a persistent grid.
        early_depth: 0 for a kernel that does not wait for the end of the one before it by itself; otherwise how much k
            the tiles of one block of a persistent grid, or all of another, may have for it to start early.
        full_early_depth: the same of a persistent grid that leaves less than a quarter of the device idle; no less.
        maps: tensor maps of the kernel's second parameter; none for a kernel without one.
        flags: a `TensorFlag` for lhs, rhs, each of 12 loads and each of 4 outputs; 0 where the kernel has none.
        library: not NONE for a kernel whose first loads are the parts of a product that the library makes.
        quantized: the form of rhs; None where it is not quantized.
    """

    kernel: str
    entry: str
    capability: int
    flavour: int
    min_m: int
    max_m: int
    block_m: int
    block_n: int
    threads: int
    shared_bytes: int
    lhs_alignment: int
    rhs_alignment: int
    load_alignments: tuple[int, ...]
    out_alignments: tuple[int, ...]
    image: bytes
    cluster: int = 0
    early_depth: int = 0
    full_early_depth: int = 0
    maps: tuple[TensorMap, ...] = ()
    flags: tuple[int, ...] = (0,) * TENSORS
    library: int = Library.NONE
    quantized: QuantizedRhs | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def architecture(self) -> str:
        """What it is compiled for, as `--arch` names it."""
        suffix = "a" if self.flavour == Flavour.SPECIFIC else ""
        return "ptx" if self.flavour == Flavour.PTX else f"sm_{self.capability}{suffix}"


def pack(records: tuple[Record, ...] | list[Record]) -> bytes:
    """The archive of some records, in their order. Equal records give equal bytes.

    Raises:
        ModelError: their images are larger than what is ever read again.
    """
    places, images, end = _place_images(records, _TABLE_START + len(records) * _RECORD.size)
    table = b"".join(_pack_record(record, places[record.image]) for record in records)
    header = HEADER.pack(MAGIC, VERSION, len(records), end)
    body = table + images
    return header + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header))) + body


def unpack(data: bytes) -> tuple[Record, ...]:
    """The records of an archive.

    Raises:
        ModelError: the bytes are not an archive of this version, or were altered.
    """
    count = _check_header(data)
    images = _Images(data, _TABLE_START + count * _RECORD.size)
    try:
        return tuple(_unpack_record(data, index, images) for index in range(count))
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"the archive holds an impossible record ({error}); {_REMEDY}") from error


def _check(record: Record) -> None:
    """Raises ModelError when the bridge would refuse the record."""
    limits = (
        (1 <= len(record.kernel) <= 31 and all(digit in "0123456789abcdefABCDEF" for digit in record.kernel), "kernel"),
        (1 <= len(record.entry) <= 63 and all("!" <= letter <= "~" for letter in record.entry), "entry"),
        (10 <= record.capability < 1000, "capability"),
        (record.flavour in tuple(Flavour), "flavour"),
        (0 <= record.min_m <= record.max_m < 2**63, "range of m"),
        (1 <= record.block_m <= MAX_BLOCK and 1 <= record.block_n <= MAX_BLOCK, "block"),
        (1 <= record.threads <= 1024, "threads"),
        (0 <= record.shared_bytes <= 2**20, "shared_bytes"),
        (len(record.load_alignments) <= MAX_LOADS and len(record.out_alignments) <= MAX_OUTS, "count of alignments"),
        (all(alignment in ALIGNMENTS for alignment in _given_alignments(record)), "alignment"),
        ((record.lhs_alignment == 0) == (record.rhs_alignment == 0), "half of a product"),
        (0 < len(record.image) <= _MAX_IMAGE_BYTES, "image"),
        (0 <= record.cluster <= 16, "cluster"),
        (0 <= record.early_depth <= record.full_early_depth < 2**32, "early depth"),
        (len(record.flags) == TENSORS and all(0 <= flags <= _ALL_FLAGS for flags in record.flags), "flags"),
        (not any(_flags_of_missing(record)), "flags of a tensor that it does not have"),
        (_is_copy_possible(record), "copy"),
        (record.library in tuple(Library) and _is_library_possible(record), "product of the library"),
        (record.quantized is None or _is_form_possible(record.quantized, record), "quantized rhs"),
        (len(record.maps) <= MAX_MAPS and all(_is_possible(entry, record) for entry in record.maps), "tensor map"),
    )
    wrong = [what for holds, what in limits if not holds]
    if wrong:
        raise ModelError(f"kernel {record.kernel!r} has an impossible {', '.join(wrong)}; {_REMEDY}")


def _is_possible(tensor_map: TensorMap, record: Record) -> bool:
    boxes = (tensor_map.box_inner, tensor_map.box_outer)
    of_product = tensor_map.tensor in (Mapped.LHS, Mapped.RHS)
    return (
        tensor_map.tensor in tuple(Mapped)
        and not (of_product and record.lhs_alignment == 0)
        and 0 <= tensor_map.index < (len(record.load_alignments) if tensor_map.tensor == Mapped.LOAD else MAX_OUTS)
        and tensor_map.swizzle in (0, 32, 64, 128)
        and all(1 <= box <= MAX_BOX for box in boxes)
    )


def _is_form_possible(form: QuantizedRhs, record: Record) -> bool:
    return (
        form.bits in QUANTIZED_BITS
        and form.block in QUANTIZED_BLOCKS
        and form.scales_alignment in ALIGNMENTS
        and form.zero_points_alignment in (0, *ALIGNMENTS)
        and record.lhs_alignment != 0
        and record.library == Library.NONE
    )


def _is_copy_possible(record: Record) -> bool:
    """Factors are copied, lhs along k and rhs along either axis, in one level; nothing else is."""
    alone = {0: (TensorFlag.COPIED,), 1: (TensorFlag.COPIED, TensorFlag.COPIED | TensorFlag.TRANSPOSED)}
    copied = [(tensor, flags) for tensor, flags in enumerate(record.flags) if flags & TensorFlag.COPIED]
    own = record.quantized is None and record.library == Library.NONE
    return not copied or (own and all(flags in alone.get(tensor, ()) for tensor, flags in copied))


def _is_library_possible(record: Record) -> bool:
    plain = record.lhs_alignment != 0 and not record.maps and record.cluster == 0 and record.load_alignments
    return record.library == Library.NONE or bool(plain)


def _given_alignments(record: Record) -> tuple[int, ...]:
    product = (record.lhs_alignment, record.rhs_alignment) if record.lhs_alignment else ()
    return (*product, *record.load_alignments, *record.out_alignments)


def _all_alignments(record: Record) -> tuple[int, ...]:
    """All 18 alignments; 0 stands for a tensor that the kernel does not have."""
    loads = record.load_alignments + (0,) * (MAX_LOADS - len(record.load_alignments))
    outs = record.out_alignments + (0,) * (MAX_OUTS - len(record.out_alignments))
    return (record.lhs_alignment, record.rhs_alignment, *loads, *outs)


def _flags_of_missing(record: Record) -> list[int]:
    return [flags for alignment, flags in zip(_all_alignments(record), record.flags, strict=False) if alignment == 0]


@dataclass(frozen=True)
class _Place:
    """Where an image lies in the archive, in bytes."""

    offset: int
    packed: int


def _place_images(records: tuple[Record, ...] | list[Record], table_end: int) -> tuple[dict[bytes, _Place], bytes, int]:
    """The place of each distinct image, the bytes that follow the table, and the size of the archive."""
    places: dict[bytes, _Place] = {}
    images = bytearray()
    for record in records:
        if record.image not in places:
            packed = _deflate(record.image)
            places[record.image] = _Place(table_end + len(images), len(packed))
            images += packed
    if sum(map(len, places)) > _MAX_ALL_BYTES:
        raise ModelError(f"the model's kernels have more than {_MAX_ALL_BYTES} bytes; fuse less, or for fewer GPUs")
    return places, bytes(images), table_end + len(images)


def _deflate(image: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW_DEFLATE)
    return packer.compress(image) + packer.flush()


def _inflate(packed: bytes, size: int) -> bytes:
    """An image of a known size.

    Raises:
        ModelError: the bytes are something else.
    """
    stream = zlib.decompressobj(_RAW_DEFLATE)
    try:
        image = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise ModelError(f"a kernel's code is damaged ({error}); {_REMEDY}") from error
    if len(image) != size or not stream.eof or stream.unused_data:
        raise ModelError(f"a kernel's code should have {size} bytes and has others; {_REMEDY}")
    return image


class _Images:
    """The images of an archive, each decompressed once."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._start = data, start
        self._left = _MAX_ALL_BYTES
        self._known: dict[tuple[int, int, int], bytes] = {}

    def read(self, index: int, offset: int, packed: int, size: int) -> bytes:
        key = (offset, packed, size)
        if key not in self._known:
            if packed == 0 or offset < self._start or offset + packed > len(self._data):
                raise ModelError(f"the code of record {index} lies outside of the archive; {_REMEDY}")
            if not 0 < size <= min(_MAX_IMAGE_BYTES, packed * _MAX_RATIO, self._left):
                raise ModelError(f"the code of record {index} has an impossible size of {size} bytes; {_REMEDY}")
            self._known[key] = _inflate(self._data[offset : offset + packed], size)
            self._left -= size
        return self._known[key]


def _pack_record(record: Record, place: _Place) -> bytes:
    names = (record.kernel.encode(), record.entry.encode())
    numbers = (record.capability, record.flavour, record.min_m, record.max_m)
    launch = (record.block_m, record.block_n, record.threads, record.shared_bytes)
    maps = b"".join(
        _MAP.pack(entry.tensor, entry.index, entry.rows_contiguous, entry.swizzle, entry.box_inner, entry.box_outer)
        for entry in record.maps
    )
    form = (0,) * 4 if record.quantized is None else astuple(record.quantized)
    tail = (
        record.cluster,
        record.early_depth,
        record.full_early_depth,
        len(record.maps),
        maps,
        record.library,
        *form,
        place.offset,
        place.packed,
        len(record.image),
    )
    return _RECORD.pack(*names, *numbers, *launch, *_all_alignments(record), bytes(record.flags), *tail)


def _check_header(data: bytes) -> int:
    """The number of records, after everything that can be checked without them."""
    if len(data) < _TABLE_START or not data.startswith(MAGIC):
        raise ModelError(f"not an archive of kernels ({len(data)} bytes); {_REMEDY}")
    _, version, count, size = HEADER.unpack_from(data)
    if version != VERSION:
        raise ModelError(f"the archive has version {version} and this onnxfuse reads version {VERSION}; {_REMEDY}")
    if size != len(data):
        raise ModelError(f"the archive should have {size} bytes and has {len(data)}; {_REMEDY}")
    checksum = zlib.crc32(memoryview(data)[_TABLE_START:], zlib.crc32(data[: HEADER.size]))
    if _CHECKSUM.unpack_from(data, HEADER.size) != (checksum,):
        raise ModelError(f"the archive's checksum does not match its bytes; {_REMEDY}")
    if _TABLE_START + count * _RECORD.size > size:
        raise ModelError(f"the archive cannot hold {count} records; {_REMEDY}")
    return int(count)


def _unpack_record(data: bytes, index: int, images: _Images) -> Record:
    fields = _RECORD.unpack_from(data, _TABLE_START + index * _RECORD.size)
    alignments, tail = fields[10 : 10 + TENSORS], fields[10 + TENSORS :]
    flags, cluster, early_depth, full_early_depth, map_count, maps, library, *form, offset, packed, size = tail
    kernel, entry, capability, flavour, min_m, max_m, block_m, block_n, threads, shared_bytes = fields[:10]
    return Record(
        kernel=_text(kernel),
        entry=_text(entry),
        capability=capability,
        flavour=flavour,
        min_m=min_m,
        max_m=max_m,
        block_m=block_m,
        block_n=block_n,
        threads=threads,
        shared_bytes=shared_bytes,
        lhs_alignment=alignments[0],
        rhs_alignment=alignments[1],
        load_alignments=_without_padding(alignments[FIRST_LOAD:FIRST_OUT]),
        out_alignments=_without_padding(alignments[FIRST_OUT:]),
        image=images.read(index, offset, packed, size),
        cluster=cluster,
        early_depth=early_depth,
        full_early_depth=full_early_depth,
        maps=_unpack_maps(maps, map_count),
        flags=tuple(flags),
        library=library,
        quantized=QuantizedRhs(*form) if any(form) else None,
    )


def _unpack_maps(field: bytes, count: int) -> tuple[TensorMap, ...]:
    if count > MAX_MAPS:
        raise ModelError(f"a record has {count} tensor maps; {_REMEDY}")
    entries = list(_MAP.iter_unpack(field))[:count]
    return tuple(
        TensorMap(tensor, index, bool(rows_contiguous), swizzle, box_inner, box_outer)
        for tensor, index, rows_contiguous, swizzle, box_inner, box_outer in entries
    )


def _text(field: bytes) -> str:
    """A text in a field of fixed width that a NUL ends."""
    text, terminator, _ = field.partition(b"\0")
    if not terminator:
        raise ModelError(f"a name in the archive is not terminated; {_REMEDY}")
    return text.decode()


def _without_padding(alignments: tuple[int, ...]) -> tuple[int, ...]:
    count = alignments.index(0) if 0 in alignments else len(alignments)
    if any(alignments[count:]):
        raise ModelError(f"the alignments of a record have a gap; {_REMEDY}")
    return alignments[:count]
