"""Hostile models and files: one line that names what is wrong, never a traceback, never a wrong result."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse.device import resolve
from onnxfuse.errors import ModelError, SettingError
from onnxfuse.graph.functions import walk
from onnxfuse.graph.graph import Graph, load_model
from onnxfuse.graph.save import save_model
from onnxfuse.pipeline import analyse_model
from onnxfuse.verify.verify import verify
from tests.helpers import corpus
from tests.helpers.matching import gate, linear, split_sizes
from tests.helpers.onnx_build import Builder
from tests.tools.sweep import difference, rewritten

ROOT = Path(__file__).parents[2]
ROUNDS = 24


def test_altered_models_are_refused_or_keep_their_outputs() -> None:
    """The short, deterministic version of `python -m tests.tools.fuzz_models`."""
    command = [sys.executable, "-m", "tests.tools.fuzz_models", "--rounds", str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ROUNDS} models:" in done.stdout
    assert "fused and run" in done.stdout, "some of the altered models still run"


def gate_model() -> ModelProto:
    b = Builder()
    return b.model(gate(b, *split_sizes(b, linear(b))))


def tensor_of(model: ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def short_data(model: ModelProto) -> None:
    weight = tensor_of(model, "weight")
    weight.raw_data = weight.raw_data[:-1]


def long_data(model: ModelProto) -> None:
    tensor_of(model, "weight").raw_data += bytes(4)


def few_entries(model: ModelProto) -> None:
    weight = tensor_of(model, "weight")
    weight.ClearField("raw_data")
    weight.float_data.extend([1.0, 2.0])


def huge_dimension(model: ModelProto) -> None:
    tensor_of(model, "weight").dims[0] = 2**62


def negative_dimension(model: ModelProto) -> None:
    tensor_of(model, "weight").dims[0] = -6


def unknown_type(model: ModelProto) -> None:
    tensor_of(model, "weight").data_type = 99


def attribute_of_wrong_size(model: ModelProto) -> None:
    """What a Constant node holds is checked like an initializer."""
    held = TensorProto(name="weight", dims=[3], data_type=TensorProto.FLOAT, raw_data=bytes(4))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["unused"], value=held))


def endless_function(model: ModelProto) -> None:
    call = helper.make_node("Weight", ["a"], ["b"], "weight", domain="own")
    opsets = [helper.make_opsetid("own", 1)]
    model.functions.append(helper.make_function("own", "Weight", ["a"], ["b"], [call], opsets))


DAMAGE = (
    (short_data, "bytes"), (long_data, "bytes"), (few_entries, "entries of float_data"), (huge_dimension, "shape"),
    (negative_dimension, "shape"), (unknown_type, "type 99"), (attribute_of_wrong_size, "4 bytes"),
    (endless_function, "calls itself"),
)  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_an_impossible_tensor_is_named(tmp_path: Path, damage: Callable[[ModelProto], None], words: str) -> None:
    model = gate_model()
    damage(model)
    (tmp_path / "bad.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=words) as caught:
        onnxfuse.optimize(tmp_path / "bad.onnx")
    assert "bad.onnx" in str(caught.value)
    assert "weight" in str(caught.value).lower()


@pytest.mark.parametrize("dtype", sorted(set(TensorProto.DataType.values()) - {0, TensorProto.STRING}))
@pytest.mark.parametrize("raw", [True, False])
def test_every_type_of_tensor_is_measured_right(dtype: int, raw: bool) -> None:
    """Three elements: types that share a byte do not fill their last one."""
    made = helper.make_tensor("t", dtype, [3], [0, 1, 0])
    if raw:
        made = numpy_helper.from_array(numpy_helper.to_array(made), "t")
    model = gate_model()
    model.graph.initializer.append(made)
    load_model(model)
    field = "raw_data" if made.HasField("raw_data") else helper.tensor_dtype_to_field(dtype)
    longer = getattr(made, field)
    extra = b"\0" * 16 if field == "raw_data" else [longer[0]] * 8
    model.graph.initializer[-1].CopyFrom(made)
    if field == "raw_data":
        model.graph.initializer[-1].raw_data += extra
    else:
        getattr(model.graph.initializer[-1], field).extend(extra)
    with pytest.raises(ModelError, match="its shape needs"):
        load_model(model)


@pytest.mark.parametrize(
    "key", [key for key in corpus.families("llama", "gpt2", "vit", "btb", size="tiny") if "fp16" in key]
)
def test_no_rule_takes_a_real_model_for_a_contradiction(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts forgive a rule that raises; on what real exporters write none may."""
    monkeypatch.setattr("onnxfuse.graph.data_propagation.CONTRADICTIONS", ())
    assert Graph(load_model(corpus.folder() / key)).nodes


@pytest.mark.parametrize("rows", [-(2**31), -7, -1, 0, 2**62])
@pytest.mark.parametrize("name", ["layer_norm", "view_1"])
def test_a_declaration_that_cannot_be_true_says_nothing(name: str, rows: int) -> None:
    """Exporters write -1 for what they do not know; ONNX Runtime takes any shape there."""
    model = onnx.load(ROOT / "models" / "vit.onnx")
    (declared,) = (value for value in model.graph.value_info if value.name == name)
    declared.type.tensor_type.shape.dim[0].dim_value = rows
    analysis = analyse_model(model, resolve("sm_90a,sm_80", list))
    assert analysis.sites
    onnx.checker.check_model(rewritten(analysis))


def test_a_scalar_is_no_matrix() -> None:
    b = Builder()
    model = b.model(b("Relu", b("MatMul", b.input("scalar", ()), b.input("x", ("m", 4)))))
    (skipped,) = analyse_model(model, resolve("sm_80", list)).skipped
    assert (skipped.reason, skipped.anchor) == ("unsupported_product", model.graph.node[0].name)


@pytest.mark.parametrize("perm", [[0, -1, 1], [0, 1, 1], [1, 2, 3], [0, 2, 3, 1, 5]])
def test_a_transpose_names_each_axis_once(perm: list[int]) -> None:
    """ONNX's shape inference passes over it, and no runtime loads the model."""
    b = Builder()
    swapped = b("Transpose", b.input("x", ("b", "m", 8)), perm=perm)
    model = b.model(b("Relu", b("MatMul", swapped, b.array(np.zeros((8, 8), np.float32), "w"))))
    name = model.graph.node[0].name
    with pytest.raises(ModelError, match=re.escape(f"the Transpose {name!r} has perm {perm}")):
        onnxfuse.optimize(model, arch="sm_80")


def beside(op: str, other: tuple[int, ...], last: bool = False) -> ModelProto:
    """What a product makes, [6, 8], meets another shape between it and the next, or as the last of the model."""
    b = Builder()
    x = b("Relu", b("MatMul", b.input("x", (6, 4)), b.array(np.zeros((4, 8)), "w")))
    mask = [b("Cast", x, to=TensorProto.BOOL)] if op == "Where" else []
    met = b(op, *mask, x, b("Abs", b.input("beside", other)))
    if last:
        return b.model(met)
    return b.model(b("Relu", b("MatMul", met, b.array(np.zeros((8, 8)), "last"))))


@pytest.mark.parametrize("op", ["Add", "Mul", "Where"])
@pytest.mark.parametrize("other", [(7,), (5, 8), (2, 5, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_shapes_that_do_not_broadcast_are_named(op: str, other: tuple[int, ...], last: bool) -> None:
    """ONNX's shape inference passes over them and knows nothing of what is behind; no runtime loads the model."""
    model = beside(op, other, last)
    name = next(node.name for node in model.graph.node if node.op_type == op)
    with pytest.raises(ModelError, match=re.escape(f"{name} ({op}): the shapes of its inputs do not broadcast")):
        onnxfuse.optimize(model, arch="sm_80")
    with pytest.raises(Exception, match="Incompatible dimensions"):
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("op", ["Add", "Mul", "Where"])
@pytest.mark.parametrize("other", [(8,), (1, 8), (6, 1), (2, 6, 8)])
@pytest.mark.parametrize("last", [False, True])
def test_shapes_that_broadcast_are_none_of_those(op: str, other: tuple[int, ...], last: bool) -> None:
    model = beside(op, other, last)
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rewritten(analyse_model(model, resolve("sm_80", list)))


@pytest.mark.parametrize("count", [0, 1, 3, 2**40])
def test_a_split_has_as_many_outputs_as_it_says(count: int) -> None:
    """In a process of its own: where ONNX's shape inference meets such a node first, it aborts."""
    b = Builder(opset=20)
    model = b.model(*b("Split", b.input("x", ("m", 6)), outputs=2, axis=1, num_outputs=2))
    next(each for each in model.graph.node[0].attribute if each.name == "num_outputs").i = count
    data = model.SerializeToString()
    code = f"import onnx, onnxfuse; onnxfuse.optimize(onnx.ModelProto.FromString({data!r}), arch='sm_80')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"has 2 outputs and says {count}" in done.stderr.splitlines()[-1]


def test_a_name_that_is_no_text_is_shown(tmp_path: Path) -> None:
    model = gate_model()
    model.graph.name = "some_name"
    (tmp_path / "bad.onnx").write_bytes(model.SerializeToString().replace(b"some_name", b"some\xdfname"))
    with pytest.raises(ModelError, match=r"bad.onnx: .*b'some\\xdfname' is no UTF-8 text"):
        onnxfuse.optimize(tmp_path / "bad.onnx")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, 1e-45])
def test_weights_of_any_value_are_fused_and_keep_their_bits(value: float) -> None:
    model = gate_model()
    weight = tensor_of(model, "weight")
    values = numpy_helper.to_array(weight).copy()
    values[::2, ::3] = value
    weight.CopyFrom(numpy_helper.from_array(values, "weight"))
    analysis = analyse_model(model, resolve("sm_80", list))
    assert len(analysis.sites) == 1
    feed = {"x": np.linspace(-3, 3, 2 * 5 * values.shape[0], dtype=np.float32).reshape(2, 5, -1)}
    assert not difference(model, rewritten(analysis), [feed])


# ---- External data stays in the model's folder -----------------------------------------------------------------------


def external_model(folder: Path, location: str) -> Path:
    """A gate whose weight lies in a file, wherever that is."""
    model = gate_model()
    folder.mkdir(exist_ok=True)
    weight = tensor_of(model, "weight")
    (folder.parent / "outside.bin").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    path = folder / "in.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def absolute(folder: Path) -> str:
    return str(folder.parent / "outside.bin")


def upward(folder: Path) -> str:
    return "../outside.bin"


def through_a_folder(folder: Path) -> str:
    (folder / "sub").mkdir()
    return "sub/../../outside.bin"


def linked(folder: Path) -> str:
    (folder / "link.bin").symlink_to(folder.parent / "outside.bin")
    return "link.bin"


def linked_folder(folder: Path) -> str:
    (folder / "sub").symlink_to(folder.parent)
    return "sub/outside.bin"


@pytest.mark.parametrize("way", [absolute, upward, through_a_folder])
def test_external_data_cannot_be_named_outside_the_models_folder(tmp_path: Path, way: Callable[[Path], str]) -> None:
    (tmp_path / "a").mkdir()
    path = external_model(tmp_path / "a", way(tmp_path / "a"))
    with pytest.raises(ModelError, match=r"in\.onnx.*'weight'.*outside the model's folder"):
        load_model(path)


@pytest.mark.parametrize("way", [linked, linked_folder])
def test_external_data_is_not_copied_through_a_link(tmp_path: Path, way: Callable[[Path], str]) -> None:
    """The only place where onnxfuse itself reads such a file is where a model moves to another folder."""
    (tmp_path / "a").mkdir()
    model = load_model(external_model(tmp_path / "a", way(tmp_path / "a")))
    with pytest.raises(ModelError, match=r"'weight'.*outside the model's folder"):
        save_model(model.proto, model, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
    assert not list(tmp_path.rglob("out.onnx.data"))


def test_data_in_a_folder_of_the_model_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    load_model(external_model(tmp_path / "a", "sub/../sub/weights.bin"))


def test_constants_of_any_value_compile() -> None:
    """Scalars become part of a kernel's text: scales, bounds, exponents, slopes."""
    b = Builder()
    t = linear(b)
    for value in (3.4e38, np.inf, -np.inf, -0.0, np.nan):
        t = b("Clip", b("Mul", t, b.array(value)), b.array(-abs(value)), b.array(value))
        t = b("LeakyRelu", b("Pow", t, b.array(value)), alpha=float(value))
    model = b.model(t)
    fused, report = onnxfuse.optimize(model, arch="sm_80")
    assert report.fused
    feed = {"x": np.linspace(-3, 3, 60, dtype=np.float32).reshape(2, 5, 6)}
    assert not difference(model, fused, [feed])


def test_two_versions_of_one_operator_set_are_refused() -> None:
    """`ai.onnx` is another name of the default domain; what a node means would depend on who reads it."""
    model = gate_model()
    model.opset_import.append(helper.make_opsetid("ai.onnx", model.opset_import[0].version - 1))
    with pytest.raises(ModelError, match="in versions"):
        load_model(model)
    model.opset_import[-1].version = model.opset_import[0].version
    load_model(model)


@pytest.mark.parametrize("rows", [2**48, 2**62])  # more than an address says, and than 64 bits count
def test_inputs_larger_than_memory_are_one_line(rows: int, tmp_path: Path) -> None:
    b, path = Builder(), tmp_path / "model.onnx"
    onnx.save(b.model(b("Relu", b.input("x", ("rows", 4)))), path)
    for options in ({"shapes": {"x": [rows, 4]}}, {"sizes": {"rows": [rows]}}):
        with pytest.raises(SettingError, match=re.escape(f"input 'x': memory does not hold the shape [{rows}, 4]")):
            verify(path, path, **options)


def test_sizes_and_runs_are_for_random_inputs(tmp_path: Path) -> None:
    b, path = Builder(), tmp_path / "model.onnx"
    onnx.save(b.model(b("Relu", b.input("x", ("rows", 4)))), path)
    for given in ({"shapes": {"x": [3, 4]}}, {"sizes": {"rows": [3]}}, {"runs": 2}):
        with pytest.raises(SettingError, match="random inputs, and inputs were given"):
            verify(path, path, inputs={"x": np.zeros((2, 4), np.float32)}, **given)


@pytest.mark.parametrize("count", [2, 3])
def test_a_tensor_that_is_stored_twice_is_named(count: int) -> None:
    b = Builder()
    weights = [np.full((4, 4), index, np.float32) for index in range(count)]
    model = b.model(b("Relu", b("MatMul", b.input("x", (2, 4)), b.array(weights[0], "w"))))
    model.graph.initializer.extend(numpy_helper.from_array(each, "w") for each in weights[1:])
    with pytest.raises(ModelError, match=re.escape(f"the initializer 'w' is stored {count} times")):
        onnxfuse.optimize(model, arch="sm_80")


def test_a_shape_larger_than_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's own inference makes some values, as those of a ConstantOfShape."""

    def out_of_memory(*_: object, **__: object) -> ModelProto:
        raise MemoryError("std::bad_alloc")

    model = gate_model()
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", out_of_memory)
    with pytest.raises(ModelError, match="larger than memory"):
        onnxfuse.optimize(model)


def fused_or_not(model: ModelProto) -> str:
    """What onnxfuse refuses the model for; empty where it takes it."""
    try:
        onnxfuse.optimize(model, arch="sm_80")
    except ModelError as error:
        return str(error)
    return ""


def is_refused(model: ModelProto) -> bool:
    """Whether ONNX Runtime loads no session of the model."""
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:
        return True
    return False


NODES = "p = MatMul(x, w) s = Add(p, b) y = Tanh(s)"
BRANCHES = """p = MatMul(x, w) y = If<
    then_branch = yes () => (float[] o) {{ {} }}, else_branch = no () => (float[] n) {{ n = Relu(p) }}>(c)"""
CONSTANTS = "a = Constant<value_float = 1.5>() p = MatMul(x, w) s = Mul(p, a) y = Add(s, b)"
GRAPHS = {
    "names apart": (NODES, "abc", ""),
    "no names": (NODES, ("", "", ""), ""),
    "one name": (NODES, "aca", "two nodes are called 'a', a MatMul and a Tanh"),
    "one name beside a Constant's": (CONSTANTS, "acca", "two nodes are called 'c', a MatMul and a Mul"),
    "a Constant's name alone": (CONSTANTS, "aacd", ""),
    "one name in two branches": (BRANCHES.format("o = Tanh(p)"), "abcc", ""),
    "the name of the If in a branch": (BRANCHES.format("o = Tanh(p)"), "abbc", ""),
    "one name in one branch": (BRANCHES.format("q = Tanh(p) o = Add(q, b)"), "abccd", "are called 'c'"),
    "a Gemm of rank 3": ("p = Gemm(x, w, b) y = Tanh(p)", "ab", "a (Gemm): an input of it should have rank 2"),
    "a Gemm of rank 2": ("p = Gemm(z, w, b) y = Tanh(p)", "ab", ""),
    "other depths of a Gemm": ("p = Gemm(w7, w, b) y = Tanh(p)", "ab", "a (Gemm): sizes 8 and 7"),
    "other depths": ("p = MatMul(w7, w) y = Tanh(p)", ("", ""), "a MatMul without a name: the shapes"),
    "other batches": ("p = MatMul(x, t) y = Tanh(p)", "ab", "a (MatMul): the shapes of its inputs do not broadcast"),
    "an axis beyond": ("p = MatMul(x, w) y = Softmax<axis = 3>(p)", "ab", "b (Softmax): its axis is not in [-3 , 2]"),
    "the last axis": ("p = MatMul(x, w) y = Softmax<axis = 2>(p)", "ab", ""),
}  # fmt: skip


def parsed(nodes: str, names: Sequence[str], output: str = "float[] y") -> ModelProto:
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[2, m, 8] x, float[m, 8] z, float[m, 7] w7, float[3, 8, 8] t, bool c) => ({output}) {{ {nodes} }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 8), np.float32), "w"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(8, np.float32), "b"))
    for node, name in zip(walk(model.graph.node), names, strict=True):
        node.name = name
    return model


@pytest.mark.parametrize("case", GRAPHS)
def test_what_onnx_runtime_does_not_load_is_refused_by_its_node_and_nothing_else(case: str) -> None:
    nodes, names, words = GRAPHS[case]
    model = parsed(nodes, names)
    assert is_refused(model) == bool(words)
    assert words in fused_or_not(model)
    assert bool(fused_or_not(model)) == bool(words)


@pytest.mark.parametrize("declared", ["float", "float16", "bool"])
@pytest.mark.parametrize("where", ["output", "between"])
def test_a_declared_element_type_is_that_of_the_node(declared: str, where: str) -> None:
    model = parsed(NODES, "abc", f"{declared}[] y" if where == "output" else "float[] y")
    if where == "between":
        element = {"float": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bool": TensorProto.BOOL}[declared]
        model.graph.value_info.append(helper.make_tensor_value_info("s", element, None))
    name = {"output": "c (Tanh): makes 'y'", "between": "b (Add): makes 's'"}[where]
    words = "" if declared == "float" else f"{name} in FLOAT, declared {declared.upper()}"
    assert is_refused(model) == bool(words)
    assert words in fused_or_not(model)
    assert bool(fused_or_not(model)) == bool(words)
