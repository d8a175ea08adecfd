"""Symbols of sizes: arithmetic that is right for all values, and shapes that are those of a run."""

from __future__ import annotations

import ast
import math

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxfuse.graph import symbolic
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.named_sizes import canonical
from tests.helpers import corpus
from tests.helpers.onnx_build import Builder, run

VALUES = {"B": 2, "S": 3, "T": 5}
SIZES = st.lists(st.sampled_from([1, 2, 4, *VALUES]), max_size=4).map(symbolic.multiply)


def value(size: symbolic.Size, values: dict[str, int]) -> int:
    """A symbol's value, by Python's own arithmetic."""
    if isinstance(size, int):
        return size
    return math.prod(int(text) if text.isdecimal() else values[text] for text in size.split("*"))


@given(SIZES, SIZES)
def test_products_and_quotients_are_right(first: symbolic.Size, second: symbolic.Size) -> None:
    product = symbolic.multiply((first, second))
    assert value(product, VALUES) == value(first, VALUES) * value(second, VALUES)
    assert symbolic.divide(product, second) == first
    quotient = symbolic.divide(first, second)
    assert quotient is None or symbolic.multiply((quotient, second)) == first


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(1, "S", "S"), ("S", 1, "S"), ("S", "S", "S"), ("S", 4, 4), (4, "S", 4), (3, 3, 3), ("S", "T", None),
     (None, 1, None), (None, 4, 4), (None, "S", None), (symbolic.at_most("S", 64), "S", "S"),
     ("2*S", symbolic.at_most("2*S", 64), "2*S"), (symbolic.at_most("S", 64), "T", None),
     (symbolic.at_most("S", 1), "S", None), ("S", "2*T", "2*T"), ("2*T", None, "2*T"),
     (symbolic.add("S", 2), "T", symbolic.add("S", 2)), ("T", symbolic.add("S", 2), symbolic.add("S", 2)),
     (symbolic.add("S", 1), "T", None), (symbolic.add(symbolic.negative("S"), 3), "T", None)],
)  # fmt: skip
def test_broadcast(first: symbolic.Size, second: symbolic.Size, expected: symbolic.Size) -> None:
    assert symbolic.broadcast(first, second) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("s1*s0", "s0*s1"), ("batch", "batch"), ("2*s0", "2*s0"),
     ("s0 + 2*s1", symbolic.add("2*s1", "s0")), ("s0*" + "9" * 5000, symbolic.atom("s0·" + "9" * 5000)),
     ("s86*((s10//s86))", symbolic.multiply(("s86", symbolic.function("/", "s10", "s86")))), ("a-b*2", "2*a-b"),
     ("(s0//4)*s1", symbolic.multiply((symbolic.function("/", "s0", 4), "s1"))), ("(s0//4", "((s0//4)"),
     ("2*s0//4", "(/ 2·s0 4)"), ("8//4", "(8//4)"), ("((2*s0)//4)", "(/ 2·s0 4)"), ("4*s0//4", "s0"),
     ("s0*(7//2)", "3*s0"), ("s0//(s1 - s1)", symbolic.function("/", "s0", 0)), ("s0*(2//0)", "(s0·(2//0))"),
     ("s0 + 2**s1", "(s0 + 2··s1)"), ("s0 s1", "(s0 s1)"), ("-s0 + 4", "(-s0 + 4)"), ("f(s0)", "(f(s0))"),
     ("(" * 999 + "s0" + ")" * 999, symbolic.atom("(" * 999 + "s0" + ")" * 999)),
     ("past + new", symbolic.add("past", "new")), ("new+past", symbolic.add("past", "new")),
     ("past + 1", symbolic.add("past", 1)), ("1 + past + 2", symbolic.add("past", 3)),
     ("c + a + b", symbolic.add(symbolic.add("a", "b"), "c")),
     ("64 - Max(0, 64 - s0)", symbolic.at_most("s0", 64)), ("Min(64, s0)", symbolic.at_most("s0", 64)),
     ("Min(64, s0) + 1", "(Min(64, s0) + 1)"), ("64 - Max(0, 32 - s0)", "(64 - Max(0, 32 - s0))")],
)  # fmt: skip
def test_names_of_dimensions(name: str, expected: str) -> None:
    assert canonical(name) == expected


@pytest.mark.parametrize(
    ("whole", "part", "expected"),
    [("S", 0, "S"), (symbolic.add("P", "S"), "P", "S"), (symbolic.add("P", "S"), "S", "P"),
     (symbolic.add("S", 3), "S", 3), (symbolic.add("S", -3), "S", None), ("S", "T", None), (5, "S", None),
     ("S", symbolic.function("-", "S", "T"), "T"), ("T", symbolic.function("-", "S", "T"), None)],
)  # fmt: skip
def test_the_rest_of_a_sum(whole: symbolic.Size, part: symbolic.Size, expected: symbolic.Size) -> None:
    """As many as a Range from the part to the whole counts."""
    assert symbolic.rest(whole, part) == expected


def test_other_functions_equal_themselves_only() -> None:
    assert symbolic.add("S", 1) == symbolic.add("S", 1) != symbolic.add("S", 2)
    assert symbolic.add(2, 3) == 5
    assert symbolic.add("S", 0) == symbolic.add(0, "S") == "S"
    assert symbolic.add("S", 5) == symbolic.add(5, "S")
    assert symbolic.add("S", "T") == symbolic.add("T", "S")
    assert symbolic.add("S", None) is symbolic.add(None, 1) is None
    assert symbolic.multiply((symbolic.add("S", 1), 2)) == "2*(+ S 1)"


@given(st.lists(st.integers(-9, 9)))
def test_numbers_that_are_added_one_after_another_are_one(numbers: list[int]) -> None:
    size: symbolic.Size = "S"
    for number in numbers:
        size = symbolic.add(size, number)
    assert size == symbolic.add("S", sum(numbers))


@given(st.sampled_from(["S", "(/ S 4)", "2*S"]), *[st.integers(0, 4)] * 3, st.integers(0, 9))
def test_a_window_has_as_many_elements_as_a_slice(name: str, added: int, start: int, further: int, known: int) -> None:
    """Where it says how many: of those from no less than 0 to an end that lies as far from the whole in every run."""
    size, end = symbolic.add(name, added), symbolic.add(name, further)
    window = symbolic.window(size, start, end)
    is_told = min(added, further) >= start and (name != "2*S" or (size == end and start == 0))
    assert window == (symbolic.add(name, min(added, further) - start) if is_told else None)
    assert not is_told or len(range(known + added)[start : known + further]) == known + min(added, further) - start
    assert symbolic.window(size, start, "T") is None


@given(st.integers(0, 4), st.integers(-6, -1), st.integers(0, 9))
def test_an_end_counted_back_is_one_of_the_sequence(added: int, end: int, known: int) -> None:
    """Where it says which: of a sequence to which no fewer were added, and which is never negative."""
    place = symbolic.from_the_end(symbolic.add("S", added), end)
    assert place == (symbolic.add("S", added + end) if added + end >= 0 else end)
    assert len(range(known + added)[:end]) == max(0, known + added + end)
    difference = symbolic.function("-", "S", "T")
    assert symbolic.from_the_end(symbolic.add(difference, added), end) == end


def padded_and_cut(b: Builder, padding: int) -> tuple[str, str]:
    """A convolution over time of an even kernel, and what is left of it without its last element."""
    x = b.input("x", (1, 2, "frames"))
    made = b("Conv", x, b.array(np.ones((2, 1, 2 * padding)), "weight"), pads=[padding] * 2, group=2)
    return x, b("Slice", made, *map(b.integers, (0, -1, 2, 1)))


@pytest.mark.parametrize("padding", [1, 4])
def test_a_sequence_that_is_padded_and_cut_is_as_long_as_it_was(padding: int) -> None:
    b = Builder()
    x, cut = padded_and_cut(b, padding)
    model = b.model(cut)
    graph = Graph(load_model(model))
    assert graph.shape(cut) == graph.shape(x)
    for frames in range(1, 4):
        assert run(model, {"x": np.ones((1, 2, frames), np.float32)})[0].shape == (1, 2, frames)


def test_a_quotient_is_what_shape_arithmetic_makes_of_it() -> None:
    assert canonical("(s1//4)") == canonical("s1//4") == symbolic.function("/", "s1", 4)


LENGTHS = ("((((((((s21//80)) - 3)//2)) - 1)//2)) + 1", "s10*((((s21//80)) - 1)//2)", "2*s21 + s10 - 3", "s10 - s21//4")


def computed(b: Builder, name: str, sizes: dict[str, str]) -> str:
    """The graph's own arithmetic for a name that torch's exporter gives a dimension, in Python's order."""

    def value(tree: ast.expr) -> str:
        match tree:
            case ast.Name(id):
                return sizes[id]
            case ast.Constant(int(number)):
                return b.integers(number)
            case ast.BinOp(left, operation, right):
                return b(OPERATORS[type(operation)], value(left), value(right))
        raise AssertionError(ast.dump(tree))

    return value(ast.parse(name, mode="eval").body)


OPERATORS = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.FloorDiv: "Div"}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_name_is_what_shape_arithmetic_makes_of_it(name: str) -> None:
    """As the length of a sound behind convolutions, which a mask's shape is computed of."""
    b = Builder()
    x = b.input("x", ("s10", "s21"))
    shape = b("Shape", x)
    sizes = {size: b("Gather", shape, b.integers(index), axis=0) for index, size in enumerate(("s10", "s21"))}
    made = b("Expand", b.array([1.0]), computed(b, name, sizes))
    assert Graph(load_model(b.model(made))).shape(made) == (canonical(name),)


def with_all_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(
        onnx.ValueInfoProto(name=name)
        for node in model.graph.node
        for name in node.output
        if name and node.op_type != "SplitToSequence"
    )
    return copy


FAMILIES = ("sd15_unet_mini", "llama", "phi3", "gpt2", "bert", "vit", "t5v11_encoder", "clip_vision", "btb")


def check_shapes(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    """Every number is the run's size, and equal symbols are equal sizes."""
    graph, copy = Graph(load_model(model)), with_all_outputs(model)
    atoms: dict[str, int] = {}
    products: list[tuple[str, int]] = []
    for output, array in zip(copy.graph.output, run(copy, feed), strict=True):
        shape = graph.shape(output.name)
        assert shape is None or len(shape) == array.ndim, output.name
        for size, actual in zip(shape or (), array.shape, strict=False):
            if isinstance(size, str) and "*" in size:
                products.append((size, actual))
            elif isinstance(size, str):
                assert atoms.setdefault(size, actual) == actual, (output.name, size)
            else:
                assert size in (None, actual), (output.name, size)
    for size, actual in products:
        if all(text.isdecimal() or text in atoms for text in size.split("*")):
            assert value(size, atoms) == actual, size


@pytest.mark.one_in(4)
@pytest.mark.parametrize("key", corpus.families(*FAMILIES, size="tiny"))
def test_derived_shapes_are_those_of_a_run(key: str) -> None:
    model = corpus.materialize(key)
    for index in (0, 1):
        check_shapes(model, corpus.feed(key, index))


def shape_of(b: Builder, x: str, *axes: int) -> list[str]:
    """Sizes of a value as vectors of one entry, as exporters make them."""
    return [b("Gather", b("Shape", x), b.integers(axis), axis=0) for axis in axes]


def scalar_size(b: Builder, x: str, axis: int) -> str:
    return b("Gather", b("Shape", x), b.array(axis, integer=True), axis=0)


def causal_mask(b: Builder, x: str) -> str:
    """As torch counts positions: rows against columns."""
    zero, one = b.array(0, integer=True), b.array(1, integer=True)
    positions = b("Range", zero, scalar_size(b, x, 1), one)
    kept = b("LessOrEqual", b("Unsqueeze", positions, b.integers(0)), b("Unsqueeze", positions, b.integers(1)))
    return b("Where", kept, b.array(0.0), b.array(-1.0))


def counted_in_floats(b: Builder, x: str, to: int = onnx.TensorProto.FLOAT) -> str:
    """As TorchScript counts the positions that a rotation is of."""
    limit = b("Cast", scalar_size(b, x, 1), to=to)
    positions = b("Range", *(b("Cast", b.array(0.0), to=to), limit, b("Cast", b.array(1.0), to=to)))
    return b("Mul", b("Unsqueeze", b("Cast", positions, to=onnx.TensorProto.FLOAT), b.integers(1)), x)


def with_positions(b: Builder, x: str) -> str:
    """A table of positions, as far as the sequence goes."""
    table = b.array(np.ones((1, 16, 8)))
    return b("Add", x, b("Slice", table, b.integers(0), *shape_of(b, x, 1), b.integers(1)))


def merged(b: Builder, x: str) -> str:
    batch, rows = shape_of(b, x, 0, 1)
    return b("Reshape", x, b("Concat", b("Mul", batch, rows), b.integers(-1), axis=0))


def split_heads_and_merged_again(b: Builder, x: str) -> str:
    heads = b("Transpose", b("Reshape", x, b.integers(0, -1, 2, 4)), perm=[0, 2, 1, 3])
    batch, rows = shape_of(b, x, 0, 1)
    return b("Reshape", b("Transpose", heads, perm=[0, 2, 1, 3]), b("Concat", batch, rows, b.integers(8), axis=0))


def byte(b: Builder, *shape: int) -> str:
    return b.raw(np.ones(shape, np.uint8), f"bytes{len(b.initializers)}")


def in_integers(b: Builder, x: str, op: str, *weight: int) -> str:
    """As ONNX Runtime's dynamic quantisation writes a product or a convolution."""
    integers, _, zero = b("DynamicQuantizeLinear", x, outputs=3)
    return b("Cast", b(op, integers, byte(b, *weight), zero), to=onnx.TensorProto.FLOAT)


def of_integers(b: Builder, x: str, op: str, *weight: int) -> str:
    """As its static quantisation does in the form of operators."""
    scale = (b.array(0.5), byte(b))
    made = b(op, b("QuantizeLinear", x, *scale), *scale, byte(b, *weight), *scale, *scale)
    return b("DequantizeLinear", made, *scale)


def rows_as_images(b: Builder, x: str) -> str:
    return b("Unsqueeze", merged(b, x), b.integers(1, 2))


def expanded_as_torchscript_does(b: Builder, x: str) -> str:
    target = b("Concat", *shape_of(b, x, 0, 1), b.integers(-1), axis=0)
    minus_one = b("Mul", b("ConstantOfShape", b.integers(3), value=ONE), b.integers(-1))
    sizes = b("Where", b("Equal", target, minus_one), b("ConstantOfShape", b.integers(3), value=ONE), target)
    return b("Expand", b.array(np.ones((1, 1, 8))), sizes)


def padded_to_windows(b: Builder, x: str) -> str:
    """As torch's older exporter pads an image to whole windows: pairs of pads, last dimension first, are turned."""
    lacking = b("Mod", b("Sub", b.integers(3), b("Mod", *shape_of(b, x, 2), b.integers(3))), b.integers(3))
    given = b("Concat", b.integers(0), lacking, axis=0)
    rest = b("ConstantOfShape", b("Sub", b.integers(6), b("Shape", given)), value=ZERO)
    pairs = b("Reshape", b("Concat", given, rest, axis=0), b.integers(-1, 2))
    turned = b("Slice", pairs, b.integers(-1), b.integers(-(2**63) + 1), b.integers(0), b.integers(-1))
    return b("Pad", x, b("Reshape", b("Transpose", turned, perm=[1, 0]), b.integers(-1)))


def convolved_causally(b: Builder, x: str) -> str:
    """A convolution padded on both sides, and what it makes beyond the sequence cut off."""
    signal = b("Transpose", x, perm=[0, 2, 1])
    t = b("Conv", signal, b.array(np.ones((8, 1, 3))), group=8, pads=[2, 2])
    return b("Slice", t, b.integers(0), *shape_of(b, x, 1), b.integers(2))


def last_of_a_table(b: Builder, x: str) -> str:
    """As many rows of a table of four as a sequence has, from its end: ALiBi's biases."""
    start = b("Neg", *shape_of(b, x, 1))
    return b("Slice", b.array(np.ones((4, 8))), start, b.integers(2**63 - 1), b.integers(0), b.integers(1))


def last_rows(b: Builder, x: str) -> str:
    rows = b("Neg", b("Sub", b("Add", *shape_of(b, x, 1), b.integers(3)), b.integers(3)))
    return b("Slice", x, rows, b.integers(2**63 - 1), b.integers(1))


def merged_to_sizes_of_a_split(b: Builder, x: str) -> str:
    """As ONNX Runtime's optimiser writes several Gathers of one shape."""
    sizes = b("Split", b("Shape", x), outputs=3, axis=0, num_outputs=3)
    rows = b("Unsqueeze", b("Mul", *(b("Squeeze", size, b.integers(0)) for size in sizes[:2])), b.integers(0))
    return b("Reshape", x, b("Concat", rows, sizes[2], axis=0))


def repeated_for_experts(b: Builder, x: str) -> str:
    """Each token once for each of its experts, as TorchScript writes repeat_interleave, beside what TopK chose."""
    chosen, places = b("TopK", x, b.integers(3), outputs=2, axis=-1)
    count = b("Reshape", b("Slice", b("Shape", places), b.integers(-1), b.integers(2**63 - 1)), b.integers(-1))
    repeats = b("OneHot", b.integers(2), b.integers(4), b("Concat", b.integers(1), count, axis=0))
    tokens = b("Tile", b("Unsqueeze", x, b.integers(2)), b("Reshape", repeats, b.integers(-1)))
    return b("Mul", b("Reshape", tokens, b.integers(-1, 8)), b("Reshape", chosen, b.integers(-1, 1)))


def twice_as_one_hot_says(b: Builder, x: str) -> str:
    twice = b("OneHot", b.integers(-1), b.integers(3), b.integers(1, 2))
    return b("Reshape", b("Concat", x, x, axis=-1), b("Mul", b("Shape", x), b("Reshape", twice, b.integers(-1))))


def folded(b: Builder, x: str, op: str) -> str:
    """As many rows as the first two sizes make together, as a converter merges the axes of an Einsum."""
    rows = b(op, b("Gather", b("Shape", x), b.integers(0, 1)), b.integers(0))
    return b("Expand", b.array(np.ones((1, 8))), b("Concat", rows, b.integers(8), axis=0))


def of_all_elements(b: Builder, x: str) -> str:
    return b("Reshape", x, b("Reshape", b("Size", x), b.integers(1)))


def of_the_larger(b: Builder, x: str) -> str:
    batch, rows = shape_of(b, x, 0, 1)
    columns = b("Min", b.integers(12), b("Max", b.integers(3), b.integers(8), *shape_of(b, x, 2)))
    return b("Reshape", x, b("Concat", b("Max", batch, batch), rows, columns, axis=0))


def convolved_by_way(b: Builder, x: str, auto_pad: str) -> str:
    """As many rows as columns are convolved, of a shape that ONNX's own inference does not tell."""
    images = b("Unsqueeze", split_heads_and_merged_again(b, x), b.integers(1))
    return b("Conv", images, b.array(np.ones((4, 1, 1, 3))), auto_pad=auto_pad, strides=[1, 2])


def joined_with_three(b: Builder, x: str) -> str:
    """As where an image's tokens and a text's attend together."""
    three = b("Expand", b.array(np.ones((1, 3, 8))), b("Concat", *shape_of(b, x, 0), b.integers(3, 8), axis=0))
    return b("Concat", three, split_heads_and_merged_again(b, x), axis=1)


def parted(b: Builder, x: str, start: int, end: int) -> str:
    return b("Slice", joined_with_three(b, x), b.integers(start), b.integers(end), b.integers(1))


def convolved_up(b: Builder, x: str, weight: tuple[int, ...] = (8, 5, 2), **attributes: object) -> str:
    """As decoders of images and of sound make their input longer."""
    return b("ConvTranspose", b("Transpose", x, perm=[0, 2, 1]), b.array(np.ones(weight)), strides=[2], **attributes)


def positions_in(b: Builder, x: str) -> str:
    """Two of each batch and row, `[batch, rows, 2, 1]`, as torch's exporter looks up a padding mask."""
    return b("Expand", b.integers(0), unfolded(b, x, 2, 1))


def grid_in(b: Builder, x: str) -> str:
    return b("Expand", b.array([0.5]), unfolded(b, x, 4, 2))


def unfolded(b: Builder, x: str, *columns: int) -> str:
    """Batch, rows and these, in a way that ONNX's own inference does not follow."""
    shape = b("Concat", b("Slice", b("Shape", x), b.integers(0), b.integers(2)), b.integers(*columns), axis=0)
    return b("Where", b("Equal", shape, b.integers(-1)), b.integers(1), shape)


ZERO = onnx.helper.make_tensor("zero", onnx.TensorProto.INT64, (1,), [0])
ONE = onnx.helper.make_tensor("one", onnx.TensorProto.INT64, (1,), [1])
CHAINS = {
    "merged": merged,
    "heads": split_heads_and_merged_again,
    "expanded": expanded_as_torchscript_does,
    "flattened": lambda b, x: b("Flatten", x, axis=2),
    "squeezed": lambda b, x: b("Squeeze", b("Unsqueeze", x, b.integers(-1, 1)), b.integers(1)),
    "token": lambda b, x: b("Concat", b("Slice", x, b.integers(0), b.integers(1), b.integers(1)), x, axis=1),
    "rest": lambda b, x: b("Slice", x, b.integers(1), b.integers(2**63 - 1), b.integers(1)),
    "every_second": lambda b, x: b("Slice", x, b.integers(0), b.integers(8), b.integers(2), b.integers(2)),
    "row": lambda b, x: b("Gather", x, b.integers(0), axis=1),
    "mean": lambda b, x: b("ReduceMean", x, b.integers(-1), keepdims=0),
    "halves": lambda b, x: b("Split", b("Concat", x, x, axis=1), outputs=2, axis=1, num_outputs=2)[0],
    "pooled": lambda b, x: b("MaxPool", b("Unsqueeze", x, b.integers(1)), kernel_shape=[1, 2], strides=[1, 2]),
    "padded": lambda b, x: b("AveragePool", b("Unsqueeze", x, b.integers(1)), kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "convolved": lambda b, x: b("Conv", b("Transpose", x, perm=[0, 2, 1]), b.array(np.ones((4, 8, 3))), strides=[2]),
    "convolved_within": lambda b, x: convolved_by_way(b, x, "VALID"),
    "convolved_everywhere": lambda b, x: convolved_by_way(b, x, "SAME_UPPER"),
    "pooled_everywhere": lambda b, x: b(
        "MaxPool", b("Unsqueeze", x, b.integers(1)), kernel_shape=[3, 2], strides=[1, 2], auto_pad="SAME_LOWER"
    ),
    "convolved_up": convolved_up,
    "convolved_apart": lambda b, x: convolved_up(
        b, x, (8, 3, 4), dilations=[2], pads=[1, 2], output_padding=[1], group=2
    ),
    "chosen": lambda b, x: b("GatherND", x, positions_in(b, x), batch_dims=1),
    "chosen_rows": lambda b, x: b("GatherND", x, b.array(np.zeros((3, 2, 1)), integer=True)),
    "sampled": lambda b, x: b("GridSample", b("Unsqueeze", x, b.integers(1)), grid_in(b, x)),
    "doubled": lambda b, x: b("Resize", b("Unsqueeze", x, b.integers(1)), "", b.array([1.0, 1.0, 2.0, 2.0])),
    "text": lambda b, x: parted(b, x, 3, 2**63 - 1),
    "image": lambda b, x: parted(b, x, 0, 3),
    "part_of_image": lambda b, x: parted(b, x, 1, 2),
    "mask": causal_mask,
    "positions": with_positions,
    "tiled": lambda b, x: b("Tile", x, b.integers(2, 1, 3)),
    "experts": repeated_for_experts,
    "one_hot": twice_as_one_hot_says,
    "windows": padded_to_windows,
    "causal": convolved_causally,
    "last": last_rows,
    "last_of_a_table": last_of_a_table,
    "sizes": merged_to_sizes_of_a_split,
    "padded_rows": lambda b, x: b("Pad", x, b.integers(1, 2), "", b.integers(1)),
    "einsum": lambda b, x: b("Einsum", x, x, equation="bsk,btk->bst"),
    "einsum_of_any_batch": lambda b, x: b("Einsum", x, x, equation="...sk,...tk->...st"),
    "einsum_without_arrow": lambda b, x: b("Einsum", x, x, equation="bsk,btk"),
    "pooled_up": lambda b, x: b(
        "MaxPool", b("Reshape", x, b.integers(-1, 1, 8)), kernel_shape=[2], strides=[2], ceil_mode=1
    ),
    "signs": lambda b, x: b("Sign", x),
    "product_in_integers": lambda b, x: in_integers(b, merged(b, x), "MatMulInteger", 8, 3),
    "convolved_in_integers": lambda b, x: in_integers(b, rows_as_images(b, x), "ConvInteger", 5, 1, 1, 3),
    "product_of_integers": lambda b, x: of_integers(b, merged(b, x), "QLinearMatMul", 8, 3),
    "convolved_of_integers": lambda b, x: of_integers(b, rows_as_images(b, x), "QLinearConv", 5, 1, 1, 3),
    "counted": lambda b, x: b("Range", b.array(0.0), b.array(4.0), b.array(2.0)),
    "counted_between": lambda b, x: b("Range", b.array(0.5), b.array(14.0), b.array(1.0)),
    "counted_by_tenths": lambda b, x: b("Range", b.array(0.0), b.array(1.0), b.array(0.1)),
    "counted_down": lambda b, x: b("Range", b.array(3.0), b.array(-1.0), b.array(-0.3)),
    "in_floats": counted_in_floats,
    "in_doubles": lambda b, x: counted_in_floats(b, x, onnx.TensorProto.DOUBLE),
    "product": lambda b, x: folded(b, x, "ReduceProd"),
    "sum": lambda b, x: folded(b, x, "ReduceSum"),
    "elements": of_all_elements,
    "larger": of_the_larger,
    "by_a_vector": lambda b, x: b("MatMul", split_heads_and_merged_again(b, x), b.array(np.ones(8))),
    "vector_by": lambda b, x: b(
        "MatMul", b.array(np.ones(8)), b("Transpose", split_heads_and_merged_again(b, x), perm=[0, 2, 1])
    ),
    "gram": lambda b, x: b("MatMul", x, b("Transpose", x, perm=[0, 2, 1])),
    "eye": lambda b, x: b("EyeLike", causal_mask(b, x)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_every_rule_tells_what_a_run_makes(name: str) -> None:
    b = Builder()
    x = b.input("x", ("B", "S", 8))
    out = CHAINS[name](b, x)
    model = b.model(b("Add", out, out))
    shape = Graph(load_model(model)).shape(out)
    assert shape is not None
    assert None not in shape
    for sizes in ((2, 3, 8), (1, 5, 8), (4, 4, 8)):
        check_shapes(model, {"x": np.ones(sizes, np.float32)})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("merged", ("B*S", 8)),
        ("heads", ("B", "S", 8)),
        ("by_a_vector", ("B", "S")),
        ("vector_by", ("B", "S")),
        ("expanded", ("B", "S", 8)),
        ("doubled", ("B", 1, "2*S", 16)),
        ("convolved_up", ("B", 5, "2*S")),
        ("product_in_integers", ("B*S", 3)),
        ("product_of_integers", ("B*S", 3)),
        ("convolved_in_integers", ("B*S", 5, 1, 6)),
        ("convolved_of_integers", ("B*S", 5, 1, 6)),
        ("convolved_within", ("B", 4, "S", 3)),
        ("convolved_everywhere", ("B", 4, "S", 4)),
        ("pooled_everywhere", ("B", 1, "S", 4)),
        ("text", ("B", "S", 8)),
        ("image", ("B", 3, 8)),
        ("part_of_image", ("B", 1, 8)),
        ("chosen", ("B", "S", 2, 8)),
        ("chosen_rows", (3, 2, "S", 8)),
        ("sampled", ("B", 1, "S", 4)),
        ("mask", ("S", "S")),
        ("positions", ("B", "S", 8)),
        ("tiled", ("2*B", "S", 24)),
        ("sizes", ("B*S", 8)),
        ("experts", ("3*B*S", 8)),
        ("product", ("B*S", 8)),
        ("sum", (symbolic.add("B", "S"), 8)),
        ("elements", ("8*B*S",)),
        ("larger", ("B", "S", 8)),
        ("windows", ("B", "S", 9)),
        ("causal", ("B", 8, "S")),
        ("last", ("B", "S", 8)),
        ("last_of_a_table", (symbolic.at_most("S", 4), 8)),
        ("padded_rows", ("B", "(+ S 3)", 8)),
        ("einsum", ("B", "S", "S")),
        ("einsum_of_any_batch", ("B", "S", "S")),
        ("einsum_without_arrow", ("S", "S")),
        ("pooled_up", ("B*S", 1, 4)),
        ("counted", (2,)),
        ("in_floats", ("B", "S", 8)),
        ("in_doubles", ("B", "S", 8)),
        ("eye", ("S", "S")),
    ],
)
def test_symbols_come_through_shape_arithmetic(name: str, expected: tuple[symbolic.Size, ...]) -> None:
    b = Builder()
    out = CHAINS[name](b, b.input("x", ("B", "S", 8)))
    assert Graph(load_model(b.model(b("Add", out, out)))).shape(out) == expected


def test_a_slice_of_what_only_the_run_knows_keeps_the_other_dimensions() -> None:
    """DINOv3 by TorchScript: how many positions there are is computed from what has no known shape."""
    b = Builder()
    x = CHAINS["heads"](b, b.input("x", ("B", "S", 8)))
    count = b("Cast", b("ReduceMax", x, keepdims=0), to=onnx.TensorProto.INT64)
    model = b.model(b("Slice", x, b.integers(0), b("Unsqueeze", count, b.integers(0)), b.integers(1)))
    first, _, last = Graph(load_model(model)).shape(model.graph.output[0].name) or ("", "", "")
    assert (first, last) == ("B", 8)


def test_a_number_from_a_rank_that_was_learnt_late_is_one() -> None:
    """The scale of TorchScript's attention behind its unflatten: what comes last in a shape."""
    b = Builder()
    x = b.input("x", ("B", "S", 64))
    last = b("Mod", b("Add", b.integers(-1), b.integers(3)), b.integers(3))
    before = b("Slice", b("Shape", x), b.integers(0), b("Reshape", last, b.integers(-1)))
    heads = b("Reshape", x, b("Concat", before, b.integers(4, 16), axis=0))
    width = b("Slice", b("Shape", heads), b.integers(-1), b.integers(2**63 - 1))
    scale = b("Sqrt", b("Cast", width, to=b.dtype))
    graph = Graph(load_model(b.model(b("Mul", heads, scale))))
    assert (graph.shape(heads), graph.shape(scale)) == (("B", "S", 4, 16), (1,))


@given(size=st.integers(1, 300), kernel=st.integers(1, 7), stride=st.integers(1, 4))
def test_what_is_padded_so_that_strides_divide_an_image_is_known(size: int, kernel: int, stride: int) -> None:
    """As TorchScript writes TensorFlow's padding: in floats, with a ceiling and a bound."""
    b = Builder()
    x = b.input("x", ("B", size))
    rows = b("Cast", b("Gather", b("Shape", x), b.integers(1)), to=onnx.TensorProto.FLOAT)
    outs = b("Ceil", b("Div", rows, b.array(float(stride))))
    reached = b("Add", b("Mul", b("Sub", outs, b.array(1.0)), b.array(float(stride))), b.array(float(kernel)))
    missing = b("Clip", b("Sub", reached, rows), b.array(0.0), "")
    before = b("Floor", b("Div", missing, b.array(2.0)))
    model = b.model(b("Identity", before), b("Identity", missing))
    graph = Graph(load_model(model))
    expected = run(model, {"x": np.zeros((2, size), np.float32)})
    for name, value in zip((before, missing), expected, strict=True):
        known = graph.known_value(graph.tensor(name))
        assert known is not None
        np.testing.assert_array_equal(known.reshape(-1), value.reshape(-1))
