"""Between a softmax and its product a guard is what changes no probability, as ONNX Runtime computes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.attention import Attention
from onnxfuse.pipeline import analyse_model
from tests.helpers.attention_graphs import SIZES, feeds, merged, number, scores
from tests.helpers.onnx_build import BOOL, FLOAT, FLOAT16, Builder, run
from tests.helpers.reference_attention import evaluate_attention
from tests.tools.sweep import rewritten

Guarding = Callable[[Builder, str], str]


def short(b: Builder, p: str, fill: float = 0.0) -> str:
    return b("Where", b("IsNaN", p), number(b, fill), p)


def nan_to_num(b: Builder, p: str) -> str:
    """Torch's, exported by TorchScript: one after another, and infinities of double ones."""
    p = short(b, p)
    for op, most in (("Greater", 65504.0), ("Less", -65504.0)):
        infinite = b("Cast", b("IsInf", b("Cast", p, to=TensorProto.DOUBLE)), to=TensorProto.BOOL)
        p = b("Where", b("And", infinite, b(op, p, number(b, 0.0))), number(b, most), p)
    return p


def beside_each_other(b: Builder, p: str) -> str:
    """The same from torch.export: all conditions are of the probability itself."""
    wide = b("Cast", p, to=FLOAT)
    infinite, zero = b("IsInf", wide), number(b, 0.0, np.dtype(np.float32))
    guarded = b("Where", b("IsNaN", wide), number(b, 0.0), p)
    guarded = b("Where", b("And", b("Less", wide, zero), infinite), number(b, -65504.0), guarded)
    return b("Where", b("And", b("Greater", wide, zero), infinite), number(b, 65504.0), guarded)


def infinities(b: Builder, p: str) -> str:
    return b("Where", b("IsInf", p), number(b, 1.0), p)


def ones(b: Builder, p: str) -> str:
    return short(b, p, 1.0)


def small_ones(b: Builder, p: str) -> str:
    return b("Where", b("Less", p, number(b, 0.004)), number(b, 0.0), p)


def below_the_smallest(b: Builder, p: str) -> str:
    return b("Where", b("Less", p, number(b, 0.0)), number(b, 0.5), p)


def inverse(b: Builder, p: str) -> str:
    return b("Where", b("IsNaN", p), p, number(b, 0.0))


GUARDS = (short, nan_to_num, beside_each_other, infinities, ones, small_ones, below_the_smallest, inverse)


def what_it_does(guard: Guarding) -> bool | None:
    """Whether NaN becomes 0, by a run; None where another number changes, or NaN becomes one."""
    b = Builder(FLOAT)
    p = np.append(np.linspace(0, 1, 1001), np.nan).astype(np.float32)
    (found,) = run(b.model(guard(b, b.input("p", (1002,)))), {"p": p})
    changes = not np.array_equal(found[:-1], p[:-1]) or not (np.isnan(found[-1]) or found[-1] == 0)
    return None if changes else not np.isnan(found[-1])


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["f16", "bf16"])
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_guards_are_those_that_change_no_probability(guard: Guarding, dtype: int) -> None:
    b = Builder(dtype)
    model = b.model(*merged(b, guard(b, b("Softmax", scores(b), axis=-1))))
    sites = analyse_model(model, [ARCHITECTURES["sm_90a"]]).sites
    attentions = [site.fusion for site in sites if isinstance(site.fusion, Attention)]
    assert [each.guarded for each in attentions] == [each for each in [what_it_does(guard)] if each is not None]


def test_a_guarded_probability_that_is_read_elsewhere_is_told() -> None:
    b = Builder(TensorProto.FLOAT16)
    p = b("Softmax", scores(b), axis=-1)
    model = b.model(*merged(b, short(b, p)), b("ReduceMax", p))
    analysis = analyse_model(model, [ARCHITECTURES["sm_90a"]])
    assert not [site for site in analysis.sites if isinstance(site.fusion, Attention)]
    assert analysis.skipped[0].reason == "probability_is_read"


@pytest.mark.parametrize("op", ["Cast", "Identity"])
@pytest.mark.parametrize("guarded", [False, True])
def test_an_op_of_the_same_name_in_another_domain_may_compute_anything(op: str, guarded: bool) -> None:
    b = Builder(TensorProto.FLOAT16)
    p = b(op, b("Softmax", scores(b), axis=-1), **({"to": TensorProto.FLOAT16} if op == "Cast" else {}))
    model = onnx.shape_inference.infer_shapes(b.model(*merged(b, short(b, p) if guarded else p)), data_prop=True)
    assert [
        True for site in analyse_model(model, [ARCHITECTURES["sm_90a"]]).sites if isinstance(site.fusion, Attention)
    ]
    next(node for node in model.graph.node if node.output[0] == p).domain = "elsewhere"
    model.opset_import.append(onnx.helper.make_opsetid("elsewhere", 1))
    analysis = analyse_model(model, [ARCHITECTURES["sm_90a"]])
    assert not [site for site in analysis.sites if isinstance(site.fusion, Attention)]


LOWEST = {FLOAT: float(np.finfo(np.float32).min), FLOAT16: -65504.0}


def masked_twice(
    b: Builder,
    fill: float,
    zero: float = 0.0,
    other: str = "mask",
    casts: bool = False,
    keeps: tuple[bool, bool] = (False,) * 2,
) -> onnx.ModelProto:
    """An attention whose mask takes scores, and probabilities again, each time with a Cast of its own or none."""

    def filled(mask: str, value: str, filling: str, keeps: bool) -> str:
        mask = b("Cast", mask, to=BOOL) if casts else mask
        return b("Where", mask, *((value, filling) if keeps else (filling, value)))

    mask = b.input("mask", ("batch", 1, "rows", "keys"), BOOL)
    mask_of_p = mask if other == "mask" else b.input(other, ("batch", 1, "rows", "keys"), BOOL)
    s = filled(mask, b("Mul", scores(b), number(b, 0.25)), number(b, fill), keeps[0])
    return b.model(*merged(b, filled(mask_of_p, b("Softmax", s, axis=-1), number(b, zero), keeps[1])))


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["f32", "f16"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("fill", ["lowest", "-inf"])
def test_zeros_of_what_a_mask_took_before_are_a_guard(fill: str, casts: bool, keeps: bool, dtype: int) -> None:
    """XSoftmax of DeBERTa and SEW-D; rows of which the mask leaves nothing are 0."""
    lowest = LOWEST[dtype] if fill == "lowest" else -np.inf
    model = masked_twice(Builder(dtype), lowest, casts=casts, keeps=(keeps, keeps))
    analysis = analyse_model(model, [ARCHITECTURES["sm_90a"]])
    (attention,) = [site.fusion for site in analysis.sites if isinstance(site.fusion, Attention)]
    feed = feeds(model, SIZES)
    feed["mask"][:, :, 3] = not keeps
    (expected,) = run(model, feed)
    assert not expected[:, 3].any()
    np.testing.assert_allclose(evaluate_attention(attention, feed), expected.astype(np.float64), rtol=2**-9, atol=2**-9)
    assert run(rewritten(analysis), feed)[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "changed",
    [{"fill": -10.0}, {"zero": 1.0}, {"other": "other"}, {"keeps": (False, True)}],
    ids=lambda changed: next(iter(changed)),
)
def test_zeros_of_anything_else_are_none(changed: dict[str, object]) -> None:
    model = masked_twice(Builder(FLOAT16), **{"fill": LOWEST[FLOAT16], **changed})
    sites = analyse_model(model, [ARCHITECTURES["sm_90a"]]).sites
    assert not [site for site in sites if isinstance(site.fusion, Attention)]
