"""Rotary embeddings behind a product, as exporters write them: heads whose halves, or pairs, turn by an angle each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, Builder

K, HEADS, HEAD = 48, 4, 16
TOP = 2**63 - 1
Rotate = Callable[[Builder, str, int], str]


def tables(b: Builder, columns: int) -> tuple[str, str]:
    """Cosines and sines of each row, of all heads; what turns later in a model has the same ones."""
    known = {value.name for value in b.inputs}
    return tuple(name if name in known else b.input(name, (1, 1, "rows", columns)) for name in ("cos", "sin"))


def half(b: Builder, x: str, start: int, end: int) -> str:
    return b("Slice", x, b.integers(start), b.integers(end), b.integers(-1), b.integers(1))


def turned(b: Builder, x: str, other: str, head: int) -> str:
    cos, sin = tables(b, head)
    return b("Add", b("Mul", x, cos), b("Mul", other, sin))


def sliced(b: Builder, x: str, head: int) -> str:
    """`x * cos + cat(-x[..., half:], x[..., :half]) * sin`."""
    first, second = half(b, x, 0, head // 2), half(b, x, head // 2, TOP)
    return turned(b, x, b("Concat", b("Neg", second), first, axis=-1), head)


def split(b: Builder, x: str, head: int) -> str:
    """The same by `chunk`."""
    first, second = b("Split", x, outputs=2, axis=-1, num_outputs=2)
    return turned(b, x, b("Concat", b("Neg", second), first, axis=3), head)


def by_halves(b: Builder, x: str, head: int) -> str:
    """`cat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`, of tables of half a head."""
    cos, sin = tables(b, head // 2)
    first, second = half(b, x, 0, head // 2), half(b, x, head // 2, head)
    left = b("Sub", b("Mul", first, cos), b("Mul", second, sin))
    right = b("Add", b("Mul", second, cos), b("Mul", first, sin))
    return b("Concat", left, right, axis=-1)


def of_two_rows(b: Builder, x: str, head: int) -> str:
    """`x1, x2 = x.reshape(..., 2, half).unbind(-2)`."""
    rows = b("Reshape", x, b.integers(0, 0, -1, 2, head // 2))
    first, second = (b("Gather", rows, b.scalar(index), axis=-2) for index in range(2))
    return turned(b, x, b("Concat", b("Neg", second), first, axis=-1), head)


def in_pairs(b: Builder, x: str, head: int) -> str:
    """`x * cos + stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin`."""
    axes, top, two = b.integers(3), b.integers(TOP), b.integers(2)
    first, second = (b("Slice", x, b.integers(start), top, axes, two) for start in (0, 1))
    pairs = [b("Unsqueeze", each, b.integers(-1)) for each in (b("Neg", second), first)]
    flat = b("Reshape", b("Concat", *pairs, axis=-1), b.integers(0, 0, -1, head))
    return turned(b, x, flat, head)


def unbound(b: Builder, x: str, head: int) -> str:
    """The same of `x.reshape(..., -1, 2).unbind(-1)`, as Flux has it and torch.export writes it."""
    pairs, last = b("Reshape", x, b.integers(0, 0, 0, -1, 2)), b.integers(-1)
    ranges = (b("Slice", pairs, b.integers(start), b.integers(start + 1), last) for start in (0, 1))
    first, second = (b("Squeeze", each, last) for each in ranges)
    parts = [b("Unsqueeze", each, last) for each in (b("Neg", second), first)]
    flat = b("Reshape", b("Concat", *parts, axis=-1), b.integers(0, 0, -1, head))
    return turned(b, x, flat, head)


def of_a_cast(b: Builder, x: str, head: int) -> str:
    """Halves of the same value cast to its own type, as TorchScript writes ModernBERT's."""
    again = b("Cast", x, to=b.dtype)
    first, second = half(b, again, 0, head // 2), half(b, again, head // 2, TOP)
    return turned(b, x, b("Concat", b("Neg", second), first, axis=-1), head)


def by_matrices(b: Builder, x: str, head: int) -> str:
    """`f[..., 0] * y[..., 0] + f[..., 1] * y[..., 1]` of `y = x.reshape(..., -1, 1, 2)`, as Flux's authors write it.

    Both columns of the matrices `f` are inputs.
    """
    known = {value.name for value in b.inputs}
    shape = (1, 1, "rows", head // 2, 2)
    matrices = [name if name in known else b.input(name, shape) for name in ("first", "second")]
    pairs = b("Reshape", x, b.integers(0, 0, 0, head // 2, 1, 2))
    ranges = [b("Gather", pairs, b.scalar(index), axis=-1) for index in range(2)]
    meeting = [b("Mul", *each) for each in zip(matrices, ranges, strict=True)]
    return b("Reshape", b("Add", *meeting), b.integers(0, 0, -1, head))


ROTATIONS: list[Rotate] = [sliced, split, by_halves, of_two_rows, in_pairs, unbound, of_a_cast, by_matrices]


def product(b: Builder, order: str, bias: bool, heads: int, head: int, k: int) -> str:
    """Heads of `x`, `[batch, heads, rows, head]`."""
    x = b.input("x", ("batch", "rows", k))
    n = heads * head
    if order == "kn":
        y = b("MatMul", x, b.array(draw(k, n) / k**0.5, "weight"))
        y = b("Add", y, b.array(draw(n, seed=1), "bias")) if bias else y
    else:
        parameters = [b.array(draw(n, k) / k**0.5, "weight"), *([b.array(draw(n, seed=1), "bias")] if bias else [])]
        flat = b("Gemm", b("Reshape", x, b.integers(-1, k)), *parameters, transB=1)
        rows = b("Slice", b("Shape", x), b.integers(0), b.integers(2))
        y = b("Reshape", flat, b("Concat", rows, b.integers(n), axis=0))
    return b("Transpose", b("Reshape", y, b.integers(0, 0, heads, head)), perm=[0, 2, 1, 3])


def rotary(
    rotate: Rotate, order: str = "kn", bias: bool = True, dtype: int = FLOAT, heads: int = HEADS, head: int = HEAD,
    k: int = K, scaled: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    b = Builder(dtype)
    y = rotate(b, product(b, order, bias, heads, head, k), head)
    return b.model(b("Mul", y, b.array(0.25)) if scaled else y)


def root_mean_square(b: Builder, x: str, columns: int) -> str:
    """RMSNorm as it is written in PyTorch: widened, and scaled behind."""
    wide = b("Cast", x, to=FLOAT)
    mean = b("ReduceMean", b("Mul", wide, wide), b.integers(-1), keepdims=1)
    root = b("Sqrt", b("Add", mean, b.raw(np.array(1e-6, np.float32), "epsilon")))
    normal = b("Cast", b("Mul", wide, b("Reciprocal", root)), to=b.dtype)
    return b("Mul", b.array(draw(columns, seed=5), "scale"), normal)


def layer_norm(b: Builder, x: str, columns: int) -> str:
    parameters = (b.array(draw(columns, seed=seed), name) for seed, name in ((5, "scale"), (6, "bias")))
    return b("LayerNormalization", x, *parameters, axis=-1)


def transposed(b: Builder, rotate: Rotate, heads: int, head: int) -> list[str]:
    """Heads of an input."""
    x = b("Reshape", b.input("x", ("batch", "rows", heads * head)), b.integers(0, 0, heads, head))
    return [rotate(b, b("Transpose", x, perm=[0, 2, 1, 3]), head)]


def as_it_lies(b: Builder, rotate: Rotate, heads: int, head: int) -> list[str]:
    """The same where it has them in front of its rows."""
    return [rotate(b, b("Exp", b.input("x", ("batch", heads, "rows", head))), head)]


def beside_others(b: Builder, rotate: Rotate, heads: int, head: int) -> list[str]:
    """Some columns of each head, as GPT-NeoX and Phi turn them; the others pass by."""
    x = b("Exp", b.input("x", ("batch", heads, "rows", head + 6)))
    return [b("Concat", rotate(b, half(b, x, 0, head), head), half(b, x, head, TOP), axis=-1)]


def of_one_product(b: Builder, rotate: Rotate, heads: int, head: int) -> list[str]:
    """Q of a product that makes keys and values as well, as those of Phi-3 and ModernBERT."""
    x = b.input("x", ("batch", "rows", K))
    packed = b("MatMul", x, b.array(draw(K, 3 * heads * head) / K**0.5, "weight"))
    q, *others = b("Split", packed, outputs=3, axis=-1, num_outputs=3)
    y = b("Transpose", b("Reshape", q, b.integers(0, 0, heads, head)), perm=[0, 2, 1, 3])
    return [rotate(b, y, head), *others]


def of_a_split(b: Builder, rotate: Rotate, heads: int, head: int) -> list[str]:
    """The second output of a Split, as that of patches behind DINOv3's first tokens; the first is read as it is."""
    x = b("Tanh", b.input("x", ("batch", 2 * heads, "rows", head)))
    first, second = b("Split", x, outputs=2, axis=1, num_outputs=2)
    return [rotate(b, second, head), b("Abs", first)]


Turning = Callable[[Builder, Rotate, int, int], list[str]]
BY_THEMSELVES: list[Turning] = [transposed, as_it_lies, beside_others, of_a_split, of_one_product]


def turning(
    value: Turning, rotate: Rotate, dtype: int = FLOAT, heads: int = HEADS, head: int = HEAD
) -> onnx.ModelProto:
    """A rotation that neither a product's kernel has nor one of normalised rows."""
    b = Builder(dtype, opset=18)
    return b.model(*value(b, rotate, heads, head))


def in_rows(dtype: int = FLOAT, heads: int = HEADS, head: int = HEAD) -> onnx.ModelProto:
    """Heads that turn beside each other, in rows that nothing moves."""
    b = Builder(dtype, opset=18)
    x = b("Exp", b.input("x", ("batch", "rows", heads * head)))
    y = b("Reshape", x, b.integers(0, 0, heads, head))
    cos, sin = (b.input(name, (1, "rows", 1, head)) for name in ("cos", "sin"))
    first, second = half(b, y, 0, head // 2), half(b, y, head // 2, TOP)
    other = b("Concat", b("Neg", second), first, axis=-1)
    turned = b("Add", b("Mul", y, cos), b("Mul", other, sin))
    return b.model(b("Reshape", turned, b.integers(0, 0, heads * head)))


NORMS: list[Rotate] = [root_mean_square, layer_norm]


def normalised(
    rotate: Rotate, norm: Rotate, dtype: int = FLOAT, heads: int = HEADS, head: int = HEAD, together: bool = False,
    scaled: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    """Heads that are normalised, each by itself as Qwen3's or all `together` as OLMo2's, and then turned."""
    b = Builder(dtype, opset=18)
    x = b.input("x", ("batch", "rows", heads * head))
    y = norm(b, x, heads * head) if together else x
    y = b("Reshape", y, b.integers(0, 0, heads, head))
    y = b("Transpose", y if together else norm(b, y, head), perm=[0, 2, 1, 3])
    y = rotate(b, y, head)
    return b.model(b("Mul", y, b.array(0.25)) if scaled else y)


def alternating(angles: np.ndarray, *made: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """A number of each of two kinds of the first angle of each pair."""
    return np.stack([make(angles[..., 0]) for make in made], -1)


MADE_OF: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "x": np.array,
    "cos": np.cos,
    "sin": np.sin,
    "first": lambda angles: alternating(angles, np.cos, np.sin),
    "second": lambda angles: alternating(angles, lambda angle: -np.sin(angle), np.cos),
}


def feed(model: onnx.ModelProto, rows: int, batch: int = 2, seed: int = 3) -> dict[str, np.ndarray]:
    """Draws; tables hold the cosines and sines of angles, and columns of matrices both."""
    sizes = {"batch": batch, "rows": rows}
    made = {}
    for value in model.graph.input:
        shape = [sizes.get(dim.dim_param) or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        made[value.name] = MADE_OF[value.name](draw(*shape, seed=seed))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    return {name: value.astype(dtype) for name, value in made.items()}
