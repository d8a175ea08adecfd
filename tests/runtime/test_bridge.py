"""The C++ bridge's pure parts, through the library that ships, against references that know nothing of strides."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.errors import ModelError
from onnxfuse.graph.archive import FIRST_LOAD, FIRST_OUT, VERSION, Flavour, Mapped, Record, TensorMap, pack, unpack
from onnxfuse.limits import MAX_LOADS, MAX_OUTS, MAX_PARTS
from tests.conftest import has_gpu
from tests.graph.test_archive import RECORD, records
from tests.helpers.bridge_build import ROOT, bridge_library, fake_driver_folder
from tests.helpers.bridge_hooks import Arguments, BridgeError, Node, Outer, Tensor, bridge
from tests.helpers.kernel_problem import ARGUMENTS
from tests.helpers.many_commands import run_helper
from tests.tools.fuzz_archive import flags

GATE = Node(
    axes="b m k, k (p n), (p n) -> b m n",
    sizes="p=2 n=1280 k=320",
    problem="m=b*m n=n k=k",
    arguments="lhs=0 rhs=1[p=0],1[p=1] loads=2[p=0],2[p=1] outs=0",
    out_types="f16",
)
GATE_SHAPES = ((2, 77, 320), (320, 2560), (2560,))


# ---- Axes: every element that a kernel would touch -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A random fused node: which axes each loop has, and each tensor as dimensions made of axes."""

    loops: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    static: tuple[str, ...]
    tensors: Mapping[str, tuple[tuple[str, ...], ...]]  # lhs, rhs0, load0, ..., out0

    @property
    def node(self) -> Node:
        items = {name: " ".join(_dimension(dim) for dim in dims) for name, dims in self.tensors.items()}
        inputs = [name for name in items if not name.startswith("out")]
        arguments = {"lhs": [], "rhs": [], "load": [], "out": []}
        for name, dims in self.tensors.items():
            position = len(arguments["out"]) if name.startswith("out") else inputs.index(name)
            has_part = any("p" in dim for dim in dims)
            parts = range(self.sizes["p"]) if has_part else [None]
            arguments[name.rstrip("0123456789")] += [
                str(position) if part is None else f"{position}[p={part}]" for part in parts
            ]
        arguments["loads"], arguments["outs"] = arguments.pop("load")[:MAX_LOADS], arguments.pop("out")
        return Node(
            axes=f"{', '.join(items[name] for name in inputs)} -> "
            + ", ".join(item for name, item in items.items() if name.startswith("out")),
            sizes=" ".join(f"{axis}={self.sizes[axis]}" for axis in self.static),
            problem=" ".join(f"{loop}={'*'.join(axes)}" for loop, axes in self.loops.items() if axes),
            arguments=" ".join(f"{name}={','.join(entries)}" for name, entries in arguments.items() if entries),
            out_types=",".join("f32" for _ in arguments["outs"]),
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[axis] for axis in dim) for dim in self.tensors[name])


def _dimension(dim: Sequence[str]) -> str:
    if not dim:
        return "1"
    return dim[0] if len(dim) == 1 else f"({' '.join(dim)})"


@st.composite
def grouped(draw: st.DrawFn, axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The axes as dimensions: neighbours may share one, and dimensions of size 1 may stand anywhere."""
    dims: list[tuple[str, ...]] = []
    for axis in axes:
        if dims and dims[-1] and draw(st.booleans()):
            dims[-1] = (*dims[-1], axis)
        else:
            dims.append((axis,))
        if draw(st.integers(0, 5)) == 0:
            dims.append(())
    return tuple(dims)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = iter("abcdefgh")
    loops = {
        loop: tuple(itertools.islice(names, draw(st.integers(least, 2))))
        for loop, least in (("batch", 0), ("m", 1), ("n", 1), ("k", 1))
    }
    axes = [axis for group in loops.values() for axis in group]
    sizes = {axis: draw(st.integers(1, 4)) for axis in axes} | {"p": draw(st.integers(2, 4))}

    def tensor(*blocks: str, apart: Sequence[str] = (), optional: bool = False) -> tuple[tuple[str, ...], ...]:
        """The loops' axes in any order; those of the loops `apart` need not be neighbours."""
        chosen = [
            block
            for name in blocks
            for block in ([(axis,) for axis in loops[name]] if name in apart else [loops.get(name, ("p",))])
            if not optional or draw(st.booleans())
        ]
        return draw(grouped([axis for block in draw(st.permutations(chosen)) for axis in block]))

    tensors = {"lhs": tensor("batch", "m", "k", apart=("batch", "k"))}
    rhs = draw(st.sampled_from([("p", "n", "k"), ("k", "n"), ("batch", "p", "n", "k"), ("batch", "k", "n")]))
    tensors["rhs0"] = tensor(*rhs, apart=("batch",))
    for index in range(draw(st.integers(0, 2))):
        tensors[f"load{index}"] = tensor("batch", "m", "n", "p", apart="mn", optional=True)
    tensors["out0"] = tensor("batch", "m", "n", apart="mn")
    inputs = [dim for name, dims in tensors.items() if name != "out0" for dim in dims]
    used = {axis for dims in tensors.values() for dim in dims for axis in dim}
    unknown: list[str] = []
    for axis in draw(st.permutations(sorted(used))):
        if all(not set(dim) & set(unknown) for dim in inputs if axis in dim) and draw(st.booleans()):
            unknown.append(axis)
    static = tuple(axis for axis in sorted(used) if axis not in unknown)
    return Case(loops, sizes, static, tensors)


def elements(case: Case, name: str, part: int, loops: tuple[str, str, str]) -> np.ndarray:
    """Flat element of the tensor at every [batch, row, column], by NumPy's own reshape and broadcasting."""
    axes = [axis for dim in case.tensors[name] for axis in dim]
    flat = np.arange(math.prod(case.shape(name))).reshape([case.sizes[axis] for axis in axes])
    wanted = [axis for loop in loops for axis in case.loops[loop]]
    if "p" in axes:
        flat = flat.take(part, axes.index("p"))
        axes.remove("p")
    flat = flat.transpose([axes.index(axis) for axis in wanted if axis in axes])
    flat = flat.reshape([case.sizes[axis] if axis in axes else 1 for axis in wanted])
    flat = np.broadcast_to(flat, [case.sizes[axis] for axis in wanted])
    return flat.reshape([math.prod(case.sizes[axis] for axis in case.loops[loop]) for loop in loops])


def touched(tensor: Tensor, outer: Outer, shape: Sequence[int]) -> np.ndarray:
    batch, row, column = np.indices(shape)
    rows = row // outer.rows * outer.row_stride + row % outer.rows * tensor.row_stride
    columns = column // outer.columns * outer.column_stride + column % outer.columns * tensor.column_stride
    batches = batch // outer.batches * outer.batch_stride + batch % outer.batches * tensor.batch_stride
    return tensor.pointer + batches + rows + columns


def assert_same(
    case: Case, name: str, tensors: Sequence[Tensor], loops: tuple[str, str, str], outers: Sequence[Outer] = ()
) -> int:
    parts = case.sizes["p"] if any("p" in dim for dim in case.tensors[name]) else 1
    for part in range(min(parts, len(tensors))):
        expected = elements(case, name, part, loops)
        outer = outers[part] if outers else Outer(0, 0, 0, *expected.shape[1:], expected.shape[0])
        found = touched(tensors[part], outer, expected.shape)
        np.testing.assert_array_equal(found, expected, err_msg=f"{name} part {part}")
    return parts


@settings(max_examples=300)
@given(cases())
def test_every_index_reaches_the_element_that_numpy_reaches(case: Case) -> None:
    inputs = [name for name in case.tensors if name != "out0"]
    arguments, out_shapes = bridge().arguments(case.node, [case.shape(name) for name in inputs])
    sizes = {loop: math.prod(case.sizes[axis] for axis in axes) for loop, axes in case.loops.items()}
    assert (arguments.batch, arguments.m, arguments.n, arguments.k) == tuple(sizes.values())
    assert out_shapes == [case.shape("out0")]
    assert_same(case, "lhs", [arguments.lhs], ("batch", "m", "k"), [arguments.lhs_outer])
    assert_same(case, "rhs0", arguments.rhs, ("batch", "k", "n"), [arguments.rhs_outer] * MAX_PARTS)
    first = 0
    for name in inputs[2:]:
        loads, outers = arguments.loads[first:MAX_LOADS], arguments.loads_outer[first:MAX_LOADS]
        first += assert_same(case, name, loads, ("batch", "m", "n"), outers)
    assert_same(case, "out0", arguments.outs, ("batch", "m", "n"), arguments.outs_outer)


@settings(max_examples=100)
@given(cases())
def test_shape_inference_agrees_with_the_run(case: Case) -> None:
    inputs = [name for name in case.tensors if name != "out0"]
    known = bridge().infer(case.node, [" ".join(map(str, case.shape(name))) for name in inputs])
    assert [tuple(map(int, shape.split())) for shape in known] == [case.shape("out0")]


def test_parts_are_offsets_in_bytes() -> None:
    arguments, _ = bridge().arguments(GATE, GATE_SHAPES, element_bytes=2, inputs=(4096, 8192, 65536), outputs=(2**40,))
    assert [arguments.rhs[part].pointer for part in range(3)] == [8192, 8192 + 2 * 1280, 0]
    assert [arguments.loads[part].pointer for part in range(3)] == [65536, 65536 + 2 * 1280, 0]
    assert (arguments.lhs.pointer, arguments.outs[0].pointer) == (4096, 2**40)


EPILOGUE_ONLY = Node(
    axes="b m (p n), (p n) -> b m n",
    sizes="p=2 n=1280",
    problem="m=b*m n=n",
    arguments="loads=0[p=0],0[p=1],1[p=0],1[p=1] outs=0",
    out_types="f16",
    kernel=RECORD.kernel,
)


def test_behind_a_product_its_parts_are_loads() -> None:
    shapes = ((2, 77, 2560), (2560,))
    arguments, out_shapes = bridge().arguments(EPILOGUE_ONLY, shapes, element_bytes=2, inputs=(4096, 8192))
    assert (arguments.batch, arguments.m, arguments.n, arguments.k) == (1, 154, 1280, 1)
    assert [load.pointer for load in arguments.loads[:4]] == [4096, 4096 + 2560, 8192, 8192 + 2560]
    assert [load.row_stride for load in arguments.loads[:4]] == [2560, 2560, 0, 0]
    assert (arguments.lhs.pointer, arguments.rhs[0].pointer) == (0, 0)
    assert out_shapes == [(2, 77, 1280)]
    assert bridge().infer(EPILOGUE_ONLY, ["B M 2560", "2560"]) == ["B M 1280"]


WINDOW = Node(
    axes="b m k, k (n1 n2):6144, (n1 n2):6144 -> b n1 m n2",
    sizes="n1=8 n2=128 k=320",
    problem="m=b*m n=n1*n2 k=k",
    arguments="lhs=0 rhs=1[+4096] loads=2[+4096] outs=0",
    out_types="f16",
    kernel=RECORD.kernel,
)
WINDOW_SHAPES = ((2, 77, 320), (320, 6144), (6144,))


def test_a_window_is_an_offset_into_wider_rows() -> None:
    arguments, out_shapes = bridge().arguments(WINDOW, WINDOW_SHAPES, element_bytes=2, inputs=(4096, 8192, 65536))
    assert (arguments.m, arguments.n, arguments.k) == (154, 1024, 320)
    assert (arguments.rhs[0].pointer, arguments.loads[0].pointer) == (8192 + 2 * 4096, 65536 + 2 * 4096)
    assert (arguments.rhs[0].row_stride, arguments.rhs[0].column_stride) == (6144, 1)
    assert out_shapes == [(2, 8, 77, 128)]
    rows = dataclasses.replace(WINDOW, axes="b m k, (n1 n2):6144 k, (n1 n2):6144 -> b n1 m n2")
    shapes = ((2, 77, 320), (6144, 320), (6144,))
    turned, _ = bridge().arguments(rows, shapes, element_bytes=2, inputs=(4096, 8192, 65536))
    assert (turned.rhs[0].pointer, turned.rhs[0].row_stride) == (8192 + 2 * 320 * 4096, 1)
    assert bridge().infer(WINDOW, ["B M 320", "320 6144", "6144"]) == ["B 8 M 128"]


@pytest.mark.parametrize(
    ("changes", "shapes", "words"),
    [
        ({}, (WINDOW_SHAPES[0], (320, 6145), (6144,)), ("dimension 1 of input 1", "6145", "6144")),
        ({"arguments": "lhs=0 rhs=1[+5121] loads=2 outs=0"}, WINDOW_SHAPES, ("input 1", "1024", "from 5121")),
        ({"sizes": "n1=49 n2=128 k=320"}, WINDOW_SHAPES, ("6272 elements",)),
        ({"sizes": "n1=8 k=320"}, WINDOW_SHAPES, ("axis n2",)),
        ({"arguments": "lhs=0[+1] rhs=1 loads=2 outs=0"}, WINDOW_SHAPES, ("arguments=", "tensor 0 has no window")),
        ({"arguments": "lhs=0 rhs=1[+n] loads=2 outs=0"}, WINDOW_SHAPES, ("arguments=", "expected a number")),
        ({"axes": "b m k, k (n1 n2):6144, (n1 n2):6144 -> b n1:8 m n2"}, WINDOW_SHAPES, ("axes=", "of an output")),
        ({"axes": "b m:77 k:320, k (n1 n2), (n1 n2) -> b n1 m n2"}, WINDOW_SHAPES, ("axes=", "second window")),
        ({"axes": "b m k 1:3, k (n1 n2), (n1 n2) -> b n1 m n2"}, WINDOW_SHAPES, ("axes=", "no axes")),
    ],
)
def test_a_window_that_does_not_fit_is_named(
    changes: Mapping[str, str], shapes: Sequence[Sequence[int]], words: Sequence[str]
) -> None:
    with pytest.raises(BridgeError) as caught:
        bridge().arguments(dataclasses.replace(WINDOW, **changes), shapes)
    for word in words:
        assert word in str(caught.value)


def test_a_kernel_with_a_product_is_not_run_without_one() -> None:
    arguments, _ = bridge().arguments(EPILOGUE_ONLY, ((2, 77, 2560), (2560,)), element_bytes=2, inputs=(4096, 8192))
    loads = dataclasses.replace(RECORD, min_m=0, load_alignments=(16, 16, 16, 16))
    pointwise = dataclasses.replace(loads, lhs_alignment=0, rhs_alignment=0)
    assert bridge().choose(pack([pointwise]), EPILOGUE_ONLY, arguments) == 0
    with pytest.raises(BridgeError, match="computes a product, the node none"):
        bridge().choose(pack([loads]), EPILOGUE_ONLY, arguments)
    with pytest.raises(BridgeError, match="computes no product"):
        choose([dataclasses.replace(ANY, lhs_alignment=0, rhs_alignment=0)])


def test_many_outputs() -> None:
    node = dataclasses.replace(
        GATE, axes="m k, k n -> m n, m n", problem="m=m n=n k=k", sizes="", arguments="lhs=0 rhs=1 outs=1,0",
        out_types="f16,f32",
    )  # fmt: skip
    arguments, shapes = bridge().arguments(node, [(3, 5), (5, 7)], outputs=(100, 200))
    assert shapes == [(3, 7), (3, 7)]
    assert [arguments.outs[0].pointer, arguments.outs[1].pointer] == [200, 100]


@pytest.mark.parametrize("shape", [(0, 77, 320), (2, 0, 320)])
def test_an_empty_batch_makes_an_empty_output(shape: tuple[int, ...]) -> None:
    arguments, out_shapes = bridge().arguments(GATE, [shape, *GATE_SHAPES[1:]])
    assert arguments.m == 0
    assert out_shapes == [(*shape[:2], 1280)]


def test_an_empty_sum_still_runs() -> None:
    node = dataclasses.replace(GATE, sizes="p=2 n=1280")
    arguments, _ = bridge().arguments(node, [(2, 77, 0), (0, 2560), (2560,)])
    assert (arguments.m, arguments.k) == (154, 0)


def test_a_scalar_has_an_empty_item() -> None:
    node = Node("m k, k n, -> m n", "m=m n=n k=k", "lhs=0 rhs=1 loads=2 outs=0")
    arguments, _ = bridge().arguments(node, [(3, 5), (5, 7), ()], inputs=(1, 2, 3))
    load = arguments.loads[0]
    assert (load.pointer, load.batch_stride, load.row_stride, load.column_stride) == (3, 0, 0, 0)


def changed(**changes: str) -> Node:
    return dataclasses.replace(GATE, **changes)


@pytest.mark.parametrize(
    ("node", "shapes", "words"),
    [
        (GATE, ((2, 77, 321), *GATE_SHAPES[1:]), ("dimension 2 of input 0", "321", "k=320")),
        (GATE, (GATE_SHAPES[0], (320, 2561), (2560,)), ("dimension 1 of input 1", "2561", "(p n)", "p=2, n=1280")),
        (GATE, (GATE_SHAPES[0], (320, 2560), (2560, 1)), ("input 2 has 2 dimensions", "1")),
        (GATE, GATE_SHAPES[:2], ("3 inputs", "got 2")),
        (changed(sizes="p=2 k=320"), (GATE_SHAPES[0], (320, 2561), (2561,)), ("axis n would be 2561 / 2", "p=2")),
        (changed(sizes="k=320"), GATE_SHAPES, ("no input tells the size of axis p",)),
        (changed(sizes="p=1 n=1280 k=320"), ((2, 77, 320), (320, 1280), (1280,)), ("index 1", "axis p=1")),
        (changed(problem="m=m n=n k=k"), GATE_SHAPES, ("axis b=2", "input 0", "walks")),
        (changed(problem="m=m*b n=n k=k"), GATE_SHAPES, ("(m b)", "one stride", "input 0", "m=77, b=2")),
        (
            Node("b c m k, k n, c n -> b c m n", "m=b*c*m n=n k=k", "lhs=0 rhs=1 loads=2 outs=0"),
            ((2, 3, 4, 5), (5, 6), (3, 6)),
            ("(b c m)", "input 2", "two strides", "b=2, c=3, m=4"),
        ),
        (
            Node("b m k, k n -> b m n", "m=b*m n=n k=k", "lhs=0 rhs=1 outs=0"),
            ((2**16, 2**16, 1), (1, 5)),
            ("m=4294967296", "32 bits"),
        ),
    ],
)
def test_what_does_not_fit_is_named(node: Node, shapes: Sequence[Sequence[int]], words: Sequence[str]) -> None:
    with pytest.raises(BridgeError) as caught:
        bridge().arguments(node, shapes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": ""}, ("kernel=", "hexadecimal")),
        ({"kernel": "a" * 32}, ("kernel=", "31")),
        ({"axes": "b m k, k (p n), (p n)"}, ("axes=", "'->'")),
        ({"axes": "b m k, k (p n, (p n) -> b m n"}, ("axes=", "expected a name")),
        ({"axes": "b m 2, k (p n), (p n) -> b m n"}, ("axes=", "or 1")),
        ({"axes": "b b k, k (p n), (p n) -> b m n"}, ("axes=", "axis b is twice")),
        ({"axes": "b m k, k (p n), (p n) -> b m n -> b"}, ("axes=", "second '->'")),
        ({"axes": " ".join(f"x{index}" for index in range(65)) + " -> x0"}, ("axes=", "64 axes")),
        ({"sizes": "p=2 q=3"}, ("sizes=", "no tensor has an axis q")),
        ({"sizes": "p=2 p=3"}, ("sizes=", "two sizes of axis p")),
        ({"sizes": "p=99999999999999999999"}, ("sizes=", "64 bits")),
        ({"problem": "m=b*m n=n k=k row=m"}, ("problem=", "row")),
        ({"problem": "m=b*m n=b k=k"}, ("problem=", "axis b is used twice")),
        ({"problem": "m=b m=m"}, ("problem=", "given twice")),
        ({"arguments": "lhs=0 rhs=1[p=0]"}, ("arguments=", "outs is missing")),
        ({"arguments": "lhs=0 outs=0"}, ("arguments=", "lhs without rhs")),
        ({"arguments": "loads=2[p=0] outs=0"}, ("arguments=", "a k and no product")),
        ({"arguments": "lhs=7 rhs=1[p=0] outs=0"}, ("arguments=", "no tensor 7")),
        ({"arguments": "lhs=0 rhs=1[b=0] outs=0"}, ("arguments=", "no axis b")),
        ({"arguments": "lhs=0 rhs=1,1,1,1,1 outs=0"}, ("arguments=", "more than 4")),
        ({"arguments": "lhs=0 rhs=1 outs=0 ins=3"}, ("arguments=", "ins is unknown")),
        ({"out_types": "f16,f16"}, ("out_types", "2 types", "1 outputs")),
        ({"out_types": "f17"}, ("out_types=", "f17")),
        ({"problem": "m=\u00e9"}, ("problem='m=??'",)),
        ({"in_types": "f16"}, ("in_types", "1 types", "3 inputs")),
        ({"sizes": "p=2 " + " " * 70000}, ("sizes", "longer than")),
    ],
)
def test_a_broken_attribute_is_named(changes: Mapping[str, str], words: Sequence[str]) -> None:
    with pytest.raises(BridgeError) as caught:
        bridge().arguments(changed(**changes), GATE_SHAPES)
    for word in words:
        assert word in str(caught.value)


@settings(max_examples=300)
@given(
    st.sampled_from(["axes", "sizes", "problem", "arguments"]),
    st.sampled_from([(GATE, GATE_SHAPES), (WINDOW, WINDOW_SHAPES)]),
    st.data(),
)
def test_mutated_attributes_never_crash(
    name: str, given_node: tuple[Node, Sequence[Sequence[int]]], data: st.DataObject
) -> None:
    original, shapes = given_node
    text = original.attributes[name]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    inserted = data.draw(st.text(" ,()[]=*->:+0123456789bmknp", max_size=6))
    node = dataclasses.replace(original, **{name: text[:start] + inserted + text[end:]})
    with contextlib.suppress(BridgeError):
        bridge().arguments(node, shapes)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (("2 77 320", "320 2560", "2560"), "2 77 1280"),
        (("B M 320", "320 2560", "2560"), "B M 1280"),
        (("? M 320", "320 2560", "2560"), "? M 1280"),
        (("", "", ""), "? ? 1280"),  # unknown rank
        (("2 77 9", "320 2560", "2560"), "2 77 1280"),  # a contradiction is the run's to report
    ],
)
def test_inferred_shapes(shapes: Sequence[str], expected: str) -> None:
    assert bridge().infer(GATE, shapes) == [expected]


def test_a_symbol_of_a_whole_group_is_carried() -> None:
    node = Node("(b m) k, k n -> (b m) n", "m=b*m n=n k=k", "lhs=0 rhs=1 outs=0")
    assert bridge().infer(node, ["R 8", "8 N"]) == ["R N"]


# ---- The archive as the bridge reads it ------------------------------------------------------------------------------


def fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def fields(record: Record) -> list[str]:
    loads = record.load_alignments + (0,) * (MAX_LOADS - len(record.load_alignments))
    outs = record.out_alignments + (0,) * (MAX_OUTS - len(record.out_alignments))
    numbers = (record.capability, int(record.flavour), record.min_m, record.max_m, record.block_m, record.block_n)
    launch = (record.threads, record.shared_bytes, record.lhs_alignment, record.rhs_alignment, *loads, *outs)
    maps = [int(value) for entry in record.maps for value in dataclasses.astuple(entry)]
    tail = (
        *record.flags,
        record.cluster,
        record.early_depth,
        record.full_early_depth,
        len(record.maps),
        *maps,
        int(record.library),
        *(dataclasses.astuple(record.quantized) if record.quantized else (0,) * 4),
        len(record.image),
        fnv1a(record.image),
    )
    return [record.kernel, record.entry, *map(str, (*numbers, *launch, *tail))]


@given(st.lists(records(), max_size=4))
def test_cpp_reads_what_python_packs(given_records: list[Record]) -> None:
    assert bridge().archive(pack(given_records)) == [fields(record) for record in given_records]


def test_an_archive_of_the_version_before_is_refused_by_its_number() -> None:
    data = pack([RECORD])
    before = data[:8] + (VERSION - 1).to_bytes(4, "little") + data[12:]
    with pytest.raises(BridgeError, match=rf"has version {VERSION - 1} .* reads version {VERSION}; use the onnxfuse"):
        bridge().archive(before)
    with pytest.raises(ModelError, match=rf"has version {VERSION - 1} .* reads version {VERSION}; .* optimize"):
        unpack(before)


def test_cpp_finds_every_truncation_and_every_flipped_bit() -> None:
    data = pack([RECORD])
    for size in range(len(data)):
        with pytest.raises(BridgeError):
            bridge().archive(data[:size])
    for position, bit in itertools.product(range(len(data)), range(8)):
        altered = bytearray(data)
        altered[position] ^= 1 << bit
        with pytest.raises(BridgeError, match="archive"):
            bridge().archive(bytes(altered))


def resealed(data: bytearray) -> bytes:
    """The bytes with a checksum that matches them again: what a fuzzer makes to get past it."""
    import zlib

    checksum = zlib.crc32(data[32:], zlib.crc32(data[:24]))
    data[24:32] = checksum.to_bytes(8, "little")
    return bytes(data)


@settings(max_examples=400)
@given(st.data())
def test_resealed_mutations_never_crash(data: st.DataObject) -> None:
    archive = bytearray(pack([RECORD, dataclasses.replace(RECORD, image=b"second image")]))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(8, len(archive) - 9))
        width = data.draw(st.sampled_from((1, 4, 8)))
        archive[position : position + width] = data.draw(st.binary(min_size=width, max_size=width))
    with contextlib.suppress(BridgeError):
        assert all((len(record) - 57) == 6 * int(record[49]) for record in bridge().archive(resealed(archive)))


# ---- Which record is launched ----------------------------------------------------------------------------------------

PLAIN = Node("m k, k n, n -> m n", "m=m n=n k=k", "lhs=0 rhs=1 loads=2 outs=0", out_types="f16", kernel=RECORD.kernel)
ANY = dataclasses.replace(
    RECORD, min_m=0, max_m=2**31 - 1, load_alignments=(2,), out_alignments=(2,), lhs_alignment=2, rhs_alignment=2
)


def plain_arguments(m: int = 64, n: int = 64, k: int = 64, pointers: Sequence[int] = (1024, 2048, 4096)) -> Arguments:
    shapes = ((m, k), (k, n), (n,))
    return bridge().arguments(PLAIN, shapes, element_bytes=2, inputs=pointers, outputs=(8192,))[0]


def choose(given_records: Sequence[Record], arguments: Arguments | None = None, **device: int) -> int:
    return bridge().choose(pack(list(given_records)), PLAIN, arguments or plain_arguments(), **device)


def arch(capability: int, flavour: Flavour, **changes: object) -> Record:
    return dataclasses.replace(ANY, capability=capability, flavour=flavour, **changes)


@pytest.mark.parametrize(
    ("device", "expected"), [(80, 0), (86, 0), (89, 0), (90, 1), (100, 2), (103, 2), (110, 3), (120, 3)]
)
def test_the_architecture_decides(device: int, expected: int) -> None:
    carried = [arch(80, Flavour.CUBIN), arch(90, Flavour.SPECIFIC), arch(100, Flavour.CUBIN), arch(80, Flavour.PTX)]
    assert choose(carried, capability=device) == expected


@pytest.mark.parametrize(
    ("device", "command"),
    [(80, "--arch sm_80"), (86, "--arch sm_86"), (87, "--arch ptx"), (90, "--arch sm_90a"), (75, "8.0 or later")],
)
def test_no_architecture_fits(device: int, command: str) -> None:
    with pytest.raises(BridgeError) as caught:
        choose([arch(100, Flavour.CUBIN), arch(103, Flavour.SPECIFIC)], capability=device)
    message = str(caught.value)
    assert f"sm_100, sm_103a and the device is sm_{device}" in message
    assert command in message
    assert device == 75 or "onnxfuse optimize ORIGINAL.onnx -o OUT.onnx" in message


def test_a_small_chip_takes_the_kernel_that_fits_its_shared_memory() -> None:
    carried = [arch(80, Flavour.CUBIN, shared_bytes=160 * 1024), arch(80, Flavour.PTX, shared_bytes=90 * 1024)]
    assert choose(carried, capability=86, shared_bytes=99 * 1024) == 1
    assert choose(carried, capability=80, shared_bytes=163 * 1024) == 0


def test_m_decides() -> None:
    small, large = dataclasses.replace(ANY, max_m=16), dataclasses.replace(ANY, min_m=17, max_m=100)
    assert [choose([small, large], plain_arguments(m=m)) for m in (1, 16, 17, 100)] == [0, 0, 1, 1]
    with pytest.raises(BridgeError, match=r"m=101 \(the model's are for m=0\.\.16, 17\.\.100\)"):
        choose([small, large], plain_arguments(m=101))


WIDE = dataclasses.replace(ANY, lhs_alignment=16, rhs_alignment=16, load_alignments=(16,), out_alignments=(16,))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 0),
        ({"pointers": (1026, 2048, 4096)}, 1),
        ({"pointers": (1024, 2056, 4096)}, 1),
        ({"pointers": (1024, 2048, 4100)}, 1),
        ({"k": 36}, 1),  # rows of lhs are 72 bytes apart
        ({"n": 36}, 1),
        ({"k": 36, "m": 1}, 1),  # one row, whose last access would end behind it
    ],
)
def test_alignment_decides(arguments: Mapping[str, object], expected: int) -> None:
    assert choose([WIDE, ANY], plain_arguments(**arguments)) == expected


@pytest.mark.parametrize(
    ("outer", "levels", "expected"),
    [
        ({"columns": 8, "column_stride": 320}, {FIRST_OUT: 2}, 0),
        ({"columns": 8, "column_stride": 321}, {FIRST_OUT: 2}, 1),  # the second run is misaligned
        ({"columns": 4, "column_stride": 320}, {FIRST_OUT: 2}, 1),  # an access would end behind its run
        (
            {"columns": 8, "column_stride": 320},
            {FIRST_OUT: 1},
            None,
        ),  # the kernel walks rows in two levels, not columns
        ({"columns": 8, "column_stride": 320}, {FIRST_LOAD: 2}, None),  # another tensor's columns
        ({"rows": 5, "row_stride": 320}, {FIRST_OUT: 1}, 0),
    ],
)
def test_levels_decide(outer: Mapping[str, int], levels: dict[int, int], expected: int | None) -> None:
    arguments = plain_arguments(m=10)
    for name, value in outer.items():
        setattr(arguments.outs_outer[0], name, value)
    carried = [dataclasses.replace(record, flags=flags(levels)) for record in (WIDE, ANY)]
    if expected is None:
        with pytest.raises(BridgeError, match="out 0"):
            choose(carried, arguments)
    else:
        assert choose(carried, arguments) == expected


def test_each_output_needs_its_own_batches_in_runs() -> None:
    arguments = plain_arguments()
    arguments.batch = 4
    for outer in (arguments.lhs_outer, arguments.rhs_outer, arguments.loads_outer[0], arguments.outs_outer[0]):
        outer.batches = 4
    arguments.outs_outer[0].batches, arguments.outs_outer[0].batch_stride = 2, 320
    assert choose([dataclasses.replace(ANY, flags=flags({FIRST_OUT: 4}))], arguments) == 0
    with pytest.raises(BridgeError, match="out 0"):
        choose([dataclasses.replace(ANY, flags=flags({FIRST_LOAD: 4}))], arguments)


SCORES = Node(
    "b m h k, b n h k -> b h m n", "batch=b*h m=m n=n k=k", "lhs=0 rhs=1 outs=0", out_types="f16", kernel="0123abcd"
)


@pytest.mark.parametrize(("levels", "missing"), [({}, "lhs"), ({0: 4}, "rhs 0"), ({1: 4}, "lhs"), ({0: 4, 1: 4}, None)])
def test_batches_in_runs_want_a_kernel_that_walks_them(levels: dict[int, int], missing: str | None) -> None:
    arguments = bridge().arguments(SCORES, ((2, 64, 4, 64), (2, 48, 4, 64)), element_bytes=2, inputs=(1024, 2048),
                                   outputs=(8192,))[0]  # fmt: skip
    assert (arguments.lhs.batch_stride, arguments.lhs_outer.batches, arguments.lhs_outer.batch_stride) == (64, 4, 16384)
    assert (arguments.rhs[0].batch_stride, arguments.rhs_outer.batches, arguments.rhs_outer.batch_stride) == (
        64, 4, 12288,
    )  # fmt: skip
    carried = pack([dataclasses.replace(ANY, load_alignments=(), flags=flags(levels))])
    if missing is None:
        assert bridge().choose(carried, SCORES, arguments) == 0
    else:
        with pytest.raises(BridgeError, match=missing):
            bridge().choose(carried, SCORES, arguments)


def test_a_product_without_depth_goes_to_a_kernel_without_tensor_maps() -> None:
    """The driver refuses to describe a tensor without elements."""
    mapped = dataclasses.replace(ANY, cluster=1, maps=(TensorMap(Mapped.LHS, box_inner=64, box_outer=64),))
    assert choose([mapped, ANY], plain_arguments(k=0)) == 1
    assert choose([mapped, ANY], plain_arguments(k=8)) == 0
    with pytest.raises(BridgeError, match="along k"):
        choose([mapped], plain_arguments(k=0))


def test_no_alignment_fits() -> None:
    with pytest.raises(BridgeError, match="lhs needs 16-byte alignment"):
        choose([WIDE], plain_arguments(k=36))


def test_unknown_kernel_and_wrong_counts() -> None:
    with pytest.raises(BridgeError, match="no kernel 0123abcd"):
        choose([dataclasses.replace(ANY, kernel="ff")])
    with pytest.raises(BridgeError, match="has 2 loads and 1 outputs, the node 1 and 1"):
        choose([dataclasses.replace(ANY, load_alignments=(2, 2))])


# ---- The library in a process ----------------------------------------------------------------------------------------


def test_the_argument_struct_is_the_one_of_the_kernels() -> None:
    import ctypes

    expected = 21 * 32 + 16 + 19 * 40 + 4 * 32 + 8
    assert bridge().hooks.onnxfuse_test_sizeof_arguments() == ctypes.sizeof(Arguments) == ARGUMENTS.itemsize == expected


def test_only_the_entry_points_and_the_hooks_are_exported() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", bridge_library()], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert {name for name in names if not name.startswith("onnxfuse_test_")} == {
        "RegisterCustomOps",
        "onnxfuse_check_nodes",
    }


def test_the_library_needs_nothing_but_libc() -> None:
    listing = subprocess.run(["readelf", "-d", bridge_library()], capture_output=True, text=True, check=True)
    needed = {line.split("[")[1].rstrip("]") for line in listing.stdout.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("case", "driver"),
    [
        ("nothing_registered", None),
        ("nothing_registered", {"FAKE_CUINIT": "100"}),
        ("nothing_registered", {"FAKE_DEVICES": "0"}),
        ("registered_for_cuda", {}),
        ("hopper_alone_runs", {}),
        ("hopper_alone_runs", {"FAKE_DEVICES": "2"}),
        ("hopper_alone_by_its_body", {"FAKE_DEVICES": "2", "FAKE_MAJOR_OF_OTHERS": "8"}),
        ("hopper_alone_by_its_body", {"FAKE_DEVICES": "2", "FAKE_MAJOR_OF_OTHERS": "12"}),
        ("runs", {}),
        ("scopes", {}),
        ("runs_behind_a_product", {}),
        ("masks", {}),
        ("launch_contract", {}),
        ("early_start", {}),
        ("rhs_that_is_ready", {}),
        ("quantized_rhs_that_is_not_ready", {}),
        ("tensor_maps", {}),
        ("tensor_maps", {"FAKE_VERSION": "12020"}),
        ("head_split", {}),
        ("unknown_shapes", {}),
        ("lifetimes", {}),
        ("contexts", {}),
        ("threads", {}),
        ("load_errors", {}),
        ("archive_at_the_same_address", {}),
        ("run_errors", {}),
        ("other_version", {}),
        ("survives", {}),
        ("absurd_shapes", {}),
        ("cache", {}),
        ("launch_error", {"FAKE_LAUNCH_ERROR": "719"}),
    ],
)
def test_session(case: str, driver: Mapping[str, str] | None) -> None:
    """A real session of ONNX Runtime; over the stand-in for the CUDA driver, or over none."""
    if driver is None and has_gpu():
        pytest.skip("this machine has a CUDA driver")
    environment = {} if driver is None else {**driver, "LD_LIBRARY_PATH": str(fake_driver_folder())}
    done = run_helper("tests.helpers.bridge_session", case, bridge_library(), **environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_reads_out_of_bounds(request: pytest.FixtureRequest) -> None:
    """Altered archives and attributes under the address and undefined-behaviour sanitizers."""
    rounds = "2500" if request.config.getoption("thorough") else "800"
    command = [sys.executable, "-m", "tests.tools.bridge_fuzz", "--rounds", rounds]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
