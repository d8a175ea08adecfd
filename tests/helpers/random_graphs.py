"""Hypothesis strategy: small graphs around products of one input, in the forms that exporters write and in others.

A graph grows from one or two products: it is split by columns, regrouped by views, combined with operands of every
broadcast shape, and read by other nodes and graph outputs. Magnitudes stay moderate, so that float32 and float64 agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np
from hypothesis import strategies as st
from onnx import ModelProto, helper

from tests.helpers.onnx_build import Builder

UNARY = ("Tanh", "Sigmoid", "Erf", "Relu", "Abs", "Neg", "Softplus", "LeakyRelu", "Elu", "HardSwish", "Gelu", "Mish",
         "Identity", "HardSigmoid", "Softsign", "Sin", "Cos")  # fmt: skip
BOUNDED = ("Tanh", "Sigmoid", "Erf", "HardSigmoid", "Softsign", "Sin", "Cos")
BINARY = ("Add", "Sub", "Min", "Max", "Mul")
OUTSIDE = ("Softmax", "ReduceMax", "Floor")
SYMBOLS = ("batch", "groups", "rows")
MAX_STEPS = 12


@dataclass(frozen=True)
class Value:
    """A value of the graph: its sizes in the run, and whether it stays within [-1, 1]."""

    name: str
    sizes: tuple[int, ...]
    bounded: bool = False


@dataclass
class Sketch:
    """A model in the making.

    Attributes:
        dims: what the model says of the input's sizes: numbers or symbols.
        values: what may be used further; `outputs` what the model returns.
    """

    b: Builder
    draw: st.DrawFn
    sizes: tuple[int, ...]
    dims: tuple[int | str, ...]
    values: list[Value] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)

    def pick(self, *choices: object) -> object:
        return self.draw(st.sampled_from(choices))

    def value(self) -> Value:
        """Mostly a late one, so that graphs grow long."""
        return self.draw(st.sampled_from(self.values[-4:] if self.draw(st.integers(0, 3)) else self.values))

    def numbers(self, *shape: int) -> np.ndarray:
        seed = self.draw(st.integers(0, 2**16))
        return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)

    def add(self, name: str, sizes: tuple[int, ...], bounded: bool = False) -> Value:
        self.values.append(Value(name, sizes, bounded))
        return self.values[-1]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """A model and its feed."""
    rank = draw(st.integers(2, 4))
    sizes = (*(draw(st.integers(1, 3)) for _ in range(rank - 1)), draw(st.sampled_from((4, 6, 7))))
    symbolic = [draw(st.booleans()) for _ in range(rank - 1)]
    names = SYMBOLS[-(rank - 1) :]
    dims = (*(n if s else size for n, s, size in zip(names, symbolic, sizes, strict=False)), sizes[-1])
    sketch = Sketch(Builder(opset=20), draw, sizes, dims)
    sketch.feeds["x"] = sketch.numbers(*sizes)
    x = sketch.b.input("x", dims)
    columns = draw(st.sampled_from((8, 12, 6)))
    for _ in range(draw(st.integers(1, 2))):
        _product(sketch, x, columns)
    for _ in range(draw(st.integers(1, MAX_STEPS))):
        draw(st.sampled_from(STEPS))(sketch)
    sketch.outputs.append(sketch.values[-1].name)
    outputs = dict.fromkeys(name for name in sketch.outputs if name != "x")
    return sketch.b.model(*outputs), sketch.feeds


def _product(s: Sketch, x: str, columns: int) -> None:
    k = s.sizes[-1]
    if len(s.sizes) == 2 and s.draw(st.booleans()):
        _gemm(s, x, s.sizes[0], columns)
        return
    if len(s.sizes) > 2 and s.draw(st.integers(0, 2)) == 0:
        _flat_gemm(s, x, columns)
        return
    transposed = s.draw(st.booleans())
    weight = s.b.array(s.numbers(columns, k) if transposed else s.numbers(k, columns), f"weight{len(s.b.nodes)}")
    product = s.b("MatMul", x, s.b("Transpose", weight, perm=[1, 0]) if transposed else weight)
    if s.draw(st.booleans()):
        bias = s.b.array(s.numbers(columns))
        product = s.b("Add", *((bias, product) if s.draw(st.booleans()) else (product, bias)))
    s.add(product, (*s.sizes[:-1], columns))


def _flat_gemm(s: Sketch, x: str, columns: int) -> None:
    """As onnxslim writes a MatMul and an Add: all rows in one dimension, and apart again where they are known."""
    rows = s.sizes[:-1]
    _gemm(s, s.b("Reshape", x, s.b.integers(-1, s.sizes[-1])), prod(rows), columns)
    if not any(isinstance(dim, str) for dim in s.dims) and s.draw(st.booleans()):
        value = s.values.pop()
        s.add(s.b("Reshape", value.name, s.b.integers(*rows, columns)), (*rows, columns))


def _gemm(s: Sketch, x: str, rows: int, columns: int) -> None:
    transposed, k = s.pick(0, 1), s.sizes[-1]
    weight = s.b.array(s.numbers(*((columns, k) if transposed else (k, columns))), f"weight{len(s.b.nodes)}")
    shapes = [None, (), (columns,), (1, columns)] + ([(rows, 1), (rows, columns)] if isinstance(s.dims[0], int) else [])
    shape = s.pick(*shapes)
    bias = () if shape is None else (_stored_or_given(s, s.numbers(*shape)),)
    out = s.b("Gemm", x, weight, *bias, transB=transposed, alpha=s.pick(1.0, 0.5), beta=s.pick(1.0, 0.5, 0.0))
    s.add(out, (rows, columns))


def _unary(s: Sketch) -> None:
    op, value = s.pick(*UNARY), s.value()
    s.add(s.b(op, value.name), value.sizes, op in BOUNDED or (op == "Identity" and value.bounded))


def _binary(s: Sketch) -> None:
    """Of two values of equal sizes; at most one factor of a product is large."""
    first = s.value()
    second = s.draw(st.sampled_from([value for value in s.values if value.sizes == first.sizes]))
    op = s.pick(*(BINARY if first.bounded or second.bounded else BINARY[:-1]))
    both = first.bounded and second.bounded and op in ("Mul", "Min", "Max")
    s.add(s.b(op, first.name, second.name), first.sizes, both)


def _operand(s: Sketch) -> None:
    """An initializer or an input that broadcasts over a value in any of its dimensions."""
    value, op = s.value(), s.pick("Add", "Mul", "Sub", "Min", "Div")
    numbers = np.asarray(np.tanh(s.numbers(*_broadcast(s, value))))
    if op == "Div":
        numbers = np.asarray(np.where(np.abs(numbers) < 0.5, 0.5, numbers), np.float32)
    operand = _stored_or_given(s, numbers)
    first, second = (value.name, operand) if op == "Div" or s.draw(st.booleans()) else (operand, value.name)
    s.add(s.b(op, first, second), value.sizes)


def _broadcast(s: Sketch, value: Value) -> tuple[int, ...]:
    """A shape that broadcasts over a value in any of its dimensions."""
    keep = [s.draw(st.booleans()) for _ in value.sizes]
    shape = tuple(size if kept else 1 for size, kept in zip(value.sizes, keep, strict=True))
    return shape[s.draw(st.integers(0, len(shape))) :]


def _masked(s: Sketch) -> None:
    """A mask that the run or the model knows chooses between a value and a number, a tensor or another one."""
    value = s.value()
    mask = _stored_or_given(s, np.asarray(s.numbers(*_broadcast(s, value)) > 0))
    if s.draw(st.booleans()):
        mask = s.b("Not", mask)
    if s.draw(st.integers(0, 3)) == 0:
        s.add(s.b("Mul", s.b("Cast", mask, to=s.b.dtype), value.name), value.sizes, value.bounded)
        return
    alike = [other.name for other in s.values if other.sizes == value.sizes]
    numbers = np.asarray(np.tanh(s.numbers(*_broadcast(s, value))))
    other = s.pick(s.b.array(-100.0), s.b.array(numbers), s.draw(st.sampled_from(alike)))
    branches = (value.name, other) if s.draw(st.booleans()) else (other, value.name)
    s.add(s.b("Where", mask, *branches), value.sizes)


def _stored_or_given(s: Sketch, numbers: np.ndarray) -> str:
    if not s.draw(st.booleans()):
        return _input(s, numbers)
    return s.b.mask(numbers) if numbers.dtype == np.bool_ else s.b.array(numbers)


def _input(s: Sketch, numbers: np.ndarray) -> str:
    """An input of the model; it has the symbols of x where its sizes are those of x."""
    name = f"operand{len(s.b.nodes)}"
    rank = numbers.ndim
    own = s.dims[-rank:] if rank else ()
    fits = rank <= len(s.sizes) and all(a in (b, 1) for a, b in zip(numbers.shape[:-1], s.sizes[-rank:], strict=False))
    dims = [symbol if fits and size != 1 else size for size, symbol in zip(numbers.shape, own, strict=False)]
    s.feeds[name] = numbers
    kind = helper.np_dtype_to_tensor_dtype(numbers.dtype)
    return s.b.input(name, (*dims[:-1], numbers.shape[-1]) if fits and rank else numbers.shape, kind)


def _split(s: Sketch) -> None:
    """Columns into equal or unequal parts, in one of the spellings."""
    value = s.value()
    columns = value.sizes[-1]
    parts = [count for count in (2, 3, 4) if columns % count == 0]
    if not parts:
        return
    count = s.pick(*parts)
    sizes = [columns // count] * count
    if columns > 3 and s.draw(st.integers(0, 4)) == 0:
        sizes = [1, columns - 1]
    for name, size in zip(s.draw(st.sampled_from(SPLITS))(s, value, sizes), sizes, strict=True):
        s.add(name, (*value.sizes[:-1], size), value.bounded)


def _gate(s: Sketch) -> None:
    """Equal parts that meet again, one of them activated."""
    value, count = s.value(), s.pick(2, 2, 2, 3)
    if value.sizes[-1] % count:
        return
    size = value.sizes[-1] // count
    first, *others = s.draw(st.sampled_from(SPLITS))(s, value, [size] * count)
    gate = s.b(s.pick(*BOUNDED), others[0])
    for name in (first, *others[1:]):
        gate = s.b("Mul", *((gate, name) if s.draw(st.booleans()) else (name, gate)))
    s.add(gate, (*value.sizes[:-1], size), value.bounded)


def _by_split(s: Sketch, value: Value, sizes: list[int]) -> list[str]:
    axis = s.pick(-1, len(value.sizes) - 1)
    return s.b("Split", value.name, s.b.integers(*sizes), outputs=len(sizes), axis=axis)


def _by_slices(s: Sketch, value: Value, sizes: list[int]) -> list[str]:
    axes, starts = s.b.integers(-1), np.cumsum([0, *sizes])
    ends = [*starts[1:-1], 2**63 - 1]
    return [
        s.b("Slice", value.name, s.b.integers(start), s.b.integers(end), axes)
        for start, end in zip(starts[:-1], ends, strict=True)
    ]


def _by_sequence(s: Sketch, value: Value, sizes: list[int]) -> list[str]:
    sequence = s.b("SplitToSequence", value.name, s.b.integers(*sizes), axis=-1)
    return [s.b("SequenceAt", sequence, s.b.scalar(index)) for index in range(len(sizes))]


def _by_steps(s: Sketch, value: Value, sizes: list[int]) -> list[str]:
    """Equal parts whose columns take turns."""
    if len({*sizes}) > 1:
        return _by_slices(s, value, sizes)
    count, axis = len(sizes), s.b.integers(-1)
    if s.draw(st.booleans()):
        step, end = s.b.integers(count), s.b.integers(2**63 - 1)
        return [s.b("Slice", value.name, s.b.integers(part), end, axis, step) for part in range(count)]
    turns = s.b("Reshape", value.name, s.b.integers(*[0] * (len(value.sizes) - 1), sizes[0], count))
    return [s.b("Gather", turns, s.b.scalar(part), axis=len(value.sizes)) for part in range(count)]


SPLITS: tuple[Callable[[Sketch, Value, list[int]], list[str]], ...] = (_by_split, _by_slices, _by_sequence, _by_steps)


def _heads(s: Sketch) -> None:
    """Columns into heads, or heads in front of the rows, or the last two dimensions merged."""
    value = s.value()
    rank, columns = len(value.sizes), value.sizes[-1]
    if rank < 4 and columns % 2 == 0 and s.draw(st.booleans()):
        sizes = (*value.sizes[:-1], 2, columns // 2)
        target = [*([0] * (rank - 1)), 2, s.pick(-1, columns // 2)]
        s.add(s.b("Reshape", value.name, s.b.integers(*target)), sizes, value.bounded)
    elif rank > 2 and s.draw(st.booleans()):
        axes = s.draw(st.permutations(range(rank)))
        s.add(s.b("Transpose", value.name, perm=axes), tuple(value.sizes[axis] for axis in axes), value.bounded)
    elif rank > 2:
        sizes = (*value.sizes[:-2], prod(value.sizes[-2:]))
        s.add(s.b("Reshape", value.name, s.b.integers(*([0] * (rank - 2)), -1)), sizes, value.bounded)


def _reader(s: Sketch) -> None:
    """Somebody else reads a value: an op that is not pointwise, or the model's user."""
    value = s.value()
    if s.draw(st.booleans()):
        s.outputs.append(value.name)
    else:
        s.outputs.append(s.b(s.pick(*OUTSIDE), value.name))


def _another(s: Sketch) -> None:
    """A product of any value."""
    value = s.value()
    if len(value.sizes) > 1:
        weight = s.b.array(0.5 * s.numbers(value.sizes[-1], 8), f"weight{len(s.b.nodes)}")
        s.add(s.b("MatMul", value.name, weight), (*value.sizes[:-1], 8))


def _scores(s: Sketch) -> None:
    """A product of two values with the same batches, one of them transposed by a Transpose or in an Einsum."""
    value = s.value()
    rank = len(value.sizes)
    alike = [other for other in s.values if other.sizes[:-2] == value.sizes[:-2] and len(other.sizes) == rank > 1]
    alike = [other for other in alike if other.sizes[-1] == value.sizes[-1]]
    if not alike:
        return
    other = s.draw(st.sampled_from(alike))
    bounded = other.name if other.bounded else s.b("Tanh", other.name)
    batch = "xyzw"[: rank - 2]
    if s.draw(st.booleans()):
        out = s.b("Einsum", value.name, bounded, equation=f"{batch}ik,{batch}jk->{batch}ij")
    else:
        out = s.b("MatMul", value.name, s.b("Transpose", bounded, perm=[*range(rank - 2), rank - 1, rank - 2]))
    s.add(out, (*value.sizes[:-1], other.sizes[-2]))


def _scores_of_unsplit_heads(s: Sketch) -> None:
    """The same with the batches behind the rows, in both or in the second value only."""
    value = s.value()
    rank = len(value.sizes)
    alike = [other for other in s.values if len(other.sizes) == rank > 2 and other.sizes[1:] == value.sizes[1:]]
    if not alike:
        return
    other = s.draw(st.sampled_from(alike))
    batch = "xyzw"[: rank - 2]
    first, second = f"i{batch}k", f"j{batch}k"
    out = s.b("Einsum", value.name, s.b("Tanh", other.name), equation=f"{first},{second}->{batch}ij")
    s.add(out, (*value.sizes[1:-1], value.sizes[0], other.sizes[0]))


def _repeating(s: Sketch) -> None:
    """An operand that is longer than a value, along a dimension of size 1 that the value has or gets."""
    value, op = s.value(), s.pick("Add", "Mul", "Sub", "Min")
    name, sizes = value.name, list(value.sizes)
    places = [place for place, size in enumerate(sizes) if size == 1]
    if len(sizes) < 4 and (not places or s.draw(st.booleans())):
        place = s.draw(st.integers(0, len(sizes)))
        name = s.b("Unsqueeze", name, s.b.integers(place))
        sizes.insert(place, 1)
    elif places:
        place = s.draw(st.sampled_from(places))
    else:
        return
    sizes[place] = s.pick(2, 3)
    keep = [at == place or s.draw(st.integers(0, 3)) > 0 for at in range(len(sizes))]
    shape = [size if kept else 1 for size, kept in zip(sizes, keep, strict=True)]
    operand = _stored_or_given(s, np.asarray(np.tanh(s.numbers(*shape))))
    s.add(s.b(op, *((name, operand) if s.draw(st.booleans()) else (operand, name))), tuple(sizes))


def _from_the_left(s: Sketch) -> None:
    """A constant times a value, or a pointwise convolution of it, which is the same product."""
    value = s.value()
    if len(value.sizes) < 3:
        return
    at = 1 if s.draw(st.booleans()) else len(value.sizes) - 2
    weight = 0.5 * s.numbers(4, value.sizes[at])
    ones = [1] * (len(value.sizes) - 2)
    if at == 1:
        name = s.b("Conv", value.name, s.b.array(weight.reshape(4, -1, *ones)), kernel_shape=ones)
    else:
        name = s.b("MatMul", s.b.array(weight), value.name)
    s.add(name, tuple(4 if index == at else size for index, size in enumerate(value.sizes)))


def _normalised(s: Sketch) -> None:
    value = s.value()
    mean = s.b("ReduceMean", s.b("Abs", value.name), s.b.integers(-1))
    s.add(s.b("Div", value.name, s.b("Add", mean, s.b.array(1.0))), value.sizes)


def _row_norm(s: Sketch) -> None:
    """A LayerNormalization, or the nodes of a RMSNorm, whose mean somebody may read as well."""
    value = s.value()
    columns = value.sizes[-1]
    if columns < 2:
        return
    scale = s.b.array(s.numbers(columns))
    if s.draw(st.booleans()):
        name = s.b("LayerNormalization", value.name, scale, axis=-1, epsilon=1e-2)
        outer = s.draw(st.integers(0, len(value.sizes) - 1))
        own = (*value.sizes[:outer], *[1] * (len(value.sizes) - 1 - outer), columns)
        s.add(s.b("Mul", name, s.b.array(s.numbers(*own))) if outer else name, value.sizes)
        return
    mean = s.b("ReduceMean", s.b("Mul", value.name, value.name), s.b.integers(-1))
    root = s.b("Sqrt", s.b("Add", mean, s.b.array(1e-2)))
    if s.draw(st.integers(0, 3)) == 0:
        s.add(s.b("Add", value.name, mean), value.sizes)
    s.add(s.b("Mul", s.b("Div", value.name, root), scale), value.sizes)


def _half_by_shape(s: Sketch) -> None:
    """The first half of the columns, or a value regrouped, by arithmetic on its shape."""
    value = s.value()
    last = s.b("Gather", s.b("Shape", value.name), s.b.integers(-1), axis=0)
    if value.sizes[-1] % 2 == 0:
        half = s.b("Div", last, s.b.integers(2))
        name = s.b("Slice", value.name, s.b.integers(0), half, s.b.integers(-1))
        s.add(name, (*value.sizes[:-1], value.sizes[-1] // 2), value.bounded)
    else:
        target = s.b("Concat", s.b.integers(*[0] * (len(value.sizes) - 1)), last, axis=0)
        s.add(s.b("Reshape", value.name, target), value.sizes, value.bounded)


STEPS: tuple[Callable[[Sketch], None], ...] = (
    _unary, _unary, _unary, _binary, _binary, _binary, _binary, _operand, _operand, _masked, _masked, _split, _gate,
    _gate, _heads, _reader, _another, _scores, _scores_of_unsplit_heads, _repeating, _from_the_left, _normalised,
    _half_by_shape, _row_norm, _row_norm,
)  # fmt: skip
