"""Which of the fusions that were found are made: by pattern, by node name, or from an edited report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from onnxfuse.errors import SettingError


@dataclass(frozen=True)
class FoundFusion:
    """What a selection sees of a fusion: its anchor, its pattern, and the names of all its nodes."""

    anchor: str
    pattern: str
    nodes: tuple[str, ...]

    def fits(self, glob: str) -> bool:
        """Whether a glob is its pattern's name or one of its nodes' names, or matches one."""
        names = (self.anchor, *self.nodes)
        return glob in (self.pattern, *names) or any(fnmatchcase(name, glob) for name in names)


@dataclass(frozen=True)
class Selection:
    """What the user wants fused; by default everything.

    Attributes:
        only: patterns' names and globs over node names; if there are any, a fusion must fit one of them.
        skip: the same; a fusion must fit none.
        plan: anchor -> pattern of each fusion to make; None for no plan.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    plan: Mapping[str, str] | None = None

    def refusal(self, candidate: FoundFusion) -> str:
        """Why a fusion is not wanted; empty for one that is."""
        skipped = next((glob for glob in self.skip if candidate.fits(glob)), None)
        if skipped is not None:
            return f"left out by skip {skipped!r}"
        if self.only and not any(candidate.fits(glob) for glob in self.only):
            return f"not among only {', '.join(map(repr, self.only))}"
        if self.plan is not None and candidate.anchor not in self.plan:
            return "not in the plan"
        return ""

    def check(self, candidates: Iterable[FoundFusion], patterns: Iterable[str]) -> None:
        """Every glob and every entry of the plan must mean something in this model.

        Raises:
            SettingError: one does not: it is misspelled, or the plan is of another model.
        """
        candidates, patterns = tuple(candidates), set(patterns)
        for glob in (*self.only, *self.skip):
            if glob not in patterns and not any(candidate.fits(glob) for candidate in candidates):
                raise SettingError(f"{glob!r} is no pattern ({', '.join(sorted(patterns))}) and no node of a fusion")
        found = {candidate.anchor: candidate.pattern for candidate in candidates}
        for anchor, pattern in (self.plan or {}).items():
            if found.get(anchor) != pattern:
                raise SettingError(f"the plan has a {pattern} at {anchor!r}, which the model does not have")


def make_selection(
    only: str | Iterable[str] = (), skip: str | Iterable[str] = (), plan: str | Path | Mapping[str, Any] | None = None
) -> Selection:
    """A selection from what users write.

    Args:
        only: a pattern's name or a glob over node names, or several.
        skip: the same.
        plan: what `explain --json` prints, edited: fusions removed, or marked with `"skip": true`; a file or the parsed
            dictionary.

    Raises:
        SettingError: the plan cannot be read.
    """
    return Selection(_globs(only), _globs(skip), None if plan is None else _read_plan(plan))


def _globs(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _read_plan(plan: str | Path | Mapping[str, Any]) -> dict[str, str]:
    report = plan if isinstance(plan, Mapping) else _load(Path(plan))
    try:
        entries = [(entry["anchor"], entry["pattern"], entry.get("skip", False)) for entry in report["fused"]]
    except (KeyError, TypeError, AttributeError):
        raise SettingError(
            "the plan is not what explain --json prints: a list `fused` of anchors and patterns"
        ) from None
    return {str(anchor): str(pattern) for anchor, pattern, skip in entries if not skip}


def _load(path: Path) -> Any:
    if path.is_dir():
        raise SettingError(f"{path}: is a folder; name a plan, what explain --json printed")
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingError(f"{path}: cannot be read as a plan: {error}") from None
