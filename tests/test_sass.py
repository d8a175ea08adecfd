"""The machine code does what the analysis promised, read from the SASS of compiled kernels; no GPU.

Each tensor of the epilogue is reached by accesses of its width, as many as cover a thread's part of the tile.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, F16, F32
from onnxfuse.errors import CompileError
from onnxfuse.fusion import Step
from onnxfuse.kernel_spec import Access, KernelSpec, Tile
from onnxfuse.kernels.emit import emit
from onnxfuse.runtime import disassemble
from onnxfuse.runtime.compile import compile_source
from onnxfuse.tile_footprint import FRAGMENT_ROWS, footprint
from tests.kernel_problem import Size, make_spec

TILE = Tile(128, 64, 64, 2, 2, 3)
UNROLLED = 8  # accesses of one tensor that the kernel writes out; more of them are a loop over these
LANES = 32
BASE = make_spec("f16", 2, "kn", TILE, Size(504, 136, 248))  # two biases in rows, one output


def epilogue(*more: Access, out: Access | None = None) -> KernelSpec:
    """The two biases and GELU of BASE, then one addition for every further operand."""
    steps, value = list(BASE.steps), BASE.out_values[0]
    for index in range(len(more)):
        steps.append(Step(f"r{index}", "add", (value, f"op{len(BASE.loads) + index}")))
        value = steps[-1].result
    outs = BASE.outs if out is None else (out,)
    return replace(BASE, loads=(*BASE.loads, *more), steps=tuple(steps), outs=outs, out_values=(value,))


EPILOGUES = {
    "biases": epilogue(),
    "residual": epilogue(Access("tile", F16, 8)),
    "residual of half the width": epilogue(Access("tile", F16, 4)),
    "residual of odd rows": epilogue(Access("tile", F16, 1)),
    "fp32 residual": epilogue(Access("tile", F32, 4)),
    "two residuals, each with its width": epilogue(Access("tile", F16, 2), Access("tile", F16, 8)),
    "bf16 row scale and fp32 scalar": epilogue(Access("row", BF16, 8), Access("scalar", F32, 1)),
    "column": epilogue(Access("column", F16, 1)),
    "fp32 output": epilogue(out=Access("tile", F32, 4)),
    "output of odd rows": epilogue(out=Access("tile", F16, 1)),
    "output of a quarter of the width": epilogue(Access("tile", F16, 8), out=Access("tile", F16, 2)),
}


def accesses(spec: KernelSpec) -> Counter[tuple[str, int]]:
    """How often the kernel's code reads (`LDG`, `LDGSTS`) and writes (`STG`) global memory, by bytes of one access."""
    image = compile_source(emit(spec), ARCHITECTURES["sm_80"])
    code = re.findall(r"\b(LDG|LDGSTS|STG)\.([A-Z0-9.]+)", disassemble.sass(image.data))
    return Counter((op, bytes_of(flags)) for op, flags in code)


def bytes_of(flags: str) -> int:
    sizes = {"128": 16, "64": 8, "U16": 2, "U8": 1}
    return next((sizes[flag] for flag in flags.split(".") if flag in sizes), 4)


def promised(spec: KernelSpec) -> Counter[tuple[str, int]]:
    """What one thread does for the operands and the outputs, from the spec alone."""
    counts: Counter[tuple[str, int]] = Counter()
    for load in spec.loads:
        size = load.width * load.dtype.bytes
        if load.kind == "tile":
            counts["LDGSTS" if size >= 4 else "LDG", size] += written_out(load, spec)
        else:
            counts["LDG", size] += 1
    for out in spec.outs:
        counts["STG", out.width * out.dtype.bytes] += written_out(out, spec)
    return counts


def written_out(access: Access, spec: KernelSpec) -> int:
    """Accesses of one lane to a tile in the code: all passes, each a loop of UNROLLED where it is longer."""
    tile, slabs = spec.tile, footprint(spec).slabs
    passes = tile.block_m // tile.warps_m // FRAGMENT_ROWS // slabs
    staged = slabs * FRAGMENT_ROWS * (tile.block_n // tile.warps_n)
    return passes * min(UNROLLED, staged // access.width // LANES)


@pytest.fixture(scope="module")
def product() -> Counter[tuple[str, int]]:
    """What the main loop alone does."""
    counts = accesses(BASE)
    counts.subtract(promised(BASE))
    assert set(+counts) == {("LDGSTS", 16)}
    assert not -counts
    return +counts


@pytest.mark.parametrize("name", EPILOGUES)
def test_every_access_is_as_wide_as_promised(name: str, product: Counter[tuple[str, int]]) -> None:
    assert accesses(EPILOGUES[name]) == product + promised(EPILOGUES[name])


def test_ptx_has_no_machine_code() -> None:
    assert disassemble.sass(b"//\n.version 9.0\n") == ""


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(CompileError, match="nvdisasm refuses the image"):
        disassemble.sass(b"\x7fELF and nothing else")


def test_a_missing_disassembler_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassemble, "TOOL", "no-such-tool")
    with pytest.raises(CompileError, match="nvidia-cuda-nvdisasm"):
        disassemble.sass(b"\x7fELF")
