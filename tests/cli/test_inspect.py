"""`inspect` tells what GPU code a file carries, and `--rebuild` whether it is onnxfuse's, without running any."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from onnxfuse.errors import ModelError
from onnxfuse.graph.archive import Record, pack, unpack
from onnxfuse.graph.rewrite import KERNELS
from onnxfuse.lowering import inspection
from onnxfuse.lowering.kernel_description import read_description
from onnxfuse.progress import silent
from tests.helpers.many_commands import run_command as command
from tests.helpers.onnx_build import of_sizes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused model with kernels of several families, of a known size: of any there would be some twenty kernels."""
    folder = tmp_path_factory.mktemp("inspect")
    original, path = folder / "model.onnx", folder / "fused.onnx"
    onnx.save(of_sizes(onnx.load(ROOT / "models" / "ff_geglu.onnx"), {"batch": 2, "sequence": 7}), original)
    assert command("optimize", original, "-o", path, "--arch", "sm_90a").returncode == 0
    return path


@pytest.fixture(scope="module")
def single(fused: Path) -> Path:
    """The same with one piece of code for each node: fewer to compile."""
    model = onnx.load(fused)
    content = content_of(model)
    first = {record.kernel: record for record in reversed(unpack(archive(model).raw_data))}
    content["kernels"] = {name: variants[:1] for name, variants in content["kernels"].items()}
    put_code(model, list(first.values()))
    return with_description(model, content, fused.parent)


def archive(model: ModelProto) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == KERNELS)


def put_code(model: ModelProto, records: Sequence[Record]) -> None:
    altered = pack(tuple(records))
    archive(model).raw_data = altered
    archive(model).dims[0] = len(altered)


def entry(model: ModelProto) -> onnx.StringStringEntryProto:
    return next(each for each in model.metadata_props if each.key == KERNELS)


def saved(model: ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "altered.onnx")
    return folder / "altered.onnx"


def with_description(model: ModelProto, content: dict, folder: Path) -> Path:
    entry(model).value = base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()
    return saved(model, folder)


def content_of(model: ModelProto) -> dict:
    return json.loads(zlib.decompress(base64.b64decode(entry(model).value)))


def test_it_lists_every_piece_of_code(fused: Path) -> None:
    printed = json.loads(command("inspect", fused, "--json").stdout)
    records = unpack(archive(onnx.load(fused)).raw_data)
    assert [code["sha256"] for code in printed["code"]] == [hashlib.sha256(r.image).hexdigest() for r in records]
    assert [code["architecture"] for code in printed["code"]] == [record.architecture for record in records]
    assert {node["kernel"] for node in printed["nodes"]} == {record.kernel for record in records}
    assert printed["rebuilt"] is None


def test_what_onnxfuse_wrote_is_what_it_makes_again(fused: Path) -> None:
    result = command("inspect", fused, "--rebuild")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "byte for byte" in result.stdout


def test_a_changed_byte_is_named(single: Path, tmp_path: Path) -> None:
    """In the middle of one piece of code, in an archive that is right otherwise."""
    model = onnx.load(single)
    first, *rest = unpack(archive(model).raw_data)
    place = len(first.image) // 2
    image = first.image[:place] + bytes([first.image[place] ^ 1]) + first.image[place + 1 :]
    put_code(model, [replace(first, image=image), *rest])
    path = saved(model, tmp_path)
    assert command("inspect", path).returncode == 0
    result = command("inspect", path, "--rebuild")
    assert result.returncode == 1
    faults = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert len(faults) == 1
    assert f"from byte {place} on" in faults[0]
    assert f"{first.architecture} code of kernel {first.kernel}" in faults[0]


def test_a_damaged_file_is_named(single: Path, tmp_path: Path) -> None:
    model = onnx.load(single)
    stored = archive(model)
    stored.raw_data = stored.raw_data[:-1] + bytes([stored.raw_data[-1] ^ 1])
    path = saved(model, tmp_path)
    result = command("inspect", path)
    assert (result.returncode, len(result.stderr.splitlines())) == (3, 1)
    assert result.stderr.startswith(f"error: {path}: the archive's checksum")


def test_an_altered_launch_rule_is_named(single: Path, tmp_path: Path) -> None:
    model = onnx.load(single)
    first, *rest = unpack(archive(model).raw_data)
    put_code(model, [replace(first, shared_bytes=first.shared_bytes + 16), *rest])
    found = inspection.inspect(saved(model, tmp_path), True, silent)
    assert [fault.rpartition(": ")[2] for fault in found.faults] == ["shared_bytes"]


def test_code_that_nobody_describes_is_a_fault(single: Path, tmp_path: Path) -> None:
    model = onnx.load(single)
    records = unpack(archive(model).raw_data)
    put_code(model, [*records, replace(records[0], kernel="abc")])
    found = inspection.inspect(saved(model, tmp_path), True, silent)
    assert found.faults == ("kernel abc has 1 pieces of code, and the file describes 0",)


def test_a_file_that_does_not_say_what_its_kernels_are_is_not_judged(single: Path, tmp_path: Path) -> None:
    model = onnx.load(single)
    del model.metadata_props[:]
    path = saved(model, tmp_path)
    assert command("inspect", path).returncode == 0
    result = command("inspect", path, "--rebuild")
    assert (result.returncode, len(result.stderr.splitlines())) == (3, 1)


def test_another_compiler_is_said(single: Path, tmp_path: Path) -> None:
    model = onnx.load(single)
    path = with_description(model, content_of(model) | {"nvrtc": [12, 9]}, tmp_path)
    result = command("inspect", path, "--rebuild")
    assert (result.returncode, "nvidia-cuda-nvrtc==12.9" in result.stderr) == (3, True)


def places(value: object) -> list[tuple[object, object]]:
    """Every text in a document with what holds it."""
    found = []
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += [(value, key)] if isinstance(each, str) else places(each)
    return found


def test_no_text_of_a_description_reaches_the_compiler(single: Path) -> None:
    """Code in the place of any name is refused before anything is written."""
    model = onnx.load(single)
    count = len(places(next(iter(content_of(model)["kernels"].values()))[0]))
    assert count > 20
    for index in range(count):
        content = content_of(model)
        holder, key = places(next(iter(content["kernels"].values()))[0])[index]
        holder[key] = '0); asm("trap;"); (0'
        text = base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()
        with pytest.raises(ModelError, match="what the file says of its kernels cannot be read"):
            read_description(text)


@pytest.mark.parametrize("alter", ["tile", "width", "family", "nonsense"])
def test_a_description_that_no_plan_would_make_is_one_line(single: Path, tmp_path: Path, alter: str) -> None:
    model = onnx.load(single)
    content = content_of(model)
    variant = next(iter(content["kernels"].values()))[0]
    if alter == "tile":
        variant[3][1]["block_n"] = "wide"
    elif alter == "width":
        variant[2][1]["lhs_width"] = 3
    elif alter == "family":
        variant[1] = next(name for name in ("portable", "small_m") if name != variant[1])
    else:
        content["kernels"] = ["nothing"]
    result = command("inspect", with_description(model, content, tmp_path), "--rebuild")
    assert result.returncode in (1, 3)
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 1


def test_a_model_without_fused_nodes_has_nothing_to_show() -> None:
    result = command("inspect", ROOT / "models" / "ff_geglu.onnx", "--rebuild")
    assert result.returncode == 0
    assert "0 fused nodes" in result.stdout
