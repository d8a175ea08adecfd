"""Machine code as text: what a compiled kernel really executes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

from onnxfuse.errors import CompileError

TOOL = "nvdisasm"
PACKAGE = "nvidia-cuda-nvdisasm"
TOOL_MISSING = f"{TOOL} is not installed; it comes with the pip package {PACKAGE}"


def sass(image: bytes) -> str:
    """The SASS of a cubin; empty for PTX, which is text already and has none before the driver compiles it.

    Raises:
        CompileError: the disassembler is not installed, or refuses the image.
    """
    if not image.startswith(b"\x7fELF"):
        return ""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([_tool(), "--print-code", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{TOOL} refuses the image: {done.stderr.strip()}")
    return done.stdout


def _tool() -> str:
    """The program of the pip package, or one on the path."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        for found in Path(folder).glob(f"*/bin/{TOOL}"):
            return str(found)
    on_path = shutil.which(TOOL)
    if on_path is None:
        raise CompileError(TOOL_MISSING)
    return on_path
