"""Attentions as exporters write them, small: what stands between the products, and how q, keys and values lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import ModelProto, helper

from tests.helpers.onnx_build import BOOL, FLOAT, FLOAT16, Builder

HEADS, HEAD = 2, 16
IMAGE = 8, 9  # whose pixels are as many as the keys
SIZES = {"batch": 2, "rows": 40, "keys": 72}


def number(b: Builder, value: float, dtype: np.dtype | None = None) -> str:
    return b.raw(np.array(value, b.numpy if dtype is None else dtype), f"c{len(b.initializers)}")


def split_heads(
    b: Builder,
    name: str,
    tokens: int | str,
    heads: int = HEADS,
    perm: tuple[int, ...] = (0, 2, 1, 3),
    head: int = HEAD,
) -> str:
    """[batch, tokens, heads * head] as [batch, heads, tokens, head]."""
    x = b.input(name, ("batch", tokens, heads * head))
    return b("Transpose", b("Reshape", x, b.integers(0, 0, heads, head)), perm=perm)


def scores(b: Builder, rows: int | str = "rows", keys: int | str = "keys", head: int = HEAD) -> str:
    k = split_heads(b, "key", keys, perm=(0, 2, 3, 1), head=head)
    return b("MatMul", split_heads(b, "query", rows, head=head), k)


def merged(b: Builder, p: str, keys: int | str = "keys", dtype: int | None = None) -> list[str]:
    """The mean of the values, which are cast to a type before."""
    values = split_heads(b, "value", keys)
    values = values if dtype is None else b("Cast", values, to=dtype)
    out = b("Transpose", b("MatMul", p, values), perm=(0, 2, 1, 3))
    return [b("Identity", b("Reshape", out, b.integers(0, 0, HEADS * HEAD)))]


def plain(b: Builder) -> list[str]:
    return merged(b, b("Softmax", b("Mul", scores(b), number(b, 0.25)), axis=-1))


def scaled_before(b: Builder) -> list[str]:
    """Torch's own: the root of the scale on q and on the transposed keys."""
    root = number(b, 0.5)
    q, k = b("Mul", split_heads(b, "query", "rows"), root), split_heads(b, "key", "keys", perm=(0, 2, 3, 1))
    return merged(b, b("Softmax", b("MatMul", q, b("Mul", k, root)), axis=-1))


def scaled_by_the_run(b: Builder) -> list[str]:
    """The same, and only the run knows it."""
    k = split_heads(b, "key", "keys", perm=(0, 2, 3, 1))
    s = b("MatMul", split_heads(b, "query", "rows"), b("Mul", k, b.input("scale", (1,))))
    return merged(b, b("Softmax", s, axis=-1))


def masked_and_guarded(b: Builder) -> list[str]:
    """Llama: in fp32, with a mask that the heads share, and 0 for a row of nothing."""
    s = b("Add", b("Cast", scores(b), to=FLOAT), b.input("mask", ("batch", 1, "rows", "keys"), FLOAT))
    p = b("Softmax", s, axis=3)
    p = b("Where", b("IsNaN", p), number(b, 0.0, np.dtype(np.float32)), p)
    return merged(b, b("Cast", p, to=b.dtype))


def values_in_fp32(b: Builder) -> list[str]:
    """Llama by torchscript: probabilities stay in fp32, the values go there, and so does the result."""
    s = b("Add", b("Cast", scores(b), to=FLOAT), b.input("mask", ("batch", 1, "rows", "keys"), FLOAT))
    p = b("Softmax", s, axis=-1)
    (out,) = merged(b, b("Where", b("IsNaN", p), number(b, 0.0, np.dtype(np.float32)), p), dtype=FLOAT)
    return [b("Cast", b("Concat", out, axis=0), to=b.dtype)]


def masked_keys(b: Builder) -> list[str]:
    """BERT: a mask of keys of each batch."""
    s = b("Add", b("Div", scores(b), number(b, 4.0)), b.input("mask", ("batch", 1, 1, "keys")))
    return merged(b, b("Softmax", s, axis=-1))


def two_biases(b: Builder) -> list[str]:
    """A bias of each head, a mask of all."""
    s = b("Add", b("Mul", scores(b), number(b, 0.25)), b.input("bias", (HEADS, "rows", "keys")))
    return merged(b, b("Softmax", b("Add", s, b.input("mask", ("rows", "keys"))), axis=-1))


def soft_cap(b: Builder) -> list[str]:
    """Gemma 2."""
    s = b("Mul", b("Tanh", b("Div", scores(b), number(b, 50.0))), number(b, 50.0))
    return merged(b, b("Softmax", b("Add", s, b.input("mask", ("rows", "keys"))), axis=-1))


def filled(b: Builder) -> list[str]:
    """A mask of type bool, keys that no vector of 16 bytes divides."""
    s = b("Mul", scores(b, 33, 77), number(b, 0.25))
    s = b("Where", b.input("mask", (33, 77), BOOL), s, number(b, -np.inf))
    return merged(b, b("Softmax", s, axis=-1), 77)


def grouped(b: Builder) -> list[str]:
    """Two heads of queries for each head of keys and values, repeated by Expand."""

    def repeated(name: str) -> str:
        heads = split_heads(b, name, 72, 2)
        wide = b("Expand", b("Unsqueeze", heads, b.integers(2)), b.integers(1, 1, 2, 1, 1))
        return b("Reshape", wide, b.integers(0, 4, 72, HEAD))

    query = split_heads(b, "query", "rows", 4)
    s = b("MatMul", query, b("Transpose", repeated("key"), perm=(0, 1, 3, 2)))
    p = b("Softmax", b("Add", s, b.input("mask", ("batch", 1, "rows", 72))), axis=-1)
    out = b("Transpose", b("MatMul", p, repeated("value")), perm=(0, 2, 1, 3))
    return [b("Identity", b("Reshape", out, b.integers(0, 0, 4 * HEAD)))]


def merged_batch(b: Builder) -> list[str]:
    """Matrices of one batch: heads are in it, as older exports have them."""

    def batched(name: str, tokens: int) -> str:
        t = b("Reshape", b.input(name, (2, tokens, HEADS * HEAD)), b.integers(0, 0, HEADS, HEAD))
        return b("Reshape", b("Transpose", t, perm=(0, 2, 1, 3)), b.integers(2 * HEADS, tokens, HEAD))

    s = b("MatMul", batched("query", 40), b("Transpose", batched("key", 72), perm=(0, 2, 1)))
    p = b("Softmax", b("Mul", s, number(b, 0.25)), axis=-1)
    out = b("Reshape", b("MatMul", p, batched("value", 72)), b.integers(2, HEADS, 40, HEAD))
    return [b("Reshape", b("Transpose", out, perm=(0, 2, 1, 3)), b.integers(2, 40, HEADS * HEAD))]


def masked_in_batches(b: Builder) -> list[str]:
    """DeBERTa, SpeechT5: the same of as many batches as only the run knows, which a mask takes apart in between.

    The keys are divided where they lie transposed, and the probabilities are merged by their own shape.
    """

    def length(value: str, place: int = 1) -> str:
        return b("Gather", b("Shape", value), b.integers(place))

    def reshaped(x: str, *sizes: str) -> str:
        return b("Reshape", x, b("Concat", b.integers(-1), *sizes, axis=0))

    def batched(name: str, tokens: str) -> str:
        return reshaped(split_heads(b, name, tokens), length(name), b.integers(HEAD))

    k = b("Div", b("Transpose", batched("key", "keys"), perm=(0, 2, 1)), number(b, 4.0))
    s = reshaped(b("MatMul", batched("query", "rows"), k), b.integers(HEADS), length("query"), length("key"))
    p = b("Softmax", b("Add", s, b.input("mask", ("batch", 1, "rows", "keys"))), axis=-1)
    p = reshaped(p, length(p, 2), length(p, 3))
    out = reshaped(b("MatMul", p, batched("value", "keys")), b.integers(HEADS), length("query"), b.integers(HEAD))
    return [b("Reshape", b("Transpose", out, perm=(0, 2, 1, 3)), b.integers(0, 0, HEADS * HEAD))]


def by_einsum(b: Builder) -> list[str]:
    def heads(name: str, tokens: str) -> str:
        return b.input(name, ("batch", tokens, HEADS, HEAD))

    s = b("Einsum", heads("query", "rows"), heads("key", "keys"), equation="bihd,bjhd->bhij")
    p = b("Softmax", b("Mul", s, number(b, 0.25)), axis=-1)
    return [b("Identity", b("Einsum", p, heads("value", "keys"), equation="bhij,bjhd->bihd"))]


def keys_first(b: Builder) -> list[str]:
    """As Keras' MultiHeadAttention has it: the keys are multiplied by the query, which has the scale."""

    def heads(name: str, tokens: str) -> str:
        return b.input(name, ("batch", tokens, HEADS, HEAD))

    q = b("Mul", heads("query", "rows"), number(b, 0.25))
    s = b("Einsum", heads("key", "keys"), q, equation="aecd,abcd->acbe")
    p = b("Softmax", b("Add", s, b.input("mask", ("batch", 1, "rows", "keys"))), axis=-1)
    return [b("Identity", b("Einsum", p, heads("value", "keys"), equation="acbe,aecd->abcd"))]


def without_heads(b: Builder) -> list[str]:
    q, k, v = (b.input(name, ("batch", tokens, HEAD)) for name, tokens in (("q", "rows"), ("k", "keys"), ("v", "keys")))
    s = b("MatMul", q, b("Transpose", k, perm=(0, 2, 1)))
    return [b("Identity", b("MatMul", b("Softmax", s, axis=-1), v))]


def keys_of_an_image(b: Builder) -> list[str]:
    """Keys and values that a strided convolution makes for all tokens, `[batch, heads * HEAD, rows, columns]`."""

    def heads(name: str) -> str:
        image = b.input(name, ("batch", HEADS * HEAD, IMAGE[0], IMAGE[1]))
        return b("Reshape", image, b.integers(0, HEADS, HEAD, IMAGE[0] * IMAGE[1]))

    values = b("Transpose", heads("value"), perm=(0, 1, 3, 2))
    s = b("Mul", b("MatMul", split_heads(b, "query", "rows"), heads("key")), number(b, 0.25))
    return [b("Identity", b("MatMul", b("Softmax", s, axis=-1), values))]


def of_channels(b: Builder, name: str, tokens: int) -> str:
    """Heads of what a convolution makes for the pixels of an image."""
    return b.input(name, ("batch", HEADS, HEAD, tokens))


def values_first(b: Builder) -> list[str]:
    """Latent diffusion's autoencoder, BigGAN: channels by tokens, multiplied by the transposed probabilities."""
    query, key, value = (of_channels(b, *name) for name in (("q", 40), ("k", 72), ("v", 72)))
    s = b("Mul", b("MatMul", b("Transpose", query, perm=(0, 1, 3, 2)), key), number(b, 0.25))
    p = b("Softmax", s, axis=3)
    return [b("Identity", b("MatMul", value, b("Transpose", p, perm=(0, 1, 3, 2))))]


def channels_by_einsum(b: Builder) -> list[str]:
    """Guided diffusion: the result has the columns that the probabilities have for rows."""
    query, key, value = (of_channels(b, *name) for name in (("q", 40), ("k", 72), ("v", 72)))
    s = b("Einsum", b("Mul", query, number(b, 0.5)), b("Mul", key, number(b, 0.5)), equation="bhct,bhcs->bhts")
    p = b("Softmax", b("Cast", s, to=FLOAT), axis=-1)
    return [b("Identity", b("Einsum", b("Cast", p, to=b.dtype), value, equation="bhts,bhcs->bhct"))]


FORMS: dict[str, Callable[[Builder], list[str]]] = {
    form.__name__: form
    for form in (
        plain, scaled_before, scaled_by_the_run, masked_and_guarded, values_in_fp32, masked_keys, two_biases, soft_cap,
        filled, grouped, merged_batch, masked_in_batches, by_einsum, keys_first,
        without_heads, keys_of_an_image, values_first, channels_by_einsum,
    )
}  # fmt: skip

# Tokens are neighbours in memory: one kernel, whatever the addresses.
READ_ANYHOW = ("keys_of_an_image", "values_first", "channels_by_einsum")
# Single elements are read where the library's kernels read rows.
LEFT_ALONE_IN_FP32 = ("values_first", "channels_by_einsum")
BY_EINSUM = ("by_einsum", "keys_first", "channels_by_einsum")  # of which ONNX has none in bfloat16


class Casting(Builder):
    """Inputs and outputs in fp32, and what is between them in another type."""

    def input(self, name: str, shape: Sequence[int | str | None], dtype: int | None = None) -> str:
        given = super().input(name, shape, dtype or FLOAT)
        return given if dtype is not None else self("Cast", given, to=self.dtype)


def _built(b: Builder, build: Callable[[Builder], list[str]]) -> ModelProto:
    outs = build(b)
    if isinstance(b, Casting):
        outs, b.dtype = [b("Cast", out, to=FLOAT) for out in outs], FLOAT
    return b.model(*outs)


def model_of(form: str, dtype: int = FLOAT16, cast: bool = False) -> ModelProto:
    """A form in some type; with `cast` in a model whose inputs and output are of fp32."""
    return _built((Casting if cast else Builder)(dtype), FORMS[form])


def of_heads(
    head: int, dtype: int = FLOAT16, heads: int = 2, cast: bool = False, sizes: dict[str, int] | None = None
) -> ModelProto:
    """A plain attention with some size of a head, of known sizes or such as only the run knows."""
    known = sizes or {}

    def build(b: Builder) -> list[str]:
        def split(name: str, tokens: str) -> str:
            x = b.input(name, (known.get("batch", "batch"), known.get(tokens, tokens), heads * head))
            return b("Transpose", b("Reshape", x, b.integers(0, 0, heads, head)), perm=(0, 2, 1, 3))

        s = b("MatMul", split("query", "rows"), b("Transpose", split("key", "keys"), perm=(0, 1, 3, 2)))
        p = b("Softmax", b("Mul", s, number(b, head**-0.5)), axis=-1)
        out = b("Transpose", b("MatMul", p, split("value", "keys")), perm=(0, 2, 1, 3))
        return [b("Identity", b("Reshape", out, b.integers(0, 0, heads * head)))]

    return _built((Casting if cast else Builder)(dtype), build)


def feeds(model, sizes: dict[str, int] = SIZES, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; a third of each mask is empty, and of those that name rows, all of the fourth."""
    generator = np.random.default_rng(seed)
    made = {}
    for value in model.graph.input:
        kind = value.type.tensor_type.elem_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        numbers = generator.standard_normal(shape)
        empty = generator.random(shape) < 0.3
        if value.name == "mask" and kind == BOOL:
            made[value.name] = ~empty
            continue
        if value.name == "mask":
            numbers[empty] = -np.inf
            if len(shape) == 4 and shape[2] > 3:
                numbers[..., 3, :] = -np.inf
        if value.name == "scale":
            numbers = np.abs(numbers)
        made[value.name] = numbers.astype(helper.tensor_dtype_to_np_dtype(kind))
    return made
