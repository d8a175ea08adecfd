"""docs/performance.md from the committed results: `python -m tests.perf.document` writes it, a test compares it."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.perf.bars import FLOORS, LATE, bars, by_weights, over_cublas, quantile, regrets, slower_than_stock
from tests.perf.result_file import read_result

ROOT = Path(__file__).parents[2]
_OTHERS = {
    "FLASH_ATTENTION": "torch, flash",
    "EFFICIENT_ATTENTION": "torch, efficient",
    "CUDNN_ATTENTION": "torch, cuDNN",
    "MultiHeadAttention": "ONNX Runtime",
}  # by the names of results
DRAWN = (
    *(f"{gpu}-anywhere-{name}" for gpu in ("h200", "h100") for name in ("f16", "bf16", "f32")),
    *(f"h200-anywhere-odd-{name}" for name in ("f16", "bf16", "f32")),
)
TARGET = ROOT / "docs" / "performance.md"
HEAD = """\
# Performance

Made by `python -m tests.perf.document` from the files in `results/`, which the commands below wrote. Every ratio is of
two times from one run on one GPU. What limits a kernel, and what was tried, is in [the notes](kernel-notes.md).
"""


def result(name: str) -> dict[str, Any]:
    """A committed result file."""
    return read_result(ROOT / "results" / f"{name}.json")


def document() -> str:
    """The whole page."""
    return "\n".join(
        (
            HEAD,
            *_bars(),
            "## Against stock ONNX Runtime\n",
            *_whole_models(result("h200")),
            *_strangers(result("h200-strangers")),
            *_convolutions(result("h200-convolutions")),
            *_memory(result("h200-memory")),
            *_drawn([result(name) for name in DRAWN]),
            *_if_there("h200-drawn-mlps", _drawn_mlps),
            *_dynamic(result("h200-dynamic-mlp")),
            *_quantized(result("h200-quantized"), result("h200-quantized-fp32")),
            *_optimized(result("h200-optimized")),
            *_if_there("h200-genai", _decoding),
            *_if_there("h200-group-norm", _group_norm),
            *_if_there("h200-channel-norm", _channel_norm),
            *_if_there("h200-attention", _attention),
            *_if_there("h200-attention-models", _attention_models),
            *_if_there("h200-few-queries", _few_queries),
            *_if_there("h200-prefer-nhwc", _nhwc),
            *_launches(result("h200-launch")),
            *_kernels(result("h200-kernels")),
            *_widths(result("h200-widths")),
            *_few_rows(result("h200-few-rows")),
            *_splits(result("h200-splits")),
            *_exact(result("h200-exact")),
            *_tuned(result("h200-tune")),
            *_soaked(result("h200-soak")),
        )
    )


def _bars() -> list[str]:
    rows = ((what, bar, figure, "yes" if met else "**no**") for what, bar, figure, met in bars(result))
    return [
        "## What is aimed at\n",
        "By the results below. Single kernels have bars in their own table; why one is missed, say [the\n"
        "notes](kernel-notes.md).\n",
        *_table(("what", "bar", "measured", "met"), rows),
    ]


def _model(row: Mapping[str, Any]) -> str:
    return f"`{Path(row['model']).name.removesuffix('.onnx')}`"


def _memory(found: Mapping[str, Any]) -> list[str]:
    rows = [(_model(row), f"{row['stock_mb']:.0f} MB", f"{row['fused_mb']:.0f} MB") for row in found["rows"]]
    return [
        "What a session holds of the device's memory after some runs, weights, activations and code:\n",
        _source(found),
        *_table(("model", "stock", "fused"), rows),
    ]


def best_of_others(row: Mapping[str, Any]) -> tuple[float, str]:
    """Microseconds of the fastest of what others have in one kernel for an attention, and whose that is."""
    return min((float(row[name]), said) for name, said in _OTHERS.items() if name in row)


def _attention(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            row["site"], _us(row["stock"]), f"{_us(other)} ({name})", _us(row["fused"]), f"{row['fused'] / other:.2f}",
            f"{row['stock'] / row['fused']:.1f}x",
        )
        for row in found["rows"]
        for other, name in [best_of_others(row)]
    ]  # fmt: skip
    return [
        "## Attention\n",
        "Sites of whole models, as projections leave their tensors, beside torch's `scaled_dot_product_attention` by",
        "each of its backends and ONNX Runtime's `MultiHeadAttention`: of these the fastest.\n",
        _source(found),
        *_table(
            ("batch, heads (of keys), rows, keys, head", "stock", "others", "fused", "of others", "over stock"), rows
        ),
    ]


def _attention_models(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (_model(row), f"{row['stock_us']:.0f} us", f"{row['fused_us']:.0f} us", f"{row['ratio']:.2f}x")
        for row in sorted(found["rows"], key=lambda row: str(row["model"]))
    ]
    return [
        "Whole models, exported with random weights by both exporters:\n",
        _source(found),
        *_table(("model", "stock", "fused", "faster"), rows),
    ]


def _few_queries(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (row["problem"], f"{row['stock_us']:.1f} us", f"{row['fused_us']:.1f} us", f"{row['ratio']:.2f}x")
        for row in found["rows"]
    ]
    return [
        "## Attention of few query rows\n",
        "What a decoder that was exported with its cache computes for a token, fp16, rows and keys dynamic: MatMul,",
        "Mul, Softmax, MatMul and Transpose beside one kernel, whose blocks split the keys.\n",
        _source(found),
        *_table(("attention", "stock", "fused", "faster"), rows),
    ]


def _quantized(found: Mapping[str, Any], of_fp32: Mapping[str, Any]) -> list[str]:
    names = ("stock", "stock, its mode", "fused")
    plain = ("of 16 or 32 bits", "the same fused")
    every = (*found["rows"], *of_fp32["rows"])
    rows = [(row["form"], str(row["m"]), *(f"{row[name]:.1f}" for name in _timed(row, names))) for row in every]
    return [
        "## Weights of 4 and 8 bits\n",
        "The MLP of a model of 8 billion parameters, 4096 -> 2 x 14336 -> 4096 with SiLU and residual, microseconds:",
        "stock ONNX Runtime, the same with `ORT_FPA_INTB_GEMM=1`, fused; and the same MLP in fp16, or in fp32 beside",
        "activations of fp32.\n",
        _source(found),
        _source(of_fp32),
        *_table(("weights", "rows", *names, *plain), rows),
    ]


def _timed(row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """What was timed of a form, beside `names` the same without few bits."""
    plain = "fp32" if "fp32" in row else "fp16"
    return (*names, plain, f"{plain} fused")


def _optimized(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            row["form"], " x ".join(map(str, row["shape"])), f"{row['stock_us']:.1f} us", f"{row['fused_us']:.1f} us",
            f"{row['ratio']:.2f}x", " -> ".join(map(str, row["launches"])),
        )
        for row in found["layers"]
    ]  # fmt: skip
    return [
        "## Behind ONNX Runtime's own optimizer\n",
        "Two layers as its transformers optimizer, or GenAI's builder, leaves them: stock, and fused after it.\n",
        _source(found),
        *_table(("layers", "batch x length", "stock", "fused", "faster", "kernels launched"), rows),
    ]


def _if_there(name: str, section: Callable[[Mapping[str, Any]], list[str]]) -> list[str]:
    """A section whose result may not be committed yet."""
    return section(result(name)) if (ROOT / "results" / f"{name}.json").exists() else []


def _decoding(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            row["form"], str(row["batch"]), _us(row["us"]["stock"]), _us(row["us"].get("stock, its mode")),
            _us(row["us"]["fused"]), f"{row['ratio']:.2f}x", " -> ".join(map(str, row["launches"])),
        )
        for row in found["rows"]
    ]  # fmt: skip
    return [
        "## Decoding with GenAI's layers\n",
        "One layer of Llama-3-8B's width as GenAI's builder writes it, one token behind a past of 512, the cache one",
        "buffer; faster than the better of stock's modes (`ORT_FPA_INTB_GEMM`). Kernels of two layers.\n",
        _source(found),
        *_table(("weights", "batch", "stock", "stock, its mode", "fused", "faster", "kernels launched"), rows),
    ]


def _image_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (row["images"], _us(row["stock_us"]), _us(row["fused_us"]), f"{row['ratio']:.2f}x") for row in found["rows"]
    ]


def _channel_norm(found: Mapping[str, Any]) -> list[str]:
    return [
        "## Normalisations of channels\n",
        "Layer normalisations of the channels of images and of sound, with scale and shift, as SAM, NAFNet and",
        "Glow-TTS spell them out; images x channels x height x width.\n",
        _source(found),
        *_table(("images", "stock", "fused", "faster"), _image_rows(found)),
    ]


def _group_norm(found: Mapping[str, Any]) -> list[str]:
    return [
        "## Normalisations of groups of channels\n",
        "torch's GroupNorm of 32 groups as TorchScript writes it, with scale, shift and SiLU; images x channels x",
        "height x width.\n",
        _source(found),
        *_table(("images", "stock", "fused", "faster"), _image_rows(found)),
    ]


def _nhwc(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            str(row["prefer_nhwc"]), _ms(row["stock_ms"]), _ms(row["fused_ms"]), f"{row['ratio']:.2f}x",
        )
        for row in found["rows"]
    ]  # fmt: skip
    return [
        "## NHWC convolutions\n",
        "The UNet of SD1.5 in fp16, 2 x 4 x 64 x 64, with the CUDA provider's option in both.\n",
        _source(found),
        *_table(("`prefer_nhwc`", "stock", "fused", "faster"), rows),
    ]


def _source(found: Mapping[str, Any]) -> str:
    runtime = f", ONNX Runtime {found['onnxruntime']}" if "onnxruntime" in found else ""
    part = f" ({found['part']})" if "part" in found else ""
    return f"{found['gpu']}, driver {found['driver']}{runtime}, {found['date']}: `{found['command']}`{part}\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(heads), _row(["---"] * len(heads)), *map(_row, rows), ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _whole_models(found: Mapping[str, Any]) -> list[str]:
    sites = (
        (f"{row['m']}, {row['k']}, {row['n']}", _us(row["stock_us"]), _us(row["fused_us"]), f"{row['ratio']:.2f}x")
        for row in found["sites"]
    )
    heads = ("stock", "fused", "faster")
    return [
        _source(found),
        *_table(("fp16 GEGLU site: m, k, n of one half", *heads), sites),
        *_model_table(found),
    ]


def _strangers(found: Mapping[str, Any]) -> list[str]:
    rows = sorted(found["rows"], key=lambda row: float(row["ratio"]))
    kinds = {kind: [row for row in rows if f".{kind}." in row["model"]] for kind in ("f16", "f32")}
    shown = [
        (kind, str(len(own)), f"{statistics.geometric_mean(row['ratio'] for row in own):.2f}x", *map(_gain, own[:4]))
        for kind, own in kinds.items()
    ]
    return [
        "Layers of models that nobody here wrote, exported by torch with random weights from transformers, timm,",
        "diffusers and torch.nn, by both exporters; their outputs agree with stock's.\n",
        _source(found),
        *_table(("type", "models", "faster, geometric mean", "least", "", "", ""), shown),
    ]


def _convolutions(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (row["model"].removesuffix(".onnx"), str(row["sites"]), " -> ".join(map(str, row["launches"])),
         _us(row["stock_us"]), _us(row["fused_us"]), f"{row['ratio']:.2f}x", f"{row['apart']:.1g}")
        for row in sorted(found["rows"], key=lambda row: row["model"])
    ]  # fmt: skip
    return [
        "Whole networks of convolutions, likewise, of 8 images (MobileNetV2 and ConvMixer 1, UNet 4, EfficientNet-B3",
        "32 of 225 x 225, ResNeXt 64 of 160 x 160). Those that squeeze and excite amplify any rounding, with random",
        "weights: on a CPU three of them are 0.15 to 0.55 from themselves with weights cut to TF32; B3 was not run.\n",
        _source(found),
        *_table(("model", "sites", "launches", "stock", "fused", "faster", "outputs apart"), rows),
    ]


def _gain(row: Mapping[str, Any]) -> str:
    return f"{row['model'].split('.')[0]} {row['ratio']:.2f}x"


def _drawn(all_found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Problems that nobody chose; the sources, then a row each."""
    heads = [f"{kind} of cuBLAS, floor {name} us" for name in FLOORS for kind in ("mean", "worst")]
    lines = [
        "## Problems drawn at random\n",
        "Rows from 1 to 16,384, widths of real models and around them, seven epilogues, both orders of weights, sizes",
        "known or not, by `tests/perf/drawn.py`. Ours is the whole site, cuBLAS the plain product of the full width.",
        "Regret is how much slower the chosen tile is than the fastest of the ten that the cost model likes best.",
        "Plans are those of an H200, also on an H100, whose memory is slower. With `--odd` k is such that rows begin",
        "where TMA does not read them, so that they are copied or read by other kernels.\n",
        *map(_source, all_found),
        *_table(
            ("command", "problems", "slower than stock by 2 %", *heads, "regret: median, 95th"),
            map(_drawn_row, all_found),
        ),
    ]
    slower = [row for found in all_found for row in slower_than_stock(found["rows"])]
    texts = (f"`{row['problem']}` ({row['ours_us'] / row['stock_us']:.3f})" for row in slower)
    return [*lines, f"Slower than stock, times its time: {', '.join(texts) or 'none'}.\n"]


def _drawn_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    rows = found["rows"]
    cells: list[str] = []
    for floor in FLOORS:
        ratios = over_cublas(rows, floor)
        cells += (
            [f"{statistics.geometric_mean(ratios):.3f} ({len(ratios)})", f"{max(ratios):.2f}"] if ratios else ["", ""]
        )
    found_regrets = regrets(rows)
    command = found["command"].removeprefix("python -m tests.perf.anywhere ")
    slower = len(slower_than_stock(rows))
    last = quantile(found_regrets, LATE)
    return command, str(len(rows)), str(slower), *cells, f"{statistics.median(found_regrets):.1%}, {last:.1%}"


def _drawn_mlps(found: Mapping[str, Any]) -> list[str]:
    cells = (
        (name, str(len(ratios)), f"{statistics.geometric_mean(ratios):.2f}x", f"{min(ratios):.2f}x")
        for name, ratios in by_weights(found["rows"]).items()
    )
    lines = [
        "MLPs drawn at random, one behind the other, with residuals, half of them behind a LayerNormalization, so that",
        "kernels start beside each other; of any width, hidden width, number of rows and activation. Weights of 4 or 8",
        "bits have any block, and zero points or none, and are beside the faster of stock's modes:\n",
        _source(found),
    ]
    return [*lines, *_table(("activations and weights", "MLPs", "faster, mean", "least"), cells)]


def _dynamic(found: Mapping[str, Any]) -> list[str]:
    rows = sorted(found["rows"], key=lambda row: row["batch"] * row["tokens"])
    cells = (
        (f"{row['batch']} x {row['tokens']}", _us(row["stock_us"]), _us(row["fused_us"]), f"{row['ratio']:.2f}x")
        for row in rows
    )
    about = "The MLP of an 8-billion-parameter LLM, weights [k, n], one file for all sizes (batch x tokens):\n"
    return [about, _source(found), *_table(("rows", "stock", "fused", "faster"), cells)]


def _model_table(found: Mapping[str, Any]) -> list[str]:
    models = (
        (
            _model(row),
            _ms(row["original"]["median"]),
            _ms(row["optimized"]["median"]),
            f"{row['ratio']:.2f}x",
            " -> ".join(map(str, row["launches"])),
        )
        for row in found["models"]
    )
    return _table(("model", "stock", "fused", "faster", "kernels launched"), models)


def _launches(found: Mapping[str, Any]) -> list[str]:
    rows = (
        (f"{row['m']} x {row['width']}", *(_us(row[f"{name}_us"]) for name in ("neg", "fused", "original")))
        for row in found["rows"]
    )
    return [
        "## What a fused node costs the host\n",
        f"Chains of {found['nodes']} nodes put on the stream without waiting for the GPU: `Neg`, a fused MatMul, bias\n"
        "and Relu, and the three nodes that it stands for.\n",
        _source(found),
        *_table(("rows x columns", "Neg", "fused", "original, three nodes"), rows),
    ]


def _kernels(found: Mapping[str, Any]) -> list[str]:
    rows = (
        (
            row["problem"], row["order"], _us(row["cublas_us"]), _us(row["fused_us"]), f"{row['ratio']:.2f}",
            "" if row["bar"] is None else f"{row['bar']:.2f}", row["tile"],
        )
        for row in found["rows"]
    )  # fmt: skip
    heads = ("problem: m, k, n of one part", "weight", "cuBLAS", "fused", "ratio", "aim", "tile")
    return [
        "## One kernel against cuBLAS's plain product\n",
        "The product of the full width alone, without what follows it; the ratio is the fused time over cuBLAS's.\n",
        _source(found),
        *_table(heads, rows),
    ]


def _widths(found: Mapping[str, Any]) -> list[str]:
    rows = (
        (
            row["problem"], row["order"], _us(row["us"]), _us(row["peer_us"]), f"{row['ratio']:.3f}",
            "" if row["bar"] is None else f"{row['bar']:.2f}", ", ".join(map(str, row["widths"])), row["tile"],
        )
        for row in found["rows"]
    )  # fmt: skip
    heads = ("problem", "weight", "fused", "beside", "ratio", "aim", "elements an access", "tile")
    return [
        "## What wide accesses are worth\n",
        "8192 rows, k of 1280, fp16. Beside it in the same run: *floor* and *odd*, cuBLAS's plain product, with the\n"
        "time that a copy of the residual's size takes where there is an aim; *transposed*, the residual stored\n"
        "[m, n]; *worth*, the same epilogue in accesses of one element. An access to lhs, rhs, then each operand and\n"
        "output.\n",
        _source(found),
        *_table(heads, rows),
    ]


def _splits(found: Mapping[str, Any]) -> list[str]:
    rows = (
        (row["problem"], row["order"], _us(row["us"]), _us(row["estimated_us"]), row["tile"]) for row in found["rows"]
    )
    heads = ("problem: m, k, n", "weight", "measured", "estimated then", "tile")
    return [
        "## Splitting k where tiles are few\n",
        "Bias and residual; the plan's estimates were changed after this run.\n",
        _source(found),
        *_table(heads, rows),
    ]


def _few_rows(found: Mapping[str, Any]) -> list[str]:
    problems: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        problems.setdefault((row["problem"], row["order"]), []).append(row)
    rows = (
        (*problem, _us(taken["cublas_us"]), _us(taken["us"]), f"{taken['ratio']:.2f}", taken["tile"], _us(best["us"]))
        for problem, timed in problems.items()
        for taken, best in [(min(timed, key=_estimated), min(timed, key=_measured))]
    )
    heads = ("problem: m, k, n of one part", "weight", "cuBLAS", "planned", "ratio", "planned tile", "best timed")
    return [
        "## Few rows\n",
        "The tile that the plan takes, and the fastest of those timed; cuBLAS computes the plain product of the full\n"
        "width. In TF32 with weights [k, n] the product is left to the library from 17 rows on.\n",
        _source(found),
        *_table(heads, rows),
    ]


def _estimated(row: Mapping[str, Any]) -> float:
    return float(row["estimated_us"])


def _measured(row: Mapping[str, Any]) -> float:
    return float(row["us"])


def _exact(found: Mapping[str, Any]) -> list[str]:
    rows = (
        (
            row["problem"], row["order"], row["math"], _us(row["us"]), _us(row["cublas_us"]), f"{row['ratio']:.2f}",
            f"{row['error_ulp']:.2f}", row["tile"],
        )
        for row in found["rows"]
    )  # fmt: skip
    heads = ("problem: m, k, n of one part", "weight", "by", "measured", "cuBLAS", "ratio", "error", "tile")
    return [
        "## Exact fp32\n",
        "Three TF32 products or FFMA, with every tile, against cuBLAS's plain product in fp32; the error is in units\n"
        "of the last place at the output's magnitude.\n",
        _source(found),
        *_table(heads, rows),
    ]


def _soaked(found: Mapping[str, Any]) -> list[str]:
    runs, wrong, failed = sum(found["runs"].values()), len(found["wrong"]), len(found["failures"])
    return [
        "## Under load\n",
        f"{found['seconds']:.0f} seconds, {found['threads']} threads, two models, shapes that change from run to run:\n"
        f"{runs:,} runs, {found['checked']:,} outputs judged, {wrong} wrong, {failed} failed. From the third quarter\n"
        f"of the time to the last its memory grew by {found['host_growth']:,} bytes, as other work left the GPU.\n",
        _source(found),
    ]


def _tuned(found: Mapping[str, Any]) -> list[str]:
    rows = (
        (
            row["problem"], row["dtype"], _us(row["microseconds"].get("left alone")), _us(_best(row["microseconds"])),
            _us(row["microseconds"].get("behind the product")), row["planned"], row["chosen"],
        )
        for row in found["rows"]
    )  # fmt: skip
    heads = ("problem", "type", "left alone", "one kernel", "behind the product", "by estimate", "by --tune")
    return ["## What --tune chooses\n", _source(found), *_table(heads, rows)]


def _best(times: Mapping[str, float]) -> float | None:
    """The fastest tile of one kernel."""
    return min((time for name, time in times.items() if name not in ("left alone", "behind the product")), default=None)


def _us(time: float | None) -> str:
    return "" if time is None else f"{time:.1f} us"


def _ms(time: float) -> str:
    return f"{time:.3f} ms"


if __name__ == "__main__":
    TARGET.write_text(document())
    sys.exit(0)
