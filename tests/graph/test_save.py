"""Nothing is lost: no overwriting unasked, no half files, external data travels with its model."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse.bench.bench import bench
from onnxfuse.errors import ModelError, OutputError
from onnxfuse.graph import save
from onnxfuse.graph.external_data import load_whole
from onnxfuse.graph.graph import load_model
from onnxfuse.triton_server import export_triton
from onnxfuse.verify.verify import verify
from tests.helpers import corpus
from tests.helpers.matching import draw
from tests.helpers.onnx_build import Builder, run


def weights_model(rows: int = 64) -> onnx.ModelProto:
    b = Builder()
    x = b.input("x", ("m", rows))
    weight = np.random.default_rng(0).standard_normal((rows, rows))
    return b.model(b("MatMul", b("MatMul", x, b.array(weight, "first")), b.array(weight.T, "second")))


FEED = {"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}


def outputs(path: Path) -> list[bytes]:
    """What a session over the file computes; run from another folder than the model's."""
    loaded = onnx.load(path)
    return [value.tobytes() for value in run(loaded, FEED)]


@pytest.mark.parametrize("prepare", ["source", "existing", "link", "folder", "missing folder"])
def test_a_target_that_would_lose_something_is_refused(tmp_path: Path, prepare: str) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(weights_model(), source)
    if prepare == "source":
        target = tmp_path / "link.onnx"
        target.symlink_to(source)
    elif prepare == "existing":
        target.write_text("mine")
    elif prepare == "link":
        target.symlink_to(tmp_path / "nothing")
    elif prepare == "folder":
        target.mkdir()
    else:
        target = tmp_path / "nowhere" / "out.onnx"
    with pytest.raises(OutputError, match=r"input|exists|folder"):
        save.check_target(source, target, force=False)


def test_force_overwrites_but_never_the_source(tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(weights_model(), source)
    target.write_text("mine")
    save.check_target(source, target, force=True)
    with pytest.raises(OutputError, match="is the input"):
        save.check_target(source, source, force=True)


@pytest.mark.parametrize("kept", ["in.onnx", "out.onnx", "link.onnx"])
def test_a_report_never_takes_the_place_of_a_model(tmp_path: Path, kept: str) -> None:
    """Of one that is there, by any name, or of one that is about to be written."""
    (tmp_path / "in.onnx").write_text("mine")
    (tmp_path / "link.onnx").symlink_to(tmp_path / "in.onnx")
    models = {"the input": tmp_path / "in.onnx", "the fused model": tmp_path / "out.onnx"}
    with pytest.raises(OutputError, match=r"is the (input|fused model)"):
        save.check_new(tmp_path / "." / kept, True, models)
    save.check_new(tmp_path / "report.json", False, models)


@pytest.mark.parametrize("path", ["nowhere/report.json", "n" * 300, "in.onnx/report.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, path: str) -> None:
    (tmp_path / "in.onnx").write_text("mine")
    with pytest.raises(OutputError, match=str(tmp_path)):
        save.check_new(tmp_path / path, True, {})


def test_a_target_over_the_weights_of_the_input_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.onnx"
    onnx.save(weights_model(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = load_model(source)
    for target in (tmp_path / "weights.bin", tmp_path / "sub" / ".." / "weights.bin"):
        with pytest.raises(OutputError, match="data of the input"):
            save.check_files(model, target, force=True)
    save.check_files(model, tmp_path / "out.onnx", force=False)


def test_a_folder_of_files_is_new_or_empty_or_forced(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    save.make_folder(folder, force=False)
    save.make_folder(folder, force=False)
    (folder / "mine").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        save.make_folder(folder, force=False)
    save.make_folder(folder, force=True)
    with pytest.raises(OutputError, match="mine"):
        save.make_folder(folder / "mine", force=True)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(weights_model(), source)
    target.write_text("mine")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    model = load_model(source)
    with pytest.raises(OutputError, match="No space left"):
        save.save_model(model.proto, model, target)
    assert target.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]


def places(folder: Path, same_folder: bool) -> tuple[Path, Path]:
    """Where a model lies, and where what is made of it goes."""
    source, target = folder / "a" / "in.onnx", folder / ("a" if same_folder else "b") / "out.onnx"
    for path in (source, target):
        path.parent.mkdir(exist_ok=True)
    return source, target


@pytest.mark.parametrize("same_folder", [True, False])
def test_external_data_of_nodes_travels(tmp_path: Path, same_folder: bool) -> None:
    """From any working directory, of weights that are Constant nodes, in the main graph and in a function."""
    source = tmp_path / "a" / "in.onnx"
    target = (tmp_path / "a" if same_folder else tmp_path / "b") / "out.onnx"
    for folder in (source.parent, target.parent):
        folder.mkdir(exist_ok=True)
    weights = [numpy_helper.from_array(draw(16, 16, seed=seed).astype(np.float32), f"w{seed}") for seed in range(2)]
    layers = [
        [
            helper.make_node("Constant", [], [f"weight{seed}"], value=weight),
            helper.make_node("MatMul", [x, f"weight{seed}"], [f"product{seed}"]),
            helper.make_node("Relu", [f"product{seed}"], [made]),
        ]
        for seed, (x, made, weight) in enumerate(zip("xy", "yz", weights, strict=True))
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    last = helper.make_function("own", "Last", ["y"], ["z"], layers[1], opsets)
    layers[1] = [helper.make_node("Last", ["y"], ["z"], domain="own")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3, 16)) for name in "xz"]
    graph = helper.make_graph([*layers[0], *layers[1]], "graph", values[:1], values[1:])
    model = helper.make_model(graph, functions=[last], opset_imports=opsets, ir_version=10)
    onnx.save(model, source, save_as_external_data=True, location="w.bin", size_threshold=0, convert_attribute=True)
    report = onnxfuse.optimize_file(source, target, arch="ptx")
    assert len(report.fused) == 2
    feed = {"x": draw(3, 16, seed=9).astype(np.float32)}
    before, after = (onnxruntime.InferenceSession(path).run(None, feed)[0] for path in (source, target))
    assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("same_folder", [True, False])
def test_external_data_of_branches_travels(tmp_path: Path, same_folder: bool) -> None:
    """From any working directory: the file lies beside the model."""
    source, target = places(tmp_path, same_folder)
    b = Builder()
    x, flag = b.input("x", (3, 16)), b.input("flag", (), TensorProto.BOOL)
    branches = {}
    for seed, name in enumerate(("then_branch", "else_branch")):
        nodes = [helper.make_node("MatMul", [x, "own"], ["p"]), helper.make_node("Relu", ["p"], ["r"])]
        own = numpy_helper.from_array(draw(16, 32, seed=seed).astype(np.float32), "own")
        out = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        branches[name] = helper.make_graph(nodes, name, [], [out], [own])
    model = b.model(b("If", flag, **branches))
    onnx.save(model, source, save_as_external_data=True, location="all.bin", size_threshold=0)
    report = onnxfuse.optimize_file(source, target, arch="ptx")
    assert len(report.fused) == 2
    for given in (True, False):
        feed = {"x": draw(3, 16, seed=9).astype(np.float32), "flag": np.array(given)}
        before, after = (onnxruntime.InferenceSession(path).run(None, feed)[0] for path in (source, target))
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("same_folder", [True, False])
def test_external_data_travels(tmp_path: Path, same_folder: bool) -> None:
    source, target = places(tmp_path, same_folder)
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    expected = outputs(source)
    model = load_model(source)
    save.save_model(model.proto, model, target)
    assert outputs(target) == expected
    expected_files = ["all.bin", "in.onnx"] if same_folder else ["out.onnx.data", "out.onnx.data/all.bin"]
    files = {str(path.relative_to(target.parent)) for path in target.parent.rglob("*")}
    assert files == {"out.onnx", *expected_files}


def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    source = tmp_path / "a" / "in.onnx"
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    model = load_model(source)
    for tensor in model.proto.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "../secret.bin"
    with pytest.raises(ModelError, match="outside the model's folder"):
        save.save_model(model.proto, model, tmp_path / "out.onnx")


def test_missing_external_data_names_the_tensor(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    source = tmp_path / "a" / "in.onnx"
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    (tmp_path / "a" / "all.bin").unlink()
    model = load_model(source)
    with pytest.raises(ModelError, match="'first'"):
        save.save_model(model.proto, model, tmp_path / "out.onnx")


@pytest.mark.parametrize("key", corpus.families("btb", "bert", "sd15_unet_mini", size="tiny")[::3])
def test_the_written_bytes_are_the_model(tmp_path: Path, key: str) -> None:
    model = load_model(corpus.materialize(key))
    save.save_model(model.proto, model, tmp_path / "out.onnx")
    assert onnx.load(tmp_path / "out.onnx") == model.proto
    assert (tmp_path / "out.onnx").stat().st_size == model.proto.ByteSize()


def test_a_model_too_large_for_one_message_gets_external_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "LARGEST_MESSAGE", 20_000)
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    original = weights_model()
    onnx.save(original, source)
    model = load_model(source)
    save.save_model(model.proto, model, target)
    assert target.stat().st_size < 20_000 < (tmp_path / "out.onnx.data").stat().st_size
    assert outputs(target) == outputs(source)
    stored = onnx.load(target, load_external_data=False)
    offsets = [
        int(entry.value)
        for tensor in stored.graph.initializer
        for entry in tensor.external_data
        if entry.key == "offset"
    ]
    assert all(offset % save.ALIGNMENT == 0 for offset in offsets)
    assert numpy_helper.to_array(onnx.load(target).graph.initializer[0]).shape == (64, 64)


def hub_cache(folder: Path) -> Path:
    """A model as the Hugging Face hub's client keeps it: its files are links to others that are named by their sums."""
    snapshot, blobs, plain = folder / "snapshots" / "abc", folder / "blobs", folder / "plain"
    for each in (snapshot, blobs, plain):
        each.mkdir(parents=True)
    model = weights_model()
    model.graph.node.append(onnx.helper.make_node("Relu", [model.graph.output[0].name], ["last"]))
    model.graph.output[0].name = "last"
    onnx.save(model, plain / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    for number, path in enumerate(sorted(plain.iterdir())):
        path.rename(blobs / f"sha{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/sha{number}")
    plain.rmdir()
    return snapshot / "model.onnx"


def session_outputs(path: Path | str) -> list[bytes]:
    """What ONNX Runtime computes, with its own rule of where external data may lie."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [value.tobytes() for value in session.run(None, FEED)]


@pytest.mark.parametrize("place", ["beside", "elsewhere", "working folder"])
def test_a_model_of_links_is_fused_to_one_that_loads(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hub_cache(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    target = {"beside": source.parent, "elsewhere": tmp_path, "working folder": Path()}[place] / "fused.onnx"
    if place == "working folder":
        monkeypatch.chdir(source.parent)
        source = Path(source.name)
    assert onnxfuse.optimize_file(source, target, arch="sm_80").fused
    assert session_outputs(str(target)) == session_outputs(str(source))
    assert verify(source, target, per_site=True).passed
    assert bench(source, target, device="cpu", runs=1, warmup=0, per_site=True).sites
    served = export_triton(target, tmp_path / "models", Path(onnxfuse.library_path()))
    assert session_outputs(served / "1" / "model.onnx") == session_outputs(str(source))
    assert {path: path.read_bytes() for path in before} == before


def test_data_that_stay_in_reach_are_not_copied(tmp_path: Path) -> None:
    """The folder's own name may be a link, and a link may stay inside."""
    source = tmp_path / "real" / "in.onnx"
    source.parent.mkdir()
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    (source.parent / "all.bin").rename(source.parent / "moved.bin")
    (source.parent / "all.bin").symlink_to("moved.bin")
    (tmp_path / "link").symlink_to("real")
    model = load_model(tmp_path / "link" / "in.onnx")
    saved = save.save_model(model.proto, model, source.parent / "out.onnx")
    assert saved == save.Saved(source.parent / "out.onnx")
    assert session_outputs(saved.model) == session_outputs(source)


def test_a_link_out_of_a_plain_folder_is_refused_as_the_runtime_does(tmp_path: Path) -> None:
    source = tmp_path / "a" / "in.onnx"
    source.parent.mkdir()
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    (tmp_path / "a" / "all.bin").rename(tmp_path / "all.bin")
    (tmp_path / "a" / "all.bin").symlink_to(tmp_path / "all.bin")
    with pytest.raises(ModelError, match=r"outside the model's folder: 'all.bin' is a link to"):
        save.check_files(load_model(source), tmp_path / "a" / "out.onnx", force=False)
    with pytest.raises(Exception, match="escapes"):
        session_outputs(source)


@pytest.mark.parametrize("one_file", [True, False])
def test_data_are_read_as_onnx_reads_them(tmp_path: Path, one_file: bool) -> None:
    source = tmp_path / "in.onnx"
    onnx.save(weights_model(), source, save_as_external_data=True, all_tensors_to_one_file=one_file, size_threshold=0)
    assert load_whole(source) == onnx.load(source)


@pytest.mark.parametrize(("fault", "message"), [("short", "cut off"), ("length", "shape needs"), ("none", "missing")])
def test_data_that_cannot_be_read_name_the_tensor(tmp_path: Path, fault: str, message: str) -> None:
    source, data = tmp_path / "in.onnx", tmp_path / "all.bin"
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    if fault == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif fault == "none":
        data.unlink()
    else:
        proto = onnx.load(source, load_external_data=False)
        next(e for e in proto.graph.initializer[1].external_data if e.key == "length").value = "4"
        onnx.save(proto, source)
    with pytest.raises(ModelError, match=f"the data of '.*{message}"):
        load_whole(source)


def test_a_name_of_255_letters_is_written(tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / ("o" * 250 + ".onnx")
    onnx.save(weights_model(), source)
    onnxfuse.optimize_file(source, target, arch="sm_80")
    assert session_outputs(target) == session_outputs(source)


@pytest.mark.parametrize("kind", ["data in files", "large"])
def test_data_of_somebody_else_are_in_the_way_where_there_are_any(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, data = tmp_path / "a" / "in.onnx", tmp_path / "out.onnx", tmp_path / "out.onnx.data"
    source.parent.mkdir()
    external = {"save_as_external_data": True, "size_threshold": 0} if kind == "data in files" else {}
    onnx.save(weights_model(), source, **external)
    if kind == "large":
        monkeypatch.setattr(save, "LARGEST_MESSAGE", 20_000)
    data.write_text("mine")
    with pytest.raises(OutputError, match=r"out\.onnx\.data: "):
        onnxfuse.optimize_file(source, target, arch="sm_80")
    assert (data.read_text(), target.exists()) == ("mine", False)
    onnx.save(weights_model(), source)
    monkeypatch.undo()
    onnxfuse.optimize_file(source, target, arch="sm_80")
    assert data.read_text() == "mine", "the model needs none"


def test_copied_and_moved_weights_lie_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "LARGEST_MESSAGE", 10_000)
    source, target = tmp_path / "a" / "in.onnx", tmp_path / "out.onnx"
    source.parent.mkdir()
    proto = weights_model()
    onnx.external_data_helper.set_external_data(proto.graph.initializer[0], "first.bin")
    onnx.save(proto, source)
    model = load_model(source)
    saved = save.save_model(model.proto, model, target)
    assert [path.parent for path in (*saved.copied, saved.weights)] == [tmp_path / "out.onnx.data"] * 2
    assert session_outputs(target) == session_outputs(source)


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in.onnx", tmp_path / "pipe"
    onnx.save(weights_model(), source)
    os.mkfifo(pipe)
    read: list[bytes] = []
    for write in (
        lambda: onnxfuse.optimize_file(source, pipe, arch="sm_80"),
        lambda: (save.check_new(pipe, True, {}), save.write_text(pipe, "report")),
    ):
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        write()
        reader.join()
        assert pipe.is_fifo()
    onnx.checker.check_model(onnx.load_from_string(read[0]).SerializeToString())
    assert read[1] == b"report"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "pipe"]


def test_a_device_and_what_is_open_already_are_streams(tmp_path: Path) -> None:
    handle, terminal = os.openpty()
    with (tmp_path / "file").open("w") as file:
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{file.fileno()}")
        for path in (os.ttyname(terminal), f"/dev/fd/{file.fileno()}", tmp_path / "link"):
            save.check_new(Path(path), False, {})
            assert save.is_stream(Path(path))
    assert not save.is_stream(tmp_path / "file")
    os.close(handle)
    os.close(terminal)


def test_a_model_with_data_in_files_does_not_fit_a_pipe(tmp_path: Path) -> None:
    source = hub_cache(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="name a file"):
        onnxfuse.optimize_file(source, tmp_path / "pipe", arch="sm_80")


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anywhere but a read-only disk
    with pytest.raises(OutputError, match="cannot be written"):
        save.check_new(tmp_path / "out.onnx", False, {})
