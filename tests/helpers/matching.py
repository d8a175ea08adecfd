"""Small graphs around one product, spellings of gates and activations, and the check that a fusion means its graph."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from onnxfuse.errors import NotFusable
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.ir.fusion import Fusion
from onnxfuse.lowering.site import Site
from onnxfuse.patterns import Match, match_sites
from onnxfuse.pipeline import Analysis
from tests.helpers.onnx_build import Builder, run
from tests.helpers.reference_fusion import evaluate

K, N = 6, 8  # of the product; the halves have N / 2 columns


def sites(model) -> list[tuple[Match, Fusion] | NotFusable]:
    graph = Graph(load_model(model))
    found = match_sites(graph, lambda match, fusion: (match, fusion))
    return [*found.fused, *(refusal for _, refusal in found.skipped)]


def with_product(analysis: Analysis) -> list[Site]:
    """The fusions of a model but for its normalisations, which have no product."""
    return [site for site in analysis.sites if site.match.products]


def only(model) -> tuple[Match, Fusion]:
    (site,) = sites(model)
    if isinstance(site, NotFusable):
        raise site
    return site


def refusal(model) -> NotFusable:
    (site,) = sites(model)
    assert isinstance(site, NotFusable), f"fused: {site[1]}"
    return site


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def linear(b: Builder, n: int = N, bias: bool = True, shape=("batch", "rows", K)) -> str:
    x = b.input("x", shape)
    product = b("MatMul", x, b.array(draw(K, n), "weight"))
    return b("Add", product, b.array(draw(n, seed=1), "bias")) if bias else product


def check_meaning(model, fusion: Fusion, feed: dict[str, np.ndarray], tolerance: float = 2e-5) -> None:
    """The fusion, computed straight from the IR in float64, is what ONNX Runtime makes of the original graph."""
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    expected = run_values(model, [tensor.name for tensor in fusion.outputs], feed)
    for wanted, actual in zip(expected, evaluate(fusion, stored | feed | run_inputs(model, fusion, feed)), strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance)


def run_values(model, names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Any values of a model, in ONNX Runtime."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    inferred = onnx.shape_inference.infer_shapes(model)
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
    copy.graph.output.extend(known[name] for name in names)
    return run(copy, feed)


def run_inputs(model, fusion: Fusion, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What other nodes of the model make for a fusion."""
    made = {name for node in model.graph.node for name in node.output}
    names = [tensor.name for tensor in fusion.inputs if tensor.name in made]
    return dict(zip(names, run_values(model, names, feed), strict=True)) if names else {}


FEED = {"x": draw(2, 5, K, seed=2).astype(np.float32)}


def split_num_outputs(b: Builder, t: str) -> list[str]:
    return b("Split", t, outputs=2, axis=2, num_outputs=2)


def split_to_sequence(b: Builder, t: str) -> list[str]:
    sequence = b("SplitToSequence", t, b.scalar(N // 2), axis=2)
    return [b("SequenceAt", sequence, b.scalar(index)) for index in range(2)]


def split_to_sequence_of_sizes(b: Builder, t: str) -> list[str]:
    sequence = b("SplitToSequence", t, b.integers(N // 2, N // 2), axis=-1)
    return [b("SequenceAt", sequence, b.scalar(index)) for index in (0, -1)]


def split_sizes(b: Builder, t: str) -> list[str]:
    return b("Split", t, b.integers(N // 2, N // 2), outputs=2, axis=-1)


def slice_pair(b: Builder, t: str) -> list[str]:
    half, axes = b.integers(N // 2), b.integers(-1)
    top = b.integers(2**63 - 1)
    return [b("Slice", t, b.integers(0), half, axes), b("Slice", t, half, top, axes, b.integers(1))]


def negative_bounds(b: Builder, t: str) -> list[str]:
    axes = b.integers(2)
    return [
        b("Slice", t, b.integers(-N), b.integers(-N // 2), axes),
        b("Slice", t, b.integers(-N // 2), b.integers(N), axes),
    ]


def all_but_the_columns(b: Builder, t: str) -> list[str]:
    """`t[:, :, :n]` names the other dimensions as well, in a Slice of their own or in the same."""
    top, first = b.integers(2**63 - 1), b.integers(0)
    t = b(
        "Slice", b("Slice", t, first, top, b.integers(0)), first, b.integers(2**31 - 1), b.integers(-2), b.integers(1)
    )
    return [
        b("Slice", t, b.integers(0, 0), b.integers(2**63 - 1, N // 2), b.integers(1, 2)),
        b("Slice", t, b.integers(0, N // 2), b.integers(2**31 - 1, N), b.integers(0, -1)),
    ]


def computed_chunk(b: Builder, t: str) -> list[str]:
    last = b("Gather", b("Shape", t), b.integers(-1), axis=0)
    half = b("Mul", b("Div", b("Add", last, b.integers(1)), b.integers(2)), b.integers(1))
    end = b("Mul", b("Div", b("Add", last, b.integers(1)), b.integers(2)), b.integers(2))
    axes = b.integers(-1)
    return [b("Slice", t, b.integers(0), half, axes), b("Slice", t, half, end, axes)]


def gelu_op(b: Builder, t: str) -> str:
    return b("Gelu", t)


def gelu_tanh_op(b: Builder, t: str) -> str:
    return b("Gelu", t, approximate="tanh")


def gelu_erf_half_last(b: Builder, t: str) -> str:
    inner = b("Add", b("Erf", b("Div", t, b.array(2**0.5))), b.array(1.0))
    return b("Mul", b("Mul", t, inner), b.array(0.5))


def gelu_erf_half_first(b: Builder, t: str) -> str:
    inner = b("Add", b("Erf", b("Mul", t, b.array(0.5**0.5))), b.array(1.0))
    return b("Mul", b("Mul", b.array(0.5), t), inner)


def gelu_tanh_cube_by_mul(b: Builder, t: str) -> str:
    cube = b("Mul", t, b("Mul", t, t))
    inner = b("Mul", b.array(0.7978845608), b("Add", t, b("Mul", b.array(0.044715), cube)))
    return b("Mul", b.array(0.5), b("Mul", t, b("Add", b.array(1.0), b("Tanh", inner))))


def gelu_tanh_cube_by_pow(b: Builder, t: str) -> str:
    cube = b("Mul", b("Pow", t, b.array(3.0)), b.array(0.044715))
    inner = b("Mul", b("Add", t, cube), b.array(0.7978845608))
    return b("Mul", b("Mul", t, b.array(0.5)), b("Add", b("Tanh", inner), b.array(1.0)))


def silu(b: Builder, t: str) -> str:
    return b("Mul", t, b("Sigmoid", t))


def silu_spelled_out(b: Builder, t: str) -> str:
    return b("Mul", t, b("Div", b.array(1.0), b("Add", b("Exp", b("Neg", t)), b.array(1.0))))


def quick_gelu(b: Builder, t: str) -> str:
    return b("Mul", t, b("Sigmoid", b("Mul", t, b.array(1.702))))


def elu_of_numbers_alike(b: Builder, t: str) -> str:
    """An exporter that does not optimise gives every number the type of a value by reading that value."""
    scale, one = (b("CastLike", b("Constant", value_float=number), t) for number in (1.5, 0.5))
    return b("Mul", b("Elu", b("Mul", t, scale)), one)


def sigmoid(b: Builder, t: str) -> str:
    return b("Sigmoid", t)


def relu(b: Builder, t: str) -> str:
    return b("Relu", t)


def every_second(b: Builder, t: str) -> list[str]:
    """`t[..., ::2]` and `t[..., 1::2]`, as gpt-oss has its gate: the columns of the parts take turns."""
    axes, top, two = b.integers(-1), b.integers(2**63 - 1), b.integers(2)
    return [b("Slice", t, b.integers(0), top, axes, two), b("Slice", t, b.integers(1 - N), b.integers(N), axes, two)]


def split_pairs(b: Builder, t: str) -> list[str]:
    pairs = b("Reshape", t, b.integers(0, 0, -1, 2))
    return [b("Squeeze", each, b.integers(-1)) for each in b("Split", pairs, outputs=2, axis=-1, num_outputs=2)]


def indexed_pairs(b: Builder, t: str) -> list[str]:
    pairs = b("Reshape", t, b.integers(0, 0, N // 2, 2))
    return [b("Gather", pairs, b.scalar(index), axis=3) for index in (0, -1)]


IN_TURN = [every_second, split_pairs, indexed_pairs]
SPLITS = [
    split_num_outputs, split_sizes, split_to_sequence, split_to_sequence_of_sizes, slice_pair, negative_bounds,
    all_but_the_columns, computed_chunk, *IN_TURN,
]  # fmt: skip
ACTIVATIONS = [
    gelu_op, gelu_tanh_op, gelu_erf_half_last, gelu_erf_half_first, gelu_tanh_cube_by_mul, gelu_tanh_cube_by_pow,
    silu, silu_spelled_out, quick_gelu, elu_of_numbers_alike, sigmoid, relu,
]  # fmt: skip


def gate(b: Builder, first: str, second: str) -> str:
    return b("Mul", first, b("Sigmoid", second))
