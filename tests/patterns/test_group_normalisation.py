"""Normalisations of groups of channels: which forms are one kernel's, and the same bits where the nodes run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper

import onnxfuse
from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.group_normalisation import GROUP, GroupNormalisation
from onnxfuse.pipeline import analyse_model
from tests.helpers.group_models import CHANNELS, GROUPS, group_model
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder

ARCHS = "sm_90a,sm_80"


def fusions(model: ModelProto, **options: object) -> list[GroupNormalisation]:
    sites = analyse_model(model, (ARCHITECTURES["sm_90a"],), **options).sites  # type: ignore[arg-type]
    return [site.fusion for site in sites if isinstance(site.fusion, GroupNormalisation)]


FORMS: dict[str, dict[str, object]] = {
    "torch": {},
    "known sizes": {"sizes": (2, CHANNELS, 6, 8)},
    "one axis of pixels": {"sizes": ("batch", CHANNELS, "pixels")},
    "fp32": {"element": FLOAT},
    "alone": {"affine": False, "activation": ""},
    "relu": {"activation": "Relu"},
    **{op: {"activation": op, "element": FLOAT} for op in ("LeakyRelu", "Elu", "HardSigmoid", "Softplus", "Softsign")},
    "HardSwish": {"activation": "HardSwish", "element": FLOAT},
    "Gelu": {"activation": "Gelu", "element": FLOAT, "opset": 20},
    "gelu spelled out": {"activation": "gelu", "element": FLOAT},
    "mish spelled out": {"activation": "mish", "element": FLOAT},
    "bounds": {"activation": "clip", "element": FLOAT},
    "slopes of channels": {"activation": "prelu", "element": FLOAT},
    "every channel a group": {"sizes": ("batch", 96, "pixels"), "groups": 96, "element": FLOAT, "activation": "gelu"},
    "few channels, all groups": {"groups": CHANNELS},
    "an op of instances": {"form": "instance"},
    "an op of groups": {"form": "group", "opset": 21, "element": FLOAT},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
def test_fused_models_compute_the_same_bits(form: str, tmp_path: Path) -> None:
    model = group_model(**FORMS[form])
    stock, fused = tmp_path / "stock.onnx", tmp_path / "fused.onnx"
    onnx.save(model, stock)
    report = onnxfuse.optimize_file(stock, fused, arch="ptx")
    assert [site.pattern for site in report.fused] == ["normalisation"]
    assert [node.op_type for node in onnx.load(fused).graph.node] == ["FusedPointwise_0"]
    before, after = (onnxruntime.InferenceSession(path) for path in (stock, fused))
    (value,) = before.get_inputs()
    own = {"batch": 3, "h": 5, "w": 7, "pixels": 11}
    shape = [own.get(size, size) for size in value.shape]
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    x = x.astype(np.float16) if value.type == "tensor(float16)" else x
    np.testing.assert_array_equal(*(session.run(None, {"x": x})[0] for session in (after, before)))


def test_the_ir_says_what_the_nodes_say() -> None:
    (fusion,) = fusions(group_model())
    assert (fusion.size(GROUP), fusion.channels, fusion.epsilon) == (GROUPS, CHANNELS // GROUPS, pytest.approx(1e-5))
    assert fusion.einops == "b (g c) p0 p1, (g c) 1 1, (g c) 1 1 -> b (g c) p0 p1"
    assert fusion.features == ("bias", "groups", "scale", "sigmoid")
    assert "t2 = sigmoid(t1)" in str(fusion)
    (fusion,) = fusions(group_model(form="instance"))
    assert (fusion.size(GROUP), fusion.channels) == (CHANNELS, 1)


@pytest.mark.parametrize(("channels", "number"), [(CHANNELS, 2.0), (96, 1.0)])
def test_numbers_of_every_channel_are_the_kernels_where_each_is_a_group(channels: int, number: float) -> None:
    """And where a node has more than are known before the run, as the 512 ones of wav2vec 2.0."""
    b = Builder(FLOAT)
    rows = b("Reshape", b.input("x", ("batch", channels, "h", "w")), b.integers(0, channels, -1))
    stored = (numpy_helper.from_array(np.full(channels, each, np.float32)) for each in (number, 0.0))
    y = b("InstanceNormalization", rows, *(b("Constant", value=each) for each in stored))
    (fusion,) = fusions(b.model(b("Relu", b("Reshape", y, b("Shape", "x")))))
    assert (fusion.size(GROUP), [step.op for step in fusion.steps]) == (channels, ["mul", "add", "relu"])


@pytest.mark.parametrize("activation", ["", "Relu"])
def test_a_product_before_leaves_the_view_to_the_normalisation(activation: str, tmp_path: Path) -> None:
    """Of known sizes its epilogue could end with the Reshape, and nobody would normalise."""
    b = Builder(FLOAT, opset=17)
    x = b.input("x", (2, CHANNELS, 6, 4))
    rng = np.random.default_rng(0)
    product = b("Conv", x, b.array(rng.standard_normal((CHANNELS, CHANNELS, 1, 1)), "weight"), kernel_shape=[1, 1])
    rows = b("Reshape", b("Add", product, x), b.integers(0, GROUPS, -1))
    y = b("InstanceNormalization", rows, b.array(np.ones(GROUPS)), b.array(np.zeros(GROUPS)))
    y = b("Reshape", y, b.integers(2, CHANNELS, 6, 4))
    model = b.model(b(activation, y) if activation else y)
    fused, report = onnxfuse.optimize(model, arch=ARCHS)
    assert sorted(site.pattern for site in report.fused) == ["gemm_epilogue", "normalisation"]
    assert [node.op_type for node in fused.graph.node if "Fused" not in node.op_type] == []
    given = {"x": rng.standard_normal((2, CHANNELS, 6, 4)).astype(np.float32)}
    before, after = (onnxruntime.InferenceSession(each.SerializeToString()) for each in (model, fused))
    np.testing.assert_array_equal(before.run(None, given)[0], after.run(None, given)[0])


def test_a_value_that_others_read_is_the_end() -> None:
    """Of what is behind it nothing is the kernel's, however pointwise."""
    b = Builder(FLOAT16)
    x = b.input("x", ("batch", CHANNELS, "h", "w"))
    y = b("InstanceNormalization", x, b.array(np.ones(CHANNELS)), b.array(np.zeros(CHANNELS)))
    scaled = b("Mul", y, b.array(np.arange(CHANNELS).reshape(CHANNELS, 1, 1), "scale"))
    (fusion,) = fusions(b.model(b("Mul", scaled, b("Sigmoid", scaled)), scaled))
    assert [step.op for step in fusion.steps] == ["mul", "add", "mul"]
    assert [out.tensor.name for out in fusion.outs] == [scaled]


def shared_view(b: Builder) -> str:
    """What the group is seen as is an output's as well."""
    x = b.input("x", ("batch", CHANNELS, "h", "w"))
    rows = b("Reshape", x, b.integers(0, GROUPS, -1))
    y = b("InstanceNormalization", rows, b.array(np.ones(GROUPS)), b.array(np.zeros(GROUPS)))
    return b("Add", b("Reshape", y, b("Shape", x)), b("Reshape", rows, b("Shape", x)))


def scaled_groups(b: Builder) -> str:
    """Groups are scaled before the image is one again."""
    x = b.input("x", ("batch", CHANNELS, "h", "w"))
    rows = b("Reshape", x, b.integers(0, GROUPS, -1))
    y = b("InstanceNormalization", rows, b.array(np.full(GROUPS, 2.0)), b.array(np.zeros(GROUPS)))
    return b("Reshape", y, b("Shape", x))


def another_shape(b: Builder) -> str:
    """The image that comes out has its pixels turned."""
    x, like = b.input("x", ("batch", CHANNELS, "h", "w")), b.input("like", ("batch", CHANNELS, "w", "h"))
    rows = b("Reshape", x, b.integers(0, GROUPS, -1))
    y = b("InstanceNormalization", rows, b.array(np.ones(GROUPS)), b.array(np.zeros(GROUPS)))
    return b("Reshape", y, b("Shape", like))


@pytest.mark.parametrize("write", [shared_view, scaled_groups, another_shape])
def test_near_forms_are_no_groups_of_channels(write: Callable[[Builder], str]) -> None:
    """What is between their views may be a normalisation of rows of pixels."""
    b = Builder(FLOAT16)
    assert [fusion for fusion in fusions(b.model(write(b))) if fusion.channels > 1] == []


def test_rounding_as_the_model_does_leaves_the_nodes() -> None:
    assert fusions(group_model(), rounding="onnx") == []
