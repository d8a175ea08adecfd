"""Sweep a folder of models: sites found against the manifest, and the same bits in plain ONNX Runtime on the CPU.

    python -m tests.tools.sweep [FOLDER] [--manifest F] [--only GLOB]

Without FOLDER it sweeps the corpus. A model that was stored without its weights gets them back
(tests/helpers/corpus.py); the feeds are `NAME.feed*.npz` beside a model, or random ones. Graph optimisation is off, or
folds constants where a kernel needs a weight in another order, and no library is registered. A model fails when an
output changes, when it has fewer sites than the manifest says, or more two-part gates, when an attention neither fuses
nor says why, and when a command cannot print or write its result. The exit code is 1 when a model fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from onnxfuse.analysis.axis_mapping import broadcast_product_axes
from onnxfuse.device import resolve
from onnxfuse.graph.functions import inline
from onnxfuse.graph.graph import Model, ModelProto
from onnxfuse.graph.known_branches import take_branches
from onnxfuse.graph.left_of_opened import left_of_opened
from onnxfuse.graph.opened_ops import add_zeros, openings
from onnxfuse.graph.save import save_model
from onnxfuse.ir.attention import Attention
from onnxfuse.ir.fusion import Fusion, Pointwise
from onnxfuse.lowering.site import Site
from onnxfuse.pipeline import Analysis, analyse_model, optimize_model
from onnxfuse.runtime.feeds import input_specs, make_feeds
from onnxfuse.schedule.strategy import Strategy
from tests.helpers import corpus, printed
from tests.helpers.onnx_build import cpu_session

ATTENTIONS = "attentions"
KINDS = ("packed_gates", "dual_gates", "activations", "residuals")
PRODUCTS = ("MatMul", "Einsum")
HANDED_ON = ("Cast", "Identity", "Reshape", "Slice", "Transpose", "Where")
# Between a product and a softmax.
BETWEEN = ("Add", "Sub", "Mul", "Div", "Tanh", "Where", "Cast", "Reshape", "Identity", "Concat")
STRICT = ("packed_gates", "dual_gates")  # one too many is a near miss that was taken for a gate
MOST_RESIDUALS = 400 / 422  # a few of the manifest's residual adds lie behind something that is not pointwise


@dataclass(frozen=True)
class Outcome:
    """One model: sites by kind, what the manifest says of them (None without one), what is wrong with the outputs.

    Attributes:
        attentions: how many its nodes have.
        apart: why the others of them are none, by reason.
    """

    found: Counter[str]
    expected: Mapping[str, int] | None
    skipped: Counter[str] = field(default_factory=Counter)
    fault: str = ""
    attentions: int = 0
    apart: Counter[str] = field(default_factory=Counter)

    @property
    def faults(self) -> list[str]:
        """Everything that makes the model fail; residuals are judged over all models."""
        wrong = [self.fault] if self.fault else []
        told = self.found[ATTENTIONS] + sum(count for reason, count in self.apart.items() if reason != "unknown_op")
        if told != self.attentions:
            wrong.append(f"{told} attentions fuse or say why not, of {self.attentions}")
        if self.expected is None:
            return wrong
        for kind in KINDS[:3]:
            found, expected = self.found[kind], self.expected[kind]
            if found < expected or (found > expected and kind in STRICT):
                wrong.append(f"{kind} {found}, not {expected}")
        return wrong


def kinds_of(fusion: Pointwise) -> Iterator[str]:
    """What the manifest would count a fusion as: it knows linear layers, whose weight is the rhs."""
    if not isinstance(fusion, Fusion) or any(axis[0] not in "knp" for axis in fusion.rhs[0].axes):
        return
    if fusion.pattern == "split_gemm":
        yield "dual_gates" if len(fusion.rhs) > 1 else "packed_gates"
    elif len(fusion.parts) == 1 and "activation" in fusion.features:
        yield "activations"
    if "residual" in fusion.features:
        yield "residuals"


def softmaxes_between_products(model: ModelProto) -> list[str]:
    """The attentions of a model by its nodes alone: what a Softmax makes is multiplied, and a product leads to it."""
    nodes = [node for body in (model.graph, *model.functions) for node in body.node]
    makers = {name: node for node in nodes for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return [
        node.name
        for node in nodes
        if node.op_type == "Softmax" and _is_multiplied(node, readers) and _comes_from_product(node, makers)
    ]


def _is_multiplied(node: onnx.NodeProto, readers: Mapping[str, list[onnx.NodeProto]]) -> bool:
    behind = readers.get(node.output[0], [])
    handed = [reader for reader in behind if reader.op_type in HANDED_ON]
    return any(reader.op_type in PRODUCTS for reader in behind) or any(_is_multiplied(each, readers) for each in handed)


def _comes_from_product(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> bool:
    queue, seen = [makers[name] for name in node.input if name in makers], set[str]()
    for maker in queue:
        if maker.op_type in PRODUCTS:
            return True
        before = (makers[name] for name in maker.input if name in makers and maker.op_type in BETWEEN)
        queue += (each for each in before if each.output[0] not in seen)
        seen.update(maker.output)
    return False


def attentions_of(analysis: Analysis, model: ModelProto) -> tuple[int, Counter[str]]:
    """How many attentions fuse, and why the others of a model are none, told of its softmax or of a product."""
    fused = {name for site in analysis.sites if isinstance(site.fusion, Attention) for name in _node_names(site)}
    reasons = {entry.anchor: entry.reason for entry in analysis.skipped}
    softmaxes = softmaxes_between_products(model)
    left = [name for name in softmaxes if name not in fused]
    makers = {name: node for node in model.graph.node for name in node.output}
    apart = Counter(reasons.get(name) or reasons.get(_product_of(name, model, makers), "unknown_op") for name in left)
    return len(softmaxes) - len(left), apart


def _node_names(site: Site) -> set[str]:
    return {site.graph.nodes[index].name for index in site.match.nodes}


def _product_of(softmax: str, model: ModelProto, makers: Mapping[str, onnx.NodeProto]) -> str:
    """The product that makes a softmax's scores: the nearest before it."""
    queue = [node for node in model.graph.node if node.name == softmax]
    for node in queue:
        if node.op_type in PRODUCTS:
            return str(node.name)
        queue += (makers[name] for name in node.input if name in makers)
    return ""


def rewritten(analysis: Analysis, epilogue_only: bool = False, transposed: bool = False) -> ModelProto:
    """The optimised model without machine code, which no CPU looks at.

    Nodes are the `epilogue_only` wherever that can be, or only where there is no other implementation. Weights are as
    the model stores them, or `transposed` where they were planned so: then nodes have the original's bits where ONNX
    Runtime folds constants.
    """
    own = analysis.sites if transposed else map(_as_stored, analysis.sites)
    sites = tuple(_bare(site, epilogue_only) for site in own)
    return optimize_model(replace(analysis, sites=sites))[0]


def _as_stored(site: Site) -> Site:
    return site.as_stored if isinstance(site.as_stored, Site) else site


def _bare(site: Site, epilogue_only: bool) -> Site:
    second = site.epilogue_only and replace(site.epilogue_only, plans=())
    fusion = site.fusion
    taken = second and (epilogue_only or (isinstance(fusion, Fusion) and broadcast_product_axes(fusion)))
    whole = site.whole and replace(site.whole, plans=())
    return replace(
        site,
        plans=(),
        epilogue_only=second,
        whole=whole,
        strategy=Strategy.EPILOGUE_ONLY if taken else Strategy.ONE_KERNEL,
    )


def feeds_of(path: Path, model: ModelProto) -> Iterator[dict[str, np.ndarray]]:
    """The feeds that lie beside a model, or one random feed."""
    stored = sorted(path.parent.glob(f"{path.stem}.feed*.npz"))
    for file in stored:
        with np.load(file) as arrays:
            yield dict(arrays)
    if not stored:
        yield make_feeds(input_specs(cpu_session(model)))


def taken_apart(original: ModelProto, analysis: Analysis) -> ModelProto:
    """The original with ONNX Runtime's ops in parts, those that fusions hold a part of: they make bits of their own."""
    copy, scope = ModelProto(), analysis.graphs[0].scope
    copy.CopyFrom(original)
    take_branches(copy, scope.branches)
    inline(copy, {key: function for key, function in openings(copy).items() if key in scope.inlined})
    add_zeros(copy.graph, left_of_opened(analysis.graphs[0]), "{}.apart".format)
    return copy


def difference(original: ModelProto, fused: ModelProto, feeds: list[dict[str, np.ndarray]], folds: bool = False) -> str:
    """The first output whose bits are not the same; empty where all are."""
    expected = _outputs(original, feeds, folds)
    for feed, (before, after) in enumerate(zip(expected, _outputs(fused, feeds, folds), strict=True)):
        for value, first, second in zip(original.graph.output, before, after, strict=True):
            if first.tobytes() != second.tobytes():
                return f"output {value.name!r} differs with feed {feed}"
    return ""


def _outputs(model: ModelProto, feeds: list[dict[str, np.ndarray]], folds: bool) -> list[list[np.ndarray]]:
    session = cpu_session(model, folds)
    names = {value.name for value in session.get_inputs()}
    return [session.run(None, {name: feed[name] for name in names}) for feed in feeds]


def sweep_model(path: Path, expected: Mapping[str, int] | None, commands: bool = False) -> Outcome:
    """Optimise one model, print that, and run it before and after; with `commands` go through verify and bench too."""
    try:
        original = corpus.with_weights(onnx.load(path))
        analysis = analyse_model(original, resolve("sm_90a,sm_80", list))
        found = Counter(kind for site in analysis.sites for kind in kinds_of(site.fusion))
        skipped = Counter(site.reason for site in analysis.skipped)
        printed.of_analysis(analysis)
        fused, feeds = rewritten(analysis), list(feeds_of(path, original))
        if commands:
            _go_through_commands(original, fused, feeds[0])
        folds = any(site.transposed and not isinstance(site.as_stored, Site) for site in analysis.sites)
        fault = difference(taken_apart(original, analysis), fused, feeds, folds)
        joined, apart = attentions_of(analysis, original)
        found[ATTENTIONS] = joined
        return Outcome(found, expected, skipped, fault, joined + apart.total(), apart)
    except Exception as error:  # whatever is wrong with one model, the others are swept
        return Outcome(Counter(), expected, fault=f"{type(error).__name__}: {str(error)[:200]}")


def _go_through_commands(original: ModelProto, fused: ModelProto, feed: dict[str, np.ndarray]) -> None:
    with tempfile.TemporaryDirectory(prefix="onnxfuse-sweep-") as name:
        before, after = Path(name) / "before.onnx", Path(name) / "after.onnx"
        save_model(original, Model(original, None), before)
        save_model(fused, Model(fused, None), after)
        printed.of_files(before, after, feed, Path(name))


def line(name: str, outcome: Outcome, seconds: float) -> str:
    """One row: found of expected by kind, and what is wrong."""
    cells = [*(_cell(outcome, kind) for kind in KINDS), f"{outcome.found[ATTENTIONS]}/{outcome.attentions}"]
    verdict = "; ".join(outcome.faults) or "same bits"
    return f"{' '.join(f'{cell:>8}' for cell in cells)} {seconds:7.1f}s  {name}  {verdict}"


def _cell(outcome: Outcome, kind: str) -> str:
    found = outcome.found[kind]
    return str(found) if outcome.expected is None else f"{found}/{outcome.expected[kind]}"


def _total(outcomes: list[Outcome]) -> Outcome:
    known = [outcome.expected for outcome in outcomes if outcome.expected is not None]
    expected = {kind: sum(entry[kind] for entry in known) for kind in KINDS} if known else None
    found, skipped, apart = Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        found, skipped, apart = found + outcome.found, skipped + outcome.skipped, apart + outcome.apart
    return Outcome(found, expected, skipped, "", sum(outcome.attentions for outcome in outcomes), apart)


def sweep(folder: Path, manifest: Mapping[str, Mapping[str, int]], only: str = "*") -> bool:
    """Sweep every model below a folder, print a line for each, and say whether all pass."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    print(" ".join(f"{kind.partition('_')[0][:8]:>8}" for kind in (*KINDS, "attends")))
    for path in sorted(folder.rglob("*.onnx")):
        name = path.relative_to(folder).as_posix()
        if not fnmatch.fnmatch(name, only):
            continue
        start = time.monotonic()
        outcomes.append(sweep_model(path, manifest.get(name), commands=True))
        print(line(name, outcomes[-1], time.monotonic() - start), flush=True)
        gc.collect()  # a session's weights, before the next model's
    total = _total(outcomes)
    failed = sum(bool(outcome.faults) for outcome in outcomes)
    few = total.expected is not None and total.found["residuals"] < MOST_RESIDUALS * total.expected["residuals"]
    print("attentions apart:", ", ".join(f"{reason} {count}" for reason, count in total.apart.most_common()) or "none")
    print(line(f"{len(outcomes)} models", replace(total, fault=f"{failed} failed"), time.monotonic() - began))
    print("left alone:", ", ".join(f"{reason} {count}" for reason, count in total.skipped.most_common()) or "nothing")
    return bool(outcomes) and not failed and not few


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.sweep", description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, nargs="?", help="folder of .onnx files; by default the corpus")
    parser.add_argument("--manifest", type=Path, help="JSON: file -> number of sites by kind; FOLDER/manifest.json")
    parser.add_argument("--only", default="*", help="glob over the files' paths below the folder")
    arguments = parser.parse_args()
    folder = arguments.folder or corpus.folder()
    file = arguments.manifest or folder / "manifest.json"
    manifest = json.loads(file.read_text()) if arguments.manifest or file.is_file() else {}
    return 0 if sweep(folder, manifest, arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
