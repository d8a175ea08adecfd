"""What tests.perf.genai_decode times: layers of GenAI's form, and the same output fused, small and on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from tests.helpers.genai_decoder import decoder
from tests.helpers.onnx_build import FLOAT16
from tests.helpers.optimized_layers import Sizes
from tests.perf.genai_decode import COUNT, FORMS, PAST, Decoder, bound, distance, feeds_of, output_of

SMALL = Sizes(256, 512, 4, 2)
ARCH = "sm_90a"


def test_the_layers_are_those_that_genai_runs() -> None:
    """Only the embedding in front and lm_head behind are not timed."""
    timed = [node.op_type for node in Decoder(SMALL, None).decoder().graph.node]
    runs = [node.op_type for node in decoder(FLOAT16).graph.node]
    first = runs.index("SimplifiedLayerNormalization")
    assert timed[timed.index("SimplifiedLayerNormalization") :] == runs[first:-1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_fused_layers_write_the_same_into_a_shared_cache(form: str, tmp_path: Path) -> None:
    stock, fused = tmp_path / "stock.onnx", tmp_path / "fused.onnx"
    onnx.save(Decoder(SMALL, FORMS[form]).decoder(), stock)
    report = onnxfuse.optimize_file(stock, fused, arch=ARCH)
    products = [site for site in report.fused if site.pattern != "normalisation"]
    assert len(products) >= 3 * COUNT  # o, the gate, down
    runs = [bound(path, feeds_of(SMALL, 2), "cpu", {}) for path in (stock, fused)]
    first, second = map(output_of, runs)
    assert first.std() > 0.1
    assert distance(second, first) < 2**-8
    before = feeds_of(SMALL, 2)["past_key_values.1.value"]
    for run in runs:  # which has written where it read
        (cache,) = (value.numpy() for spec, value in run.inputs.items() if spec.name == "past_key_values.1.value")
        np.testing.assert_array_equal(cache[:, :, :PAST], before[:, :, :PAST])
        np.testing.assert_array_equal(cache[:, :, PAST + 1 :], before[:, :, PAST + 1 :])
        assert not np.array_equal(cache[:, :, PAST], before[:, :, PAST])
