"""Nothing is lost: no overwriting unasked, no half files, external data travels with its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxfuse import store
from onnxfuse.errors import ModelError, OutputError
from onnxfuse.graph import load_model
from tests import corpus
from tests.onnx_build import Builder, run


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


@pytest.mark.parametrize("prepare", ["source", "existing", "data", "folder", "missing folder"])
def test_a_target_that_would_lose_something_is_refused(tmp_path: Path, prepare: str) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(weights_model(), source)
    if prepare == "source":
        target = tmp_path / "link.onnx"
        target.symlink_to(source)
    elif prepare == "existing":
        target.write_text("mine")
    elif prepare == "data":
        (tmp_path / "out.onnx.data").write_text("mine")
    elif prepare == "folder":
        target.mkdir()
    else:
        target = tmp_path / "nowhere" / "out.onnx"
    with pytest.raises(OutputError, match=r"input|exists|folder"):
        store.check_target(source, target, force=False)


def test_force_overwrites_but_never_the_source(tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(weights_model(), source)
    target.write_text("mine")
    store.check_target(source, target, force=True)
    with pytest.raises(OutputError, match="is the input"):
        store.check_target(source, source, force=True)


@pytest.mark.parametrize("kept", ["in.onnx", "out.onnx", "link.onnx"])
def test_a_report_never_takes_the_place_of_a_model(tmp_path: Path, kept: str) -> None:
    """Of one that is there, by any name, or of one that is about to be written."""
    (tmp_path / "in.onnx").write_text("mine")
    (tmp_path / "link.onnx").symlink_to(tmp_path / "in.onnx")
    models = {"the input": tmp_path / "in.onnx", "the fused model": tmp_path / "out.onnx"}
    with pytest.raises(OutputError, match=r"is the (input|fused model)"):
        store.check_new(tmp_path / "." / kept, True, models)
    store.check_new(tmp_path / "report.json", False, models)


@pytest.mark.parametrize("path", ["nowhere/report.json", "n" * 300, "in.onnx/report.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path, path: str) -> None:
    (tmp_path / "in.onnx").write_text("mine")
    with pytest.raises(OutputError, match=str(tmp_path)):
        store.check_new(tmp_path / path, True, {})


def test_a_target_over_the_weights_of_the_input_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.onnx"
    onnx.save(weights_model(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = load_model(source)
    for target in (tmp_path / "weights.bin", tmp_path / "sub" / ".." / "weights.bin"):
        with pytest.raises(OutputError, match="data of the input"):
            store.check_files(model, target, force=True)
    store.check_files(model, tmp_path / "out.onnx", force=False)


def test_a_folder_of_files_is_new_or_empty_or_forced(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    store.make_folder(folder, force=False)
    store.make_folder(folder, force=False)
    (folder / "mine").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        store.make_folder(folder, force=False)
    store.make_folder(folder, force=True)
    with pytest.raises(OutputError, match="mine"):
        store.make_folder(folder / "mine", force=True)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(weights_model(), source)
    target.write_text("mine")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    model = load_model(source)
    with pytest.raises(OutputError, match="No space left"):
        store.save_model(model.proto, model, target)
    assert target.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.onnx", "out.onnx"]


@pytest.mark.parametrize("same_folder", [True, False])
def test_external_data_travels(tmp_path: Path, same_folder: bool) -> None:
    source = tmp_path / "a" / "in.onnx"
    target = (tmp_path / "a" if same_folder else tmp_path / "b") / "out.onnx"
    for folder in (source.parent, target.parent):
        folder.mkdir(exist_ok=True)
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    expected = outputs(source)
    model = load_model(source)
    store.save_model(model.proto, model, target)
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
        store.save_model(model.proto, model, tmp_path / "out.onnx")


def test_missing_external_data_names_the_tensor(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    source = tmp_path / "a" / "in.onnx"
    onnx.save(weights_model(), source, save_as_external_data=True, location="all.bin", size_threshold=0)
    (tmp_path / "a" / "all.bin").unlink()
    model = load_model(source)
    with pytest.raises(ModelError, match="'first'"):
        store.save_model(model.proto, model, tmp_path / "out.onnx")


@pytest.mark.parametrize("key", corpus.families("btb", "bert", "sd15_unet_mini", size="tiny")[::3])
def test_the_written_bytes_are_the_model(tmp_path: Path, key: str) -> None:
    model = load_model(corpus.materialize(key))
    store.save_model(model.proto, model, tmp_path / "out.onnx")
    assert onnx.load(tmp_path / "out.onnx") == model.proto
    assert (tmp_path / "out.onnx").stat().st_size == model.proto.ByteSize()


def test_a_model_too_large_for_one_message_gets_external_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LARGEST_MESSAGE", 20_000)
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    original = weights_model()
    onnx.save(original, source)
    model = load_model(source)
    store.save_model(model.proto, model, target)
    assert target.stat().st_size < 20_000 < (tmp_path / "out.onnx.data").stat().st_size
    assert outputs(target) == outputs(source)
    stored = onnx.load(target, load_external_data=False)
    offsets = [
        int(entry.value)
        for tensor in stored.graph.initializer
        for entry in tensor.external_data
        if entry.key == "offset"
    ]
    assert all(offset % store.ALIGNMENT == 0 for offset in offsets)
    assert numpy_helper.to_array(onnx.load(target).graph.initializer[0]).shape == (64, 64)
