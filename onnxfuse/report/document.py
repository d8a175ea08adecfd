"""What all JSON begins with. docs/json.schema.json describes every document, and tests hold the commands to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

SCHEMA = 1  # goes up where a field goes or changes its meaning; one that is new leaves it


def document(kind: str, model: str | None, architectures: Sequence[str], body: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON-ready dictionary.

    Args:
        kind: `report`, `verify`, `bench` or `inspect`.
        model: the path as it was given; None for a model that was no file.
        architectures: that kernels are for.
        body: the fields of the kind.
    """
    head = {"schema": SCHEMA, "kind": kind, "onnxfuse": version("onnxfuse"), "model": model}
    return {**head, "architectures": list(architectures), **body}
