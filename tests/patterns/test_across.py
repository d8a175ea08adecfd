"""Normalisations along an axis that is not the last: channels, of which those of neighbouring pixels lie together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.limits import MOST_ACROSS
from onnxfuse.schedule.norm_tile import NormTile
from tests.helpers.matching import check_meaning, draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.patterns.test_normalisation import analysed, by_a_fast_variance, spelled_out, to_a_power
from tests.patterns.test_normalisation import layer_norm as layer_norm_op
from tests.tools import sweep

CHANNELS = 48
IMAGE = ("batch", CHANNELS, "height", "width")
SIZES = {"batch": 2, "height": 5, "width": 7, "frames": 11}
Form = Callable[[Builder, str, int], str]


def mean(b: Builder, x: str) -> str:
    return b("ReduceMean", x, axes=[1], keepdims=1)


def of_channels(b: Builder, seed: int, rank: int) -> str:
    return b.array(1 + draw(CHANNELS, *[1] * (rank - 2), seed=seed) / 8)


def layer_norm(b: Builder, x: str, rank: int) -> str:
    """As SAM, ConvNeXt and NAFNet have it."""
    centred = b("Sub", x, mean(b, x))
    deviation = b("Sqrt", b("Add", mean(b, b("Pow", centred, b.array(2.0))), b.array(1e-6)))
    scaled = b("Mul", of_channels(b, 0, rank), b("Div", centred, deviation))
    return b("Add", scaled, of_channels(b, 1, rank))


def by_the_reciprocal(b: Builder, x: str, rank: int) -> str:
    """As Glow-TTS has it, and an activation."""
    centred = b("Sub", x, mean(b, x))
    variance = b("Add", mean(b, b("Mul", centred, centred)), b.array(1e-4))
    normal = b("Mul", centred, b("Reciprocal", b("Sqrt", variance)))
    return b("Relu", b("Add", b("Mul", normal, of_channels(b, 0, rank)), of_channels(b, 1, rank)))


def rms_norm(b: Builder, x: str, rank: int) -> str:
    deviation = b("Sqrt", b("Add", mean(b, b("Mul", x, x)), b.array(1e-5)))
    return b("Mul", b("Div", x, deviation), of_channels(b, 0, rank))


def scaled_first(b: Builder, x: str, rank: int) -> str:
    """As Keras has a LayerNormalization of axis 1."""
    average = mean(b, x)
    centred = b("Sub", x, average)
    deviation = b("Sqrt", b("Add", mean(b, b("Mul", centred, centred)), b.array(1e-3)))
    scale = b("Mul", b("Reciprocal", deviation), of_channels(b, 0, rank))
    shift = b("Add", b("Mul", b("Neg", average), scale), of_channels(b, 1, rank))
    return b("Add", b("Mul", x, scale), shift)


def of_length_one(b: Builder, x: str, rank: int) -> str:
    """As descriptors of pixels are made."""
    return b("Div", x, b("Clip", b("ReduceL2", x, axes=[1], keepdims=1), b.array(1e-3)))


def over_a_length_of_its_own_dimension(b: Builder, x: str, rank: int) -> str:
    """As SuperPoint has it."""
    length = b("ReduceL2", x, axes=[1], keepdims=0)
    return b("Div", x, b("Unsqueeze", length, b.integers(1)))


def with_a_variance_of_its_own_dimension(b: Builder, x: str, rank: int) -> str:
    average = b("Unsqueeze", b("ReduceMean", b("Mul", x, x), axes=[-rank + 1], keepdims=0), b.integers(1))
    return b("Mul", b("Div", x, b("Sqrt", b("Add", average, b.array(1e-5)))), of_channels(b, 0, rank))


def over_the_deviation(b: Builder, x: str, rank: int) -> str:
    """As `(x - x.mean(1)) / (x.std(1) + eps)`, of one channel less."""
    centred = b("Sub", x, mean(b, x))
    squares = mean(b, b("Mul", centred, centred))
    variance = b("Div", b("Mul", squares, b.array(float(CHANNELS))), b.array(CHANNELS - 1.0))
    return b("Div", centred, b("Add", b("Sqrt", variance), b.array(1e-3)))


def by_a_fast_variance_of_channels(b: Builder, x: str, rank: int) -> str:
    average = mean(b, x)
    variance = b("Sub", mean(b, b("Mul", x, x)), b("Mul", average, average))
    root = b("Sqrt", b("Add", b("Max", variance, b.array(0.0)), b.array(1e-4)))
    return b("Mul", b("Div", b("Sub", x, average), root), of_channels(b, 0, rank))


def with_a_residual(b: Builder, x: str, rank: int) -> str:
    shape = [dim.dim_param or dim.dim_value for dim in b.inputs[0].type.tensor_type.shape.dim]
    return b("Add", layer_norm(b, x, rank), b.input("residual", shape))


FORMS: tuple[Form, ...] = (
    by_a_fast_variance_of_channels,
    over_the_deviation,
    over_a_length_of_its_own_dimension,
    with_a_variance_of_its_own_dimension,
    layer_norm,
    by_the_reciprocal,
    rms_norm,
    of_length_one,
    scaled_first,
    with_a_residual,
)


def between_transposes(norm: Callable[[Builder, str], str]) -> Form:
    """As timm has it, diffusers' autoencoders, VITS and Wav2Vec2."""

    def form(b: Builder, x: str, rank: int) -> str:
        there, back = [0, *range(2, rank), 1], [0, rank - 1, *range(1, rank - 1)]
        return b("Transpose", norm(b, b("Transpose", x, perm=there)), perm=back)

    form.__name__ = norm.__name__
    return form


TURNED = tuple(map(between_transposes, (layer_norm_op, spelled_out, to_a_power, by_a_fast_variance)))


def model_of(form: Form, dtype: int = FLOAT, shape: tuple[int | str, ...] = IMAGE) -> ModelProto:
    b = Builder(dtype, opset=17)
    return b.model(form(b, b.input("x", shape), len(shape)))


def feed_of(model: ModelProto) -> dict[str, np.ndarray]:
    found = {}
    for index, value in enumerate(model.graph.input):
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value or SIZES[dim.dim_param] for dim in dims]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        found[value.name] = (2 * draw(*shape, seed=index) + 0.5).astype(dtype)
    return found


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
@pytest.mark.parametrize("shape", [IMAGE, (2, CHANNELS, 8, 8), ("batch", CHANNELS, "frames")], ids=str)
@pytest.mark.parametrize("form", [*FORMS, *TURNED], ids=lambda form: form.__name__)
def test_a_form_is_one_kernel_and_has_the_bits_of_the_model(
    form: Form, shape: tuple[int | str, ...], dtype: int
) -> None:
    model = model_of(form, dtype, shape)
    analysis = analysed(model)
    (site,) = analysis.sites
    assert isinstance(site.fusion, Normalisation)
    fused = sweep.rewritten(analysis)
    assert [node.op_type for node in fused.graph.node] == ["FusedPointwise_0"]
    assert not sweep.difference(model, fused, [feed_of(model)])
    if dtype == FLOAT:
        check_meaning(model, site.fusion, feed_of(model))


@pytest.mark.parametrize("form", [*FORMS, *TURNED], ids=lambda form: form.__name__)
def test_threads_of_a_warp_read_neighbours(form: Form) -> None:
    """And parameters of adjacent channels at once, where those are aligned."""
    (site,) = analysed(model_of(form, FLOAT16)).sites
    assert site.whole is not None
    for plan in site.whole.plans:
        for variant in plan.variants:
            assert isinstance(variant.tile, NormTile)
            assert variant.tile.across
            assert variant.tile.block_n >= CHANNELS
            assert {way.width for way in (*variant.spec.loads, *variant.spec.outs) if way.kind == "tile"} == {1}
        widest, narrow = plan.variants[0].spec, plan.variants[-1].spec
        assert {way.width for way in narrow.loads} == {1}
        assert all(way.width == 8 for way in widest.loads if way.kind == "row")


def with_a_view_of_the_variance(b: Builder, x: str, rank: int) -> str:
    """As torch.export has `torch.var`, where the sizes are known."""
    centred = b("Sub", x, mean(b, x))
    averages = b("ReduceMean", b("Mul", centred, centred), axes=[1], keepdims=0)
    height, width = (dim.dim_value for dim in b.inputs[0].type.tensor_type.shape.dim[2:])
    shape = b.integers(-1, 1, height, width) if height else b("Shape", mean(b, x))
    normal = b("Div", centred, b("Sqrt", b("Add", b("Reshape", averages, shape), b.array(1e-5))))
    return b("Mul", normal, of_channels(b, 0, rank))


@pytest.mark.parametrize(("shape", "count"), [((2, CHANNELS, 8, 8), 1), (("batch", CHANNELS, 6, 9), 1), (IMAGE, 0)])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_a_view_of_the_variance_whose_sizes_are_known(shape: tuple[int | str, ...], count: int, dtype: int) -> None:
    model = model_of(with_a_view_of_the_variance, dtype, shape)
    analysis = analysed(model)
    assert len(analysis.sites) == count
    assert not sweep.difference(model, sweep.rewritten(analysis), [feed_of(model)])


def with_views(b: Builder, x: str, rank: int) -> str:
    """As Restormer has it: pixels in one dimension, and behind it as they were."""
    tokens = b("Reshape", x, b.integers(0, CHANNELS, -1))
    rows = layer_norm_op(b, b("Transpose", tokens, perm=[0, 2, 1]))
    return b("Reshape", b("Transpose", rows, perm=[0, 2, 1]), b("Shape", x))


def test_pixels_in_one_dimension() -> None:
    model = model_of(with_views, FLOAT16)
    fused = sweep.rewritten(analysed(model))
    assert "Transpose" not in [node.op_type for node in fused.graph.node]
    assert not sweep.difference(model, fused, [feed_of(model)])


def there_alone(b: Builder, x: str, rank: int) -> str:
    """As in front of ConvNeXt's products."""
    return layer_norm_op(b, b("Transpose", x, perm=[0, 2, 3, 1]))


def read_by_others(b: Builder, x: str, rank: int) -> str:
    rows = b("Transpose", x, perm=[0, 2, 3, 1])
    return b("Transpose", b("Add", layer_norm_op(b, rows), rows), perm=[0, 3, 1, 2])


@pytest.mark.parametrize("form", [there_alone, read_by_others], ids=lambda form: form.__name__)
def test_a_transpose_whose_rows_are_wanted_stays(form: Form) -> None:
    model = model_of(form)
    fused = sweep.rewritten(analysed(model))
    assert [node.op_type for node in fused.graph.node][:2] == ["Transpose", "FusedPointwise_0"]
    assert not sweep.difference(model, fused, [feed_of(model)])


def test_few_rows_beside_each_other_stay_rows() -> None:
    model = model_of(TURNED[0], FLOAT, ("batch", CHANNELS, 4, 4))
    assert [node.op_type for node in sweep.rewritten(analysed(model)).graph.node].count("Transpose") > 0


def moved_behind(b: Builder, x: str, rank: int) -> str:
    return b("Transpose", layer_norm(b, x, rank), perm=[0, 2, 3, 1])


def test_a_transpose_that_brings_rows_together_stays_behind() -> None:
    model = model_of(moved_behind)
    fused = sweep.rewritten(analysed(model))
    assert [node.op_type for node in fused.graph.node] == ["FusedPointwise_0", "Transpose"]
    assert not sweep.difference(model, fused, [feed_of(model)])


def of_two_axes(b: Builder, x: str, rank: int) -> str:
    average = b("ReduceMean", b("Mul", x, x), axes=[1, 2], keepdims=1)
    return b("Div", x, b("Sqrt", b("Add", average, b.array(1e-5))))


def without_the_axis(b: Builder, x: str, rank: int) -> str:
    average = b("ReduceMean", b("Mul", x, x), axes=[1], keepdims=0)
    return b("Div", x, b("Sqrt", b("Add", average, b.array(1e-5))))


def by_a_mean_of_rows(b: Builder, x: str, rank: int) -> str:
    """The mean is along another axis than that of squares."""
    centred = b("Sub", x, b("ReduceMean", x, axes=[-1], keepdims=1))
    return b("Div", centred, b("Sqrt", b("Add", mean(b, b("Mul", centred, centred)), b.array(1e-5))))


def in_double(b: Builder, x: str, rank: int) -> str:
    wide = Builder(TensorProto.DOUBLE)
    wide.nodes, wide.initializers = b.nodes, b.initializers
    return rms_norm(wide, wide("Cast", x, to=TensorProto.DOUBLE), rank)


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (of_two_axes, IMAGE),
        (without_the_axis, (3, 3, 3)),
        (in_double, IMAGE),
        (of_length_one, ("batch", MOST_ACROSS + 8, 4, 4)),
        (of_length_one, ("batch", "channels", 4, 4)),
    ],
)
def test_what_is_none_is_none(form: Form, shape: tuple[int | str, ...]) -> None:
    assert not any(isinstance(site.fusion, Normalisation) for site in analysed(model_of(form, FLOAT, shape)).sites)


def test_a_mean_of_another_axis_is_no_part() -> None:
    """What is centred otherwise is what an RMSNorm reads."""
    model = model_of(by_a_mean_of_rows)
    analysis = analysed(model)
    assert not any(isinstance(site.fusion, Normalisation) and site.fusion.centred for site in analysis.sites)
    assert not sweep.difference(model, sweep.rewritten(analysis), [feed_of(model)])
