"""Attentions of whole models beside the best that others have: `python -m tests.perf.attention --out F`.

Of each site, with q, keys and values as projections leave them (`[batch, tokens, heads * head]`): stock ONNX Runtime's
nodes, its `MultiHeadAttention`, the fused model, and torch's `scaled_dot_product_attention` by each backend that takes
the site, all in captured CUDA graphs, replayed in turn, with as many attentions of tensors of their own as it takes to
miss the L2 cache. Microseconds of one. One head of what the fused model gives is compared with float64.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, helper

import onnxfuse
from onnxfuse.bench.contender import warm
from onnxfuse.bench.cuda_graph import capture
from onnxfuse.device import spec_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import driver
from onnxfuse.runtime.feeds import from_bfloat16, to_bfloat16
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder
from tests.perf.anywhere import read
from tests.perf.compare import origin
from tests.perf.document import best_of_others
from tests.perf.every_tile import in_turn
from tests.perf.result_file import write_result
from tests.perf.torch_graph import captured_by_torch, replay_seconds

Array = np.ndarray[Any, np.dtype[Any]]
COLD = 100e6  # bytes of a model's tensors, twice the L2 cache
MOST = 12  # attentions of a model
MOST_APART: dict[int, float] = {
    FLOAT16: 2.0**-8,
    BFLOAT16: 2.0**-6,
    FLOAT: 2.0**-8,
}  # of the largest value; factors of fp32 are TF32
BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
TYPES: dict[int, str] = {FLOAT16: "float16", BFLOAT16: "bfloat16", FLOAT: "float32"}
ROUNDS = 9


@dataclass(frozen=True)
class Site:
    """Sizes of an attention.

    Attributes:
        mask: `causal`, of rows and keys in memory; `keys`, of each batch's keys; or none.
        shared: heads of queries for each head of keys.
        bar: of the time over the best of the others', or in fp32 of stock's over it.
    """

    batch: int
    heads: int
    rows: int
    keys: int
    head: int
    bar: float
    mask: str = ""
    shared: int = 1
    element: int = FLOAT16

    @property
    def copies(self) -> int:
        """Attentions beside each other."""
        size = 2 * self.batch * self.head * (self.heads * self.rows + self.heads // self.shared * self.keys) * 2
        return max(2, min(MOST, math.ceil(COLD / size)))

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Of what is added to the scores."""
        return (1, 1, self.rows, self.keys) if self.mask == "causal" else (self.batch, 1, 1, self.keys)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.shared == 1 else f"{self.heads} ({self.heads // self.shared})"
        mask = f", mask of {'rows and keys' if self.mask == 'causal' else 'keys'}" * bool(self.mask)
        return f"{self.batch}, {heads}, {self.rows}, {self.keys}, {self.head} {TYPES[self.element]}{mask}"


SITES = (
    Site(2, 8, 4096, 4096, 40, 1.10),
    Site(2, 10, 4096, 4096, 64, 1.10),
    Site(2, 8, 4096, 77, 40, 1.15),
    Site(2, 8, 1024, 1024, 80, 1.15),
    Site(2, 8, 256, 256, 160, 1.15),
    Site(1, 32, 2048, 2048, 64, 1.10, "causal"),
    Site(1, 32, 2048, 2048, 128, 1.10, "causal", shared=4),
    Site(32, 12, 128, 128, 64, 1.10, "keys"),
    Site(8, 16, 1500, 1500, 64, 1.10, element=BFLOAT16),
    Site(64, 12, 197, 197, 64, 1.10),
    Site(1, 8, 4096, 4096, 40, 1.10),
    Site(1, 8, 1024, 1024, 80, 1.10),
    Site(1, 24, 4429, 4429, 64, 1.10),
    Site(1, 12, 512, 512, 64, 1.10),
    Site(1, 16, 257, 257, 80, 1.10),
    Site(2, 8, 4096, 4096, 40, 2.0, element=FLOAT),
    Site(32, 12, 128, 128, 64, 2.0, "keys", element=FLOAT),
)


def _inputs(b: Builder, site: Site, copy: int) -> tuple[str, str, str]:
    own = site.heads // site.shared
    names = (("q", site.rows, site.heads), ("k", site.keys, own), ("v", site.keys, own))
    q, k, v = (b.input(f"{name}{copy}", (site.batch, tokens, heads * site.head)) for name, tokens, heads in names)
    return q, k, v


def _heads(b: Builder, site: Site, x: str, heads: int, perm: tuple[int, ...]) -> str:
    split = b("Transpose", b("Reshape", x, b.integers(0, 0, heads, site.head)), perm=perm)
    if heads == site.heads:
        return split
    tail = (site.head, site.keys) if perm[-1] == 1 else (site.keys, site.head)
    wide = b("Expand", b("Unsqueeze", split, b.integers(2)), b.integers(1, 1, site.shared, 1, 1))
    return b("Reshape", wide, b.integers(site.batch, site.heads, *tail))


def spelled_out(site: Site) -> ModelProto:
    """The nodes of an exporter."""
    b = Builder(site.element)
    scale, own = b.array(np.array(site.head**-0.5), "scale"), site.heads // site.shared
    mask, outs = b.input("mask", site.mask_shape) if site.mask else "", []
    for copy in range(site.copies):
        q, k, v = _inputs(b, site, copy)
        keys = _heads(b, site, k, own, (0, 2, 3, 1))
        scores = b("Mul", b("MatMul", _heads(b, site, q, site.heads, (0, 2, 1, 3)), keys), scale)
        p = b("Softmax", b("Add", scores, mask) if mask else scores, axis=-1)
        out = b("Transpose", b("MatMul", p, _heads(b, site, v, own, (0, 2, 1, 3))), perm=(0, 2, 1, 3))
        outs.append(b("Reshape", out, b.integers(0, 0, site.heads * site.head)))
    return b.model(*outs)


def as_one_op(site: Site) -> ModelProto:
    """ONNX Runtime's own op, whose mask has every row."""
    b, outs = Builder(site.element), []
    shape = (*site.mask_shape[:2], site.rows, site.keys)
    mask = b.input("mask", shape) if site.mask else ""
    for copy in range(site.copies):
        inputs = [*_inputs(b, site, copy), "", "", mask] if mask else _inputs(b, site, copy)
        outs.append(b("MultiHeadAttention", *inputs, domain="com.microsoft", num_heads=site.heads))
    values = [
        helper.make_tensor_value_info(name, site.element, (site.batch, site.rows, site.heads * site.head))
        for name in outs
    ]
    graph = helper.make_graph(b.nodes, "attentions", b.inputs, values, b.initializers)
    opsets = [helper.make_opsetid("", b.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def numbers(site: Site) -> dict[str, Array]:
    """Of every input, fp32 that the element type holds."""
    drawn = np.random.default_rng(site.keys).standard_normal(1 << 22, np.float32)
    own = site.heads // site.shared * site.head
    shapes = {"q": (site.rows, site.heads * site.head), "k": (site.keys, own), "v": (site.keys, own)}
    names = [(f"{name}{copy}", name) for copy in range(site.copies) for name in shapes]
    made = {
        name: _stored(np.resize(np.roll(drawn, 977 * place), (site.batch, *shapes[kind])), site.element)
        for place, (name, kind) in enumerate(names)
    }
    if site.mask == "causal":
        made["mask"] = np.where(np.tri(site.rows, site.keys, dtype=bool), 0, -np.inf)[None, None].astype(np.float32)
    if site.mask == "keys":
        lengths = np.arange(site.batch)[:, None, None, None] * 7 % (site.keys // 2) + site.keys // 2
        made["mask"] = np.where(np.arange(site.keys) < lengths, 0, -10000.0).astype(np.float32)
    return made


def _stored(values: Array, element: int) -> Array:
    """Rounded to the type, as fp32."""
    fed = _feed(values, element)
    return from_bfloat16(fed) if element == BFLOAT16 else fed.astype(np.float32)


def _feed(values: Array, element: int) -> Array:
    """As the session takes it; bfloat16 as its bits."""
    if element == BFLOAT16:
        return to_bfloat16(values)
    return values.astype(np.float16) if element == FLOAT16 else values


def in_session(path: Path, site: Site, of: dict[str, Array]) -> tuple[Callable[[], float], Array]:
    """Seconds of a replay, and the first output."""
    feeds = {name: _feed(values, site.element) for name, values in of.items()}
    contender, stream = warm(path, feeds, "cuda")
    shape = (site.batch, site.rows, site.heads * site.head)
    out = read(next(iter(contender.outputs().values())), shape, site.element)
    return capture(stream, contender.submit).seconds, out


def expected(site: Site, of: dict[str, Array]) -> Array:
    """The last head of the first output, in float64: `[batch, rows, head]`."""
    query, key, value = (of[name][..., -site.head :].astype(np.float64) for name in ("q0", "k0", "v0"))
    scores = query @ key.transpose(0, 2, 1) * site.head**-0.5
    scores = scores + of["mask"][:, 0].astype(np.float64) if site.mask else scores
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mean: Array = p / p.sum(-1, keepdims=True) @ value
    return mean


def by_torch(site: Site, of: dict[str, Array], backend: str) -> Callable[[], float] | None:
    """Seconds of a replay; None where the backend does not take the site."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_float32_matmul_precision("high")
    element, function = getattr(torch, TYPES[site.element]), torch.nn.functional.scaled_dot_product_attention
    on = {name: torch.as_tensor(values).to("cuda", element) for name, values in of.items()}
    heads = {name: each if name == "mask" else _split(each, site.head) for name, each in on.items()}
    mask = heads["mask"].expand(site.batch, site.heads, site.rows, site.keys) if site.mask else None

    def every() -> None:
        for copy in range(site.copies):
            three = (heads[f"{name}{copy}"] for name in "qkv")
            function(*three, attn_mask=mask, enable_gqa=site.shared > 1)

    try:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            graph = captured_by_torch(every)
    except RuntimeError:
        return None
    return partial(replay_seconds, graph)


def _split(x: Any, head: int) -> Any:
    """`[batch, heads, tokens, head]` of a torch tensor, where it lies."""
    return x.view(*x.shape[:2], -1, head).transpose(1, 2)


def measure(site: Site, folder: Path, arch: str) -> dict[str, Any]:
    """Microseconds of one attention, by each."""
    stock, fused, one_op = (folder / f"{name}.onnx" for name in ("stock", "fused", "one_op"))
    onnx.save(spelled_out(site), stock)
    onnx.save(as_one_op(site), one_op)
    report = onnxfuse.optimize_file(stock, fused, arch=arch, force=True)
    assert len(report.fused) == site.copies, f"{site}: {len(report.fused)} sites"
    of = numbers(site)
    runs: dict[str, Callable[[], float]] = {}
    runs["stock"], _ = in_session(stock, site, of)
    runs["fused"], found = in_session(fused, site, of)
    wanted: Array = expected(site, of)
    apart = float(np.abs(found[..., -site.head :] - wanted).max() / np.abs(wanted).max())
    assert apart <= MOST_APART[site.element], f"{site}: {apart}"
    runs |= _others(site, of, one_op)
    times = [seconds * 1e6 / site.copies for seconds in in_turn(list(runs.values()), ROUNDS)]
    return {"site": str(site), "bar": site.bar, "fp32": site.element == FLOAT, "apart": apart} | dict(
        zip(runs, times, strict=True)
    )


def _others(site: Site, of: dict[str, Array], one_op: Path) -> dict[str, Callable[[], float]]:
    """ONNX Runtime's op where it takes the site, and torch's backends."""
    found = {backend: by_torch(site, of, backend) for backend in BACKENDS}
    runs = {name: run for name, run in found.items() if run is not None}
    wide = of if not site.mask else of | {"mask": _every_row(site, of["mask"])}
    try:
        return runs if site.shared > 1 else runs | {"MultiHeadAttention": in_session(one_op, site, wide)[0]}
    except OnnxfuseError as error:
        print(f"  MultiHeadAttention: {str(error)[:200]}", flush=True)
        return runs


def _every_row(site: Site, mask: Array) -> Array:
    return np.broadcast_to(mask, (*mask.shape[:2], site.rows, site.keys)).copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--only", default="", help="only sites whose description contains this")
    options = parser.parse_args()
    arch, rows = spec_of(driver.local_architectures()[0]).arch, []
    with tempfile.TemporaryDirectory() as name:
        for site in SITES:
            if options.only not in str(site):
                continue
            row = measure(site, Path(name), arch)
            rows.append(row)
            best, other = best_of_others(row)
            ratio = f"{row['fused'] / best:.2f} of the {best:.1f} of {other}"
            print(f"{site}: stock {row['stock']:.1f} us, fused {row['fused']:.1f} us, {ratio}", flush=True)
            command = f"python -m tests.perf.attention --out results/{options.out.name}"
            write_result(options.out, {**origin(command), "rows": rows})


if __name__ == "__main__":
    main()
