"""The archive's reader in Python, driven by libFuzzer through atheris, which is not among the development packages.

    pip install atheris && python -m tests.fuzz_archive [-max_total_time=600]

What is read is an archive again, to the byte where nothing lies between its images; all else is a ModelError. The
checksum is mended first, so that the fuzzer gets behind it. The C++ reader has tests/bridge_fuzz.py.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import zlib

from onnxfuse import artifact
from onnxfuse.errors import ModelError

HEADER = struct.Struct("<8sIIQ")


def mended(data: bytes) -> bytes:
    """The bytes with the magic, version, size and checksum that let a reader go on."""
    if len(data) < 32:
        return data
    count = struct.unpack_from("<I", data, 12)[0]
    header = HEADER.pack(b"onnxfuse", 3, count, len(data))
    return header + struct.pack("<Q", zlib.crc32(data[32:], zlib.crc32(header))) + data[32:]


def read(data: bytes) -> tuple[artifact.Record, ...]:
    """Read bytes as they are and mended; what is read survives packing and reading again."""
    records: tuple[artifact.Record, ...] = ()
    for candidate in (data, mended(data)):
        with contextlib.suppress(ModelError):
            records = artifact.unpack(candidate)
            again = artifact.pack(records)
            assert artifact.unpack(again) == records
    return records


if __name__ == "__main__":
    import atheris

    atheris.instrument_func(artifact.unpack)
    for name in ("_check_header", "_unpack_record", "_unpack_maps", "_text", "_without_padding", "_check"):
        setattr(artifact, name, atheris.instrument_func(getattr(artifact, name)))
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()
