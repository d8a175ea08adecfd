"""The entry of a Triton model repository: read by Triton's own message types, and served as it lies there."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from onnx import helper
from tritonclient.grpc import model_config_pb2

import onnxfuse
from onnxfuse import triton_server
from onnxfuse.errors import ModelError, OutputError, SettingError
from onnxfuse.triton_server import export_triton
from tests.helpers import corpus
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import Builder, run

BRIDGE = Path(onnxfuse.library_path())
UNET = "tiny/sd15_unet_mini.tiny.torchscript.op17.fp16.dynamic.onnx"


def parsed(place: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse((place / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("triton") / "unet.fused.onnx"
    model, _ = onnxfuse.optimize(corpus.materialize(UNET), arch="ptx", only="split_gemm")
    onnx.save(model, path)
    return path


def test_the_configuration_copies_the_models_axes(fused: Path, tmp_path: Path) -> None:
    result = command("export-triton", fused, tmp_path / "models", "--mount", "/models")
    assert result.returncode == 0, result.stderr
    config = parsed(tmp_path / "models" / "unet")
    assert (config.name, config.backend, config.max_batch_size) == ("unet", "onnxruntime", 8)
    assert config.HasField("dynamic_batching")
    assert list(config.model_operations.op_library_filename) == ["/models/unet/libonnxfuse.so"]
    session = onnxruntime.InferenceSession(fused)
    for ports, values in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [port.name for port in ports] == [value.name for value in values]
        for port, value in zip(ports, values, strict=True):
            expected = [size if isinstance(size, int) else -1 for size in value.shape[1:]]
            assert list(port.dims) == (expected or [1])
            assert port.HasField("reshape") == (not expected)


def test_the_copied_model_and_library_are_those_of_the_package(fused: Path, tmp_path: Path) -> None:
    place = export_triton(fused, tmp_path, BRIDGE, name="served")
    assert (place / "libonnxfuse.so").read_bytes() == BRIDGE.read_bytes()
    feed = corpus.feed(UNET, 0)
    expected = run(onnx.load(fused), feed)
    actual = run(onnx.load(place / "1" / "model.onnx"), feed)
    assert all(left.tobytes() == right.tobytes() for left, right in zip(expected, actual, strict=True))


def model(shape_in: list[int | str | None], shape_out: list[int | str | None], element: int = 1) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", element, shape_in)
    y = helper.make_tensor_value_info("y", element, shape_out)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize(
    ("shape_in", "shape_out", "batch", "dims"),
    [
        (["b", 3, "s"], ["b", 3, "s"], 4, [3, -1]),
        ([None, 3], [None, 3], 4, [3]),
        ([2, 3], [2, 3], 0, [2, 3]),
        ([2, "s"], [2, "s"], 0, [2, -1]),
        (["b"], ["b"], 4, [1]),
    ],
)
def test_a_batch_is_a_first_axis_that_is_dynamic_everywhere(tmp_path, shape_in, shape_out, batch, dims) -> None:
    onnx.save(model(shape_in, shape_out), tmp_path / "m.onnx")
    place = export_triton(tmp_path / "m.onnx", tmp_path / "models", BRIDGE, max_batch=4, unfused=True)
    config = parsed(place)
    assert (config.max_batch_size, list(config.input[0].dims)) == (batch, dims)
    assert config.HasField("dynamic_batching") == bool(batch)


def test_nothing_is_overwritten_and_what_triton_lacks_is_named(tmp_path: Path) -> None:
    onnx.save(model(["b", 3], ["b", 3]), tmp_path / "m.onnx")
    export_triton(tmp_path / "m.onnx", tmp_path / "models", BRIDGE, unfused=True)
    with pytest.raises(OutputError, match="models/m: exists"):
        export_triton(tmp_path / "m.onnx", tmp_path / "models", BRIDGE, unfused=True)
    onnx.save(model([3], [3], onnx.TensorProto.COMPLEX64), tmp_path / "c.onnx")
    with pytest.raises(ModelError, match="'x': Triton has no tensor type"):
        export_triton(tmp_path / "c.onnx", tmp_path / "models", BRIDGE, unfused=True)


def with_external_data(folder: Path) -> Path:
    """A model whose weight lies in a file beside it."""
    b = Builder()
    proto = b.model(b("MatMul", b.input("x", ("b", 64)), b.array(np.eye(64), "weight")))
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    return folder / "m.onnx"


@pytest.mark.parametrize("exists", [False, True], ids=["new repository", "repository of others"])
@pytest.mark.parametrize("fault", ["no data", "no bridge", "full disk"])
def test_what_fails_leaves_nothing_and_the_next_try_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, exists: bool
) -> None:
    source, repository, bridge = with_external_data(tmp_path), tmp_path / "deep" / "models", BRIDGE
    if exists:
        (repository / "other").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        if fault == "no data":
            (tmp_path / "weights").rename(tmp_path / "away")
        elif fault == "full disk":
            patch.setattr(triton_server, "write_text", no_space)
        with pytest.raises(ModelError if fault == "no data" else OutputError):
            export_triton(source, repository, tmp_path / "absent.so" if fault == "no bridge" else bridge, unfused=True)
    if fault == "no data":
        (tmp_path / "away").rename(tmp_path / "weights")
    assert sorted(tmp_path.rglob("*")) == before
    place = export_triton(source, repository, bridge, unfused=True)
    x = np.arange(64, dtype=np.float32)[None]
    np.testing.assert_array_equal(run(onnx.load(place / "1" / "model.onnx"), {"x": x})[0], x)
    assert {path.name for path in place.iterdir()} == {"1", "config.pbtxt", "libonnxfuse.so"}
    assert [path.name for path in repository.iterdir() if path != place] == ["other"] * exists
    assert place.stat().st_mode == place.parent.stat().st_mode, "a server of another user reads it"


def no_space(target: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("max_batch", [-5, -1, 1 << 31])
def test_a_batch_that_is_no_number_of_rows_is_refused(tmp_path: Path, max_batch: int) -> None:
    onnx.save(model(["b", 3], ["b", 3]), tmp_path / "m.onnx")
    result = command("export-triton", tmp_path / "m.onnx", tmp_path / "models", "--max-batch", max_batch)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert str(max_batch) in result.stderr
    with pytest.raises(SettingError, match=str(max_batch)):
        export_triton(tmp_path / "m.onnx", tmp_path / "models", BRIDGE, max_batch=max_batch, unfused=True)
    assert not (tmp_path / "models").exists()


def test_the_library_command_prints_the_bridge() -> None:
    assert command("library").stdout.strip() == str(BRIDGE)


def test_types_are_numpys_under_triton_names() -> None:
    from onnxfuse.triton_server import DATA_TYPES

    for element, name in DATA_TYPES.items():
        assert name in model_config_pb2.DataType.keys(), element  # noqa: SIM118
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(element))
        if name not in ("TYPE_STRING", "TYPE_BOOL"):
            assert name.removeprefix("TYPE_").removeprefix("B").endswith(str(8 * kind.itemsize)), element
