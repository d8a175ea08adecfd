"""What other providers have compiled stays as it is: EPContext nodes, to the byte, and the files that they name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxfuse.errors import ModelError, OutputError
from onnxfuse.graph.functions import walk
from onnxfuse.graph.graph import load_model
from onnxfuse.graph.load import Model
from onnxfuse.graph.save import check_files, save_model
from onnxfuse.triton_server import export_triton
from tests.helpers.many_commands import run_command
from tests.helpers.matching import K, N, draw, silu
from tests.helpers.onnx_build import Builder

EMBEDDED = bytes(range(256)) * 64  # no text: zero bytes, and what is not UTF-8
FILES = {"b.bin": b"beside the model", "parts/c.bin": EMBEDDED[::-1]}


def context(read: str, made: str, /, **attributes: object) -> onnx.NodeProto:
    name = f"compiled {made}"
    return helper.make_node("EPContext", [read], [made], name=name, domain="com.microsoft", **attributes)


def contexts(model: onnx.ModelProto) -> list[bytes]:
    """Every EPContext node in a model, as it is stored."""
    return [
        node.SerializeToString(deterministic=True) for node in walk(model.graph.node) if node.op_type == "EPContext"
    ]


def value(name: str, columns: int = N) -> onnx.ValueInfoProto:
    """What no schema tells of an EPContext node's output."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "rows", columns])


def mixed_model() -> onnx.ModelProto:
    """A fusion between compiled parts: embedded, in a file, inside that of another, and in a file in a branch."""
    b = Builder()
    x = b.input("x", ("batch", "rows", K))
    gate = silu(b, b("MatMul", "compiled", b.array(draw(K, N), "weight")))
    b.nodes.insert(0, context(x, "compiled", embed_mode=1, ep_cache_context=EMBEDDED, partition_name="a"))
    b.nodes.append(context(gate, "y", embed_mode=0, ep_cache_context="b.bin", source="X", notes="é"))
    b.nodes.append(context("y", "z", embed_mode=0, main_context=0, partition_name="b"))
    branches = {
        f"{name}_branch": helper.make_graph([node], name, [], [value(name)])
        for name, node in {
            "then": context("z", "then", embed_mode=0, ep_cache_context="parts/c.bin"),
            "else": helper.make_node("Identity", ["z"], ["else"]),
        }.items()
    }
    b.nodes.append(helper.make_node("If", [b.input("yes", (), TensorProto.BOOL)], ["out"], **branches))
    made = [value("compiled", K), value("y"), value("z")]
    graph = helper.make_graph(b.nodes, "mixed", b.inputs, [value("out")], b.initializers, value_info=made)
    opsets = [helper.make_opsetid("", b.opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "in.onnx"
    for name, content in FILES.items():
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_bytes(content)
    onnx.save(mixed_model(), path)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".onnx")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def optimize(source: Path, target: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_command("optimize", source, "-o", target, "--arch", "sm_80", *flags)


@pytest.mark.parametrize("folder", ["a", "b"])
def test_compiled_parts_go_through_and_their_files_come_along(source: Path, folder: str, tmp_path: Path) -> None:
    """Nodes keep every byte, so that in another folder each file lies at the same path relative to the model."""
    target = tmp_path / folder / "out.onnx"
    target.parent.mkdir(exist_ok=True)
    result = optimize(source, target)
    assert result.returncode == 0, result.stderr
    written = onnx.load(target)
    assert [node.op_type for node in written.graph.node if node.domain == "onnxfuse"] == ["FusedGemm_0"]
    assert contexts(written) == contexts(mixed_model())
    assert len(contexts(written)) == 4
    assert files_of(target.parent) == FILES


def test_onnx_runtime_finds_no_fault_but_the_missing_provider(source: Path, tmp_path: Path) -> None:
    """Without the provider that compiled them neither model runs; the message is the same."""
    target = tmp_path / "a" / "out.onnx"
    assert optimize(source, target).returncode == 0
    messages = []
    for path in (source, target):
        with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*EPContext") as raised:
            onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_file_in_the_way_is_kept_without_force(source: Path, tmp_path: Path) -> None:
    target, mine = tmp_path / "b" / "out.onnx", tmp_path / "b" / "parts" / "c.bin"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    refused = optimize(source, target)
    assert (refused.returncode, mine.read_text()) == (3, "mine")
    assert "c.bin: exists" in refused.stderr
    assert not target.exists()
    assert optimize(source, target, "--force").returncode == 0
    assert files_of(target.parent) == FILES


def test_the_same_file_in_the_way_is_no_obstacle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.bin").write_bytes(FILES["b.bin"])
    check_files(load_model(source), tmp_path / "b" / "out.onnx", force=False)


def missing(folder: Path) -> str:
    return "nothing.bin"


def upward(folder: Path) -> str:
    return "../outside.bin"


def around(folder: Path) -> str:
    return f"parts/../../{folder.name}/b.bin"


def absolute(folder: Path) -> str:
    return str(folder / "b.bin")


def linked(folder: Path) -> str:
    (folder / "link.bin").symlink_to(folder.parent / "outside.bin")
    return "link.bin"


def zero(folder: Path) -> str:
    return "b.bin\0"


@pytest.mark.parametrize("way", [missing, upward, around, absolute, linked, zero])
def test_a_file_elsewhere_is_not_copied(source: Path, way: Callable[[Path], str], tmp_path: Path) -> None:
    """Before any work, and again where the model is written."""
    (tmp_path / "outside.bin").write_text("secret")
    (tmp_path / "b").mkdir()
    proto = mixed_model()
    node = next(node for node in proto.graph.node if node.output[0] == "y")
    next(each for each in node.attribute if each.name == "ep_cache_context").s = way(source.parent).encode()
    model = Model(proto, source)
    for write in (check_files, lambda model, target, _: save_model(model.proto, model, target)):
        with pytest.raises(ModelError, match=r"in\.onnx: the context of 'compiled y' (is missing|lies outside)"):
            write(model, tmp_path / "b" / "out.onnx", False)
    assert not files_of(tmp_path / "b")


def test_a_model_without_a_folder_names_what_its_user_keeps(source: Path, tmp_path: Path) -> None:
    """A message that came from no file has files only its user knows: it is written, and nothing is copied."""
    model = load_model(mixed_model())
    target = tmp_path / "b" / "out.onnx"
    target.parent.mkdir()
    check_files(model, target, force=False)
    save_model(model.proto, model, target)
    assert contexts(onnx.load(target)) == contexts(mixed_model())
    assert files_of(target.parent) == {}


def test_a_failed_copy_leaves_no_rubbish(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "b").mkdir()
    monkeypatch.setattr(Path, "replace", refuse)
    model = load_model(source)
    with pytest.raises(OutputError, match="No space left"):
        save_model(model.proto, model, tmp_path / "b" / "out.onnx")
    assert files_of(tmp_path / "b") == {}


def test_the_files_come_along_to_a_server(source: Path, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.touch()
    place = export_triton(source, tmp_path / "repository", library, unfused=True)
    assert files_of(place / "1") == FILES
