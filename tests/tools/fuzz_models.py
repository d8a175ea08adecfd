"""Hostile models: real ones, altered. `optimize` keeps what they compute or says in one line what is wrong with them.

    python -m tests.tools.fuzz_models [--rounds N | --seconds S] [--seed N] [--keep DIR]

Every round runs in a process of its own, so that a crash, a hang or a flood of memory is found as well and the next
round starts clean. A round fails when anything but an OnnxfuseError that names the file is raised, when the result is
no valid model though the altered one was, when an output in plain ONNX Runtime is not the same bits, and when a command
cannot print or write what it found. What is wrong
in ONNX Runtime itself, which runs hostile models less carefully, is counted and left to its developers. The exit code
is 1 when a round fails; `--keep` stores the models at fault.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxfuse.device import resolve
from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph.functions import subgraphs, walk
from onnxfuse.pipeline import Analysis, analyse_model
from onnxfuse.runtime.feeds import input_specs, make_feeds
from tests.helpers import printed
from tests.helpers.onnx_build import cpu_session
from tests.tools.sweep import difference, rewritten

MODELS = Path(__file__).parents[2] / "models"
SECONDS = 60  # of processor time for one round; a real model of this size takes a tenth of one
MEMORY = 8 << 30  # address space of one round
LARGEST_FEED = 1 << 22  # elements: an altered shape may ask for more than a test should compute
NUMBERS = (-(2**63), -(2**31), -7, -2, -1, 0, 1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3.4e38)
WORDS = ("", " ", "NOTSET", "none", "tanh", "\u00e9", "x" * 5000, "a/b\\c", "../../etc/passwd", "\n")
OPS = (
    "Add", "Cast", "Concat", "Constant", "Conv", "Einsum", "Expand", "FusedGemm", "Gather", "Gemm", "Identity", "If",
    "Loop", "MatMul", "Mul", "Nothing", "Pow", "Reshape", "Shape", "Slice", "Softmax", "Split", "SplitToSequence",
    "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip


# ---- What is altered -------------------------------------------------------------------------------------------------


def _graphs(model: ModelProto) -> list[GraphProto]:
    inner = [graph for node in walk(model.graph.node) for _, graph in subgraphs(node)]
    return [model.graph, *inner]


def _nodes(model: ModelProto) -> list[NodeProto]:
    return [*walk(model.graph.node), *(node for function in model.functions for node in walk(function.node))]


def _values(model: ModelProto) -> list[str]:
    return sorted({name for node in _nodes(model) for name in (*node.input, *node.output)} | {"", "nowhere"})


def _any_node(source: random.Random, model: ModelProto) -> NodeProto:
    """A node; a product or its neighbourhood more often than another."""
    nodes = _nodes(model)
    products = [index for index, node in enumerate(nodes) if node.op_type in ("MatMul", "Gemm", "Conv", "Einsum")]
    if products and source.random() < 0.6:
        return nodes[min(source.choice(products) + source.randrange(8), len(nodes) - 1)]
    return source.choice(nodes)


def _any_tensor(source: random.Random, model: ModelProto) -> TensorProto:
    held = [attribute.t for node in _nodes(model) for attribute in node.attribute if attribute.HasField("t")]
    tensors: list[TensorProto] = [*model.graph.initializer, *held]
    return source.choice(tensors or [TensorProto()])


def drop_node(source: random.Random, model: ModelProto) -> None:
    graph = source.choice(_graphs(model))
    if graph.node:
        del graph.node[source.randrange(len(graph.node))]


def duplicate_node(source: random.Random, model: ModelProto) -> None:
    graph = source.choice(_graphs(model))
    if not graph.node:
        return
    copy = NodeProto()
    copy.CopyFrom(source.choice(graph.node))
    if source.random() < 0.5:
        for index, name in enumerate(copy.output):
            copy.output[index] = f"{name}.again"
    graph.node.append(copy)


def swap_nodes(source: random.Random, model: ModelProto) -> None:
    nodes = model.graph.node
    first, second = source.randrange(len(nodes)), source.randrange(len(nodes))
    copy = NodeProto()
    copy.CopyFrom(nodes[first])
    nodes[first].CopyFrom(nodes[second])
    nodes[second].CopyFrom(copy)


def reconnect(source: random.Random, model: ModelProto) -> None:
    """An input reads something else: often of another shape, sometimes a cycle."""
    node = _any_node(source, model)
    if node.input:
        node.input[source.randrange(len(node.input))] = source.choice(_values(model))


def rename_output(source: random.Random, model: ModelProto) -> None:
    node = _any_node(source, model)
    if node.output:
        node.output[source.randrange(len(node.output))] = source.choice(_values(model))


def change_arity(source: random.Random, model: ModelProto) -> None:
    node = _any_node(source, model)
    values = source.choice((node.input, node.output))
    if values and source.random() < 0.6:
        del values[source.randrange(len(values)) :]
    else:
        values.extend(source.choices(_values(model), k=source.randint(1, 3)))


def change_op(source: random.Random, model: ModelProto) -> None:
    node = _any_node(source, model)
    node.op_type = source.choice(OPS)
    node.domain = source.choice(("", "", "", "ai.onnx", "com.microsoft", "onnxfuse", "own"))


def _attribute(source: random.Random, name: str) -> AttributeProto:
    words = [source.choice(WORDS) for _ in range(source.randrange(1, 3))]
    values = (
        source.choice(NUMBERS), source.choice(FLOATS), source.choice(WORDS), source.choices(NUMBERS, k=3),
        source.choices(FLOATS, k=2), words, numpy_helper.from_array(np.array(source.choice(NUMBERS)), "t"),
        helper.make_graph([], "empty", [], []),
    )  # fmt: skip
    return helper.make_attribute(name, source.choice(values))


def change_attribute(source: random.Random, model: ModelProto) -> None:
    """Another value, often of another type, of an attribute that is there or that another op has."""
    node = _any_node(source, model)
    names = [attribute.name for attribute in node.attribute]
    name = source.choice([*names, *names, "axis", "axes", "perm", "transA", "alpha", "to", "num_outputs", "value"])
    for index in reversed([index for index, attribute in enumerate(node.attribute) if attribute.name == name]):
        if source.random() < 0.9:
            del node.attribute[index]
    if source.random() < 0.8:
        node.attribute.append(_attribute(source, name))


def mistype_attribute(source: random.Random, model: ModelProto) -> None:
    """The declared type no longer says which field holds the value."""
    node = _any_node(source, model)
    if node.attribute:
        source.choice(node.attribute).type = source.randrange(15)


def change_dims(source: random.Random, model: ModelProto) -> None:
    tensor = _any_tensor(source, model)
    if tensor.dims and source.random() < 0.7:
        tensor.dims[source.randrange(len(tensor.dims))] = source.choice(NUMBERS)
    else:
        tensor.dims.extend(source.choices(NUMBERS, k=source.choice((1, 1, 2, 70))))


def swap_dims(source: random.Random, model: ModelProto) -> None:
    """The right number of elements in a wrong shape."""
    tensor = _any_tensor(source, model)
    dims = source.sample(list(tensor.dims), len(tensor.dims))
    del tensor.dims[:]
    tensor.dims.extend(
        [min(math.prod(dims), 2**63 - 1)] if source.random() < 0.3 and min(dims, default=1) >= 0 else dims
    )


def change_tensor_type(source: random.Random, model: ModelProto) -> None:
    _any_tensor(source, model).data_type = source.choice((*range(26), 99))


def change_bytes(source: random.Random, model: ModelProto) -> None:
    """Raw data that is too short, too long, or gone."""
    tensor = _any_tensor(source, model)
    data = tensor.raw_data
    tensor.raw_data = source.choice((b"", data[:-1], data[: len(data) // 2], data + b"\1", bytes(1 << 20)))


def change_values(source: random.Random, model: ModelProto) -> None:
    """NaN, infinities and denormals among weights; absurd numbers among shapes and axes."""
    tensor = _any_tensor(source, model)
    try:
        values = numpy_helper.to_array(tensor).copy()
    except Exception:  # already altered into something without values
        return
    if not values.size:
        return
    floats = np.issubdtype(values.dtype, np.floating)
    with np.errstate(all="ignore"):
        drawn = np.array(source.choice(FLOATS if floats else NUMBERS)).astype(values.dtype)
    values.flat[:: source.choice((1, 3, values.size))] = drawn
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def make_external(source: random.Random, model: ModelProto) -> None:
    """A weight that lies in a file: missing, outside of the folder, or the machine's own."""
    tensor = _any_tensor(source, model)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    location = source.choice(("missing.bin", "../x.bin", "/etc/passwd", "/dev/zero", "", ".", "a\0b", "x" * 5000))
    for key, value in (("location", location), ("offset", str(source.choice(NUMBERS))), ("length", "many")):
        if source.random() < 0.8:
            tensor.external_data.add(key=key, value=value)


def drop_initializer(source: random.Random, model: ModelProto) -> None:
    stored = model.graph.initializer
    if stored:
        index = source.randrange(len(stored))
        if source.random() < 0.5:
            stored.append(stored[index])
        else:
            del stored[index]


def change_declaration(source: random.Random, model: ModelProto) -> None:
    """What the graph says of an input, output or value: its type, its shape, its name."""
    graph = source.choice(_graphs(model))
    declared = [*graph.input, *graph.output, *graph.value_info]
    if not declared:
        return
    value = source.choice(declared)
    kind = value.type.tensor_type
    match source.randrange(6):
        case 0:
            kind.elem_type = source.choice((*range(26), 99))
        case 1 if kind.shape.dim:
            source.choice(kind.shape.dim).dim_value = source.choice(NUMBERS)
        case 2 if kind.shape.dim:
            source.choice(kind.shape.dim).dim_param = source.choice(WORDS)
        case 3:
            kind.shape.dim.add(dim_value=source.choice(NUMBERS))
        case 4:
            value.name = source.choice(_values(model))
        case _:
            value.ClearField("type")


def change_opset(source: random.Random, model: ModelProto) -> None:
    entry = source.choice(model.opset_import)
    if source.random() < 0.5:
        entry.version = source.choice((*range(1, 28), *NUMBERS))
    elif source.random() < 0.5:
        entry.domain = source.choice(("", "ai.onnx", "com.microsoft", "own"))
    else:
        model.opset_import.append(helper.make_opsetid(source.choice(("", "own")), source.choice((1, 13, 20))))


def change_outputs(source: random.Random, model: ModelProto) -> None:
    """Any value may be an output: of the graph, twice, or of a branch."""
    name = source.choice(_values(model))
    graph = source.choice(_graphs(model))
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def nest(source: random.Random, model: ModelProto) -> None:
    """A node moves into a branch, a loop's body or a function; deeper than any exporter would write."""
    node = source.choice(model.graph.node)
    for depth in range(source.choice((1, 2, 12))):
        inner = NodeProto()
        inner.CopyFrom(node)
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inner.output if name]
        graph = helper.make_graph([inner], f"inner{depth}", [], outputs)
        node.Clear()
        condition = source.choice((_values(model)[-1], "yes"))
        node.CopyFrom(helper.make_node("If", [condition], list(inner.output), f"if{depth}", then_branch=graph))
        if source.random() < 0.8:
            node.attribute.append(helper.make_attribute("else_branch", graph))
        if source.random() < 0.5:
            break
    if not any(tensor.name == "yes" for tensor in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))


def make_function(source: random.Random, model: ModelProto) -> None:
    """A node's body becomes a function of the model; sometimes one that calls itself or misses a value."""
    node = source.choice(model.graph.node)
    inner = NodeProto()
    inner.CopyFrom(node)
    name = source.choice(("Own", "Own", node.op_type))
    if source.random() < 0.2:
        inner.op_type, inner.domain = name, "own"
    inputs = list(dict.fromkeys(filter(None, inner.input)))[source.choice((0, 0, 0, 1)) :]
    imports = [helper.make_opsetid("", model.opset_import[0].version)] if source.random() < 0.9 else []
    outputs = list(filter(None, inner.output))
    model.functions.append(helper.make_function("own", name, inputs, outputs, [inner], imports))
    node.CopyFrom(helper.make_node(name, inputs, outputs, node.name, domain="own"))
    if source.random() < 0.9:
        model.opset_import.append(helper.make_opsetid("own", 1))


def change_name(source: random.Random, model: ModelProto) -> None:
    _any_node(source, model).name = source.choice((*WORDS, source.choice(_nodes(model)).name))


MUTATIONS: tuple[Callable[[random.Random, ModelProto], None], ...] = (
    drop_node, duplicate_node, swap_nodes, reconnect, reconnect, rename_output, change_arity, change_op,
    change_attribute, change_attribute, mistype_attribute, change_dims, swap_dims, change_tensor_type, change_bytes,
    change_values, change_values, make_external, drop_initializer, change_declaration, change_declaration, change_opset,
    change_outputs, nest, make_function, change_name,
)  # fmt: skip


def _altered_bytes(source: random.Random, data: bytes) -> bytes:
    """The file itself is damaged: cut, overwritten, a piece twice or missing."""
    start = source.randrange(len(data))
    end = min(len(data), start + source.choice((1, 2, 8, 100)))
    pieces = (
        data[:start],
        data[:start] + source.randbytes(end - start) + data[end:],
        data[:start] + data[end:],
        data[:end] + data[start:],
        data[:start] + bytes([data[start] ^ 1 << source.randrange(8)]) + data[start + 1 :],
    )
    return source.choice(pieces)


@functools.cache
def originals() -> tuple[bytes, ...]:
    """The example models, serialised: with weights, and small."""
    return tuple(path.read_bytes() for path in sorted(MODELS.glob("*.onnx")))


def hostile_model(seed: int) -> tuple[bytes, str]:
    """An altered model and what was done to it; the same for the same seed."""
    source = random.Random(seed)
    model = ModelProto.FromString(source.choice(originals()))
    done = []
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        mutation = source.choice(MUTATIONS)
        mutation(source, model)
        done.append(mutation.__name__)
    data = model.SerializeToString()
    if source.random() < 0.1:
        data = _altered_bytes(source, data)
        done.append("bytes")
    return data, " ".join(done)


# ---- What must hold --------------------------------------------------------------------------------------------------


def check(path: Path, enter: Callable[[str], None]) -> str:
    """Put one file through `optimize`; returns `refused`, `unchanged`, `fused` or `fused and run`.

    Args:
        path: the hostile file.
        enter: told whose code runs next, `onnxfuse` or `onnxruntime`, so that a crash is laid at the right door.

    Raises:
        AssertionError: a property does not hold. Anything else that is raised is a fault as well.
    """
    enter("onnxfuse")
    analysis, refusal = _analysed(path)
    if analysis is None:
        assert path.name in refusal, f"the file is not named: {refusal}"
        assert "\n" not in refusal, f"more than one line: {refusal}"
        return "refused"
    original = onnx.load(path, load_external_data=False)
    printed.of_analysis(analysis)
    fused = rewritten(analysis)
    if not analysis.sites:
        assert _by_output(fused) == _by_output(original), "nothing was fused, and the model has changed"
        return "unchanged"
    enter("onnx")
    if _is_valid(original):
        onnx.checker.check_model(fused)
    enter("onnxruntime")
    feed = _feed(original)
    if feed is None:
        return "fused"
    enter("the fused model")
    fault = difference(original, fused, [feed])
    assert not fault, fault
    enter("onnxruntime")  # with its own optimiser, which less hostile models than these have ended
    onnx.save(fused, path.with_name("fused.onnx"))
    printed.of_files(path, path.with_name("fused.onnx"), feed, path.parent)
    return "fused and run"


def _by_output(model: ModelProto) -> ModelProto:
    """The same model for every order of its nodes, which ONNX Runtime and onnxfuse change where it is none."""
    model.graph.node.sort(key=lambda node: list(node.output))
    return model


def _analysed(path: Path) -> tuple[Analysis | None, str]:
    try:
        return analyse_model(path, resolve("sm_90a,sm_80", list)), ""
    except OnnxfuseError as error:
        return None, str(error)


def _is_valid(model: ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except Exception:
        return False
    return True


def _feed(model: ModelProto) -> dict[str, np.ndarray] | None:
    """A feed that ONNX Runtime runs the altered model with; None where it does not."""
    try:
        session = cpu_session(model)
        if any(math.prod(dim for dim in value.shape if isinstance(dim, int)) > LARGEST_FEED
               for value in session.get_inputs()):  # fmt: skip
            return None
        feed = make_feeds(input_specs(session))
        session.run(None, feed)
    except Exception:
        return None
    return feed


@dataclass(frozen=True)
class Outcome:
    """How one round ended: what `check` returned, or the fault."""

    verdict: str
    fault: str = ""


def one_round(seed: int, folder: Path) -> Outcome:
    """One hostile model in a child process, with limits on its time and memory."""
    data, _ = hostile_model(seed)
    path = folder / "hostile.onnx"
    path.write_bytes(data)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _in_child(path, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        words = pipe.read().decode(errors="replace").split("\x1e")
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return Outcome(words[-1])
    if os.waitstatus_to_exitcode(status) > 0:
        return Outcome("fault", words[-1])
    killed = signal.Signals(-os.waitstatus_to_exitcode(status)).name
    if words[-1] == "onnxruntime":
        return Outcome(f"onnxruntime {killed}")
    return Outcome("fault", f"{killed} in {words[-1]}")


def _in_child(path: Path, pipe: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # ONNX Runtime reports every refusal there
    try:
        verdict, code = check(path, lambda where: _tell(pipe, where)), 0
    except BaseException as error:
        frames = traceback.format_tb(error.__traceback__)[-4:]
        verdict, code = f"{type(error).__name__}: {str(error)[:300]}\n{''.join(frames)}", 1
    _tell(pipe, verdict)
    os._exit(code)


def _tell(pipe: int, words: str) -> None:
    os.write(pipe, b"\x1e" + words.encode()[-4000:])


def _seeds(first: int, rounds: int, seconds: float) -> Iterator[int]:
    began = time.monotonic()
    seed = first
    while seed < first + rounds if rounds else time.monotonic() - began < seconds:
        yield seed
        seed += 1


def fuzz(seeds: Iterator[int], keep: Path | None = None) -> bool:
    """Run the rounds, print each fault and a count of the verdicts, and say whether all passed."""
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="onnxfuse-fuzz-") as folder:
        for seed in seeds:
            outcome = one_round(seed, Path(folder))
            verdicts[outcome.verdict] += 1
            if not outcome.fault:
                continue
            data, done = hostile_model(seed)
            print(f"seed {seed} ({done}): {outcome.fault}", flush=True)
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{seed}.onnx").write_bytes(data)
    print(f"{verdicts.total()} models:", ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common()))
    return verdicts.total() > 0 and not verdicts["fault"]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz_models", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=0, help="how many models; by default as many as fit in --seconds")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; each next one has the next")
    parser.add_argument("--keep", type=Path, help="folder for the models that make a round fail")
    arguments = parser.parse_args()
    return 0 if fuzz(_seeds(arguments.seed, arguments.rounds, arguments.seconds), arguments.keep) else 1


if __name__ == "__main__":
    sys.exit(main())
