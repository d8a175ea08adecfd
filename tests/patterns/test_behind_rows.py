"""What one kernel does behind normalised rows: halves that turn, heads that move, what each row has beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onnxfuse.ir.fusion import PART_AXIS
from onnxfuse.ir.normalisation import Normalisation
from onnxfuse.lowering.site import Site
from tests.helpers.matching import check_meaning, draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.helpers.rotary_models import (
    HEAD,
    HEADS,
    NORMS,
    ROTATIONS,
    Rotate,
    feed,
    half,
    layer_norm,
    normalised,
    root_mean_square,
    tables,
)
from tests.patterns.test_normalisation import analysed
from tests.tools import sweep

WIDTH = HEADS * HEAD


def the_norm(model) -> tuple[Site, Normalisation]:
    (site,) = analysed(model).sites
    assert isinstance(site.fusion, Normalisation)
    return site, site.fusion


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_rotation_is_steps_of_normalised_heads(rotate: Rotate, norm: Rotate, together: bool, scaled: bool) -> None:
    model = normalised(rotate, norm, together=together, scaled=scaled)
    site, fusion = the_norm(model)
    assert site.match.out == model.graph.output[0].name
    assert (fusion.parts, fusion.size(PART_AXIS), "rotary" in fusion.features) == (2, 2, True)
    check_meaning(model, fusion, feed(model, 5))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_without_us_the_file_computes_the_same_bits(rotate: Rotate, norm: Rotate) -> None:
    for dtype in (FLOAT, FLOAT16):
        model = normalised(rotate, norm, dtype=dtype)
        assert not sweep.difference(model, sweep.rewritten(analysed(model)), [feed(model, 5)])


def on_rows(b: Builder) -> str:
    return layer_norm(b, b.input("x", ("batch", "rows", WIDTH)), WIDTH)


def residual(b: Builder) -> str:
    """As behind the second norm of each block of Gemma 2."""
    return b("Add", b.input("skip", ("batch", "rows", WIDTH)), on_rows(b))


def gated(b: Builder) -> str:
    """As in Mamba 2, whose gate is an activation of another value."""
    return b("Mul", on_rows(b), b.input("gate", ("batch", "rows", WIDTH)))


def by_row(b: Builder) -> str:
    return b("Mul", on_rows(b), b.input("weight", ("batch", "rows", 1)))


def moved_heads(b: Builder) -> str:
    """SD3's, which are normalised and not turned."""
    y = b("Reshape", b.input("x", ("batch", "rows", WIDTH)), b.integers(0, 0, HEADS, HEAD))
    return b("Transpose", root_mean_square(b, y, HEAD), perm=[0, 2, 1, 3])


def halves(b: Builder) -> str:
    first, second = b("Split", on_rows(b), outputs=2, axis=-1, num_outputs=2)
    return b("Mul", first, b("Sigmoid", second))


def windows(b: Builder) -> str:
    """Swin's: rows change places."""
    y = layer_norm(b, b.input("x", ("batch", 8, 6, HEAD)), HEAD)
    y = b("Reshape", y, b.integers(-1, 2, 4, 2, 3, HEAD))
    return b("Reshape", b("Transpose", y, perm=[0, 1, 3, 2, 4, 5]), b.integers(-1, 12, HEAD))


BEHIND = [residual, gated, by_row, moved_heads, halves, windows]


def drawn(model) -> dict[str, np.ndarray]:
    sizes = {"batch": 2, "rows": 5}
    shapes = {
        value.name: [sizes.get(dim.dim_param) or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    return {name: draw(*shape, seed=seed).astype(np.float32) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize(
    ("behind", "features"),
    [
        (residual, ("bias", "residual", "scale")),
        (by_row, ("bias", "scale")),
        (moved_heads, ("scale",)),
        (halves, ("bias", "gate", "scale", "sigmoid")),
    ],
)
def test_what_a_report_says(behind: Callable[[Builder], str], features: tuple[str, ...]) -> None:
    b = Builder(FLOAT, opset=18)
    assert the_norm(b.model(behind(b)))[1].features == features


@pytest.mark.parametrize("behind", BEHIND)
def test_it_is_one_kernel_with_what_is_behind(behind: Callable[[Builder], str]) -> None:
    b = Builder(FLOAT, opset=18)
    model = b.model(behind(b))
    site, fusion = the_norm(model)
    assert site.match.out == model.graph.output[0].name
    check_meaning(model, fusion, drawn(model))
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [drawn(model)])


def test_a_normalised_row_that_is_an_output_is_stored_as_well() -> None:
    b = Builder(FLOAT, opset=18)
    y = on_rows(b)
    model = b.model(b("Relu", y), y)
    _, fusion = the_norm(model)
    assert {tensor.name for tensor in fusion.outputs} == {value.name for value in model.graph.output}
    check_meaning(model, fusion, drawn(model))


def columns_first(b: Builder) -> str:
    """A kernel that goes along rows would store single elements."""
    return b("Transpose", on_rows(b), perm=[0, 2, 1])


def one_half(b: Builder) -> str:
    """The others of the row are normalised as well, and stored nowhere."""
    return b("Relu", half(b, on_rows(b), 0, WIDTH // 2))


def itself(b: Builder) -> str:
    x = b.input("x", ("batch", "rows", WIDTH))
    return b("Mul", layer_norm(b, x, WIDTH), x)


def added_and_normalised(b: Builder) -> str:
    """ONNX Runtime adds in the kernel of the second one."""
    total = b("Add", b.input("skip", ("batch", "rows", WIDTH)), on_rows(b))
    return b("LayerNormalization", total, b.array(draw(WIDTH, seed=8), "other"), axis=-1)


@pytest.mark.parametrize("behind", [columns_first, one_half, itself, added_and_normalised])
def test_it_stays_behind(behind: Callable[[Builder], str]) -> None:
    b = Builder(FLOAT, opset=18)
    model = b.model(behind(b))
    first = analysed(model).sites[0]
    assert [first.graph.nodes[index].op for index in first.match.nodes] == ["LayerNormalization"]
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [drawn(model)])


def rms(b: Builder, x: str) -> str:
    """As exporters write it, with a cast of what is fp32 as it is."""
    wide = b("Cast", x, to=FLOAT)
    root = b("Sqrt", b("Add", b("ReduceMean", b("Mul", wide, wide), b.integers(-1)), b.array(1e-6)))
    return b("Div", wide, root)


def groups(b: Builder, x: str) -> str:
    """As torch's GroupNorm, between two Reshapes."""
    ones, zeros = b.array(np.ones(4), "ones"), b.array(np.zeros(4), "zeros")
    made = b("InstanceNormalization", b("Reshape", x, b.integers(0, 4, -1)), ones, zeros)
    return b("Reshape", made, b.integers(0, 12, WIDTH))


@pytest.mark.parametrize(("behind", "rows"), [(rms, "rows"), (groups, 12)])
def test_what_the_next_one_begins_with_is_its_own(behind: Callable[[Builder, str], str], rows: str | int) -> None:
    b = Builder(FLOAT, opset=18)
    first = layer_norm(b, b.input("x", ("batch", rows, WIDTH)), WIDTH)
    total = b("Add", b.input("skip", ("batch", rows, WIDTH)), first)
    model = b.model(behind(b, total))
    sites = analysed(model).sites
    assert [site.match.out for site in sites] == [total, model.graph.output[0].name]
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [drawn(model)])


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_a_view_that_moves_nothing_stays_behind(dtype: int) -> None:
    """It is free there, and in 16 bits the CPU's provider would round otherwise."""
    b = Builder(dtype, opset=18)
    y = b("Mul", layer_norm(b, b.input("x", ("batch", 5, HEAD)), HEAD), b.array(draw(HEAD), "weight"))
    rows = b("Concat", b.input("others", ("batch", 2, 1, HEAD)), b("Unsqueeze", y, b.integers(2)), axis=1)
    model = b.model(b("Add", b("Neg", rows), b.array(draw(HEAD, seed=4), "more")))
    assert the_norm(model)[0].match.out == y
    feed = {name: value.astype(b.numpy) for name, value in drawn(model).items()}
    assert not sweep.difference(model, sweep.rewritten(analysed(model)), [feed])


def test_q_and_k_have_their_tables_in_common() -> None:
    """Grouped queries: heads of k are fewer."""
    b = Builder(FLOAT, opset=18)
    cos, sin = tables(b, HEAD)
    outs = []
    for name, heads in (("q", HEADS), ("k", 2)):
        y = b("Reshape", b.input(name, ("batch", "rows", heads * HEAD)), b.integers(0, 0, heads, HEAD))
        y = b("LayerNormalization", y, b.array(draw(HEAD, seed=heads), f"scale of {name}"), axis=-1)
        y = b("Transpose", y, perm=[0, 2, 1, 3])
        first, second = b("Split", y, outputs=2, axis=-1, num_outputs=2)
        outs.append(b("Add", b("Mul", y, cos), b("Mul", b("Concat", b("Neg", second), first, axis=-1), sin)))
    model = b.model(*outs)
    sites = analysed(model).sites
    assert [site.match.out for site in sites] == [value.name for value in model.graph.output]
    for site in sites:
        check_meaning(model, site.fusion, drawn(model))
