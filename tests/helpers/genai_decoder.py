"""A decoder in the form that ONNX Runtime GenAI's model builder writes: Llama's layers with a cache, and its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from tests.helpers.optimized_layers import EPSILON, MICROSOFT, Layers, Sizes

SIZES = Sizes(width=64, hidden=128, heads=4, groups=2)
HEAD = SIZES.width // SIZES.heads
COUNT = 2  # layers
VOCABULARY = 24
CONTEXT = 64  # tokens
CACHE = ("batch_size", SIZES.groups, "past_sequence_length", "kv_cache_dim")


class Decoder(Layers):
    """Builds one."""

    def lengths(self) -> tuple[str, str]:
        """Of the mask: the last index of each row's keys, and how many keys there are."""
        mask = self.input("attention_mask", ("batch_size", "total_sequence_length"), TensorProto.INT64)
        last = self("Sub", self("ReduceSum", mask, self.integers(1), keepdims=0), self.integers(1))
        total = self("Gather", self("Shape", mask), self.scalar(1), axis=0)
        return self("Cast", last, to=TensorProto.INT32), self("Cast", total, to=TensorProto.INT32)

    def turned(self) -> tuple[str, str]:
        """Cosines and sines of the positions."""
        angles = np.outer(np.arange(CONTEXT), 10_000.0 ** (-np.arange(0, HEAD, 2) / HEAD))
        return self.array(np.cos(angles), "cos_cache"), self.array(np.sin(angles), "sin_cache")

    def attended(self, x: str, layer: int, lengths: tuple[str, str], caches: tuple[str, str]) -> str:
        """GroupQueryAttention of one packed product and a cache."""
        packed = self("MatMul", x, self.weight(SIZES.width, (SIZES.heads + 2 * SIZES.groups) * HEAD))
        past = [self.input(f"past_key_values.{layer}.{each}", CACHE) for each in ("key", "value")]
        outputs = [f"attended.{layer}", *(f"present.{layer}.{each}" for each in ("key", "value"))]
        counts = {"num_heads": SIZES.heads, "kv_num_heads": SIZES.groups, "do_rotary": 1, "scale": HEAD**-0.5}
        inputs = [packed, "", "", *past, *lengths, *caches]
        self.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **counts))
        return outputs[0]

    def decoder(self) -> ModelProto:
        """From tokens to logits."""
        tokens = self.input("input_ids", ("batch_size", "sequence_length"), TensorProto.INT64)
        lengths, caches = self.lengths(), self.turned()
        total = self("Gather", self.weight(VOCABULARY, SIZES.width), tokens)
        y = self(
            "SimplifiedLayerNormalization", total, self.weight(SIZES.width), axis=-1, epsilon=EPSILON, stash_type=1
        )
        for layer in range(COUNT):
            o = self("MatMul", self.attended(y, layer, lengths, caches), self.weight(SIZES.width, SIZES.width))
            y, total = self.rms_normalised(total, o)
            y, total = self.rms_normalised(total, self.gated_mlp(y), wanted=layer + 1 < COUNT)
        self.nodes.append(helper.make_node("MatMul", [y, self.weight(SIZES.width, VOCABULARY)], ["logits"]))
        return self.finished(
            "logits", *(f"present.{layer}.{each}" for layer in range(COUNT) for each in ("key", "value"))
        )


def decoder(dtype: int) -> ModelProto:
    """A decoder of few tokens with drawn weights."""
    model = Decoder(SIZES, dtype).decoder()
    for output in model.graph.output:
        shape = (*CACHE[:2], "total_sequence_length", CACHE[3])
        shape = ("batch_size", "sequence_length", VOCABULARY) if output.name == "logits" else shape
        output.CopyFrom(helper.make_tensor_value_info(output.name, dtype, shape))
    return model


NAMES = {
    "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask",
               "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
    "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
}  # fmt: skip


def write_folder(place: Path, model: ModelProto, options: Mapping[str, object]) -> Path:
    """What GenAI reads: the model with its data beside it, and the configuration; no tokenizer, tokens are numbers."""
    place.mkdir()
    onnx.save(model, place / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=256)
    part = {"filename": "model.onnx", "head_size": HEAD, "hidden_size": SIZES.width, "num_hidden_layers": COUNT,
            "num_attention_heads": SIZES.heads, "num_key_value_heads": SIZES.groups,
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": [], **options}, **NAMES}  # fmt: skip
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
    settings = {"model": {**ends, "context_length": CONTEXT, "type": "llama", "decoder": part},
                "search": {"max_length": CONTEXT, "past_present_share_buffer": True}}  # fmt: skip
    (place / "genai_config.json").write_text(json.dumps(settings))
    return place
