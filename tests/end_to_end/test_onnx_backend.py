"""ONNX's own backend tests, the node and model tests that ship in the `onnx` package, through `optimize`.

Their weights are inputs and nothing follows their products, so most hold nothing to fuse. Each model with a product is
therefore also taken with all its inputs but the first stored, and an activation behind its outputs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.backend.test.case import base
from onnx.backend.test.case.model import collect_testcases as model_cases
from onnx.backend.test.case.node import collect_testcases as node_cases
from onnx.reference.ops import op_pool_common

from onnxfuse.device import resolve
from onnxfuse.errors import ModelError
from onnxfuse.graph.functions import walk
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.onnx_build import cpu_session, run
from tests.helpers.thinning import Taken
from tests.tools.sweep import rewritten

DATA = Path(onnx.backend.test.__file__).parent / "data"
PRODUCTS = {"MatMul", "Gemm", "Einsum", "Conv"}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
FUSED = 10  # models with a fusion once they are completed; more as more forms are understood


@functools.cache
def cases() -> dict[str, tuple[ModelProto, dict[str, np.ndarray] | None]]:
    """Every model of the package by name, with its first feed where that is tensors only."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # the references of some node tests overflow on purpose
        # Two thirds of the time: what models of pools compute, of which the shape alone is used, and their source code.
        patch.setattr(op_pool_common, "pool", _shape_of_pool)
        patch.setattr(base, "process_snippet", lambda *_: ("", ""))
        found = [*node_cases(None), *model_cases()]
    built = {case.name: (case.model, _feed(case.model, case.data_sets)) for case in found if case.model is not None}
    return built | dict(_stored())


def _shape_of_pool(
    padded: np.ndarray, x_shape: Any, kernel: Any, strides: Any, out_shape: Any, *_: Any, **__: Any
) -> Any:
    return np.zeros([*x_shape[:2], *out_shape], padded.dtype)


def _feed(model: ModelProto, data_sets: list) -> dict[str, np.ndarray] | None:
    inputs = data_sets[0][0] if data_sets else []
    if len(inputs) != len(model.graph.input) or not all(isinstance(value, np.ndarray) for value in inputs):
        return None
    return {value.name: array for value, array in zip(model.graph.input, inputs, strict=True)}


def _stored() -> Iterator[tuple[str, tuple[ModelProto, dict[str, np.ndarray] | None]]]:
    for path in sorted(DATA.rglob("*.onnx")):
        model = onnx.load(path)
        yield path.relative_to(DATA).as_posix(), (model, _stored_feed(path, model))


def _stored_feed(path: Path, model: ModelProto) -> dict[str, np.ndarray] | None:
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in stored]
    files = [path.parent / "test_data_set_0" / f"input_{index}.pb" for index in range(len(names))]
    if not all(file.is_file() and value.type.HasField("tensor_type") for file, value in
               zip(files, model.graph.input, strict=False)):  # fmt: skip
        return None
    tensors = [onnx.load_tensor(file) for file in files]
    return dict(zip(names, map(numpy_helper.to_array, tensors), strict=True))


def completed(model: ModelProto, feed: Mapping[str, np.ndarray]) -> ModelProto:
    """The model with every input but the first stored, and a Tanh behind every float output."""
    made = ModelProto()
    made.CopyFrom(model)
    inputs = [value for value in made.graph.input if value.name in feed]
    for value in inputs[1:]:
        made.graph.initializer.append(numpy_helper.from_array(feed[value.name], value.name))
        made.graph.input.remove(value)
    for value in made.graph.output:
        if value.type.tensor_type.elem_type in FLOATS:
            made.graph.node.append(helper.make_node("Tanh", [value.name], [f"{value.name}_tanh"]))
            value.name += "_tanh"
    return made


def analyse(model: ModelProto) -> Analysis:
    return analyse_model(model, resolve("sm_90a,sm_80", list))


def test_every_product_is_fused_or_listed_and_a_model_with_nothing_to_fuse_comes_back_byte_for_byte(
    taken: Taken,
) -> None:
    assert len(cases()) > 2000
    for name, (model, _) in taken(list(cases().items()), 8):
        analysis = analyse(model)
        assert (rewritten(analysis) != model) == bool(analysis.sites), name
        products = sum(node.op_type in ("MatMul", "Gemm") for node in walk(model.graph.node))
        seconds = sum(site.fusion.pattern == "attention" for site in analysis.sites)
        assert len(analysis.sites) + seconds + len(analysis.skipped) >= products, name


def test_completed_models_keep_their_outputs() -> None:
    """To the bit, for every model that ONNX Runtime can run; what it cannot run need not be fused by anybody."""
    fused = 0
    for name, (model, feed) in cases().items():
        if feed is None or not any(node.op_type in PRODUCTS for node in walk(model.graph.node)):
            continue
        original = completed(model, feed)
        analysis = analyse(original)
        if not analysis.sites or not _runs(original):
            continue
        fused += 1
        for expected, actual in zip(run(original, feed), run(rewritten(analysis), feed), strict=True):
            assert expected.tobytes() == actual.tobytes(), name
    assert fused >= FUSED


def _runs(model: ModelProto) -> bool:
    try:
        cpu_session(model)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("version", [0, onnx.defs.onnx_opset_version() + 1])
def test_only_operator_sets_that_nobody_knows_are_refused(version: int) -> None:
    model = ModelProto()
    model.CopyFrom(cases()["test_matmul_2d"][0])
    model.opset_import[0].version = version
    with pytest.raises(ModelError, match="unknown opset"):
        analyse(model)
