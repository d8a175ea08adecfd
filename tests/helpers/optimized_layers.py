"""Layers of transformers in the form that ONNX Runtime's transformers optimizer and GenAI's builder leave them in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, helper

from tests.helpers.onnx_build import FLOAT16, Builder

MICROSOFT = "com.microsoft"
EPSILON = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Widths of a layer: of the residual, of the MLP, heads, and of these groups of keys and values."""

    width: int
    hidden: int
    heads: int
    groups: int = 0


class Layers(Builder):
    """Builds layers; weights repeat a million drawn numbers."""

    def __init__(self, sizes: Sizes, dtype: int = FLOAT16) -> None:
        super().__init__(dtype, opset=17)
        self.sizes = sizes
        self._drawn = np.random.default_rng(0).standard_normal(1 << 20, np.float32)

    def weight(self, *shape: int) -> str:
        """A weight, or a vector."""
        scale = 1 / math.sqrt(shape[0]) if len(shape) > 1 else 0.5
        values = np.resize((self._drawn * scale).astype(self.numpy), shape)
        return self.raw(values, f"w{len(self.initializers)}")

    def contrib(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> list[str]:
        """A node of ONNX Runtime's; its outputs."""
        names = [f"v{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=MICROSOFT, **attributes))
        return names

    def normalised(self, product: str, skip: str, bias: str = "", wanted: bool = True) -> tuple[str, str]:
        """SkipLayerNormalization: its result and the sum, which is empty where nobody wants it."""
        name = f"v{len(self.nodes)}"
        outputs = [f"{name}_y", *(["", "", f"{name}_sum"] if wanted else [])]
        inputs = [product, skip, self.weight(self.sizes.width), self.weight(self.sizes.width), bias]
        op = "SkipLayerNormalization"
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=MICROSOFT, epsilon=EPSILON))
        return outputs[0], outputs[-1] if wanted else ""

    def rms_normalised(self, product: str, skip: str, wanted: bool = True) -> tuple[str, str]:
        """SkipSimplifiedLayerNormalization."""
        name = f"v{len(self.nodes)}"
        outputs = [f"{name}_y", *(["", "", f"{name}_sum"] if wanted else [])]
        inputs = [product, skip, self.weight(self.sizes.width)]
        op = "SkipSimplifiedLayerNormalization"
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=MICROSOFT, epsilon=EPSILON))
        return outputs[0], outputs[-1] if wanted else ""

    def attention(self, x: str, **attributes: int) -> str:
        """Attention, which has the product of q, k and v inside."""
        width = self.sizes.width
        packed = self.weight(width, 3 * width), self.weight(3 * width)
        return self.contrib("Attention", x, *packed, num_heads=self.sizes.heads, **attributes)[0]

    def many_heads(self, x: str) -> str:
        """MultiHeadAttention of three products with their biases."""
        width = self.sizes.width
        parts = [self("Add", self("MatMul", x, self.weight(width, width)), self.weight(width)) for _ in range(3)]
        return self.contrib("MultiHeadAttention", *parts, num_heads=self.sizes.heads)[0]

    def grouped_heads(self, x: str, batch: int, tokens: int) -> str:
        """GroupQueryAttention of one packed product, its cache empty."""
        sizes = self.sizes
        head = sizes.width // sizes.heads
        packed = self("MatMul", x, self.weight(sizes.width, sizes.width + 2 * sizes.groups * head))
        if not any(tensor.name == "lengths" for tensor in self.initializers):
            self.raw(np.full(batch, tokens - 1, np.int32), "lengths")
            self.raw(np.array(tokens, np.int32), "total")
            for name in ("cos", "sin"):
                self.raw(np.ones((tokens, head // 2), self.numpy), name)
        inputs = packed, "", "", "", "", "lengths", "total", "cos", "sin"
        counts = {"num_heads": sizes.heads, "kv_num_heads": sizes.groups, "do_rotary": 1}
        return self.contrib("GroupQueryAttention", *inputs, outputs=3, **counts)[0]

    def mlp(self, x: str, op: str) -> str:
        """Product, an activation with its bias, product."""
        sizes = self.sizes
        hidden = self("MatMul", x, self.weight(sizes.width, sizes.hidden))
        (active,) = self.contrib(op, hidden, self.weight(sizes.hidden))
        return self("MatMul", active, self.weight(sizes.hidden, sizes.width))

    def gated_mlp(self, x: str) -> str:
        """Gate, up and down."""
        sizes = self.sizes
        gate, up = (self("MatMul", x, self.weight(sizes.width, sizes.hidden)) for _ in range(2))
        return self(
            "MatMul", self("Mul", self("Mul", gate, self("Sigmoid", gate)), up), self.weight(sizes.hidden, sizes.width)
        )

    def finished(self, *outputs: str) -> ModelProto:
        """The model."""
        graph = helper.make_graph(self.nodes, "layers", self.inputs, [], self.initializers)
        for name in outputs:
            graph.output.add(name=name).type.tensor_type.elem_type = self.dtype
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def bert(b: Layers, x: str, shape: tuple[int, int], count: int) -> str:
    """Normalised behind each sum, which nobody else wants."""
    for _ in range(count):
        o = b("MatMul", b.attention(x), b.weight(b.sizes.width, b.sizes.width))
        y, _ = b.normalised(o, x, b.weight(b.sizes.width), wanted=False)
        x, _ = b.normalised(b.mlp(y, "BiasGelu"), y, b.weight(b.sizes.width), wanted=False)
    return x


def vit(b: Layers, x: str, shape: tuple[int, int], count: int) -> str:
    """Normalised in front: every sum but the last goes on. Whisper's encoder is the same."""
    y, total = b("LayerNormalization", x, b.weight(b.sizes.width), b.weight(b.sizes.width)), x
    for layer in range(count):
        o = b("MatMul", b.many_heads(y), b.weight(b.sizes.width, b.sizes.width))
        y, total = b.normalised(o, total, b.weight(b.sizes.width))
        y, total = b.normalised(b.mlp(y, "BiasGelu"), total, b.weight(b.sizes.width), wanted=layer + 1 < count)
    return y


def gpt2(b: Layers, x: str, shape: tuple[int, int], count: int) -> str:
    """The same with the product of q, k and v inside of Attention, and the other GELU."""
    y, total = b("LayerNormalization", x, b.weight(b.sizes.width), b.weight(b.sizes.width)), x
    for layer in range(count):
        o = b("MatMul", b.attention(y, unidirectional=1), b.weight(b.sizes.width, b.sizes.width))
        y, total = b.normalised(o, total, b.weight(b.sizes.width))
        y, total = b.normalised(b.mlp(y, "FastGelu"), total, b.weight(b.sizes.width), wanted=layer + 1 < count)
    return y


def llama(b: Layers, x: str, shape: tuple[int, int], count: int) -> str:
    """Grouped heads and a gate, as GenAI's builder writes them."""
    y = b("SimplifiedLayerNormalization", x, b.weight(b.sizes.width), axis=-1, epsilon=EPSILON, stash_type=1)
    total = x
    for layer in range(count):
        o = b("MatMul", b.grouped_heads(y, *shape), b.weight(b.sizes.width, b.sizes.width))
        y, total = b.rms_normalised(o, total)
        y, total = b.rms_normalised(b.gated_mlp(y), total, wanted=layer + 1 < count)
    return y


FORMS = {"bert": bert, "vit": vit, "whisper": vit, "gpt2": gpt2, "llama": llama}


def layers(form: str, sizes: Sizes, shape: tuple[int, int], count: int, dtype: int = FLOAT16) -> onnx.ModelProto:
    """A model of some layers, one behind the other, of batch and tokens as given; its input is `x`."""
    b = Layers(sizes, dtype)
    x = b.input("x", (*shape, sizes.width))
    return b.finished(FORMS[form](b, x, shape, count))
