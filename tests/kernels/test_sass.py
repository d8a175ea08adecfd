"""The machine code does what the analysis promised, read from the SASS of compiled kernels; no GPU.

Each tensor of the epilogue is reached by accesses of its width, as many as cover a thread's part of the tile, by the
instruction that its path names; nothing spills to local memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BF16, BOOL, F16, F32, DType
from onnxfuse.errors import CompileError
from onnxfuse.ir.fusion import Step
from onnxfuse.kernels.hopper import emit as emit_hopper
from onnxfuse.runtime import disassemble
from onnxfuse.runtime.compile import CompiledImage, compile_source
from onnxfuse.schedule import hopper_tile
from onnxfuse.schedule.access_path import CP_ASYNC_BYTES
from onnxfuse.schedule.hopper import HOPPER as HOPPER_FAMILY
from onnxfuse.schedule.hopper_tile import SLAB_ROWS, HopperTile
from onnxfuse.schedule.kernel_spec import Access, Tile
from onnxfuse.schedule.portable import PORTABLE
from onnxfuse.schedule.portable_tile import FRAGMENT_ROWS, footprint
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec

FAMILIES = {"portable": PORTABLE, "sm_90a": HOPPER_FAMILY}
TILE = Tile(128, 64, 64, 2, 2, 3)
HOPPER, HOPPER_TILE = ARCHITECTURES["sm_90a"], HopperTile(128, 128, False)
UNROLLED = 8  # accesses of one tensor that the kernel writes out; more of them are a loop over these
LANES = 32
WORDS_OF_PIECE = 3  # of 8 bytes, that 16 bytes which begin anywhere can touch
BASE = make_spec("f16", 2, "kn", TILE, Size(504, 136, 248))  # two biases in rows, one output


def epilogue(*more: Access, out: Access | None = None) -> TiledSpec:
    """The two biases and GELU of BASE, then further operands are added; a mask lets the value or -inf pass."""
    steps, value = list(BASE.steps), BASE.out_values[0]
    for index, load in enumerate(more, len(BASE.loads)):
        read = f"op{index}"
        op, inputs = ("where", (read, value, -math.inf)) if load.dtype == BOOL else ("add", (value, read))
        steps.append(Step(f"r{index}", op, inputs))
        value = steps[-1].result
    outs = BASE.outs if out is None else (out,)
    return replace(BASE, loads=(*BASE.loads, *more), steps=tuple(steps), outs=outs, out_values=(value,))


def walked(dtype: DType, width: int, run: int = 0, transposed: bool = False, loop: str = "n") -> Access:
    """A tile whose columns or rows lie in runs, as after heads were split."""
    return Access("tile", dtype, width, transposed, (loop,), run)


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
    "transposed residual": epilogue(Access("tile", F16, 8, transposed=True)),
    "transposed residual of odd columns": epilogue(Access("tile", F16, 1, transposed=True)),
    "transposed fp32 residual and output": epilogue(Access("tile", F32, 2, True), out=Access("tile", F32, 4, True)),
    "transposed output": epilogue(out=Access("tile", F16, 8, transposed=True)),
    "heads": epilogue(out=walked(F16, 8, run=64)),
    "narrow heads": epilogue(walked(F16, 8, run=40), out=walked(F16, 8, run=40)),
    "mask": epilogue(Access("tile", BOOL, 16)),
    "mask of half the width, and a residual": epilogue(Access("tile", BOOL, 8), Access("tile", F16, 8)),
    "mask of odd rows": epilogue(Access("tile", BOOL, 1)),
    "mask of even rows": epilogue(Access("tile", BOOL, 2)),
    "mask of the columns": epilogue(Access("row", BOOL, 16)),
    "transposed mask": epilogue(Access("tile", BOOL, 16, transposed=True)),
    "transposed output in runs of rows": epilogue(out=walked(F16, 4, transposed=True, loop="m")),
}

# What a path says, and the instruction that does it; the rest goes through registers.
INSTRUCTIONS = {"TMA store": "UTMASTG", "TMA": "UTMALDG", "cp.async": "LDGSTS", "direct store": "STG", "": "LDG"}
DIRECT = ("LDG", "LDGSTS", "STG")

Accesses = Counter[tuple[str, int]]


def instruction(path: str) -> str:
    return next(name for words, name in INSTRUCTIONS.items() if words in path)


def compiled(kernel: str, spec: TiledSpec) -> CompiledImage:
    if kernel == "portable":
        return compile_source(spec.source(), ARCHITECTURES["sm_80"])
    return compile_source(emit_hopper(spec, HOPPER_TILE, HOPPER.shared_bytes), HOPPER)


def accesses(image: CompiledImage) -> Accesses:
    """How often the kernel's code reads and writes global memory, by bytes of one access; 0 for a box of TMA."""
    names = "|".join(INSTRUCTIONS.values())
    code = re.findall(rf"\b({names})\.([A-Z0-9.]+)", disassemble.sass(image.data))
    return Counter((op, bytes_of(flags) if op in DIRECT else 0) for op, flags in code)


def bytes_of(flags: str) -> int:
    sizes = {"128": 16, "64": 8, "U16": 2, "U8": 1}
    return next((sizes[flag] for flag in flags.split(".") if flag in sizes), 4)


def promised(kernel: str, spec: TiledSpec) -> Accesses:
    """What the code does for the operands and the outputs, from the spec alone."""
    counts: Accesses = Counter()
    for load in spec.loads:
        size = load.width * load.dtype.bytes
        small = kernel == "sm_90a" and size < CP_ASYNC_BYTES
        each = UNROLLED if small else WRITTEN_OUT[kernel](load, spec)
        counts[instruction(FAMILIES[kernel].access_path("load", load)), size] += each if load.kind == "tile" else 1
    for out in spec.outs:
        op = instruction(FAMILIES[kernel].access_path("out", out))
        size, each = (out.width * out.dtype.bytes, WRITTEN_OUT[kernel](out, spec)) if op == "STG" else (0, 1)
        counts[op, size] += each * (hopper_slabs(spec) if kernel == "sm_90a" else 1)
    return counts


def written_out(access: Access, spec: TiledSpec) -> int:
    """Accesses of one lane to a tile in the code: all passes, each a loop of UNROLLED where it is longer."""
    tile, slabs = spec.tile, footprint(spec, spec.tile).slabs
    passes = tile.block_m // tile.warps_m // FRAGMENT_ROWS // slabs
    staged = slabs * FRAGMENT_ROWS * (tile.block_n // tile.warps_n)
    return passes * min(UNROLLED, staged // access.width // LANES)


def hopper_written_out(access: Access, spec: TiledSpec) -> int:
    """Accesses of one lane to a slab in the code: whole rows a pass, or a loop of two where they are many or walked."""
    columns = hopper_tile.footprint(spec, HOPPER_TILE, HOPPER.shared_bytes).slab_columns
    if access.transposed or access.two_levels:
        return min(2, SLAB_ROWS * columns // access.width // LANES)
    rows = max(LANES // (columns // access.width), 1)
    passes = -(-SLAB_ROWS // rows)
    return passes if passes <= UNROLLED else 2


def hopper_slabs(spec: TiledSpec) -> int:
    """Slabs of one warp's part of a tile: their code is written out."""
    columns = hopper_tile.footprint(spec, HOPPER_TILE, HOPPER.shared_bytes).slab_columns
    return HOPPER_TILE.group_m // hopper_tile.FRAGMENT_ROWS * (HOPPER_TILE.block_n // columns)


WRITTEN_OUT = {"portable": written_out, "sm_90a": hopper_written_out}


@pytest.fixture(scope="module")
def product() -> Accesses:
    """What the portable kernel's main loop alone does."""
    counts = accesses(compiled("portable", BASE))
    counts.subtract(promised("portable", BASE))
    assert set(+counts) == {("LDGSTS", 16)}
    assert not -counts
    return +counts


@pytest.mark.one_in(32)
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_access_is_as_wide_as_promised(name: str, product: Accesses) -> None:
    image = compiled("portable", EPILOGUES[name])
    assert accesses(image) == product + promised("portable", EPILOGUES[name])
    assert (image.local_bytes, image.spill_bytes) == (0, 0)


@pytest.mark.one_in(32)
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_access_of_the_hopper_kernel_is_as_wide_as_promised(name: str) -> None:
    spec = EPILOGUES[name]
    assert hopper_tile.why_not(spec, HOPPER_TILE, HOPPER.shared_bytes) is None
    image = compiled("sm_90a", spec)
    pieces = hopper_tile.rhs_pieces(spec, HOPPER_TILE)
    boxes = 1 + 2 * sum(spec.parts * piece.columns // piece.atom for piece in pieces)  # of a stage, and rhs ahead
    assert accesses(image) == promised("sm_90a", spec) + Counter({("UTMALDG", 0): boxes})
    assert (image.local_bytes, image.spill_bytes) == (0, 0)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", EPILOGUES)
def test_the_lane_that_acts_for_a_warp_needs_no_loop_over_all(name: str) -> None:
    """Around an instruction with uniform operands, as TMA's: ptxas makes one unless it knows that one lane is there."""
    code = disassemble.sass(compiled("sm_90a", EPILOGUES[name]).data)
    assert "UTMALDG" in code
    assert "ELECT" in code
    assert "BRA.U.ANY" not in code


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kernel", ["portable", "sm_90a"])
@pytest.mark.parametrize("name", ["residual of odd rows", "transposed residual of odd columns", "mask of odd rows"])
def test_copies_through_registers_wait_together(kernel: str, name: str) -> None:
    code = disassemble.sass(compiled(kernel, EPILOGUES[name]).data)
    order = "".join(op[0] for op in re.findall(r"\b(LDG|STS)\.[A-Z0-9.]*U(?:16|8)\b", code))
    assert re.fullmatch(f"(L{{{UNROLLED}}}S{{{UNROLLED}}})+", order)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("tile", [TILE, Tile(128, 128, 64, 2, 2, 3), Tile(128, 256, 64, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("order", ["kn", "nk"])
def test_rows_that_begin_anywhere_are_read_in_words_that_wait_together(order: str, tile: Tile) -> None:
    parts = 1 if tile.block_n > TILE.block_n else 2
    image = compiled("portable", make_spec("f16", parts, order, tile, Size(37, 41, 53), narrow=True))
    order_of_accesses = re.findall(r"\b(LDG\.E\.64|LDGSTS|STS\.128)\b", disassemble.sass(image.data))
    batches = re.findall("L+S+", "".join(op[0] for op in order_of_accesses))
    assert {batch.count("L") / batch.count("S") for batch in batches} == {WORDS_OF_PIECE}
    assert {batch.count("S") for batch in batches} == {4}
    assert (image.local_bytes, image.spill_bytes) == (0, 0)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    "name", ["residual", "fp32 residual", "transposed output", "heads", "mask of half the width, and a residual"]
)
def test_a_checked_kernel_has_wide_accesses_and_single_ones(name: str) -> None:
    wide = replace(EPILOGUES[name], tile=Tile(32, 64, 64, 1, 4, 4))
    loads, outs = (tuple(replace(each, width=1) for each in group) for group in (wide.loads, wide.outs))
    element = ("LDG" if wide.dtype.bytes == 2 else "LDGSTS", wide.dtype.bytes)  # of lhs and rhs
    single = accesses(compiled("portable", replace(wide, loads=loads, outs=outs)))
    image = compiled("portable", replace(wide, checked=True))
    assert {*accesses(image)} == {*accesses(compiled("portable", wide)), *single, element}
    assert (image.local_bytes, image.spill_bytes) == (0, 0)


@pytest.mark.parametrize("kernel", ["portable", "sm_90a"])
def test_merged_heads_are_read_as_wide_as_whole_rows(kernel: str) -> None:
    image = compiled(kernel, replace(BASE, lhs_run=64))
    widths = {width for op, width in accesses(image) if op in ("LDGSTS", "UTMALDG")}
    assert widths == {16 if kernel == "portable" else 0}
    assert instruction(FAMILIES[kernel].access_path("lhs", BASE.factors[0])) in {op for op, _ in accesses(image)}
    assert (image.local_bytes, image.spill_bytes) == (0, 0)


def test_ptx_has_no_machine_code() -> None:
    assert disassemble.sass(b"//\n.version 9.0\n") == ""


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(CompileError, match="nvdisasm refuses the image"):
        disassemble.sass(b"\x7fELF and nothing else")


def test_a_missing_disassembler_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassemble, "TOOL", "no-such-tool")
    with pytest.raises(CompileError, match="nvidia-cuda-nvdisasm"):
        disassemble.sass(b"\x7fELF")
