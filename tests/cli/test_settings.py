"""What the environment says, and what it may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxfuse.errors import SettingError
from onnxfuse.settings import cache_dir, compile_jobs


def test_a_user_without_a_home_works_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONNXFUSE_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cache_dir() is None


def test_a_home_that_is_named_and_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", "~nobody-of-this-name/cache")
    with pytest.raises(SettingError, match="ONNXFUSE_CACHE_DIR"):
        cache_dir()


def homeless(_: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("value", ["0", "-1", "many", "\u00b2", ""])
def test_a_number_of_jobs_is_positive(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_COMPILE_JOBS", value)
    with pytest.raises(SettingError, match="ONNXFUSE_COMPILE_JOBS"):
        compile_jobs()
