"""A folder of ONNX Runtime GenAI with its models fused: everything else as it was, the bridge, and a configuration.

GenAI's runtime loads the library that `custom_ops_library` of a model's session options names, and only from the
model's own folder: so the bridge lies there as a file of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxfuse.errors import ModelError, OutputError
from onnxfuse.graph.external_data import data_files
from onnxfuse.graph.load import leaves_folder
from onnxfuse.graph.save import save_model, write_text
from onnxfuse.pipeline import Analysis, optimize_model
from onnxfuse.progress import Progress
from onnxfuse.report.site_report import Report
from onnxfuse.staging import whole_folder

CONFIG = "genai_config.json"
BRIDGE = "libonnxfuse.so"
OPTION = "custom_ops_library"


@dataclass(frozen=True)
class Component:
    """One model of a folder: the part of the configuration that names it, and its file."""

    settings: dict[str, Any]
    file: str


def export_genai(
    source: Path, target: Path, bridge: Path, analyse: Callable[[Path], Analysis], progress: Progress
) -> dict[str, Report]:
    """Write a copy of a GenAI folder whose models are fused.

    Args:
        source: what GenAI's model builder wrote, with `genai_config.json`; it is not changed.
        target: the new folder.
        bridge: the library of the fused nodes.
        analyse: finds and plans the fusions of a model.
        progress: called after each kernel.

    Returns:
        For the file of each model, what was fused.

    Raises:
        ModelError: the configuration or a model cannot be read, a model has custom operators of its own, or in none is
            anything to fuse.
        OutputError: the target exists, or the disk refuses.
    """
    config = _read_config(source)
    components = list(_components(config.get("model", {})))
    if not components:
        raise ModelError(f"{source / CONFIG}: names no model")
    if target.exists():
        raise OutputError(f"{target}: exists; remove it, or choose another folder")
    analyses = {each.file: _checked(source, each, analyse) for each in components}
    if not any(found.sites for found in analyses.values()):
        raise ModelError(f"{source}: nothing in it can be fused; `onnxfuse explain` of {components[0].file} says why")
    try:
        with whole_folder(target) as unfinished:
            _copy_others(source, unfinished, analyses)
            reports = {file: _write(found, unfinished / file, progress) for file, found in analyses.items()}
            for each in components:
                if analyses[each.file].sites:
                    each.settings["session_options"] = _options(each) | {OPTION: BRIDGE}
                    shutil.copyfile(bridge, unfinished / Path(each.file).parent / BRIDGE)
            write_text(unfinished / CONFIG, json.dumps(config, indent=4) + "\n")
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    return reports


def _read_config(source: Path) -> dict[str, Any]:
    path = source / CONFIG
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}; name a folder of GenAI's model builder") from error
    except ValueError as error:
        raise ModelError(f"{path}: is no JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ModelError(f"{path}: has no `model`")
    return config


def _components(settings: Any) -> Iterator[Component]:
    """The models that a part of the configuration names, at any depth: decoder, encoder, stages of a pipeline."""
    if isinstance(settings, dict):
        file = settings.get("filename")
        if isinstance(file, str) and file.endswith(".onnx"):
            yield Component(settings, file)
        settings = list(settings.values())
    for each in settings if isinstance(settings, list) else ():
        yield from _components(each)


def _checked(source: Path, component: Component, analyse: Callable[[Path], Analysis]) -> Analysis:
    """The analysis of a model that may take the bridge."""
    if leaves_folder(component.file):
        raise ModelError(f"{source / CONFIG}: {component.file!r} lies outside of the folder")
    other = _options(component).get(OPTION, BRIDGE)
    if other != BRIDGE:
        detail = f"{component.file} has custom operators of {other!r}, and GenAI loads one library"
        raise ModelError(f"{source / CONFIG}: {detail}")
    return analyse(source / component.file)


def _options(component: Component) -> dict[str, Any]:
    """A component's session options; empty where it has none."""
    options = component.settings.get("session_options") or {}
    if not isinstance(options, dict):
        raise ModelError(f"{CONFIG}: the session options of {component.file} are no object")
    return options


def _copy_others(source: Path, target: Path, analyses: Mapping[str, Analysis]) -> None:
    """Everything but the models and their data, which are written by themselves, and the configuration."""
    written = {source / CONFIG}
    for file, analysis in analyses.items():
        path = source / file
        written |= {path, *(path.parent / location for location in data_files(analysis.model.proto))}
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        elif path not in written:
            shutil.copyfile(path, place)


def _write(analysis: Analysis, target: Path, progress: Progress) -> Report:
    proto, report = optimize_model(analysis, progress=progress, to_save=True)
    save_model(proto, analysis.model, target)
    return report
