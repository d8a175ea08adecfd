"""Small ONNX models for tests, written as one would write them on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper

if TYPE_CHECKING:
    import onnxruntime

FLOAT = onnx.TensorProto.FLOAT
FLOAT16 = onnx.TensorProto.FLOAT16
BFLOAT16 = onnx.TensorProto.BFLOAT16
BOOL = onnx.TensorProto.BOOL


class Builder:
    """Collects nodes; `b("Add", x, y)` makes a node and returns its output's name; arrays become initializers."""

    def __init__(self, dtype: int = FLOAT, opset: int = 20) -> None:
        self.dtype, self.opset = dtype, opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    @property
    def numpy(self) -> np.dtype:
        return helper.tensor_dtype_to_np_dtype(self.dtype)

    def input(self, name: str, shape: Sequence[int | str | None], dtype: int | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype or self.dtype, shape))
        return name

    def array(self, value: np.ndarray | float | Sequence[float], name: str = "", integer: bool = False) -> str:
        array = np.asarray(value, np.int64 if integer else self.numpy)
        name = name or f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def raw(self, value: np.ndarray, name: str) -> str:
        """An initializer of the array's own type, without a copy more than ONNX needs."""
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def mask(self, value: np.ndarray, name: str = "") -> str:
        name = name or f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, np.bool_), name))
        return name

    def integers(self, *values: int) -> str:
        return self.array(np.array(values), integer=True)

    def scalar(self, value: int) -> str:
        return self.array(np.array(value), integer=True)

    @overload
    def __call__(self, op: str, *inputs: str, outputs: int, domain: str = "", **attributes: object) -> list[str]: ...

    @overload
    def __call__(self, op: str, *inputs: str, domain: str = "", **attributes: object) -> str: ...

    def __call__(
        self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: object
    ) -> str | list[str]:
        names = [f"v{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(
            helper.make_node(op, inputs, names, name=f"{op}_{len(self.nodes)}", domain=domain, **attributes)
        )
        return names[0] if outputs == 1 else names

    def model(self, *outputs: str, ir_version: int = 9) -> ModelProto:
        values = [helper.make_tensor_value_info(name, self.dtype, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "test", self.inputs, values, self.initializers)
        for value in graph.output:
            value.ClearField("type")
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=ir_version)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True)
        shapes = {value.name: value for value in inferred.graph.output}
        for value in graph.output:
            value.CopyFrom(shapes[value.name])
            if not value.type.tensor_type.elem_type:  # of an op that ONNX does not know
                value.type.tensor_type.elem_type = self.dtype
        model.graph.CopyFrom(graph)
        return model


def of_sizes(model: ModelProto, sizes: Mapping[str, int]) -> ModelProto:
    """The model with some of its unknown sizes known: of any number of rows a site has some ten kernels to compile."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return model


def cpu_session(model: ModelProto, folds: bool = False) -> onnxruntime.InferenceSession:
    """Plain ONNX Runtime on the CPU, graph optimisation off or such that it folds constants, no library registered."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # others take four times as long to start as a small model to load, and spin
    level = "ORT_ENABLE_BASIC" if folds else "ORT_DISABLE_ALL"
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: ModelProto, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of one run in a `cpu_session`."""
    session = cpu_session(model)
    return session.run(None, {entry.name: feed[entry.name] for entry in session.get_inputs()})
