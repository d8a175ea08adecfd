"""Which variant of a plan the bridge launches for pointers, pitches and sizes that only the run knows.

The rule itself is the bridge's, in C++. Whatever it launches reaches every element by legal accesses; it never fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxfuse.axes import AxisMapping, map_axes
from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BOOL, F16, F32
from onnxfuse.errors import NotFusable
from onnxfuse.fusion import Fusion, Tensor
from onnxfuse.packing import Kernels, kernel_source, node_attributes, pack_forms
from onnxfuse.plan import Variant, make_plan
from onnxfuse.rewrite import FUSED_GEMM
from onnxfuse.runtime.compile import CompiledImage
from onnxfuse.site import Form
from onnxfuse.vector_width import analyse
from tests.addresses import accesses, is_legal, lines
from tests.bridge_hooks import Arguments, Node, bridge
from tests.fusions import fusion
from tests.test_vector_width import random_fusions

IMAGE = CompiledImage(b"// no machine code", "", None, None, None)  # the rule does not look into it
APART = 1 << 20  # bytes from tensor to tensor


@dataclass(frozen=True)
class Launch:
    """A planned and packed fusion, and how the bridge chooses from it."""

    fusion: Fusion
    mapping: AxisMapping
    variants: tuple[Variant, ...]
    archive: bytes
    node: Node

    @property
    def input_bytes(self) -> list[int]:
        return [tensor.dtype.bytes for tensor in self.fusion.inputs]

    def arguments(self, sizes: Mapping[str, int], offsets: Mapping[str, int]) -> Arguments:
        """What a run passes for its sizes, with tensors that begin so many elements behind a wide boundary."""
        pointers = [
            APART * (1 + place) + offsets.get(tensor.name, 0) * tensor.dtype.bytes
            for place, tensor in enumerate((*self.fusion.inputs, *self.fusion.outputs))
        ]
        shapes = [shape_of(tensor, sizes) for tensor in self.fusion.inputs]
        count = len(shapes)
        return bridge().arguments(
            self.node, shapes, element_bytes=self.input_bytes, inputs=pointers[:count], outputs=pointers[count:]
        )[0]

    def chosen(self, arguments: Arguments, capability: int = 80) -> Variant:
        index = bridge().choose(
            self.archive, self.node, arguments, capability=capability, element_bytes=self.input_bytes
        )
        return self.variants[index]


def shape_of(tensor: Tensor, sizes: Mapping[str, int]) -> list[int]:
    shape = []
    for dim in tensor.dims:
        shape.append(1)
        for axis in dim:
            shape[-1] *= sizes[axis]
    return shape


def launch(built: Fusion, arch: str = "sm_80") -> Launch:
    mapping, device = map_axes(built), ARCHITECTURES[arch]
    plan = make_plan(built, mapping, analyse(built, mapping), device, exact_fp32=False)
    nowhere: Any = None  # no graph: the rule knows the node's attributes only
    form = Form(nowhere, nowhere, FUSED_GEMM, (), built, mapping, (plan,))
    kernels = Kernels({(kernel_source(variant, device), arch): IMAGE for variant in plan.variants})
    archive, (name,) = pack_forms([form], kernels)
    attributes = {key: text for key, text in node_attributes(form, name).items() if key != "fusion"}
    return Launch(built, mapping, plan.variants, archive, Node(**attributes))


def widths(variant: Variant) -> dict[str, list[int]]:
    spec = variant.spec
    return {
        "lhs": [spec.lhs_width],
        "rhs": [spec.rhs_width],
        "loads": [load.width for load in spec.loads],
        "outs": [out.width for out in spec.outs],
    }


WIDE = {"lhs": [8], "rhs": [8], "loads": [8, 8], "outs": [8]}
NARROW = {"lhs": [1], "rhs": [1], "loads": [1, 1], "outs": [1]}


def biased(**sizes: int | None) -> Launch:
    """lhs[m, k] * rhs[k, n] + operand0[n] + operand1[m, n]."""
    return launch(fusion({"m": 504, "n": 136, "k": 248} | sizes, operands=[("n", F16), ("m n", F16)]))


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ({}, WIDE),
        ({"lhs": 8, "rhs": 16, "operand0": 8, "operand1": 24, "out": 8}, WIDE),
        ({"lhs": 2}, NARROW),
        ({"rhs": 2}, NARROW),
        ({"operand0": 2}, NARROW),
        ({"operand1": 2}, NARROW),
        ({"out": 2}, NARROW),
        ({"lhs": 1}, NARROW),
        ({"out": 4}, NARROW),
    ],
)
def test_pointers_decide(offsets: Mapping[str, int], expected) -> None:
    """Offsets in elements of 2 bytes, as views of larger tensors have them."""
    biased_launch = biased()
    arguments = biased_launch.arguments({"m": 504, "n": 136, "k": 248}, offsets)
    assert widths(biased_launch.chosen(arguments)) == expected


@pytest.mark.parametrize(
    ("tensor", "pad", "expected"),
    [
        ("lhs", 8, WIDE),
        ("lhs", 1, NARROW),
        ("lhs", 2, NARROW),
        ("rhs", 8, WIDE),
        ("rhs", 1, NARROW),
        ("rhs", 2, NARROW),
        ("loads", 1, NARROW),
        ("loads", 2, NARROW),
        ("outs", 1, NARROW),
        ("outs", 2, NARROW),
        ("outs", 8, WIDE),
    ],
)
def test_pitches_decide(tensor: str, pad: int, expected) -> None:
    """Rows that are so many elements longer than what the kernel reads of them."""
    made = biased()
    arguments = made.arguments({"m": 504, "n": 136, "k": 248}, {})
    field = getattr(arguments, tensor)
    place = field if tensor == "lhs" else field[{"rhs": 0, "loads": 1, "outs": 0}[tensor]]
    place.row_stride += pad
    assert widths(made.chosen(arguments)) == expected


@pytest.mark.parametrize(
    ("stride", "expected"), [(1, WIDE), (2, NARROW), (136, NARROW)], ids=["dense", "every second", "turned"]
)
def test_an_inner_axis_that_is_not_contiguous_is_read_element_by_element(stride: int, expected) -> None:
    made = biased()
    arguments = made.arguments({"m": 504, "n": 136, "k": 248}, {})
    arguments.loads[1].column_stride = stride
    assert widths(made.chosen(arguments)) == expected


@pytest.mark.parametrize(("m", "out"), [(16, 8), (504, 8), (12, 1), (505, 1), (1, 1), (8, 8)])
def test_a_size_that_only_the_run_knows_narrows_its_own_tensor_alone(m: int, out: int) -> None:
    made = launch(fusion({"m": None, "n": 136, "k": 248}, out="n m", operands=[("m n", F16), ("n", F32)]))
    chosen = made.chosen(made.arguments({"m": m, "n": 136, "k": 248}, {}))
    assert widths(chosen) == {"lhs": [8], "rhs": [8], "loads": [8, 4], "outs": [out]}


@pytest.mark.parametrize(("offset", "width"), [(0, 16), (16, 16), (8, 1), (1, 1)])
def test_a_mask_of_single_bytes_begins_anywhere(offset: int, width: int) -> None:
    made = launch(fusion({"m": 504, "n": 144, "k": 248}, operands=[("m n", BOOL)]))
    arguments = made.arguments({"m": 504, "n": 144, "k": 248}, {"operand0": offset})
    assert widths(made.chosen(arguments))["loads"] == [width]


@pytest.mark.parametrize(("m", "width"), [(16, 16), (512, 16), (24, 1), (505, 1), (1, 1)])
def test_a_mask_turned_by_a_size_of_the_run(m: int, width: int) -> None:
    made = launch(fusion({"m": None, "n": 144, "k": 248}, operands=[("n m", BOOL)]))
    assert widths(made.chosen(made.arguments({"m": m, "n": 144, "k": 248}, {})))["loads"] == [width]


@pytest.mark.parametrize(("m", "lhs"), [(16, 8), (1, 1), (12, 1)])
def test_a_transposed_input_is_read_along_m_where_m_allows_it(m: int, lhs: int) -> None:
    made = launch(fusion({"m": None, "n": 136, "k": 248}, lhs="k m"))
    assert widths(made.chosen(made.arguments({"m": m, "n": 136, "k": 248}, {})))["lhs"] == [lhs]


@pytest.mark.parametrize(("m", "out"), [(16, 8), (1, 1), (12, 1)])
def test_a_size_of_one_makes_no_other_axis_contiguous_for_the_kernel(m: int, out: int) -> None:
    """[h, n, 1] lies as [h, n]: its columns are neighbours, and the kernel goes down its rows."""
    made = launch(fusion({"h": 8, "m": None, "n": 136, "k": 248}, lhs="h m k", out="h n m"))
    chosen = made.chosen(made.arguments({"h": 8, "m": m, "n": 136, "k": 248}, {}))
    assert widths(chosen)["outs"] == [out]


@pytest.mark.parametrize(("n", "rhs", "bias"), [(136, 8, [8, 8]), (132, 4, [4, 4]), (137, 1, [1, 1])])
def test_the_second_half_decides_for_both(n: int, rhs: int, bias: Sequence[int]) -> None:
    """Where a half is odd, the second one is misaligned though the first is not."""
    sizes = {"m": 504, "n": n, "p": 2, "k": 248}
    made = launch(fusion(sizes, rhs="k (p n)", operands=[("(p n)", F16)], parts=2))
    arguments = made.arguments(sizes, {})
    assert (arguments.rhs[1].pointer - arguments.rhs[0].pointer) == 2 * n
    chosen = widths(made.chosen(arguments))
    assert (chosen["lhs"], chosen["rhs"], chosen["loads"]) == ([8], [rhs], bias)


@settings(max_examples=300, deadline=None)
@given(random_fusions(), st.sampled_from(["sm_80", "sm_90a"]), st.data())
def test_whatever_is_launched_is_legal_at_every_index(drawn, arch: str, data: st.DataObject) -> None:
    """Walked loops, parts, views at an offset, sizes with guards true and false: some variant always fits."""
    built, sizes = drawn
    try:
        made = launch(built, arch)
    except NotFusable:
        assume(False)
    names = [tensor.name for tensor in (*built.inputs, *built.outputs)]
    offsets = {name: data.draw(st.sampled_from([0, 0, 0, 8, 4, 2, 1]), name) for name in names}
    chosen = widths(made.chosen(made.arguments(sizes, offsets), 90 if arch == "sm_90a" else 80))
    loads = iter(chosen["loads"][next(i for i, load in enumerate(built.loads) if load.operand == index)]
                 for index in range(len(built.operands)))  # fmt: skip
    of_role = {"lhs": iter(chosen["lhs"]), "rhs": iter(chosen["rhs"]), "operand": loads, "out": iter(chosen["outs"])}
    for role, tensor, along, loops in accesses(built, made.mapping):
        width = next(of_role[role])
        elements = lines(tensor, along, loops, sizes, offsets[tensor.name])
        assert width == 1 or is_legal(elements, width), (role, str(tensor), width, sizes, offsets)
