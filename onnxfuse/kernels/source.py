"""What the text of every kernel is made of: hand-written files, constants, tables of how tensors are reached.

The result is self-contained but for `cuda_fp16.h` and `cuda_bf16.h`: `--dump` shows it and NVRTC compiles it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from onnxfuse.schedule.kernel_spec import Access, KernelSpec, Turn
from onnxfuse.schedule.pointwise_tile import PointwiseSpec
from onnxfuse.schedule.shared_memory import copy_width

TEMPLATES = Path(__file__).parent / "cuda"

GENERATED_USES = (
    "common/arguments.cuh",
    "common/element.cuh",
    "common/addressing.cuh",
    "common/math.cuh",
    "common/fast_math.cuh",
)

_OWN_INCLUDE = re.compile(r'^#(?:pragma once|include "(.*)")\n', re.MULTILINE)


def assembled(generated: str, kernel: str, uses: Iterable[str] = GENERATED_USES) -> str:
    """The full text of a kernel: every file once, behind those that it includes.

    Args:
        generated: the text that differs from kernel to kernel.
        kernel: the file that uses it, and so may all files that only this one includes.
        uses: the files that the generated text uses.
    """
    before = dict.fromkeys(name for root in uses for name in with_includes(root))
    after = [name for name in with_includes(kernel) if name not in before]
    return "\n".join([*map(template, before), generated, *map(template, after)])


@cache
def with_includes(name: str) -> tuple[str, ...]:
    """A file behind all that it includes, each once, in the order of the `#include` lines."""
    includes = [found for found in _OWN_INCLUDE.findall(_text(name)) if found]
    return tuple(dict.fromkeys([*(inner for found in includes for inner in with_includes(found)), name]))


@cache
def _text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def template(name: str) -> str:
    """The text of a hand-written file, without its includes of our own files, which stand before it."""
    return f"// ---- {name}\n{_OWN_INCLUDE.sub('', _text(name))}"


def constants(numbers: Mapping[str, int]) -> str:
    """A line of C++ for each number."""
    return "\n".join(f"constexpr int {name} = {value};" for name, value in numbers.items())


def without_product(spec: PointwiseSpec, numbers: Mapping[str, int], more: str, functor: str) -> str:
    """The generated text of a kernel that multiplies nothing.

    Args:
        spec: what to compute.
        numbers: of its tile.
        more: lines of the kernel's own.
        functor: the steps.
    """
    offsets = (0,) * len(spec.loads), (0,) * len(spec.outs)
    tables = access_tables(spec.loads, offsets[0], spec.outs, offsets[1], _in_turns, _in_turns)
    counts = {"LOADS": len(spec.loads), "OUTS": len(spec.outs)}
    return f"""\
// ---- generated
namespace onnxfuse {{

enum class Kind {{ scalar, row, column, tile }};

{constants({**counts, **numbers})}
constexpr bool CHECKED = {flag(spec.checked)};
{more}
{tables}

{functor}
}}  // namespace onnxfuse
"""


def quantized_numbers(spec: KernelSpec) -> dict[str, int]:
    """The constants of a quantized rhs; none of any other."""
    form = spec.quantization
    if form is None:
        return {}
    return {
        "QUANTIZED_BITS": form.bits,
        "QUANTIZED_BLOCK": form.block,
        "ZERO_POINTS": int(form.zero_points),
        "SCALES_WIDTH": spec.scales_width,
        "ZERO_POINTS_WIDTH": spec.zero_points_width,
    }


def access_tables(
    loads: Sequence[Access],
    load_offsets: Sequence[int],
    outs: Sequence[Access],
    out_offsets: Sequence[int],
    of_out: Callable[[Access], str] = lambda out: "",
    of_load: Callable[[Access], str] = lambda load: "",
) -> str:
    """The tables `Load<I>` and `Out<I>`; offsets are in bytes of shared memory, `of_out` and `of_load` give members."""
    rows = ["template <int INDEX> struct Load;"]
    for index, (load, offset) in enumerate(zip(loads, load_offsets, strict=True)):
        rows.append(
            _row("Load", index, load, offset, f"static constexpr Kind KIND = Kind::{load.kind}; {of_load(load)}")
        )
    rows.append("template <int INDEX> struct Out;")
    for index, (out, offset) in enumerate(zip(outs, out_offsets, strict=True)):
        rows.append(_row("Out", index, out, offset, of_out(out)))
    return "\n".join(rows)


def _in_turns(access: Access) -> str:
    """How parts take turns; those that do not move no columns so."""
    turn = access.turn or Turn(0, 0, 1, 0)
    numbers = {"LEADER": turn.leader, "TURN": turn.own, "TURN_PARTS": turn.parts, "TURN_COLUMNS": turn.columns}
    return " ".join(f"static constexpr int {name} = {value};" for name, value in numbers.items()) + " "


def _row(table: str, index: int, access: Access, offset: int, extra: str) -> str:
    """Type, how it is walked, width in elements, offset."""
    flags = {
        "TRANSPOSED": access.transposed,
        "OUTER_ROWS": "m" in access.two_levels,
        "OUTER_COLUMNS": "n" in access.two_levels,
        "OUTER_BATCH": "batch" in access.two_levels,
    }
    numbers = {"WIDTH": copy_width(access.width, access.dtype.bytes), "OFFSET": offset}
    members = [f"static constexpr bool {name} = {flag(value)};" for name, value in flags.items()]
    members += [f"static constexpr int {name} = {value};" for name, value in numbers.items()]
    head = f"template <> struct {table}<{index}> {{ using Type = {access.dtype.cuda}; {extra}"
    return f"{head}{' '.join(members)} }};"


def flag(value: bool) -> str:
    """A C++ literal."""
    return "true" if value else "false"
