"""The corpus's kernels as PTX, assembled for GPUs that no machine of this project has.

    python -m tests.tools.ptx [--arch sm_100,sm_120] [--every N]

A GPU for which a file has no machine code gets it from the driver, which assembles PTX as the model loads. nvJitLink
has the same assembler. Of every N-th distinct kernel that the corpus's models have as PTX, what does not assemble is
listed, and what spills registers is counted. The exit code is 1 when something fails.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from onnx import ModelProto

from onnxfuse.device import ARCHITECTURES, PTX
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime.compile import compile_cached
from onnxfuse.settings import cache_dir
from tests.helpers.corpus import manifest, materialize

LATER = ("sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
DEVICE = ARCHITECTURES[PTX]
_PTX_INPUT = 2  # NVJITLINK_INPUT_PTX
_SPILLS = re.compile(rb"(\d+) bytes spill stores")


class AssembleError(Exception):
    """PTX that is refused, in the assembler's words."""


@cache
def _assembler() -> ctypes.CDLL:
    from cuda import pathfinder

    return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("nvJitLink").abs_path)


def _function(name: str) -> ctypes._NamedFuncPointer:
    return getattr(_assembler(), f"__{name}_13_0")  # type: ignore[no-any-return]


def assemble(ptx: bytes, arch: str) -> tuple[int, int]:
    """Make machine code of PTX.

    Args:
        ptx: its text.
        arch: for what, `sm_120`.

    Returns:
        Bytes of machine code, and bytes that a thread of any entry stores for want of registers.

    Raises:
        AssembleError: the assembler refuses it.
    """
    options = [f"-arch={arch}".encode(), b"-verbose"]
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    given = (ctypes.c_char_p * len(options))(*options)
    _check(None, _function("nvJitLinkCreate")(ctypes.byref(handle), len(options), given))
    try:
        text = ptx + b"\0"
        _check(handle, _function("nvJitLinkAddData")(handle, _PTX_INPUT, text, ctypes.c_size_t(len(text)), b"kernel"))
        _check(handle, _function("nvJitLinkComplete")(handle))
        _check(handle, _function("nvJitLinkGetLinkedCubinSize")(handle, ctypes.byref(size)))
        return size.value, sum(map(int, _SPILLS.findall(_log(handle, "Info"))))
    finally:
        _function("nvJitLinkDestroy")(ctypes.byref(handle))


def _check(handle: ctypes.c_void_p | None, result: int) -> None:
    if result:
        words = _log(handle, "Error").decode() if handle is not None else ""
        raise AssembleError(f"nvJitLink: {result} {words}".strip())


def _log(handle: ctypes.c_void_p, kind: str) -> bytes:
    size = ctypes.c_size_t()
    _function(f"nvJitLinkGet{kind}LogSize")(handle, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    _function(f"nvJitLinkGet{kind}Log")(handle, text)
    return text.value


def sources(model: ModelProto) -> Iterator[str]:
    """The kernels that a model has as PTX."""
    for site in analyse_model(model, [DEVICE]).sites:
        for device, variant in site.implementation.variants:
            yield kernel_source(variant, device)


def compiled(source: str) -> bytes:
    """The PTX of a kernel."""
    return compile_cached(source, [DEVICE], cache_dir())[0].data


def failures(texts: Sequence[str], architectures: Sequence[str]) -> Iterator[str]:
    """Assemble kernels, and tell what each architecture makes of them; yields what is refused."""

    def tried(text: str, arch: str) -> tuple[int, str]:
        try:
            return assemble(compiled(text), arch)[1], ""
        except AssembleError as error:
            return 0, str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for arch in architectures:
            found = list(pool.map(tried, texts, [arch] * len(texts)))
            refused = [error for _, error in found if error]
            spilling = sum(spills > 0 for spills, _ in found)
            print(f"{arch}: {len(texts) - len(refused)} of {len(texts)} kernels, {spilling} of them spill", flush=True)
            yield from (f"{arch}: {error}" for error in refused)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.ptx", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arch", default=",".join(LATER), help="for what")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the distinct kernels")
    chosen = parser.parse_args()
    distinct = dict.fromkeys(text for key in sorted(manifest()) for text in sources(materialize(key)))
    refused = list(failures([*distinct][:: chosen.every], chosen.arch.split(",")))
    print("\n".join(refused), end="\n" * bool(refused))
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
