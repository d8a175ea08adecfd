"""Which variant of a plan the bridge launches for pointers, pitches and sizes that only the run knows.

The rule itself is the bridge's, in C++. Whatever it launches reaches every element by legal accesses; it never fails.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxfuse.analysis.axis_mapping import AxisMapping, map_axes, map_pointwise
from onnxfuse.analysis.vector_width import analyse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import BOOL, F16, F32
from onnxfuse.errors import NotFusable
from onnxfuse.graph.archive import Library
from onnxfuse.graph.op_names import FUSED_GEMM, FUSED_POINTWISE
from onnxfuse.ir.epilogue_only import epilogue_of
from onnxfuse.ir.fusion import Fusion, Pointwise, Tensor
from onnxfuse.kernels.emit import kernel_source
from onnxfuse.lowering.compile_kernels import Kernels
from onnxfuse.lowering.fused_node import node_attributes
from onnxfuse.lowering.pack import pack_implementations
from onnxfuse.lowering.site import Implementation
from onnxfuse.pipeline import analyse_model
from onnxfuse.runtime.compile import CompiledImage
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.library import LIBRARY, MATH
from onnxfuse.schedule.plan import by_library, make_plan
from onnxfuse.schedule.pointwise_plan import make_pointwise_plan
from onnxfuse.schedule.strategy import Strategy
from onnxfuse.schedule.variant import AnyPlan, AnyVariant, ProductVariant
from tests.analysis.test_vector_width import random_fusions
from tests.helpers.addresses import accesses, is_legal, lines
from tests.helpers.bridge_hooks import Arguments, Node, bridge
from tests.helpers.fusions import fusion
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16
from tests.ir.test_epilogue_only import products_of
from tests.perf.drawn import PARTS, Drawn, model

IMAGE = CompiledImage(b"// no machine code", "", None, None, None)  # the rule does not look into it
APART = 1 << 20  # bytes from tensor to tensor


@dataclass(frozen=True)
class Launch:
    """A planned and packed fusion, and how the bridge chooses from it."""

    fusion: Pointwise
    mapping: AxisMapping
    variants: tuple[AnyVariant, ...]
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

    def chosen(self, arguments: Arguments, capability: int = 80) -> AnyVariant:
        index = bridge().choose(
            self.archive, self.node, arguments, capability=capability, element_bytes=self.input_bytes
        )
        return self.variants[index]

    def widths(self, arguments: Arguments, capability: int = 80) -> dict[str, list[int]]:
        """What the chosen kernel takes of each tensor at once."""
        return widths(self.chosen(arguments, capability), arguments)


def shape_of(tensor: Tensor, sizes: Mapping[str, int]) -> list[int]:
    shape = []
    for dim in tensor.dims:
        shape.append(1)
        for axis in dim:
            shape[-1] *= sizes[axis]
    if tensor.wide is not None:
        shape[tensor.wide[0]] = tensor.wide[1]
    return shape


def launch(built: Fusion, arch: str = "sm_80") -> Launch:
    mapping, device = map_axes(built), ARCHITECTURES[arch]
    plan = make_plan(built, mapping, analyse(built, mapping), device, exact_fp32=False)
    return packed(FUSED_GEMM, built, mapping, replace(plan, library_rows=()))


def launch_behind_library(built: Fusion) -> Launch:
    """With the library's product wherever it can be had."""
    mapping = map_axes(built)
    plan = make_plan(built, mapping, analyse(built, mapping), ARCHITECTURES["sm_80"], exact_fp32=False)
    return packed(FUSED_GEMM, built, mapping, by_library(plan) if plan.library else plan)


def launch_behind(built: Fusion, arch: str = "sm_80") -> Launch:
    """Of the epilogue-only kernel."""
    epilogue_only = epilogue_of(built, products_of(built))
    mapping = map_pointwise(epilogue_only, map_axes(built))
    return packed(
        FUSED_POINTWISE, epilogue_only, mapping, make_pointwise_plan(epilogue_only, mapping, ARCHITECTURES[arch])
    )


def packed(op: str, built: Pointwise, mapping: AxisMapping, plan: AnyPlan) -> Launch:
    nowhere: Any = None  # no graph: the rule knows the node's attributes only
    implementation = Implementation(nowhere, nowhere, op, (), built, mapping, (plan,))
    kernels = Kernels({(kernel_source(variant, plan.device), plan.device.arch): IMAGE for variant in plan.tried})
    archive, (name,) = pack_implementations([implementation], kernels)
    ignored = ("math", "fusion")  # by the bridge
    attributes = {key: text for key, text in node_attributes(implementation, name).items() if key not in ignored}
    return Launch(built, mapping, plan.tried, archive, Node(**attributes))


@pytest.mark.parametrize(
    ("offsets", "checked", "width"),
    [
        ({}, False, 8),
        ({"product0": 8, "operand0": 16, "operand1": 8, "out": 8}, False, 8),
        ({"product0": 1}, True, 8),
        ({"operand0": 2}, True, 8),
        ({"operand1": 4}, True, 8),
        ({"product0": 1, "operand0": 2, "operand1": 4}, True, 8),
        ({"out": 4}, False, 1),
        ({"operand0": 1, "out": 1}, False, 1),
    ],
)
def test_behind_a_product_what_is_read_is_checked_and_what_is_written_is_not(
    offsets: Mapping[str, int], checked: bool, width: int
) -> None:
    made = launch_behind(fusion({"m": None, "n": 136, "k": 248}, operands=[("n", F16), ("m n", F16)]))
    for m in (1, 504, 9000):
        spec = made.chosen(made.arguments({"m": m, "n": 136}, offsets)).spec
        assert (spec.checked, {each.width for each in (*spec.loads, *spec.outs)}) == (checked, {width})


def widths(variant: ProductVariant, arguments: Arguments) -> dict[str, list[int]]:
    """What a kernel takes of each tensor at once: its widths or, where it is checked, those that are legal there."""
    spec, loads, outs = variant.spec, arguments.loads, arguments.outs
    k_inside, k_outside = spec.lhs_order == "mk", spec.rhs_order == "kn"
    lhs_run = arguments.lhs_outer.columns if spec.lhs_run else arguments.k if k_inside else arguments.m
    lhs_outer = arguments.lhs_outer.column_stride if spec.lhs_run else 0

    def of_product(factor: str, tensor: Any, width: int, down: bool, *pitches: int) -> int:
        # What copies a factor looks at its rows as a checked kernel does: they may begin anywhere.
        looking = replace(spec, checked=spec.checked or factor in spec.copied)
        return allowed(looking, tensor, width, spec.dtype.bytes, down, pitches)

    def of_epilogue(access: Access, tensor: Any, outer: Any) -> int:
        rows = outer.rows if "m" in access.two_levels else arguments.m
        columns = outer.columns if "n" in access.two_levels else arguments.n
        strides = {"m": outer.row_stride, "n": outer.column_stride, "batch": outer.batch_stride}
        pitches = [strides[loop] for loop in access.two_levels]
        run = rows if access.transposed else columns
        return allowed(spec, tensor, access.width, access.dtype.bytes, access.transposed, [*pitches, run])

    inside = arguments.n if k_outside else arguments.k
    return {
        "lhs": [of_product("lhs", arguments.lhs, spec.lhs_width, not k_inside, lhs_run, lhs_outer)],
        "rhs": [of_product("rhs", each, spec.rhs_width, not k_outside, inside) for each in arguments.rhs[: spec.parts]],
        "loads": [of_epilogue(*each) for each in zip(spec.loads, loads, arguments.loads_outer, strict=False)],
        "outs": [of_epilogue(*each) for each in zip(spec.outs, outs, arguments.outs_outer, strict=False)],
    }


def allowed(spec: KernelSpec, tensor: Any, width: int, element_bytes: int, down: bool, pitches: Sequence[int]) -> int:
    """The kernel's own rule: all that it has of a tensor, or single elements. `down` its rows, or along its columns."""
    along, across = (tensor.row_stride, tensor.column_stride)[:: 1 if down else -1]
    whole = all(each % width == 0 for each in (*pitches, across, tensor.batch_stride))
    legal = along == 1 and whole and (tensor.pointer or 0) % (width * element_bytes) == 0
    return width if legal or not spec.checked else 1


WIDE = {"lhs": [8], "rhs": [8], "loads": [8, 8], "outs": [8]}
BIASED = {"lhs": {"lhs": [1]}, "rhs": {"rhs": [1]}, "operand0": {"loads": [1, 8]}, "operand1": {"loads": [8, 1]},
          "out": {"outs": [1]}}  # fmt: skip


def narrow(*names: str) -> dict[str, list[int]]:
    """Widths of `biased` where some tensors are reached element by element, and no other."""
    return WIDE | {role: found for name in names for role, found in BIASED[name].items()}


def biased(**sizes: int | None) -> Launch:
    """lhs[m, k] * rhs[k, n] + operand0[n] + operand1[m, n]."""
    return launch(fusion({"m": 504, "n": 136, "k": 248} | sizes, operands=[("n", F16), ("m n", F16)]))


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ({}, WIDE),
        ({"lhs": 8, "rhs": 16, "operand0": 8, "operand1": 24, "out": 8}, WIDE),
        ({"lhs": 2}, narrow("lhs")),
        ({"rhs": 2}, narrow("rhs")),
        ({"operand0": 2}, narrow("operand0")),
        ({"operand1": 2}, narrow("operand1")),
        ({"out": 2}, narrow("out")),
        ({"lhs": 1}, narrow("lhs")),
        ({"out": 4}, narrow("out")),
        ({"lhs": 8, "rhs": 1, "out": 2}, narrow("rhs", "out")),
    ],
)
def test_pointers_decide(offsets: Mapping[str, int], expected) -> None:
    """Offsets in elements of 2 bytes, as views of larger tensors have them."""
    biased_launch = biased()
    arguments = biased_launch.arguments({"m": 504, "n": 136, "k": 248}, offsets)
    assert biased_launch.widths(arguments) == expected


@pytest.mark.parametrize(
    ("tensor", "pad", "expected"),
    [
        ("lhs", 8, WIDE),
        ("lhs", 1, narrow("lhs")),
        ("lhs", 2, narrow("lhs")),
        ("rhs", 8, WIDE),
        ("rhs", 1, narrow("rhs")),
        ("rhs", 2, narrow("rhs")),
        ("loads", 1, narrow("operand1")),
        ("loads", 2, narrow("operand1")),
        ("outs", 1, narrow("out")),
        ("outs", 2, narrow("out")),
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
    assert made.widths(arguments) == expected


@pytest.mark.parametrize(
    ("stride", "expected"),
    [(1, WIDE), (2, narrow("operand1")), (136, narrow("operand1"))],
    ids=["dense", "every second", "transposed"],
)
def test_an_inner_axis_that_is_not_contiguous_is_read_element_by_element(stride: int, expected) -> None:
    made = biased()
    arguments = made.arguments({"m": 504, "n": 136, "k": 248}, {})
    arguments.loads[1].column_stride = stride
    assert made.widths(arguments) == expected


@pytest.mark.parametrize(("m", "out"), [(16, 8), (504, 8), (12, 1), (505, 1), (1, 1), (8, 8)])
def test_a_size_that_only_the_run_knows_narrows_its_own_tensor_alone(m: int, out: int) -> None:
    made = launch(fusion({"m": None, "n": 136, "k": 248}, out="n m", operands=[("m n", F16), ("n", F32)]))
    chosen = made.widths(made.arguments({"m": m, "n": 136, "k": 248}, {}))
    assert chosen == {"lhs": [8], "rhs": [8], "loads": [8, 4], "outs": [out]}


@pytest.mark.parametrize(("offset", "width"), [(0, 16), (16, 16), (8, 1), (1, 1)])
def test_a_mask_of_single_bytes_begins_anywhere(offset: int, width: int) -> None:
    made = launch(fusion({"m": 504, "n": 144, "k": 248}, operands=[("m n", BOOL)]))
    arguments = made.arguments({"m": 504, "n": 144, "k": 248}, {"operand0": offset})
    assert made.widths(arguments)["loads"] == [width]


@pytest.mark.parametrize(("m", "width"), [(16, 16), (512, 16), (24, 1), (505, 1), (1, 1)])
def test_a_mask_turned_by_a_size_of_the_run(m: int, width: int) -> None:
    made = launch(fusion({"m": None, "n": 144, "k": 248}, operands=[("n m", BOOL)]))
    assert made.widths(made.arguments({"m": m, "n": 144, "k": 248}, {}))["loads"] == [width]


@pytest.mark.parametrize(("m", "lhs"), [(16, 8), (1, 1), (12, 1)])
def test_a_transposed_input_is_read_along_m_where_m_allows_it(m: int, lhs: int) -> None:
    made = launch(fusion({"m": None, "n": 136, "k": 248}, lhs="k m"))
    assert made.widths(made.arguments({"m": m, "n": 136, "k": 248}, {}))["lhs"] == [lhs]


@pytest.mark.parametrize(("m", "out"), [(16, 8), (1, 1), (12, 1)])
def test_a_size_of_one_makes_no_other_axis_contiguous_for_the_kernel(m: int, out: int) -> None:
    """[h, n, 1] lies as [h, n]: its columns are neighbours, and the kernel goes down its rows."""
    made = launch(fusion({"h": 8, "m": None, "n": 136, "k": 248}, lhs="h m k", out="h n m"))
    chosen = made.widths(made.arguments({"h": 8, "m": m, "n": 136, "k": 248}, {}))
    assert chosen["outs"] == [out]


@pytest.mark.parametrize(("n", "rhs", "bias"), [(136, 8, [8, 8]), (132, 4, [4, 4]), (137, 1, [1, 1])])
def test_the_second_half_decides_for_both(n: int, rhs: int, bias: Sequence[int]) -> None:
    """Where a half is odd, the second one is misaligned though the first is not."""
    sizes = {"m": 504, "n": n, "p": 2, "k": 248}
    made = launch(fusion(sizes, rhs="k (p n)", operands=[("(p n)", F16)], parts=2))
    arguments = made.arguments(sizes, {})
    assert (arguments.rhs[1].pointer - arguments.rhs[0].pointer) == 2 * n
    chosen = made.widths(arguments)
    assert (chosen["lhs"], chosen["rhs"], chosen["loads"]) == ([8], [rhs, rhs], bias)


@settings(max_examples=120)
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
    chosen = made.widths(made.arguments(sizes, offsets), 90 if arch == "sm_90a" else 80)
    loads = iter(chosen["loads"][next(i for i, load in enumerate(built.loads) if load.operand == index)]
                 for index in range(len(built.operands)))  # fmt: skip
    rhs = iter({part.tensor: width for part, width in zip(built.parts, chosen["rhs"], strict=True)}.values())
    of_role = {"lhs": iter(chosen["lhs"]), "rhs": rhs, "operand": loads, "out": iter(chosen["outs"])}
    for role, tensor, along, loops in accesses(built, made.mapping):
        width = next(of_role[role])
        elements = lines(tensor, along, loops, sizes, offsets[tensor.name])
        assert width == 1 or is_legal(elements, width), (role, str(tensor), width, sizes, offsets)


@settings(max_examples=200)
@given(random_fusions(), st.data())
def test_whatever_is_launched_behind_the_library_is_legal(drawn, data: st.DataObject) -> None:
    """Of the parts as they lie in scratch memory, and of all other tensors; some kernel behind the library fits."""
    built, sizes = drawn
    try:
        made = launch_behind_library(built)
    except NotFusable:
        assume(False)
    names = [tensor.name for tensor in (*built.inputs, *built.outputs)]
    offsets = {name: data.draw(st.sampled_from([0, 0, 0, 8, 4, 2, 1]), name) for name in names}
    arguments = made.arguments(sizes, offsets)
    assume(made.variants[-1].spec.math in MATH)
    math = Library[made.variants[-1].spec.math.upper()]
    _, products, behind = bridge().library(made.node, arguments, math, element_bytes=made.input_bytes)
    chosen = made.chosen(arguments)
    assert (chosen.family is LIBRARY) == bool(products and any(each.family is LIBRARY for each in made.variants))
    if chosen.family is LIBRARY and not chosen.spec.checked:
        spec = chosen.spec
        for accesses_of, tensors in ((spec.loads, behind.loads), (spec.outs, behind.outs)):
            for access, tensor in zip(accesses_of, tensors, strict=False):
                steps = (tensor.row_stride, tensor.batch_stride) if access.kind == "tile" else ()
                assert access.width == 1 or tensor.column_stride == 1
                assert (tensor.pointer or 0) % (access.width * access.dtype.bytes) == 0
                assert all(step % access.width == 0 for step in steps)


@pytest.mark.parametrize("element", [FLOAT, FLOAT16, BFLOAT16])
def test_what_a_plan_chose_is_what_runs(element: int) -> None:
    """Where tensors begin on wide boundaries nothing takes over, whatever k and n; with weights as they lie and not."""
    draw = random.Random(element)
    taken = set[str]()
    for keep_weights in (False, True) * 2:
        kind, order = draw.choice(list(PARTS)), draw.choice(("kn", "nk"))
        k, n = draw.randrange(130, 700), draw.choice((draw.randrange(8, 300), 8 * draw.randrange(1, 40)))
        drawn = model(Drawn(kind, 300, k, n, order, element, True, 0), 1, 1)
        devices = (ARCHITECTURES["sm_90a"], ARCHITECTURES["sm_80"])
        for site in analyse_model(drawn, devices, keep_weights=keep_weights).sites:
            for plan in site.plans if site.strategy is Strategy.ONE_KERNEL else ():
                made = packed(FUSED_GEMM, site.fusion, site.mapping, replace(plan, library_rows=()))
                taken |= check_first(made, int(plan.device.arch[3:5]))
    assert {"hopper", "portable", "small_m", "padded", "copied"} <= taken


def check_first(made: Launch, capability: int) -> set[str]:
    """At several numbers of rows the first kernel of them runs; what there was."""
    seen = set[str]()
    for m in (1, 17, 300, 5000):
        sizes = {axis.name: axis.size or m for axis in made.fusion.axes}
        wanted = next(each for each in made.variants if each.min_m <= m <= each.max_m)
        chosen = made.chosen(made.arguments(sizes, {}), capability)
        assert chosen == wanted, (m, str(made.fusion))
        seen |= {chosen.family.name, *(["copied"] if chosen.spec.copied else [])}
    return seen | {"padded" for tensor in made.fusion.inputs if tensor.wide is not None}
