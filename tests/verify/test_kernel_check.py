"""On a machine without a GPU verify looks at the kernels: what is not what it claims to be is found. On the CPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxfuse
from onnxfuse.errors import DeviceError
from onnxfuse.graph.archive import Flavour, Record, pack, unpack
from onnxfuse.progress import silent
from onnxfuse.runtime import session
from onnxfuse.runtime.disassemble import sass
from onnxfuse.runtime.session import CPU
from onnxfuse.verify import kernel_check, verify
from onnxfuse.verify.kernel_check import check_kernels
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import FLOAT16, Builder

ARCHITECTURES = "sm_80,sm_90a,ptx"
disassembled = functools.cache(sass)  # a fault alters one image, and leaves the others as they were


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "default_providers", lambda: [CPU])


@pytest.fixture
def _each_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "sass", disassembled)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One site of few kernels: each is disassembled."""
    b = Builder(FLOAT16)
    weight, bias = np.random.default_rng(0).standard_normal((32, 64)) / 8, np.linspace(-1, 1, 64)
    path = tmp_path_factory.mktemp("models") / "source.onnx"
    onnx.save(b.model(b("Tanh", b("Add", b("MatMul", b.input("x", [16, 32]), b.array(weight)), b.array(bias)))), path)
    return path


@pytest.fixture(scope="module")
def model(source: Path) -> onnx.ModelProto:
    return onnxfuse.optimize(source, arch=ARCHITECTURES)[0]


def nodes_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == "onnxfuse"]


def archive_of(model: onnx.ModelProto) -> onnx.TensorProto:
    (name,) = {node.input[0] for node in nodes_of(model)}
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def with_archive(model: onnx.ModelProto, change: Callable[[bytes], bytes]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    tensor = archive_of(changed)
    tensor.raw_data = change(tensor.raw_data)
    tensor.dims[:] = [len(tensor.raw_data)]
    return changed


def with_records(model: onnx.ModelProto, change: Callable[[Record], Record]) -> onnx.ModelProto:
    return with_archive(model, lambda data: pack([change(record) for record in unpack(data)]))


def with_attribute(model: onnx.ModelProto, name: str, value: str) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for attribute in nodes_of(changed)[0].attribute:
        if attribute.name == name:
            attribute.s = value.encode()
    return changed


def of(record: Record, flavour: Flavour, **changes: object) -> Record:
    return replace(record, **changes) if record.flavour == flavour else record


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def without_code(image: bytes) -> bytes:
    """A cubin whose instructions are no instructions; its tables stay."""
    start = len(image) // 2
    return image[:start] + b"\xee" * 4096 + image[start + 4096 :]


def in_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    """As converters of types leave a file that they see no custom operators in; its bodies run in either type."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for tensor in changed.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for value in (*changed.graph.input, *changed.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return changed


FAULTS: dict[str, tuple[Callable[[onnx.ModelProto], onnx.ModelProto], str]] = {
    "a bit": (lambda m: with_archive(m, flipped), "checksum"),
    "garbage": (lambda m: with_archive(m, lambda data: b"garbage"), "not an archive"),
    "cut": (lambda m: with_archive(m, lambda data: data[:-100]), "should have"),
    "another kernel": (lambda m: with_attribute(m, "kernel", "ab12"), "carries no kernel ab12"),
    "other axes": (lambda m: with_attribute(m, "axes", "m k -> m"), "has"),
    "an argument less": (lambda m: with_attribute(m, "arguments", "lhs=0 rhs=1 outs=0"), "loads"),
    "machine code for another": (lambda m: with_records(m, lambda r: of(r, Flavour.CUBIN, capability=86)), "sm_86"),
    "PTX for another": (lambda m: with_records(m, lambda r: of(r, Flavour.PTX, capability=90)), "is for sm_80"),
    "another function": (lambda m: with_records(m, lambda r: of(r, Flavour.CUBIN, entry="other")), "function 'other'"),
    "no function in PTX": (lambda m: with_records(m, lambda r: of(r, Flavour.PTX, entry="other")), "function 'other'"),
    "text for machine code": (
        lambda m: with_records(m, lambda r: of(r, Flavour.CUBIN, image=b"garbage" * 100)),
        "not a cubin",
    ),
    "broken instructions": (
        lambda m: with_records(m, lambda r: of(r, Flavour.SPECIFIC, image=without_code(r.image))),
        "does not disassemble",
    ),
    "another type": (in_fp32, "input 0 is f32 and its kernel was compiled for f16; another tool"),
    "text for PTX": (lambda m: with_records(m, lambda r: of(r, Flavour.PTX, image=b"garbage")), "no architecture"),
}  # fmt: skip


def test_good_kernels_are_counted(source: Path, model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "fused.onnx")
    result = verify.verify(source, tmp_path / "fused.onnx")
    found = result.kernels
    records = unpack(archive_of(model).raw_data)
    assert (found.passed, found.nodes) == (True, len(nodes_of(model)))
    assert found.architectures == ("ptx", "sm_80", "sm_90a")
    assert found.kernels == len({(record.image, record.flavour) for record in records})
    assert "verify passed: the original nodes agree; no kernel was run" in str(result)
    assert result.to_dict()["kernels"]["run"] is False


@pytest.mark.usefixtures("_each_image_once")
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_kernels_is_found(name: str, model: onnx.ModelProto, tmp_path: Path) -> None:
    change, message = FAULTS[name]
    onnx.save(change(model), tmp_path / "fused.onnx")
    found = check_kernels(tmp_path / "fused.onnx", silent)
    assert not found.passed
    assert message in "\n".join(found.faults), found.faults
    assert str(found).startswith("kernels  FAILED: ")


def test_an_archive_that_is_missing_is_named(model: onnx.ModelProto, tmp_path: Path) -> None:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    node = nodes_of(changed)[0]
    node.input[0] = next(tensor.name for tensor in changed.graph.initializer if tensor.name != node.input[0])
    onnx.save(changed, tmp_path / "fused.onnx")
    assert "not an archive" in "\n".join(check_kernels(tmp_path / "fused.onnx", silent).faults)


def test_a_model_without_a_fused_node_has_no_kernels(source: Path) -> None:
    assert check_kernels(source, silent) is None
    assert str(verify.verify(source, source)).endswith("verify passed")


def test_garbage_fails_the_command_and_a_gpu_can_be_required(
    source: Path, model: onnx.ModelProto, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.onnx", tmp_path / "bad.onnx"
    onnx.save(model, good)
    onnx.save(with_archive(model, flipped), bad)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    failed = command("verify", source, bad, **hidden)
    assert (failed.returncode, failed.stdout.splitlines()[-1]) == (1, "verify FAILED")
    assert "checksum" in failed.stdout
    required = command("verify", source, good, "--require-gpu", **hidden)
    assert (required.returncode, required.stderr.count("\n")) == (3, 1)
    assert "no kernel can run" in required.stderr
    with pytest.raises(DeviceError, match="no CUDA device"):
        verify.verify(source, good, require_gpu=True)


@pytest.mark.parametrize("library", ["libc.so.6", "no_library_at_all.so"])
def test_a_library_of_another_version_is_one_line_with_the_remedy(
    library: str, model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "library_path", lambda: library)
    onnx.save(model, tmp_path / "fused.onnx")
    with pytest.raises(DeviceError, match=rf"^{library} is not of this version of onnxfuse; install .* again.*$"):
        check_kernels(tmp_path / "fused.onnx", silent)


def test_what_was_checked_is_a_sentence(model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "fused.onnx")
    found = check_kernels(tmp_path / "fused.onnx", silent)
    assert str(found).startswith(f"kernels  1 fused node with {found.kernels} kernels for ptx, sm_80, sm_90a: ")


def test_no_other_kernel_is_read_behind_an_interruption(
    model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` that is asked to end ends, however many kernels are left."""
    read = []

    def interrupted(record: Record) -> str | None:
        read.append(record)
        if len(read) > 1:
            time.sleep(0.2)  # time for the others to be cancelled
        raise KeyboardInterrupt

    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    monkeypatch.setenv("ONNXFUSE_COMPILE_JOBS", "1")
    monkeypatch.setattr(kernel_check, "_fault_of_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check_kernels(path, silent)
    assert len(read) < len(unpack(archive_of(model).raw_data)) / 2
