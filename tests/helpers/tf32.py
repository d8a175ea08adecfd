"""TF32 by the bits of float32, for tests of what is computed in it."""

from __future__ import annotations

import numpy as np


def to_tf32(values: np.ndarray) -> np.ndarray:
    """Float32 with 10 explicit bits: to nearest, halfway values to the even neighbour."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32)
