"""Attentions in ONNX Runtime's CUDA provider: forms, types, heads, ragged lengths from run to run, captured graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto

import onnxfuse
from onnxfuse.graph.op_names import FUSED_ATTENTION, kind_of
from onnxfuse.runtime.driver import local_architectures
from onnxfuse.verify.verify import verify
from tests.helpers.attention_graphs import BY_EINSUM, FORMS, LEFT_ALONE_IN_FP32, SIZES, feeds, model_of, of_heads
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder, run
from tests.patterns.test_diagonal import FOUND as DIAGONALS
from tests.patterns.test_diagonal import Mask, attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("sm_90a" not in local_architectures(), reason="there is no attention kernel for this GPU"),
]
DYNAMIC = [
    {"batch": 1, "rows": 1, "keys": 4000},
    {"batch": 2, "rows": 16, "keys": 1500},
    SIZES,
    {"batch": 1, "rows": 129, "keys": 256},
    {"batch": 3, "rows": 1, "keys": 8},
    {"batch": 1, "rows": 300, "keys": 1000},
    {"batch": 2, "rows": 65, "keys": 77},
    {"batch": 1, "rows": 2, "keys": 1},
]
CUDA = ["CUDAExecutionProvider"]


@dataclass(frozen=True)
class Type:
    """An ONNX type, as tests feed it: in fp32, which the model casts. What they feed fp16 holds, and so does TF32."""

    number: int
    numpy: np.dtype
    rounding: float


NAMES = ("f16", "bf16", "f32")
TYPES = [
    Type(FLOAT16, np.dtype(np.float16), 2.0**-11),
    Type(BFLOAT16, np.dtype(ml_dtypes.bfloat16), 2.0**-8),
    Type(FLOAT, np.dtype(np.float16), 2.0**-11),
]
CASES = [
    pytest.param(form, each, id=f"{form}-{name}")
    for form in FORMS
    for name, each in zip(NAMES, TYPES, strict=True)
    if form not in {"bf16": BY_EINSUM, "f32": LEFT_ALONE_IN_FP32}.get(name, ())
]


def fused(model: ModelProto, folder: Path) -> Path:
    made, _ = onnxfuse.optimize(model, arch="sm_90a", attention=True)
    assert [kind_of(node.op_type) for node in made.graph.node if node.domain == "onnxfuse"] == [FUSED_ATTENTION]
    onnx.save(made, folder / "fused.onnx")
    return folder / "fused.onnx"


def rounded(feed: dict[str, np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    """What a type holds exactly, in fp32; masks of type bool as they are."""
    return {
        name: value if value.dtype == np.bool_ else value.astype(dtype).astype(np.float32)
        for name, value in feed.items()
    }


def check(found: np.ndarray, model: ModelProto, feed: dict[str, np.ndarray], each: Type) -> None:
    """Against the same graph in fp32: probabilities are rounded once, and the mean of the values that they weigh."""
    (expected,) = run(model, feed)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    largest = np.abs(feed["value" if "value" in feed else "v"]).max()
    worst = np.nanmax(np.abs(found - expected), initial=0)
    assert worst <= 2.2 * each.rounding * largest, f"{worst / each.rounding / largest:.2f} units"


@pytest.mark.parametrize(("form", "each"), CASES)
def test_a_form_at_lengths_that_change_from_run_to_run(form: str, each: Type, tmp_path: Path) -> None:
    model, exact = model_of(form, each.number, cast=True), model_of(form, FLOAT)
    live = onnxfuse.InferenceSession(fused(model, tmp_path), providers=CUDA)
    for sizes in DYNAMIC:
        feed = rounded(feeds(exact, sizes), each.numpy)
        (found,) = live.run(None, feed)
        check(found, exact, feed, each)


@pytest.mark.parametrize("each", [TYPES[0], TYPES[2]], ids=["f16", "f32"])
@pytest.mark.parametrize("mask", DIAGONALS)
def test_masks_that_the_model_builds_at_changing_lengths(mask: Mask, each: Type, tmp_path: Path) -> None:
    """Blocks of keys are left out; rows that a finite mask leaves nothing look at all of them."""
    model, exact = (b.model(*attention(b, mask)[0]) for b in (Builder(each.number), Builder(FLOAT)))
    live = onnxfuse.InferenceSession(fused(model, tmp_path), providers=CUDA)
    own = np.float32 if each.number == FLOAT else each.numpy
    for sizes in DYNAMIC:
        feed = rounded(feeds(exact, sizes), each.numpy)
        given = {name: value if value.dtype == np.bool_ else value.astype(own) for name, value in feed.items()}
        (found,) = live.run(None, given)
        check(found.astype(np.float32), exact, feed, each)


@pytest.mark.parametrize("each", TYPES, ids=NAMES)
@pytest.mark.parametrize("head", [8, 40, 64, 80, 96, 128, 160, 256])
def test_heads_of_every_size(head: int, each: Type, tmp_path: Path) -> None:
    heads = 2 if head < 256 else 4  # two of them are left alone
    model, exact = of_heads(head, each.number, heads, cast=True), of_heads(head, FLOAT, heads)
    live = onnxfuse.InferenceSession(fused(model, tmp_path), providers=CUDA)
    for sizes in DYNAMIC[:4]:
        feed = rounded(feeds(exact, sizes), each.numpy)
        (found,) = live.run(None, feed)
        check(found, exact, feed, each)


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT], ids=["f16", "f32"])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in LEFT_ALONE_IN_FP32])
def test_verify_passes(form: str, dtype: int, tmp_path: Path) -> None:
    """fp32 in TF32; odd lengths by the kernel that reads elements."""
    model = model_of(form, dtype)
    onnx.save(model, tmp_path / "original.onnx")
    result = verify(tmp_path / "original.onnx", fused(model, tmp_path), inputs=[feeds(model, each) for each in DYNAMIC])
    assert result.provider.startswith("CUDA")
    assert result.passed, str(result)


def test_a_captured_graph_reads_what_its_inputs_hold(tmp_path: Path) -> None:
    import onnxruntime

    model = of_heads(64, FLOAT16, sizes=SIZES)
    path = fused(model, tmp_path)
    live = onnxfuse.InferenceSession(path, providers=[("CUDAExecutionProvider", {"enable_cuda_graph": "1"})])
    plain = onnxfuse.InferenceSession(path, providers=CUDA)
    binding, bound = live.io_binding(), {}
    for name, value in feeds(model).items():
        bound[name] = onnxruntime.OrtValue.ortvalue_from_numpy(value, "cuda", 0)
        binding.bind_ortvalue_input(name, bound[name])
    shape = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
    out = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float16, "cuda", 0)
    binding.bind_ortvalue_output(live.get_outputs()[0].name, out)
    for seed in (0, 0, 1, 2):
        feed = feeds(model, seed=seed)
        for name, value in feed.items():
            bound[name].update_inplace(value)
        live.run_with_iobinding(binding)
        np.testing.assert_array_equal(out.numpy(), plain.run(None, feed)[0])


def test_scores_leave_no_tensor(tmp_path: Path) -> None:
    """At 8,192 tokens the scores of these heads alone would take a gigabyte; equal inputs give equal bits."""
    model = of_heads(64, FLOAT16, heads=8)
    live = onnxfuse.InferenceSession(
        fused(model, tmp_path), providers=[("CUDAExecutionProvider", {"gpu_mem_limit": str(1 << 28)})]
    )
    feed = feeds(model, {"batch": 1, "rows": 8192, "keys": 8192})
    first, second = (live.run(None, feed)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()
