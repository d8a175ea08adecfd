"""Norms inside of an attention, for which ONNX Runtime has no CPU kernel: the reference has them in front of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.verify.float64_model import float64_model
from onnxfuse.verify.node_types import node_types
from tests.helpers.cached_model import GROUPS, HEAD, HEADS, cached_feeds, cached_model
from tests.helpers.onnx_build import FLOAT

PAST = 4  # keys in the cache before


def outputs(model: ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    reference = float64_model(model, node_types()).model
    return onnxruntime.InferenceSession(reference.SerializeToString()).run(None, feeds)


def normalised(rows: np.ndarray, heads: int, weights: np.ndarray, epsilon: float) -> np.ndarray:
    split = rows.astype(np.float64).reshape(*rows.shape[:2], heads, HEAD)
    scaled = split / np.sqrt((split**2).mean(-1, keepdims=True) + epsilon) * weights
    return scaled.reshape(rows.shape).astype(np.float32)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize("epsilons", [{}, {"qk_norm_epsilon": 0.5}, {"qk_norm_epsilon": 0.5, "k_norm_epsilon": 0.1}])
def test_the_reference_is_that_of_rows_normalised_before(epsilons: dict[str, float], packed: bool, tokens: int) -> None:
    """Of a model without norms that is fed what they make."""
    model = cached_model(packed, element=FLOAT, norms=True, **epsilons)
    weights = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    feeds = {name: value.astype(np.float32) if value.dtype == np.float16 else value
             for name, value in cached_feeds(packed, tokens, PAST, 20, batch=1).items()}  # fmt: skip
    both = epsilons.get("qk_norm_epsilon", 1e-6)
    of_key = epsilons.get("k_norm_epsilon", both)
    found = outputs(model, feeds)
    own = feeds["query"] if packed else np.concatenate([feeds[name] for name in ("query", "key", "value")], axis=2)
    query, key, value = np.split(own, [HEADS * HEAD, (HEADS + GROUPS) * HEAD], axis=2)
    rows = [
        normalised(query, HEADS, weights["query_norm"], both),
        normalised(key, GROUPS, weights["key_norm"], of_key),
        value,
    ]
    fed = {"query": np.concatenate(rows, axis=2)} if packed else dict(zip(("query", "key", "value"), rows, strict=True))
    out, *caches = outputs(cached_model(packed, element=FLOAT), feeds | fed)
    np.testing.assert_allclose(found[0], out, rtol=1e-5, atol=1e-5)
    for one, other in zip(found[1:], caches, strict=True):
        known = np.s_[:, :, : PAST + tokens]
        np.testing.assert_allclose(one[known], other[known], rtol=1e-5, atol=1e-5)
