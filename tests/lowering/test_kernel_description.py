"""What a file says of its kernels is read back as it was planned, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from onnxfuse.device import ARCHITECTURES
from onnxfuse.lowering.kernel_description import describe, read_description
from onnxfuse.lowering.site import Implementation
from onnxfuse.pipeline import analyse_model
from onnxfuse.schedule.families import FAMILIES
from onnxfuse.schedule.kernel_spec import KernelSpec
from tests.helpers.attention_graphs import FORMS, model_of
from tests.helpers.cached_model import cached_model
from tests.helpers.group_models import group_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.helpers.optimized_layers import Sizes, layers
from tests.helpers.quantized import Form, quantized_model

MODEL = Path(__file__).parents[2] / "models" / "ff_geglu.onnx"
DEVICES = [ARCHITECTURES[name] for name in ("sm_90a", "sm_80")]


def ragged() -> Builder:
    """A width at which the product stays the library's, with a kernel behind it."""
    b = Builder(FLOAT16)
    product = b("MatMul", b.input("x", ("rows", 771)), b.array(draw(771, 1283), "weight"))
    b("Relu", b("Add", product, b.array(draw(1283), "bias")))
    return b


def of_154_rows() -> ModelProto:
    """Of which the weight is the M side."""
    b = Builder(FLOAT16)
    x = b.input("x", (154, 4096))
    gate, up = (b("MatMul", x, b.raw(np.zeros((4096, 14336), np.float16), name)) for name in ("gate", "up"))
    return b.model(b("Mul", b("Mul", gate, b("Sigmoid", gate)), up))


def of_many_rows() -> ModelProto:
    """So few columns that rows from some number on are the library's."""
    b = Builder(FLOAT16)
    product = b("MatMul", b.input("x", ("rows", 12288)), b.raw(np.zeros((12288, 328), np.float16), "weight"))
    return b.model(b("Add", product, b.raw(np.zeros(328, np.float16), "bias")))


def of_padded_rows() -> ModelProto:
    """A weight with zeros behind its rows."""
    b = Builder(FLOAT)
    return b.model(b("Relu", b("MatMul", b.input("x", ("rows", 1138)), b.raw(np.zeros((1138, 512), np.float32), "w"))))


def of_copied_rows() -> ModelProto:
    """Rows that TMA reads in a copy alone."""
    b = Builder(FLOAT16)
    return b.model(
        b("Relu", b("MatMul", b.input("x", (2048, 2730)), b.raw(np.zeros((2730, 1024), np.float16), "weight")))
    )


def implementations() -> dict[str, Implementation]:
    """Those of several models, each with a name, and of one site both."""
    b = ragged()
    sites = [
        site
        for model in (
            MODEL,
            b.model(b.nodes[-1].output[0]),
            of_154_rows(),
            of_many_rows(),
            of_copied_rows(),
            of_padded_rows(),
        )
        for site in analyse_model(model, DEVICES).sites
    ]
    for tokens, width in ((8, 64), (2048, 512)):
        few_bits = quantized_model(layers("llama", Sizes(width, 2 * width, 4, 2), (1, tokens), 1, FLOAT16), Form(4, 32))
        sites += analyse_model(few_bits, DEVICES[:1]).sites
    for form in FORMS:
        sites += analyse_model(model_of(form), DEVICES[:1], attention=True).sites
    for model in (cached_model(), group_model()):
        sites += analyse_model(model, (ARCHITECTURES["sm_90a"],)).sites
    own = [site.implementation for site in sites] + [site.epilogue_only for site in sites if site.epilogue_only]
    return {f"{number:x}": each for number, each in enumerate(own)}


@pytest.fixture(scope="module")
def known() -> dict[str, Implementation]:
    return implementations()


def test_it_is_read_back_as_it_was(known: dict[str, Implementation]) -> None:
    found = read_description(describe(list(known.values()), list(known)))
    for name, implementation in known.items():
        # The word for the sizes that kernels are chosen by is no part of it.
        expected = [(device, replace(variant, by="m")) for device, variant in implementation.variants]
        assert [*found.kernels[name]] == expected


def test_every_family_is_among_them(known: dict[str, Implementation]) -> None:
    """And a kernel that reads a copy."""
    specs = [variant.spec for each in known.values() for _, variant in each.variants]
    assert any(isinstance(spec, KernelSpec) and spec.copied for spec in specs)
    families = {variant.family.name for each in known.values() for _, variant in each.variants}
    assert families == {family.name for family in FAMILIES}
