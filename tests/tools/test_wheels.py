"""What tests.tools.wheels is made of: the bridge's hooks through a server, and what it says where something lacks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxfuse.graph.archive import pack
from tests.graph.test_archive import RECORD
from tests.helpers.bridge_build import bridge_library
from tests.helpers.bridge_hooks import Arguments, Bridge, BridgeError, load
from tests.helpers.remote_hooks import RemoteHooks
from tests.runtime.test_bridge import GATE, GATE_SHAPES
from tests.tools import wheels


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    server = tmp_path_factory.mktemp("server") / "hook_server"
    command = ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", str(wheels.SERVER), "-o", str(server), "-ldl"]
    subprocess.run(command, check=True)
    hooks = RemoteHooks([str(server), str(bridge_library())])
    yield Bridge(hooks)
    hooks.close()


def test_a_server_answers_as_the_library_does(remote: Bridge) -> None:
    local = load(bridge_library())
    pointers = {"element_bytes": 2, "inputs": (4096, 8192, 65536), "outputs": (2**40,)}
    (found, shapes), (wanted, expected) = (each.arguments(GATE, GATE_SHAPES, **pointers) for each in (remote, local))
    assert bytes(found) == bytes(wanted) != bytes(Arguments())
    assert shapes == expected
    assert remote.archive(pack([RECORD])) == local.archive(pack([RECORD]))
    assert remote.infer(GATE, ["B M 320", "320 2560", "2560"]) == ["B M 1280"]
    assert remote.hooks.onnxfuse_test_sizeof_arguments() == len(bytes(wanted))


def test_a_server_reports_what_the_library_refuses(remote: Bridge) -> None:
    messages = []
    for each in (remote, load(bridge_library())):
        with pytest.raises(BridgeError) as caught:
            each.arguments(dataclasses.replace(GATE, problem="m=b*m n=n"), GATE_SHAPES)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] != ""


def test_what_lacks_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["wheels", str(tmp_path), "--arch", "riscv64"])
    assert wheels.main() == 2
    assert capsys.readouterr().err == "unknown architecture riscv64\n"
    monkeypatch.setattr(sys, "argv", ["wheels", str(tmp_path)])
    monkeypatch.setattr(wheels, "NEEDED", ("no_such_package",))
    monkeypatch.setattr(wheels, "EMULATOR", ("no-such-emulator", "", "/nowhere"))
    assert wheels.main() == 2
    assert capsys.readouterr().err == "pip install '.[wheels]'; apt install qemu-user libc6-arm64-cross\n"
    assert not [*tmp_path.iterdir()]
