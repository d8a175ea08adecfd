"""Whole corpus models in ONNX Runtime's CUDA provider: fused for the GPU at hand, and judged against float64.

The models have their exporters' own graphs, tiny and of true width, in fp16 and fp32, with random weights. The bound is
that of `onnxfuse verify`; fp32 is computed in TF32 and in full precision.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.corpus_runs import RUNS, verified

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("key", "fp32"), RUNS)
def test_a_fused_model_is_as_good_as_the_original(key: str, fp32: str, tmp_path: Path) -> None:
    result = verified(key, tmp_path, "native", fp32)
    assert result.provider.startswith("CUDA")
    assert result.passed, str(result)
