"""Products that the library makes for a node: how it is asked, and sessions over a stand-in for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from onnxfuse.graph.archive import Library, pack
from tests.helpers.bridge_build import bridge_library, fake_cublaslt, fake_driver_folder
from tests.helpers.bridge_hooks import Arguments, Matrix, Node, Tensor, bridge
from tests.helpers.many_commands import run_helper
from tests.tools.fuzz_archive import RECORD

BYTES = {Library.F16: 2, Library.BF16: 2, Library.TF32: 4}
LHS, RHS, OTHER_RHS, OPERAND, OUT = (1 << 20) * np.arange(1, 6)


@dataclasses.dataclass(frozen=True)
class Case:
    """A node, the shapes of its inputs, the einsum of one part, and the rows of a product: all that share a weight."""

    node: Node
    shapes: Sequence[Sequence[int]]
    equation: str
    rows: int

    @property
    def weights(self) -> int:
        return len(self.shapes) - 2


def node(lhs: str, rhs: Sequence[str], out: str, problem: str, sizes: str, parts: Sequence[str]) -> Node:
    operand = out.replace("b ", "")
    arguments = f"lhs=0 rhs={','.join(parts)} loads={len(rhs) + 1} outs=0"
    return Node(f"{lhs}, {', '.join(rhs)}, {operand} -> {out}", problem, arguments, sizes, "0123abcd")


def case(order: str, weights: str, lhs: str, n: int = 40, k: int = 24) -> Case:
    """Of m = 6 rows, or 2 x 3, or 2 batches of them: what they multiply is one weight, a packed one, or two."""
    batch = {"plain": "", "tokens": "b ", "shared": "b ", "batched": "b ", "km": ""}[lhs]
    rows = (2, 3) if batch else (6,)
    left, left_shape = ("k m", (k, 6)) if lhs == "km" else (f"{batch}m k", (*rows, k))
    columns = {"one": "n", "packed": "(p n)", "three": "(p n)", "two": "n"}[weights]
    parts = {"one": 1, "packed": 2, "three": 3, "two": 2}[weights]
    width = n * (1 if weights == "two" else parts)
    shape = (k, width) if order == "kn" else (width, k)
    item = f"k {columns}" if order == "kn" else f"{columns} k"
    if lhs == "batched":
        item, shape = f"b {item}", (2, *shape)
    count = 2 if weights == "two" else 1
    indexed = ["1"] if weights == "one" else ["1", "2"] if weights == "two" else [f"1[p={p}]" for p in range(parts)]
    problem = "m=b*m n=n k=k" if lhs == "tokens" else "batch=b m=m n=n k=k" if batch else "m=m n=n k=k"
    known = f"n={n} k={k}" + (f" p={parts}" if "p" in columns else "")
    operand = (3, n) if batch else (6, n)
    made = node(left, [item] * count, f"{batch}m n", problem, known, indexed)
    shapes = (left_shape, *[shape] * count, operand)
    rhs = "".join(letter for letter in item if letter in "bkn")
    return Case(made, shapes, f"{left.replace(' ', '')},{rhs}->{batch.strip()}mn", 3 if lhs == "batched" else 6)


CASES = [
    case(order, weights, lhs)
    for order in ("kn", "nk")
    for weights in ("one", "packed", "three", "two")
    for lhs in ("plain", "tokens", "shared", "batched", "km")
]
ODD = [case(order, weights, "tokens", n, k) for order in ("kn", "nk") for weights in ("one", "packed", "two")
       for n, k in ((37, 11), (1, 24), (40, 1))]  # fmt: skip


def bound(given: Case, size: int, lhs: int = LHS) -> Arguments:
    inputs = (lhs, *(RHS, OTHER_RHS)[: given.weights], OPERAND)
    return bridge().arguments(given.node, given.shapes, element_bytes=size, inputs=inputs, outputs=(OUT,))[0]


def strided(memory: np.ndarray, offset: int, matrix: Matrix, shape: tuple[int, int, int]) -> np.ndarray:
    """The matrices [batch, rows, columns] that a description names, of a memory of elements."""
    _, rows, columns = shape
    strides = (matrix.batch_stride, 1, matrix.pitch) if matrix.transposed else (matrix.batch_stride, matrix.pitch, 1)
    stored = rows if matrix.transposed else columns
    assert matrix.pitch >= stored, "rows of a matrix do not overlap"
    reached = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    assert reached < memory.size, "inside of its tensor"
    return np.lib.stride_tricks.as_strided(memory[offset:], shape, [memory.itemsize * stride for stride in strides])


def parts_of(memory: np.ndarray, arguments: Arguments, size: int, count: int) -> np.ndarray:
    """[part, batch, m, n] as the kernel behind the library reads its first loads."""

    def part(tensor: Tensor) -> np.ndarray:
        strides = [8 * stride for stride in (tensor.batch_stride, tensor.row_stride, tensor.column_stride)]
        shape = (arguments.batch, arguments.m, arguments.n)
        return np.lib.stride_tricks.as_strided(memory[tensor.pointer // size :], shape, strides)

    return np.stack([part(arguments.loads[index]) for index in range(count)])


@pytest.mark.parametrize("math", [Library.F16, Library.BF16, Library.TF32])
@pytest.mark.parametrize("given", [*CASES, *ODD], ids=lambda given: f"{given.node.axes}|{given.node.problem}")
def test_the_library_is_asked_for_the_parts(given: Case, math: Library) -> None:
    """Computed from the descriptions alone, and read as the kernel reads it, the product is what einsum makes."""
    size = BYTES[math]
    arguments = bound(given, size)
    total, products, behind = bridge().library(given.node, arguments, math, element_bytes=size)
    rng = np.random.default_rng(1)
    tensors = [rng.standard_normal(shape) for shape in given.shapes[:-1]]
    if arguments.n > 1:  # parts of one column have no stride along n, by which they would be known as neighbours
        assert [product.m for product in products] == [given.rows] * given.weights, "a weight is read once"
    memory = dict(zip((LHS, RHS, OTHER_RHS), (tensor.ravel() for tensor in tensors), strict=False))
    scratch = np.full(total // size, np.nan)
    for product in products:
        assert (product.math, product.k) == (math, arguments.k)
        lhs = strided(memory[LHS], 0, product.lhs, (product.batch, product.m, product.k))
        base = RHS if product.rhs_pointer < OTHER_RHS else OTHER_RHS
        offset = (product.rhs_pointer - int(base)) // size
        rhs = strided(memory[base], offset, product.rhs, (product.batch, product.k, product.n))
        strided(scratch, product.out_offset // size, product.out, (product.batch, product.m, product.n))[:] = lhs @ rhs
        assert product.out.pitch * size % 16 == 0
        places = (product.lhs_pointer, product.rhs_pointer, product.out_offset or 256)
        matrices = (product.lhs, product.rhs, product.out)
        assert [each.alignment for each in matrices] == [min(256, place & -place) for place in places]
    count = given.node.arguments.split("loads")[0].count(",") + 1
    axis = given.equation.split(",")[1].index("n")
    weights = tensors[1:] if given.weights == count else np.split(tensors[1], count, axis)
    expected = [np.einsum(given.equation, tensors[0], weight) for weight in weights]
    found = parts_of(scratch, behind, size, count)
    np.testing.assert_allclose(found.reshape(count, -1), np.stack(expected).reshape(count, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("address", "alignment"), [(LHS, 256), (LHS + 128, 128), (LHS + 2, 2), (LHS + 48, 16)])
def test_the_library_is_told_how_pointers_are_aligned(address: int, alignment: int) -> None:
    given = case("kn", "packed", "tokens")
    (product,) = bridge().library(given.node, bound(given, 2, address), Library.F16)[1]
    assert product.lhs.alignment == alignment


def test_without_depth_or_in_two_levels_the_library_is_not_asked() -> None:
    heads = Node(
        "b h m d, n (h d), m n -> b m n", "batch=b m=m n=n k=h*d", "lhs=0 rhs=1 loads=2 outs=0", "h=4 d=8 n=40"
    )
    arguments = bridge().arguments(heads, ((2, 4, 3, 8), (40, 32), (3, 40)), element_bytes=2)[0]
    assert arguments.lhs_outer.columns == 8
    assert bridge().library(heads, arguments, Library.F16)[:2] == (0, [])
    empty = case("kn", "one", "plain", k=0)
    assert bridge().library(empty.node, bound(empty, 2), Library.F16)[:2] == (0, [])


KERNEL = dataclasses.replace(RECORD, entry="onnxfuse_pointwise", capability=80, min_m=0, max_m=2**31 - 1,
                             shared_bytes=0, lhs_alignment=2, rhs_alignment=2, out_alignments=(2,))  # fmt: skip
OWN = dataclasses.replace(KERNEL, load_alignments=(2,))
BEHIND = dataclasses.replace(KERNEL, load_alignments=(2, 2, 2), library=Library.F16)


def test_a_record_of_the_library_is_chosen_by_what_its_kernel_reads() -> None:
    given = case("kn", "packed", "plain", 36, 11)
    wide = dataclasses.replace(BEHIND, load_alignments=(8, 8, 8))
    wider = dataclasses.replace(BEHIND, load_alignments=(16, 16, 8))
    arguments = bound(given, 2)
    for records, chosen in (
        ([wide, OWN], 0),
        ([wider, OWN], 1),
        ([wider, BEHIND, OWN], 1),
        ([dataclasses.replace(wide, max_m=5), OWN], 1),
        ([dataclasses.replace(wide, max_m=6), OWN], 0),
    ):
        carried = pack([dataclasses.replace(record, flavour=2) for record in records])
        assert bridge().choose(carried, given.node, arguments) == chosen


CASES_IN_A_PROCESS = (
    "takes_it",
    "without_it",
    "refusals",
    "bounded",
    "contexts",
    "threads",
    "no_memory",
    "sixteen_bit",
)


@pytest.mark.parametrize("name", CASES_IN_A_PROCESS)
def test_session(name: str) -> None:
    """A real session of ONNX Runtime over the stand-ins for the driver and the library."""
    libraries = bridge_library(), fake_cublaslt()
    done = run_helper("tests.helpers.library_session", name, *libraries, LD_LIBRARY_PATH=str(fake_driver_folder()))
    assert done.returncode == 0, done.stdout + done.stderr
