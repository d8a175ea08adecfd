"""How all kernels copy to and from shared memory, and how rows that an epilogue stages lie there."""

from __future__ import annotations

from onnxfuse.schedule.kernel_spec import Access

CHUNK_BYTES = 16  # the widest copy of one thread
STAGED_PADDING = 8  # elements at the end of a staged row, against bank conflicts; in bytes 16 at least


def staged_pitch(access: Access, columns: int) -> int:
    """Elements from row to row of a staging area."""
    return columns + max(STAGED_PADDING, CHUNK_BYTES // access.dtype.bytes)


def copy_width(width: int, element_bytes: int) -> int:
    """Elements of one access: what the tensor allows, in at most 16 bytes."""
    return min(width, CHUNK_BYTES // element_bytes)
