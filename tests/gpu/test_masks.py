"""Masks of type bool in ONNX Runtime's CUDA provider: each broadcast, both strategies, small and large M, widths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.corpus_runs import judged
from tests.helpers.masked_models import MODELS, SIZES, built, feed
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "fp32"), [(FLOAT, "tf32"), (FLOAT, "exact"), (FLOAT16, "tf32")])
@pytest.mark.parametrize("graph", MODELS)
def test_a_masked_model_is_as_good_as_the_original(
    graph: Callable[[Builder], str], dtype: int, fp32: str, tmp_path: Path
) -> None:
    model = built(graph, dtype)
    result = judged(model, [feed(model, *size) for size in SIZES], tmp_path, "native", fp32)
    assert result.provider.startswith("CUDA")
    assert result.passed, str(result)
