"""One token of an LLM as GenAI's builder writes it: `python -m tests.perf.genai_decode --out results/h200-genai.json`.

Two layers of Llama-3-8B's width, GroupQueryAttention over a past of 512 tokens, fp16 and 4 bits (MatMulNBits, blocks of
32), batch 1 and 16; microseconds of one layer. The cache is one buffer for past and present, as GenAI binds it. Stock
ONNX Runtime (of 4 bits in both of its modes, ORT_FPA_INTB_GEMM) and the fused model, each captured in a CUDA graph with
its inputs and outputs bound, are replayed in turn, and the fused model's output is compared with stock's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

import onnxfuse
from onnxfuse.bench.contender import Contender
from onnxfuse.bench.cuda_graph import Capture, capture, new_stream
from onnxfuse.device import spec_of
from onnxfuse.runtime import driver
from onnxfuse.runtime.session import onnxruntime
from tests.helpers.optimized_layers import EPSILON, MICROSOFT, Sizes
from tests.helpers.quantized import Form
from tests.perf.behind_optimizer import MOST_APART
from tests.perf.compare import origin
from tests.perf.every_tile import in_turn
from tests.perf.quantized_mlp import MODE, Mlp
from tests.perf.result_file import write_result

SIZES = Sizes(4096, 14336, 32, 8)
FORMS = {"fp16": None, "4 bits, blocks of 32": Form(4, 32)}
BATCHES = (1, 16)
PAST, CONTEXT = 512, 1024  # tokens in the cache, and its room
COUNT = 2  # layers


class Decoder(Mlp):
    """Builds the layers between the embedding and lm_head."""

    def __init__(self, sizes: Sizes, form: Form | None) -> None:
        super().__init__(form)
        self.sizes, self.head = sizes, sizes.width // sizes.heads

    def lengths(self) -> tuple[str, str]:
        """Of the mask: the last index of each row's keys, and how many keys there are."""
        mask = self.input("attention_mask", ("batch_size", "total_sequence_length"), TensorProto.INT64)
        last = self("Sub", self("ReduceSum", mask, self.integers(1), keepdims=0), self.integers(1))
        total = self("Gather", self("Shape", mask), self.scalar(1), axis=0)
        return self("Cast", last, to=TensorProto.INT32), self("Cast", total, to=TensorProto.INT32)

    def turned(self) -> tuple[str, str]:
        """Cosines and sines of the positions."""
        angles = np.outer(np.arange(CONTEXT), 500_000.0 ** (-np.arange(0, self.head, 2) / self.head))
        return self.array(np.cos(angles), "cos_cache"), self.array(np.sin(angles), "sin_cache")

    def attended(self, x: str, layer: int, shared: tuple[str, ...]) -> str:
        """GroupQueryAttention of one packed product and a cache."""
        sizes = self.sizes
        packed = self.product(x, sizes.width, (sizes.heads + 2 * sizes.groups) * self.head)
        cache = ("batch_size", sizes.groups, "past_sequence_length", self.head)
        past = [self.input(f"past_key_values.{layer}.{each}", cache) for each in ("key", "value")]
        outputs = [f"attended.{layer}", *map(present, past)]
        counts = {"num_heads": sizes.heads, "kv_num_heads": sizes.groups, "do_rotary": 1, "scale": self.head**-0.5}
        inputs = [packed, "", "", *past, *shared]
        self.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **counts))
        return self.product(outputs[0], sizes.width, sizes.width)

    def gated(self, x: str) -> str:
        """Gate, up and down."""
        width, hidden = self.sizes.width, self.sizes.hidden
        gate, up = (self.product(x, width, hidden) for _ in range(2))
        return self.product(self("Mul", self("Mul", gate, self("Sigmoid", gate)), up), hidden, width)

    def decoder(self) -> ModelProto:
        """From embedded tokens to the last normalisation."""
        total = self.input("x", ("batch_size", "sequence_length", self.sizes.width))
        shared = *self.lengths(), *self.turned()
        weight = self.weight(self.sizes.width)
        y = self("SimplifiedLayerNormalization", total, weight, axis=-1, epsilon=EPSILON, stash_type=1)
        for layer in range(COUNT):
            y, total = self.rms_normalised(total, self.attended(y, layer, shared))
            y, total = self.rms_normalised(total, self.gated(y), wanted=layer + 1 < COUNT)
        return self.finished(y, *(present(entry.name) for entry in self.inputs if "past" in entry.name))


def present(past: str) -> str:
    """What a part of the cache is called behind the run."""
    return past.replace("past_key_values", "present")


def feeds_of(sizes: Sizes, batch: int) -> dict[str, np.ndarray]:
    """One token a row behind a past of PAST tokens, in a cache with room for CONTEXT."""
    rng = np.random.default_rng(batch)
    cache = (batch, sizes.groups, CONTEXT, sizes.width // sizes.heads)
    shapes: dict[str, tuple[int, ...]] = {"x": (batch, 1, sizes.width)}
    shapes |= {f"past_key_values.{layer}.{each}": cache for layer in range(COUNT) for each in ("key", "value")}
    drawn = {name: rng.standard_normal(shape, np.float32).astype(np.float16) for name, shape in shapes.items()}
    return {**drawn, "attention_mask": np.ones((batch, PAST + 1), np.int64)}


def bound(path: Path, feeds: Mapping[str, np.ndarray], device: str, options: Mapping[str, str]) -> Contender:
    """A session whose present is written where its past is, after a few runs."""
    settings = onnxruntime().SessionOptions()
    # Known lengths are no nodes on the host, whose copies no graph can hold.
    settings.add_free_dimension_override_by_name("total_sequence_length", PAST + 1)
    contender = Contender(path, feeds, device, options, settings)
    contender.write_to({present(spec.name): value for spec, value in contender.inputs.items() if "past" in spec.name})
    for _ in range(3):
        contender.run()
    contender.pin_outputs()
    contender.run()
    return contender


def output_of(contender: Contender) -> np.ndarray:
    """The first output of the last run."""
    output: np.ndarray = next(iter(contender.outputs().values())).numpy()
    return output.astype(np.float32)


def captured(
    path: Path, feeds: Mapping[str, np.ndarray], options: Mapping[str, str] | None = None
) -> tuple[Capture, np.ndarray]:
    """A model's run as a CUDA graph, and its first output."""
    stream = new_stream()
    contender = bound(path, feeds, "cuda", {"user_compute_stream": str(stream.ptr), **(options or {})})
    return capture(stream, contender.submit), output_of(contender)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, of the largest output."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def timed(paths: Mapping[str, Path], batch: int) -> dict[str, Any]:
    """Microseconds of one layer by the model's name, kernels launched, and how far the fused output is from stock's."""
    feeds = feeds_of(SIZES, batch)
    runs, outputs = {}, {}
    for name, path in paths.items():
        os.environ[MODE] = "1" if name == "stock, its mode" else "0"
        runs[name], outputs[name] = captured(path, feeds)
    times = in_turn([run.seconds for run in runs.values()])
    us = {name: seconds * 1e6 / COUNT for name, seconds in zip(runs, times, strict=True)}
    best = min(time for name, time in us.items() if name != "fused")
    launches = [runs[name].launches for name in ("stock", "fused")]
    apart = distance(outputs["fused"], outputs["stock"])
    return {"us": us, "ratio": best / us["fused"], "launches": launches, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    options = parser.parse_args()
    arch = spec_of(driver.local_architectures()[0]).arch
    result: dict[str, Any] = origin("python -m tests.perf.genai_decode --out results/h200-genai.json")
    result["rows"] = []
    with tempfile.TemporaryDirectory() as name:
        stock, fused = Path(name, "stock.onnx"), Path(name, "fused.onnx")
        for form in FORMS:
            onnx.save(Decoder(SIZES, FORMS[form]).decoder(), stock)
            report = onnxfuse.optimize_file(stock, fused, arch=arch, force=True)
            paths = {"stock": stock, **({"stock, its mode": stock} if FORMS[form] else {}), "fused": fused}
            for batch in BATCHES:
                row = {"form": form, "batch": batch, "past": PAST, "sites": len(report.fused), **timed(paths, batch)}
                result["rows"].append(row)
                write_result(options.out, result)
                print(*row.items(), flush=True)
                assert row["apart"] <= MOST_APART, f"{form} is wrong: {row['apart']}"


if __name__ == "__main__":
    main()
