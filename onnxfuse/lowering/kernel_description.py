"""What each kernel of a model is, in words that its CUDA text is made of again: an entry of the model's metadata.

The entry is named after the archive of kernels. It is JSON, deflated, in base64:

    {"onnxfuse": "0.1.0", "nvrtc": [13, 0], "kernels": {id: [[arch, family, spec, tile, min_m, max_m], ...]}}

with the variants of a kernel in the order of its records. A spec and a tile are `[name of the class, {field: value}]`.
Nothing in it is code: numbers, names out of tables, and the steps of the epilogue. Who reads it takes nothing else.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from typing import Any

from onnxfuse.device import DeviceSpec, spec_of
from onnxfuse.dtypes import ALL, INTEGERS, DType
from onnxfuse.errors import ModelError, SettingError
from onnxfuse.ir.attention import Diagonal
from onnxfuse.ir.fusion import OPS, Step
from onnxfuse.ir.quantization import Quantization
from onnxfuse.lowering.site import Implementation
from onnxfuse.runtime.compile import nvrtc_version
from onnxfuse.schedule.attention_tile import AttentionSpec
from onnxfuse.schedule.cached_attention_tile import CachedAttentionSpec
from onnxfuse.schedule.families import FAMILIES
from onnxfuse.schedule.group_norm_tile import GroupNormSpec
from onnxfuse.schedule.kernel_spec import Access, KernelSpec
from onnxfuse.schedule.library_tile import LibrarySpec
from onnxfuse.schedule.norm_tile import NormSpec
from onnxfuse.schedule.pointwise_tile import PointwiseSpec
from onnxfuse.schedule.variant import AnyVariant, Variant

_SPECS = (KernelSpec, PointwiseSpec, NormSpec, GroupNormSpec, LibrarySpec, AttentionSpec, CachedAttentionSpec)
_PLAIN = (*_SPECS, Diagonal, Access, Step, Quantization)
_CLASSES: dict[str, type[Any]] = {each.__name__: each for each in (*_PLAIN, *(each.tile_type for each in FAMILIES))}
_DTYPES = {dtype.name: dtype for dtype in (*ALL, *INTEGERS)}
_FAMILIES = {family.name: family for family in FAMILIES}
_NAME = re.compile(r"[A-Za-z0-9_]{0,40}")  # what text may say: it goes into CUDA text
_MOST_BYTES = 1 << 26
_IMPOSSIBLE = (AttributeError, LookupError, TypeError, ValueError, RecursionError)  # what reading nonsense ends in

Described = tuple[DeviceSpec, AnyVariant]


@dataclass(frozen=True)
class Description:
    """What a model's metadata says of its kernels.

    Attributes:
        onnxfuse: the version that wrote it.
        nvrtc: the compiler that made the machine code.
        kernels: by id, each variant with its architecture, in the order of the records.
    """

    onnxfuse: str
    nvrtc: tuple[int, int]
    kernels: Mapping[str, tuple[Described, ...]]


def describe(implementations: Sequence[Implementation], names: Sequence[str]) -> str:
    """The entry of a model with these implementations, whose kernels have these ids; empty without kernels."""
    kernels = {
        name: [
            [device.arch, variant.family.name, _plain(variant.spec), _plain(variant.tile), variant.min_m, variant.max_m]
            for device, variant in implementation.variants
        ]
        for implementation, name in zip(implementations, names, strict=True)
    }
    if not any(kernels.values()):
        return ""
    content = {"onnxfuse": version("onnxfuse"), "nvrtc": nvrtc_version(), "kernels": kernels}
    return base64.b64encode(zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 9)).decode()


def read_description(text: str) -> Description:
    """What an entry says.

    Raises:
        ModelError: it is none, or says what no kernel of this version is.
    """
    try:
        content = json.loads(zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MOST_BYTES))
        major, minor = content["nvrtc"]
        kernels = {name: tuple(_variant(*each) for each in listed) for name, listed in content["kernels"].items()}
        return Description(str(content["onnxfuse"]), (int(major), int(minor)), kernels)
    except (binascii.Error, zlib.error, SettingError, *_IMPOSSIBLE) as error:
        raise ModelError(f"what the file says of its kernels cannot be read: {error}") from error


def _variant(arch: str, family: str, spec: Any, tile: Any, min_m: int, max_m: int) -> Described:
    made: AnyVariant = Variant(_FAMILIES[family], _made(spec), _made(tile), int(min_m), int(max_m))
    return spec_of(arch), made


def _plain(value: Any) -> Any:
    """A value of a spec or a tile as JSON has it."""
    if isinstance(value, DType):
        return ["DType", value.name]
    if is_dataclass(value):
        held = {each.name: getattr(value, each.name) for each in fields(value)}
        return [type(value).__name__, {name: _plain(each) for name, each in held.items() if each is not None}]
    if isinstance(value, tuple):
        return ["tuple", [_plain(each) for each in value]]
    return value


def _made(value: Any) -> Any:
    """The same back; ValueError for what no spec has."""
    if isinstance(value, list):
        name, content = value
        if name == "DType":
            return _DTYPES[content]
        if name == "tuple":
            return tuple(map(_made, content))
        made = _CLASSES[name](**{str(key): _made(each) for key, each in content.items()})
        if isinstance(made, Step) and made.op not in OPS:
            raise ValueError(f"a step {made.op!r}")
        return made
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError(f"a name {value!r}")
    if value is None or isinstance(value, dict):
        raise ValueError("a value that is no number and no name")
    return value
