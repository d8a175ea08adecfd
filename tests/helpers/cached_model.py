"""A model of one GroupQueryAttention over a cache, and what it is fed.

`python -m tests.helpers.cached_model FORM STOCK FUSED` writes one of `FORMS`, and the same fused for sm_90a.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from tests.helpers.onnx_build import FLOAT16, Builder

HEADS, GROUPS, HEAD, ROOM = 8, 2, 64, 24
POSITIONS = 32
FORMS: dict[str, dict[str, Any]] = {"packed": {}, "apart": {"packed": False}, "sink": {"rotary": 0, "sink": True}}


def cached_model(
    packed: bool = True, sizes: tuple[int, int, int] = (HEADS, GROUPS, HEAD), element: int = FLOAT16, **attributes: Any
) -> ModelProto:
    """Inputs `query` (with key and value behind, or `key` and `value`), `past_*`, `lengths` and `mask`; any batch.

    Attributes are the op's; `rotary` columns of a head are turned, all where it is missing and none where it is 0; the
    cache has `cached` columns, a name or a head's; with `norms`, heads of query and key are normalised, and with `sink`
    each has one.
    """
    heads, groups, head = sizes
    b = Builder(element)
    rotary = attributes.pop("rotary", head)
    norms, sink, rng = attributes.pop("norms", False), attributes.pop("sink", False), np.random.default_rng(3)
    cached = attributes.pop("cached", head)
    width = (heads + 2 * groups) * head if packed else heads * head
    own = [b.input("query", ("batch", "tokens", width))]
    own += ["", ""] if packed else [b.input(each, ("batch", "tokens", groups * head)) for each in ("key", "value")]
    past = [b.input(f"past_{each}", ("batch", groups, "room", cached)) for each in ("key", "value")]
    lengths = b.input("lengths", ("batch",), TensorProto.INT32)
    mask = b.input("mask", ("batch", "total"), TensorProto.INT64)
    total = b("Cast", b("Gather", b("Shape", mask), b.scalar(1), axis=0), to=TensorProto.INT32)
    angles = np.outer(np.arange(POSITIONS), 100.0 ** -np.linspace(0, 1, max(rotary // 2, 1)))
    tables = [b.array(np.cos(angles), "cos"), b.array(np.sin(angles), "sin")] if rotary else []
    counts = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": int(rotary > 0), **attributes}
    outputs = ["out", "present_key", "present_value"]
    inputs = [*own, *past, lengths, total, *(tables or ["", ""]), "", ""]
    inputs += [b.array(rng.standard_normal(heads), "sink") if sink else "", "", ""]
    inputs += [b.array(rng.uniform(0.5, 1.5, head), f"{each}_norm") for each in ("query", "key")] if norms else []
    inputs = inputs[: max(place for place, name in enumerate(inputs) if name) + 1]
    b.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **counts))
    shapes = [("batch", "tokens", heads * head), *[("batch", groups, "after", head)] * 2]
    values = [helper.make_tensor_value_info(*each) for each in zip(outputs, [element] * 3, shapes, strict=True)]
    graph = helper.make_graph(b.nodes, "cached", b.inputs, values, b.initializers)
    opsets = [helper.make_opsetid("", b.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def cached_feeds(
    packed: bool, tokens: int, past: int, room: int, sizes: tuple[int, int, int] = (HEADS, GROUPS, HEAD), batch: int = 2
) -> dict[str, np.ndarray]:
    """So many tokens of each sequence behind a past, in a cache with so much room; in fp16."""
    heads, groups, head = sizes
    rng = np.random.default_rng(tokens + past)
    width = (heads + 2 * groups) * head if packed else heads * head
    shapes = {"query": (batch, tokens, width)}
    shapes |= {} if packed else dict.fromkeys(("key", "value"), (batch, tokens, groups * head))
    shapes |= {f"past_{each}": (batch, groups, room, head) for each in ("key", "value")}
    drawn = {name: rng.standard_normal(shape, np.float32).astype(np.float16) for name, shape in shapes.items()}
    lengths = np.full(batch, past + tokens - 1, np.int32)
    return {**drawn, "lengths": lengths, "mask": np.ones((batch, past + tokens), np.int64)}


def main() -> None:
    import onnxfuse

    form, stock, fused = FORMS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
    onnx.save(cached_model(**form), stock)
    onnxfuse.optimize_file(stock, fused, arch="sm_90a")


if __name__ == "__main__":
    main()
