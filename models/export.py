"""Build a real architecture from its configuration, with seeded weights, and export it with one of torch's exporters.

    python models/export.py --list
    python models/export.py btb_320 --out exported --exporter torchscript --dtype fp16

Needs torch, diffusers, transformers, onnx and onnxscript (models/README.md); nothing is downloaded, and nothing else of
the project imports this script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

DEFAULT_OPSET = {"torchscript": 17, "dynamo": 20}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VOCABULARY = 99
IMAGE = 32


@dataclass(frozen=True)
class Example:
    """A model, inputs to trace it with, and which of their dimensions vary.

    Attributes:
        model: the module; called with the inputs by position.
        inputs: name -> example value.
        axes: name -> dimension -> its symbol.
        outputs: names of the outputs.
    """

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    axes: dict[str, dict[int, str]]
    outputs: tuple[str, ...] = ("out",)


class FirstOutput(nn.Module):
    """A transformers model with the fields of its result that are exported, as a tuple."""

    def __init__(self, model: nn.Module, *fields: str) -> None:
        super().__init__()
        self.model, self.fields = model, fields

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the model; its inputs are `input_ids, attention_mask` or `pixel_values`."""
        names = ("input_ids", "attention_mask") if len(inputs) == 2 else ("pixel_values",)
        result = self.model(**dict(zip(names, inputs, strict=True)), return_dict=True)
        values = tuple(getattr(result, field) for field in self.fields)
        return values[0] if len(values) == 1 else values


class UNetOutput(nn.Module):
    """A diffusers UNet that returns its sample as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        """One denoising step."""
        return self.model(sample, timestep, encoder_hidden_states, return_dict=False)[0]


class LstmGates(nn.Module):
    """The gates of an LSTM cell: one product, four ways; looks like a gate of two halves and is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The new hidden state from a cell state of zero."""
        i, _, g, o = self.gates(x).chunk(4, dim=-1)
        return torch.sigmoid(o) * torch.tanh(torch.sigmoid(i) * torch.tanh(g))


def _transformer_block(width: int, heads: int, context: int) -> Example:
    """The transformer block of the Stable Diffusion 1.5 UNet, with cross attention and a GEGLU feed-forward."""
    from diffusers.models.attention import BasicTransformerBlock

    model = BasicTransformerBlock(width, heads, width // heads, cross_attention_dim=context, activation_fn="geglu")
    inputs = {"hidden_states": torch.randn(2, 16, width), "encoder_hidden_states": torch.randn(2, 7, context)}

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = model

        def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
            return self.block(hidden_states, encoder_hidden_states=encoder_hidden_states)

    axes = {"hidden_states": {0: "batch", 1: "sequence"}, "encoder_hidden_states": {0: "batch", 1: "text"}}
    return Example(Block(), inputs, axes)


def _feed_forward(activation: str, width: int) -> Example:
    from diffusers.models.attention import FeedForward

    model = FeedForward(width, activation_fn=activation)
    return Example(model, {"hidden_states": torch.randn(2, 16, width)}, {"hidden_states": {0: "batch", 1: "sequence"}})


def _unet() -> Example:
    """A UNet with the layout of Stable Diffusion 1.5 and narrow layers."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64, 64, 64),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
        layers_per_block=1,
    )
    inputs = {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([7, 7]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
    }
    axes = {
        "sample": {0: "batch", 2: "height", 3: "width"},
        "timestep": {0: "batch"},
        "encoder_hidden_states": {0: "batch", 1: "text"},
    }
    return Example(UNetOutput(model), inputs, axes, ("out_sample",))


def _tokens() -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    ids = torch.randint(0, VOCABULARY, (2, 9))
    axes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, axes


def _bert() -> Example:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=64, attn_implementation="eager")  # fmt: skip
    return Example(
        FirstOutput(BertModel(config), "last_hidden_state", "pooler_output"),
        *_tokens(),
        ("last_hidden_state", "pooler_output"),
    )


def _vit() -> Example:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                       image_size=IMAGE, patch_size=8, attn_implementation="eager")  # fmt: skip
    model = FirstOutput(ViTModel(config, add_pooling_layer=False), "last_hidden_state")
    return Example(model, {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE)}, {"pixel_values": {0: "batch"}})


def _decoder(family: str) -> Example:
    """One layer of a causal language model, without its head."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        use_cache=False, attn_implementation="eager")  # fmt: skip
    model = FirstOutput(getattr(transformers, f"{family}Model")(config), "last_hidden_state")
    return Example(model, *_tokens())


def _lstm_gates() -> Example:
    return Example(LstmGates(24), {"x": torch.randn(2, 5, 24)}, {"x": {0: "batch", 1: "sequence"}})


MODELS: dict[str, Callable[[], Example]] = {
    "btb": lambda: _transformer_block(32, 2, 24),
    "unet_block": lambda: _transformer_block(96, 4, 64),
    "btb_320": lambda: _transformer_block(320, 8, 768),
    "btb_640": lambda: _transformer_block(640, 8, 768),
    "btb_1280": lambda: _transformer_block(1280, 8, 768),
    "ff_geglu": lambda: _feed_forward("geglu", 48),
    "ff_swiglu": lambda: _feed_forward("swiglu", 48),
    "ff_gelu": lambda: _feed_forward("gelu", 48),
    "sd15_unet_mini": _unet,
    "bert": _bert,
    "vit": _vit,
    "llama": lambda: _decoder("Llama"),
    "phi3": lambda: _decoder("Phi3"),
    "lstm_gates": _lstm_gates,
}


def build(name: str, dtype: str, seed: int = 0) -> Example:
    """Build a model with seeded weights, in evaluation mode; its float inputs have its dtype."""
    torch.manual_seed(seed)
    example = MODELS[name]()
    draw_weights(example.model)
    model = example.model.eval().to(DTYPES[dtype])
    inputs = {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in example.inputs.items()}
    return Example(model, inputs, example.axes, example.outputs)


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Weights whose products keep the variance, and vectors off their defaults: a bias of zeros would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))


def without_paths(target: Path) -> None:
    """Drop the stack traces that the dynamo exporter notes at each node: they hold paths of this machine."""
    model = onnx.load(target)
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if not entry.key.endswith("stack_trace")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(model, target)


def export(example: Example, target: Path, exporter: str, opset: int) -> None:
    """Export with dynamic axes to one file, weights inside."""
    names = list(example.inputs)
    arguments = tuple(example.inputs.values())
    if exporter == "torchscript":
        axes = {**example.axes, **{name: {0: "batch"} for name in example.outputs}}
        options: dict[str, Any] = {"dynamic_axes": axes, "dynamo": False}
    else:
        symbols = {s: torch.export.Dim(s) for dims in example.axes.values() for s in dims.values()}
        axes = {name: {d: symbols[s] for d, s in example.axes[name].items()} for name in names}
        shapes = (tuple(axes.values()),) if isinstance(example.model, FirstOutput) else tuple(axes.values())
        options = {"dynamic_shapes": shapes, "dynamo": True, "external_data": False}
    with torch.no_grad():
        torch.onnx.export(
            example.model, arguments, str(target), input_names=names, output_names=list(example.outputs),
            opset_version=opset, **options)  # fmt: skip
    without_paths(target)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=sorted(MODELS), help="which model")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--out", type=Path, default=Path("exported"), help="a folder, or a file NAME.onnx")
    parser.add_argument("--exporter", choices=sorted(DEFAULT_OPSET), default="torchscript")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp16")
    parser.add_argument("--opset", type=int, help="default: 17 for torchscript, 20 for dynamo")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(MODELS))
        return
    if arguments.name is None:
        parser.error("give a NAME, or --list")
    target: Path = arguments.out
    if target.suffix != ".onnx":
        target /= f"{arguments.name}.{arguments.exporter}.{arguments.dtype}.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    opset = arguments.opset or DEFAULT_OPSET[arguments.exporter]
    export(build(arguments.name, arguments.dtype, arguments.seed), target, arguments.exporter, opset)
    print(f"wrote {target} ({target.stat().st_size:,} bytes)", file=sys.stderr)


if __name__ == "__main__":
    main()
