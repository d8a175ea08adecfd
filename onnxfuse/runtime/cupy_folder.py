"""CuPy makes a folder for its kernels in the user's home as it is imported, and is not imported where it cannot."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

VARIABLE = "CUPY_CACHE_DIR"
DEFAULT = "~/.cupy/kernel_cache"


def give_cupy_a_folder() -> None:
    """Before CuPy is imported: name a temporary folder where its own cannot be made. None of our kernels goes there.

    Raises:
        OSError: nor can a temporary one.
    """
    if "cupy" in sys.modules or VARIABLE in os.environ or _own_can_be_made():
        return
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="onnxfuse-cupy-")
    atexit.register(shutil.rmtree, os.environ[VARIABLE], ignore_errors=True)


def _own_can_be_made() -> bool:
    try:
        Path(DEFAULT).expanduser().mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter where the user has no home
        return False
    return True
