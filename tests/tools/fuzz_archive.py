"""The archive's reader in Python, driven by libFuzzer through atheris, which is not among the development packages.

    pip install atheris && python -m tests.tools.fuzz_archive [-max_total_time=600]

What is read is an archive again, to the byte where nothing lies between its images; all else is a ModelError. The
checksum is mended first, so that the fuzzer gets behind it. The C++ reader has tests/tools/bridge_fuzz.py.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

from onnxfuse.errors import ModelError
from onnxfuse.graph import archive

RECORD = archive.Record(
    kernel="0123abcd", entry="onnxfuse_gemm", capability=90, flavour=archive.Flavour.SPECIFIC, min_m=1, max_m=4096,
    block_m=128, block_n=64, threads=256, shared_bytes=100_000, lhs_alignment=16, rhs_alignment=8,
    load_alignments=(16, 4), out_alignments=(16,), image=b"\x7fELF not really",
)  # fmt: skip


def flags(of: dict[int, int]) -> tuple[int, ...]:
    """A record's flags: those of some tensors, 0 of the others."""
    return tuple(of.get(tensor, 0) for tensor in range(archive.TENSORS))


def mended(data: bytes) -> bytes:
    """The bytes with the magic, version, size and checksum that let a reader go on."""
    if len(data) < 32:
        return data
    count = struct.unpack_from("<I", data, 12)[0]
    header = archive.HEADER.pack(archive.MAGIC, archive.VERSION, count, len(data))
    return header + struct.pack("<Q", zlib.crc32(data[32:], zlib.crc32(header))) + data[32:]


def read(data: bytes) -> tuple[archive.Record, ...]:
    """Read bytes as they are and mended; what is read survives packing and reading again."""
    records: tuple[archive.Record, ...] = ()
    for candidate in (data, mended(data)):
        with contextlib.suppress(ModelError):
            records = archive.unpack(candidate)
            again = archive.pack(records)
            assert archive.unpack(again) == records
    return records


def seeds() -> list[bytes]:
    """Archives to start from: bytes out of nothing hardly ever become one."""
    tensor_map = archive.TensorMap(archive.Mapped.OUT, 0, False, 128, 64, 8)
    mapped = replace(RECORD, cluster=2, maps=(tensor_map,), flags=flags({0: archive.TensorFlag.TRANSPOSED}))
    in_runs = flags({archive.FIRST_LOAD: archive.TensorFlag.COLUMNS_IN_RUNS})
    behind = replace(RECORD, kernel="89ef", lhs_alignment=0, rhs_alignment=0, flags=in_runs)
    portable = replace(RECORD, flavour=archive.Flavour.PTX, min_m=4097, max_m=2**31 - 1, image=b"//" * 40)
    library = replace(RECORD, load_alignments=(16, 16, 16, 4), library=archive.Library.BF16)
    groups: tuple[list[archive.Record], ...] = (
        [RECORD],
        [mapped],
        [behind],
        [library, RECORD],
        [RECORD, portable, mapped],
        [],
    )
    return [archive.pack(records) for records in groups]


def main() -> None:
    import atheris

    atheris.instrument_func(archive.unpack)
    for name in ("_check_header", "_unpack_record", "_unpack_maps", "_text", "_without_padding", "_check", "_inflate"):
        setattr(archive, name, atheris.instrument_func(getattr(archive, name)))
    with tempfile.TemporaryDirectory() as folder:
        for index, seed in enumerate(seeds()):
            (Path(folder) / str(index)).write_bytes(seed)
        atheris.Setup([*sys.argv, folder], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
