"""Normalisations: every way in which they are written, what they take in, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxfuse.device import resolve
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.limits import MOST_NORMALISED
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.selection import Selection
from tests.helpers.matching import draw
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder
from tests.tools import sweep

N = 48
ROWS = ("batch", "rows")


def vector(b: Builder, seed: int = 0) -> str:
    return b.array(1 + draw(N, seed=seed) / 8, f"vector{seed}")


def layer_norm(b: Builder, x: str) -> str:
    return b("LayerNormalization", x, vector(b), vector(b, 1), axis=-1, epsilon=1e-6)


def without_a_bias(b: Builder, x: str) -> str:
    return b("LayerNormalization", x, vector(b), axis=2)


def simplified(b: Builder, x: str) -> str:
    return b("SimplifiedLayerNormalization", x, vector(b), axis=-1, epsilon=1e-6)


def mean(b: Builder, x: str) -> str:
    return b("ReduceMean", x, axes=[-1], keepdims=1)


def root(b: Builder, squared: str) -> str:
    return b("Sqrt", b("Add", mean(b, squared), b.array(1e-5)))


def spelled_out(b: Builder, x: str) -> str:
    """As TorchScript writes it for operator sets without the op."""
    centred = b("Sub", x, mean(b, x))
    normal = b("Div", centred, root(b, b("Pow", centred, b.array(2.0))))
    return b("Add", b("Mul", normal, vector(b)), vector(b, 1))


def subtracted_twice(b: Builder, x: str) -> str:
    average = mean(b, x)
    squared = b("Pow", b("Sub", x, average), b.array(2.0))
    return b("Mul", vector(b), b("Div", b("Sub", x, average), root(b, squared)))


def multiplied_by_itself(b: Builder, x: str) -> str:
    return b("Mul", b("Div", x, root(b, b("Mul", x, x))), vector(b))


def one_over(b: Builder, x: str) -> str:
    return b("Mul", b("Mul", x, b("Div", b.array(1.0), root(b, b("Pow", x, b.array(2.0))))), vector(b))


def to_a_power(b: Builder, x: str) -> str:
    average = b("Add", mean(b, b("Pow", x, b.array(2.0))), b.array(1e-5))
    return b("Mul", vector(b), b("Mul", x, b("Pow", average, b.array(-0.5))))


def widened(b: Builder, x: str) -> str:
    """As Llama has it: in fp32, and back before the scale."""
    wide = b("Cast", x, to=FLOAT)
    two, epsilon = b.raw(np.float32(2), "two"), b.raw(np.float32(1e-6), "epsilon")
    squares = b("ReduceMean", b("Pow", wide, two), axes=[-1], keepdims=1)
    scale = b("Reciprocal", b("Sqrt", b("Add", squares, epsilon)))
    return b("Mul", vector(b), b("Cast", b("Mul", wide, scale), to=b.dtype))


def one_plus(b: Builder, x: str) -> str:
    """As Gemma has it: what scales is one more than what is stored."""
    return b("Mul", b("Div", x, root(b, b("Pow", x, b.array(2.0)))), b("Add", vector(b), b.array(1.0)))


def widened_twice(b: Builder, x: str) -> str:
    """As TorchScript writes two casts of which the second changes nothing."""
    first = b("Cast", x, to=FLOAT)
    second, two, epsilon = b("Cast", first, to=FLOAT), b.raw(np.float32(2), "two"), b.raw(np.float32(1e-6), "epsilon")
    average = b("Add", b("ReduceMean", b("Pow", first, two), axes=[-1], keepdims=1), epsilon)
    normal = b("Mul", second, b("Div", b.raw(np.float32(1), "one"), b("Sqrt", average)))
    return b("Mul", vector(b), b("Cast", normal, to=b.dtype))


def deviation(b: Builder, x: str, average: str, pool: bool = False) -> str:
    centred, epsilon = b("Sub", x, average), b.raw(np.float32(1e-3).astype(b.numpy), "epsilon")
    squares = b("Mul", centred, centred)
    return b("Sqrt", b("Add", b("GlobalAveragePool", squares) if pool else mean(b, squares), epsilon))


def scaled_first(b: Builder, x: str) -> str:
    """As TensorFlow's batch normalisation computes it."""
    average = mean(b, x)
    scale = b("Mul", b("Reciprocal", deviation(b, x, average)), vector(b))
    return b("Add", b("Mul", x, scale), b("Sub", vector(b, 1), b("Mul", average, scale)))


def pooled(b: Builder, x: str) -> str:
    """As Keras has it, in fp32 where layers have 16 bits."""
    wide = Builder(FLOAT)
    wide.nodes, wide.initializers = b.nodes, b.initializers
    of = wide("Cast", x, to=FLOAT)
    average = wide("GlobalAveragePool", of)
    scale = wide("Mul", wide("Reciprocal", deviation(wide, of, average, True)), vector(wide))
    shift = wide("Add", wide("Mul", wide("Neg", average), scale), vector(wide, 1))
    return b("Cast", wide("Add", wide("Mul", of, scale), shift), to=b.dtype)


def without_parameters(b: Builder, x: str) -> str:
    average = mean(b, x)
    over = b("Div", b.array(1.0), deviation(b, x, average))
    return b("Sub", b("Mul", over, x), b("Mul", average, over))


def without_a_shift(b: Builder, x: str) -> str:
    average = mean(b, x)
    scale = b("Mul", vector(b), b("Reciprocal", deviation(b, x, average)))
    return b("Add", b("Mul", b("Neg", average), scale), b("Mul", scale, x))


def by_a_scaled_reciprocal(b: Builder, x: str) -> str:
    """As Haiku has it: what rows are multiplied by has the scale."""
    average = mean(b, x)
    scale = b("Mul", vector(b), b("Reciprocal", deviation(b, x, average)))
    return b("Add", b("Mul", scale, b("Sub", x, average)), vector(b, 1))


def fast_variance(b: Builder, x: str, least: Callable[[Builder, str], str]) -> tuple[str, str]:
    """The mean, and the variance as Flax has it."""
    average = mean(b, x)
    return average, least(b, b("Sub", mean(b, b("Mul", x, x)), b("Mul", average, average)))


def by_a_fast_variance(b: Builder, x: str) -> str:
    """As Flax's LayerNorm is by default, through any exporter of JAX."""
    average, variance = fast_variance(b, x, lambda b, value: b("Max", value, b.array(0.0)))
    scale = b("Mul", b("Reciprocal", b("Sqrt", b("Add", variance, b.array(1e-3)))), vector(b))
    return b("Add", b("Mul", b("Sub", x, average), scale), vector(b, 1))


def by_a_fast_variance_and_wide(b: Builder, x: str) -> str:
    wide = Builder(FLOAT)
    wide.nodes, wide.initializers = b.nodes, b.initializers
    of = wide("Cast", x, to=FLOAT)
    average, variance = fast_variance(wide, of, lambda b, value: b("Clip", value, b.array(0.0)))
    normal = wide("Div", wide("Sub", of, average), wide("Sqrt", wide("Add", variance, wide.array(1e-3))))
    return b("Mul", b("Cast", normal, to=b.dtype), vector(b))


def by_a_fast_variance_of_any_sign(b: Builder, x: str) -> str:
    average, variance = fast_variance(b, x, lambda b, value: value)
    return b("Div", b("Sub", x, average), b("Sqrt", b("Add", variance, b.array(1e-3))))


def by_a_scaled_power(b: Builder, x: str) -> str:
    squares = b("Add", mean(b, b("Mul", x, x)), b.array(1e-3))
    return b("Mul", x, b("Mul", b("Pow", squares, b.array(-0.5)), vector(b)))


def total(b: Builder, squared: str) -> str:
    return b("ReduceSum", squared, b.integers(-1), keepdims=1)


def of_length_one(b: Builder, x: str) -> str:
    """As Qwen 3 Next has it of queries and keys: a sum of squares and no mean."""
    length = b("Sqrt", b("Add", total(b, b("Mul", x, x)), b.array(1e-3)))
    return b("Mul", b("Mul", x, b("Reciprocal", length)), vector(b))


def of_length_one_and_wide(b: Builder, x: str) -> str:
    """As TorchScript writes it in 16 bits, where the scale of the columns lies behind the cast."""
    wide, two, epsilon = b("Cast", x, to=FLOAT), b.raw(np.float32(2), "two"), b.raw(np.float32(1e-3), "epsilon")
    length = b("Sqrt", b("Add", total(b, b("Pow", wide, two)), epsilon))
    return b("Mul", vector(b), b("Cast", b("Div", wide, length), to=b.dtype))


def summed_over_their_number(b: Builder, x: str) -> str:
    """As JAX has a mean, and who writes `(x * x).sum(-1, keepdim=True) / x.shape[-1]`."""
    squares = b("Div", total(b, b("Mul", x, x)), b.array(float(N)))
    return b("Mul", b("Mul", x, b("Reciprocal", b("Sqrt", b("Add", squares, b.array(1e-3))))), vector(b))


def summed_wide_over_their_number(b: Builder, x: str) -> str:
    """The same of 16 bits by torch.export; the deviation divides here."""
    squares = b("Cast", total(b, b("Cast", b("Mul", x, x), to=FLOAT)), to=b.dtype)
    return b("Div", x, b("Sqrt", b("Add", b("Div", squares, b.array(float(N))), b.array(1e-3))))


def a_part_of_the_mean(b: Builder, x: str) -> str:
    squares = b("Mul", b.array(0.375), mean(b, b("Pow", x, b.array(2.0))))
    return b("Mul", x, b("Pow", b("Add", squares, b.array(1e-3)), b.array(-0.5)))


def centred_by_sums(b: Builder, x: str) -> str:
    """JAX's variance: both means are sums over their number."""
    centred = b("Sub", x, b("Div", total(b, x), b.array(float(N))))
    variance = b("Div", total(b, b("Mul", centred, centred)), b.array(float(N)))
    return b("Mul", b("Mul", centred, b("Reciprocal", b("Sqrt", b("Add", variance, b.array(1e-3))))), vector(b))


def over_its_scaled_length(b: Builder, x: str) -> str:
    """The RMSNorm of its authors: epsilon is added to the root of the mean of squares (Zhang and Sennrich, 2019)."""
    length = b("Mul", b("ReduceL2", x, axes=[-1], keepdims=1), b.array(0.125))  # of 64 columns; every type has it
    return b("Mul", vector(b), b("Div", x, b("Add", length, b.array(2.0**-10))))


def over_its_scaled_and_bounded_length(b: Builder, x: str) -> str:
    """As x-transformers and many after it had theirs."""
    length = b("Clip", b("Mul", b("ReduceL2", x, axes=[-1], keepdims=1), b.array(0.125)), b.array(1e-8))
    return b("Mul", b("Div", x, length), vector(b))


def summed_wide(b: Builder, x: str) -> str:
    """As torch.export writes a sum of 16 bits: the sum alone is wide."""
    length = b("Cast", total(b, b("Cast", b("Mul", x, x), to=FLOAT)), to=b.dtype)
    return b("Mul", b("Mul", x, b("Reciprocal", b("Sqrt", b("Add", length, b.array(1e-3))))), vector(b))


def without_an_epsilon(b: Builder, x: str) -> str:
    """As torch.export writes one of 1e-8: its optimiser takes that for 0."""
    return b("Mul", b("Mul", x, b("Reciprocal", b("Sqrt", mean(b, b("Pow", x, b.array(2.0)))))), vector(b))


def with_a_copied_mean(b: Builder, x: str) -> str:
    """As TensorFlow has it: a variance is about a copy of the mean, through which no gradient goes."""
    average = mean(b, x)
    squared = b("Pow", b("Sub", x, b("Identity", average)), b.array(2.0))
    return b("Mul", vector(b), b("Div", b("Sub", x, average), root(b, squared)))


def by_a_variance_of_its_own_shape(b: Builder, x: str) -> str:
    """As torch.export writes `x.var(-1, unbiased=False, keepdim=True)`: the last dimension is lost and comes back."""
    centred = b("Sub", x, mean(b, x))
    variance = b("ReduceMean", b("Mul", centred, centred), axes=[-1], keepdims=0)
    variance = b("Reshape", variance, b("Concat", b("Shape", variance), b.integers(1), axis=0))
    sizes = [b("Gather", b("Shape", x), b.integers(place)) for place in (0, 1)]
    variance = b("Expand", variance, b("Concat", *sizes, b.integers(1), axis=0))
    deviation = b("Sqrt", b("Add", variance, b.array(1e-3)))
    return b("Add", b("Mul", b("Div", b("Sub", x, mean(b, x)), deviation), vector(b)), vector(b, 1))


def with_its_own_shape(b: Builder, x: str, reduced: str) -> str:
    """The last dimension that a reduction has taken away, as torch.export brings it back."""
    kept = b("Reshape", reduced, b("Concat", b("Shape", reduced), b.integers(1), axis=0))
    sizes = [b("Gather", b("Shape", x), b.integers(place)) for place in (0, 1)]
    return b("Expand", kept, b("Concat", *sizes, b.integers(1), axis=0))


def by_variance_and_mean(
    b: Builder, x: str, count: float = N, wide: bool = False, averaged: Callable[[Builder, str], str] = lambda b, x: x
) -> str:
    """As torch.export writes `torch.var_mean`: the mean that is subtracted is sums over their number."""
    read, element = (b("Cast", x, to=FLOAT), np.float32) if wide else (x, helper.tensor_dtype_to_np_dtype(b.dtype))
    centred = b("Sub", read, b("ReduceMean", read, axes=[-1], keepdims=1))
    variance = b("ReduceMean", b("Mul", centred, centred), axes=[-1], keepdims=0)
    total = with_its_own_shape(b, x, b("ReduceSum", averaged(b, read), b.integers(-1), keepdims=0))
    average, variance = b("Div", total, b.raw(np.asarray(count, element), "count")), with_its_own_shape(b, x, variance)
    if wide:
        average, variance = (b("Cast", each, to=b.dtype) for each in (average, variance))
    deviation = b("Sqrt", b("Add", variance, b.array(1e-3)))
    return b("Mul", b("Mul", b("Sub", x, average), b("Reciprocal", deviation)), vector(b))


def by_variance_and_mean_and_wide(b: Builder, x: str) -> str:
    """Of 16 bits both are of fp32, and rounded."""
    return by_variance_and_mean(b, x, wide=True)


def over_its_length(b: Builder, x: str) -> str:
    """As CLIP has it of what it compares."""
    return b("Div", x, b("ReduceL2", x, axes=[-1], keepdims=1))


def over_its_bounded_length(b: Builder, x: str) -> str:
    """As torch's exporters write `normalize`; in 16 bits its bound is 0."""
    length = b("Clip", b("ReduceL2", x, axes=[-1], keepdims=1), b.array(1e-12))
    return b("Mul", b("Div", x, b("Expand", length, b("Shape", x))), vector(b))


OF_LENGTH_ONE = (of_length_one, of_length_one_and_wide, summed_wide, over_its_length, over_its_bounded_length)
BY_SUMS = (summed_over_their_number, summed_wide_over_their_number, a_part_of_the_mean, centred_by_sums,
           over_its_scaled_length, over_its_scaled_and_bounded_length)  # fmt: skip
FAST = (by_a_fast_variance, by_a_fast_variance_and_wide, by_a_fast_variance_of_any_sign)
SCALED_FIRST = (scaled_first, pooled, without_parameters, without_a_shift)
FORMS = (layer_norm, without_a_bias, simplified, spelled_out, subtracted_twice, with_a_copied_mean,
         multiplied_by_itself, one_over, by_a_variance_of_its_own_shape, by_variance_and_mean,
         by_variance_and_mean_and_wide, to_a_power, widened, widened_twice, one_plus, without_an_epsilon,
         by_a_scaled_reciprocal, by_a_scaled_power, *FAST, *OF_LENGTH_ONE, *BY_SUMS, *SCALED_FIRST)  # fmt: skip
OPS = (layer_norm, without_a_bias, simplified)


def model_of(form: Callable[[Builder, str], str], dtype: int = FLOAT, *rows: int | str) -> ModelProto:
    b = Builder(dtype, opset=17)
    return b.model(form(b, b.input("x", (*(rows or ROWS), N))))


def analysed(model: ModelProto, **arguments: str) -> Analysis:
    return analyse_model(model, resolve("sm_90a", list), **arguments)


def the_norm(model: ModelProto) -> tuple[Site, Normalisation]:
    (site,) = analysed(model).sites
    assert isinstance(site.fusion, Normalisation)
    return site, site.fusion


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_form_is_one_kernel_and_has_the_bits_of_the_model(form: Callable[..., str], dtype: int) -> None:
    model = model_of(form, dtype)
    analysis = analysed(model)
    (site,) = analysis.sites
    assert site.fusion.pattern == "normalisation"
    fused = sweep.rewritten(analysis)
    assert [node.op_type for node in fused.graph.node if node.op_type != "Add"] == ["FusedPointwise_0"]
    x = draw(2, 5, N).astype(helper.tensor_dtype_to_np_dtype(dtype))
    assert not sweep.difference(model, fused, [{"x": x}])


@pytest.mark.parametrize("form", [form for form in FORMS if form is not pooled], ids=lambda form: form.__name__)
def test_a_form_in_bf16_is_that_in_fp16(form: Callable[..., str]) -> None:
    """Where ONNX has its ops in bf16, a pool not. Epsilon is rounded in both, below the normal numbers of fp16."""
    (_, brain), (_, half) = (the_norm(model_of(form, dtype)) for dtype in (BFLOAT16, FLOAT16))
    assert abs(brain.epsilon - half.epsilon) <= 2**-9 * half.epsilon + 2**-25
    assert {tensor.dtype.name for tensor in (*brain.inputs, *brain.outputs)} == {"bf16"}
    assert abs(brain.least - half.least) <= 2**-25
    same = replace(brain, epsilon=half.epsilon, least=half.least)
    assert str(same).replace("bf16", "f16") == str(half)


def test_it_reads_as_what_it_is() -> None:
    _, fusion = the_norm(model_of(layer_norm))
    assert str(fusion).split("\n")[2:] == [
        "in0     f32[b, m, n]  x",
        "in1     f32[n]  vector0",
        "in2     f32[n]  vector1",
        "        acc0 = in0, normalised by mean and variance along n, epsilon 1e-06",
        "        t0 = acc0 * in1",
        "        t1 = t0 + in2",
        "out     f32[b, m, n] <- t1",
    ]


def in_double(b: Builder, x: str) -> str:
    """As TorchScript writes it in 16 bits for operator sets without the op: the sum of squares in fp64."""
    wide = b("Cast", b("Sub", x, mean(b, x)), to=TensorProto.DOUBLE)
    two, epsilon = b.raw(np.float64(2), "two"), b.raw(np.float64(1e-5), "epsilon")
    deviation = b("Sqrt", b("Add", mean(b, b("Pow", wide, two)), epsilon))
    normal = b("Cast", b("Div", wide, deviation), to=b.dtype)
    return b("Add", b("Mul", normal, vector(b)), vector(b, 1))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_sums_in_double_are_a_kernel_s_where_rows_have_16_bits(dtype: int) -> None:
    """Of fp32 they are more accurate than the kernel."""
    model = model_of(in_double, dtype)
    analysis = analysed(model)
    assert len(analysis.sites) == (dtype == FLOAT16)
    x = draw(2, 5, N).astype(helper.tensor_dtype_to_np_dtype(dtype))
    assert not sweep.difference(model, sweep.rewritten(analysis), [{"x": x}])


@pytest.mark.parametrize(
    ("form", "centred"), [(layer_norm, True), (spelled_out, True), (simplified, False), (widened, False)]
)
def test_what_it_means(form: Callable[..., str], centred: bool) -> None:
    """The widened form reads 16 bits and writes 16 bits."""
    _, fusion = the_norm(model_of(form, FLOAT16))
    assert fusion.centred == centred
    assert {tensor.dtype.name for tensor in (*fusion.inputs, *fusion.outputs)} == {"f16"}


def along_another_axis(b: Builder, x: str) -> str:
    return b("LayerNormalization", x, b.array(draw(5, N)), axis=1)


def cubed(b: Builder, x: str) -> str:
    return b("Div", x, root(b, b("Pow", x, b.array(3.0))))


def without_the_axis(b: Builder, x: str) -> str:
    squares = b("ReduceMean", b("Pow", x, b.array(2.0)), axes=[-1], keepdims=0)
    return b("Div", b("Transpose", x, perm=[2, 0, 1]), b("Sqrt", b("Add", squares, b.array(1e-5))))


def by_a_repeated_variance(b: Builder, x: str) -> str:
    """Of one row seven are made."""
    row = b("Slice", x, b.integers(0), b.integers(1), b.integers(0))
    centred = b("Sub", row, mean(b, row))
    variance = b("Expand", mean(b, b("Mul", centred, centred)), b.integers(7, 1, 1))
    return b("Div", centred, b("Sqrt", b("Add", variance, b.array(1e-3))))


def of_another_tensor(b: Builder, x: str) -> str:
    return b("Div", b.input("other", (*ROWS, N)), root(b, b("Pow", x, b.array(2.0))))


def with_an_epsilon_of_the_run(b: Builder, x: str) -> str:
    average = b("Add", mean(b, b("Pow", x, b.array(2.0))), b.input("epsilon", ()))
    return b("Div", x, b("Sqrt", average))


def length_of_another(b: Builder, x: str) -> str:
    return b("Div", x, b("ReduceL2", b.input("other", (*ROWS, N)), axes=[-1], keepdims=1))


def length_over_it(b: Builder, x: str) -> str:
    return b("Div", b("ReduceL2", x, axes=[-1], keepdims=1), x)


def length_along_another_axis(b: Builder, x: str) -> str:
    return b("Div", x, b("ReduceL2", x, axes=[1], keepdims=1))


def of_a_sum_along_another_axis(b: Builder, x: str) -> str:
    squares = b("ReduceSum", b("Mul", x, x), b.integers(1), keepdims=1)
    return b("Div", x, b("Sqrt", b("Add", squares, b.array(1e-3))))


def rounded_to_whole_numbers(b: Builder, x: str) -> str:
    squares = b("Cast", mean(b, b("Mul", x, x)), to=TensorProto.INT64)
    return b("Div", x, b("Sqrt", b("Add", b("Cast", squares, to=b.dtype), b.array(1e-3))))


NO_NORMALISATION = (
    along_another_axis, cubed, without_the_axis, by_a_repeated_variance,
    of_another_tensor, with_an_epsilon_of_the_run, length_of_another,
    length_over_it, length_along_another_axis, of_a_sum_along_another_axis,
    rounded_to_whole_numbers,
)  # fmt: skip


@pytest.mark.parametrize("form", NO_NORMALISATION, ids=lambda form: form.__name__)
def test_what_is_none_is_none(form: Callable[..., str]) -> None:
    rows = (2, 5) if form is along_another_axis else ROWS
    analysis = analysed(model_of(form, FLOAT, *rows))
    assert not analysis.sites
    assert not analysis.skipped


def of_two(b: Builder, x: str, average: str, other: str, swapped: bool = False) -> str:
    scale = b("Mul", b("Reciprocal", deviation(b, x, mean(b, x))), vector(b))
    product, shift = b("Mul", other, scale), b("Mul", average, scale)
    return b("Sub", *((shift, product) if swapped else (product, shift)))


def of_three(b: Builder, x: str, least: str, *others: Callable[[Builder, str], str]) -> str:
    """What is squared, what has the mean, and what is centred: rows, or another where it is said."""
    squared, averaged, centred = (other(b, x) for other in others)
    average = mean(b, averaged)
    difference = b("Sub", mean(b, b("Mul", squared, squared)), b("Mul", average, average))
    variance = b("Add", b("Max", difference, least), b.array(1e-3))
    return b("Mul", b("Sub", centred, average), b("Reciprocal", b("Sqrt", variance)))


def itself(b: Builder, x: str) -> str:
    return x


def exponential(b: Builder, x: str) -> str:
    return b("Exp", x)


NEARLY_A_MEAN = {
    "one less than there are": lambda b, x: by_variance_and_mean(b, x, N - 1),
    "their squares' root": lambda b, x: by_variance_and_mean(b, x, N**0.5),
    "the sum of another": lambda b, x: by_variance_and_mean(b, x, averaged=exponential),
    "the sum of another, in fp32": lambda b, x: by_variance_and_mean(b, x, wide=True, averaged=exponential),
}


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("case", NEARLY_A_MEAN)
def test_what_is_nearly_a_mean_beside_a_variance_is_none(case: str, dtype: int) -> None:
    assert not analysed(model_of(NEARLY_A_MEAN[case], dtype)).sites


@pytest.mark.parametrize("op", ["ReduceSum", "Div", "Expand"])
def test_sums_that_others_read_keep_the_nodes(op: str) -> None:
    b = Builder(FLOAT, opset=17)
    out = by_variance_and_mean(b, b.input("x", (*ROWS, N)))
    read = next(node.output[0] for node in b.nodes if node.op_type == op)
    assert not analysed(b.model(out, read)).sites


NEARLY_FAST = {
    "squares of another": lambda b, x: of_three(b, x, b.array(0.0), exponential, itself, itself),
    "the mean of another": lambda b, x: of_three(b, x, b.array(0.0), itself, exponential, itself),
    "another than what has the variance": lambda b, x: of_three(b, x, b.array(0.0), itself, itself, exponential),
    "at least 1": lambda b, x: of_three(b, x, b.array(1.0), itself, itself, itself),
    "a variance of the run": lambda b, x: of_three(b, x, mean(b, x), itself, itself, itself),
}


@pytest.mark.parametrize("case", NEARLY_FAST)
def test_what_is_nearly_a_fast_variance_is_none(case: str) -> None:
    assert not analysed(model_of(NEARLY_FAST[case])).sites


NEARLY_SCALED_FIRST = {
    "the mean of another": lambda b, x: of_two(b, x, mean(b, b("Neg", x)), x),
    "another than what has the deviation": lambda b, x: of_two(b, x, mean(b, x), b("Exp", x)),
    "the mean less the row": lambda b, x: of_two(b, x, mean(b, x), x, swapped=True),
    "another of rank 4": lambda b, x: pooled(b, b("Reshape", x, b.integers(2, 1, 5, N))),
}


@pytest.mark.parametrize("case", NEARLY_SCALED_FIRST)
def test_what_is_nearly_scaled_first_is_none(case: str) -> None:
    assert not analysed(model_of(NEARLY_SCALED_FIRST[case])).sites


@pytest.mark.parametrize("inner", range(11))
@pytest.mark.parametrize("form", [scaled_first, by_a_fast_variance], ids=lambda form: form.__name__)
def test_no_fusion_makes_what_others_read_within_it(form: Callable[..., str], inner: int) -> None:
    b = Builder(FLOAT, opset=17)
    out = form(b, b.input("x", (*ROWS, N)))
    assert not analysed(b.model(out, b.nodes[inner].output[0])).sites


@pytest.mark.parametrize("position", [2, 3])
def test_what_others_read_on_the_way_is_made(position: int) -> None:
    """A mean, a variance: no kernel stores them."""
    b = Builder(FLOAT, opset=17)
    out = spelled_out(b, b.input("x", (*ROWS, N)))
    inner = b.nodes[position].output[0]
    assert not analysed(b.model(out, inner)).sites


# Shapes of x, scale and shift, how many axes of x are the batch, and how many of the two nodes the kernel takes in.
ADAPTIVE = [
    (("batch", "rows", N), ("batch", 1, N), ("batch", 1, N), 1, 2),
    ((3, 64, N), (3, 1, N), (1, 1, N), 1, 2),
    ((3, 5, N), (3, 1, N), (1, 1, N), 0, 2),  # a batch has too few rows for a block
    ((3, 64, N), (N,), (3, 1, 1), 1, 2),
    ((3, 2, 64, N), (3, 1, 1, N), (3, 1, 1, N), 1, 2),
    (("batch", 2, "rows", N), ("batch", 2, 1, N), ("batch", 2, 1, 1), 2, 2),
    ((1, 5, N), (1, 1, N), (1, N), 0, 2),
    ((3, 1, 64, N), (3, 1, 1, N), (1, 1, 1, N), 1, 2),
    ((3, 2, 5, N), (3, 1, 1, N), (3, 2, 1, N), 0, 2),
    (("batch", "rows", N), ("batch", "rows", N), ("batch", 1, N), 0, 2),
    (("batch", "rows", N), (1, "rows", N), ("batch", 1, N), 0, 2),
    ((3, 5, N), (3, 5, 1), (3, 1, N), 0, 2),
    ((3, 1, N), (3, 1, N), (N,), 0, 2),  # every row has its own
    ((1, 5, N), (2, 1, N), (N,), 0, 0),  # makes it longer
]


@pytest.mark.parametrize("form", [layer_norm, spelled_out, widened], ids=lambda form: form.__name__)
@pytest.mark.parametrize(("rows", "scale", "shift", "batch", "taken"), ADAPTIVE)
def test_a_scale_and_a_shift_of_each_image_are_steps(
    rows: Sequence[int | str], scale: Sequence[int | str], shift: Sequence[int | str], batch: int, taken: int,
    form: Callable[..., str],
) -> None:  # fmt: skip
    """As behind the norms of DiT, PixArt, Stable Diffusion 3 and Flux."""
    b = Builder(FLOAT, opset=17)
    y = form(b, b.input("x", rows))
    scaled = b("Mul", y, b("Add", b.input("scale", scale), b.array(1.0)))
    model = b.model(b("Add", scaled, b.input("shift", shift)))
    analysis = analysed(model)
    (site,) = analysis.sites
    assert [y, scaled, model.graph.output[0].name].index(site.match.out) == taken
    assert len(site.mapping.batch) == batch
    sizes = {"batch": 2, "rows": 5}
    feed = {
        name: draw(*(sizes.get(size, size) for size in shape), seed=seed).astype(np.float32)
        for seed, (name, shape) in enumerate({"x": rows, "scale": scale, "shift": shift}.items())
    }
    assert not sweep.difference(model, sweep.rewritten(analysis), [feed])


@pytest.mark.parametrize(
    ("columns", "dtype"), [("columns", FLOAT), (MOST_NORMALISED + 1, FLOAT), (1, FLOAT), (N, TensorProto.DOUBLE)]
)
def test_a_length_or_type_of_no_kernel(columns: int | str, dtype: int) -> None:
    b = Builder(dtype, opset=17)
    scale = b.input("scale", (columns,))
    assert not analysed(b.model(b("LayerNormalization", b.input("x", (*ROWS, columns)), scale))).sites


def test_where_intermediates_are_rounded_only_ops_are_kernels() -> None:
    for form in FORMS:
        found = analysed(model_of(form, FLOAT16), rounding="onnx").sites
        assert [len(site.match.nodes) for site in found] == ([1] if form in OPS else [])


def test_what_is_not_selected_or_needs_no_run_stays() -> None:
    model = model_of(layer_norm)
    left = analyse_model(model, resolve("sm_90a", list), selection=Selection(skip=("normalisation",)))
    assert not left.sites
    assert [entry.reason for entry in left.skipped] == ["not_selected"]
    b = Builder(FLOAT, opset=17)
    assert not analysed(b.model(b("Add", layer_norm(b, b.array(draw(3, N))), b.input("x", (3, N))))).sites


def test_products_before_and_behind_are_kernels_of_their_own() -> None:
    b = Builder(FLOAT16, opset=17)
    x = b.input("x", (*ROWS, 512))
    residual = b("Add", b("MatMul", x, b.array(draw(512, N))), b.input("skip", (*ROWS, N)))
    y = layer_norm(b, residual)
    model = b.model(b("Add", b("Relu", b("Add", b("MatMul", y, b.array(draw(N, N))), vector(b, 3))), residual))
    analysis = analysed(model)
    assert not analysis.skipped
    patterns = [site.fusion.pattern for site in analysis.sites]
    assert patterns == ["gemm_epilogue", "normalisation", "gemm_epilogue"]
    assert len(sweep.rewritten(analysis).graph.node) == 3


@pytest.mark.parametrize("form", [widened, widened_twice])
def test_a_product_leaves_the_cast_of_a_normalisation_to_it(form: Callable[..., str]) -> None:
    """So it stores 16 bits, and one kernel reads them; with the cast it would store two tensors of 32."""
    b = Builder(FLOAT16, opset=17)
    product = b("Add", b("MatMul", b.input("x", (*ROWS, 512)), b.array(draw(512, N))), vector(b, 4))
    model = b.model(form(b, product))
    first, second = analysed(model).sites
    assert [tensor.dtype.name for tensor in first.fusion.outputs] == ["f16"]
    assert second.match.out == model.graph.output[0].name
    feed = {"x": draw(2, 3, 512).astype(np.float16)}
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [feed])


def test_two_of_one_row_are_two() -> None:
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (*ROWS, N))
    names = [b.array(draw(N), name) for name in ("first", "second")]
    made = [
        b(op, x, name) for op, name in zip(("LayerNormalization", "SimplifiedLayerNormalization"), names, strict=True)
    ]
    assert len(analysed(b.model(*made)).sites) == 2


def test_in_a_branch() -> None:
    inner = Builder(FLOAT, opset=17)
    out = layer_norm(inner, "x")
    value = helper.make_tensor_value_info(out, FLOAT, (*ROWS, N))
    then = helper.make_graph(inner.nodes, "then", [], [value], inner.initializers)
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])],
        "else",
        [],
        [helper.make_tensor_value_info("z", FLOAT, (*ROWS, N))],
    )
    b = Builder(FLOAT, opset=17)
    b.input("x", (*ROWS, N))
    b.inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    b.nodes.append(helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other))
    model = b.model("y")
    analysis = analysed(model)
    assert [site.fusion.pattern for site in analysis.sites] == ["normalisation"]
    feeds = [{"x": draw(2, 5, N).astype(np.float32), "flag": np.array(flag)} for flag in (True, False)]
    assert not sweep.difference(model, sweep.rewritten(analysis), feeds)


def test_a_known_size_of_what_is_modulated_holds_up_nothing() -> None:
    """As in Stable Diffusion 3: views of the product of scales and shifts are folded with it, some by such a size."""
    b = Builder(FLOAT, opset=17)
    t = b("Gemm", b.input("t", ("batch", N)), b.array(draw(N, 6 * N) / 8), b.array(draw(6 * N)))

    def columns(part: int, end: str) -> str:
        return b("Unsqueeze", b("Slice", t, b.integers(part * N), end, b.integers(1)), b.integers(1))

    scale, shift = (columns(part, b.integers((part + 1) * N)) for part in range(2))
    y = layer_norm(b, b.input("x", ("batch", 5, N)))
    y = b("Add", b("Mul", y, b("Add", scale, b.array(1.0))), shift)
    size = b("Gather", b("Shape", y), b.integers(2))
    for part in range(2, 6):
        y = b("Add", b("Softmax", y), columns(part, b("Mul", size, b.integers(part + 1))))
    model = b.model(y)
    analysis = analysed(model)
    assert {site.fusion.pattern: len(site.match.nodes) for site in analysis.sites}["normalisation"] == 3
    feed = {"x": draw(2, 5, N).astype(np.float32), "t": draw(2, N).astype(np.float32)}
    assert not sweep.difference(model, sweep.rewritten(analysis), [feed])
