"""Inputs for a model: read from an .npz file and checked, or drawn at random.

An `InputSpec` mirrors what ONNX Runtime says of an input: a name, `tensor(float16)`, and `[batch, 77, None]` with a
string for a symbol. bfloat16 has no NumPy type; such an input is kept as its bits in uint16.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.errors import ModelError, OnnxfuseError, SettingError
from onnxfuse.known_inputs import NOTHING, InputFacts, InputSizes

Array = np.ndarray[Any, np.dtype[Any]]
Dim = int | str | None

SYMBOL_SIZE = 16
BATCH_SIZE = 2
STRING = "string"
WORDS = ("a", "b")
IDS = 2  # the smallest vocabulary that a real model has (token types)

# ONNX Runtime's name of an element type -> NumPy type.
_NUMPY = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "bfloat16": np.uint16, "bool": np.bool_,
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    STRING: np.object_, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class InputSpec:
    """One input of a model.

    Attributes:
        name: its name.
        element: the element type as ONNX Runtime writes it, `float16`.
        dims: sizes; a string is a symbol, None is unknown; None in place of all where their number is unknown.
        any_rank: whether an array of any number of dimensions fits: ONNX Runtime tells a scalar and an input of
            unknown rank alike.
        words: what text to draw from.
    """

    name: str
    element: str
    dims: tuple[Dim, ...] | None
    any_rank: bool = False
    words: tuple[str, ...] = WORDS

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of its values; uint16 for bfloat16.

        Raises:
            ModelError: no NumPy array can hold such an input.
        """
        if self.element not in _NUMPY:
            raise ModelError(f"input {self.name!r}: inputs of type {self.element} are not supported")
        return np.dtype(_NUMPY[self.element])

    def __str__(self) -> str:
        if self.dims is None:
            return f"{self.element} of unknown rank"
        return f"{self.element}[{', '.join('?' if dim is None else str(dim) for dim in self.dims)}]"


def input_specs(session: Any, facts: InputFacts | None = None) -> tuple[InputSpec, ...]:
    """The inputs of an `onnxruntime.InferenceSession`.

    Args:
        session: the session.
        facts: what the model's file says besides.
    """
    specs = map(_spec, session.get_inputs())
    return tuple(spec if facts is None else _informed(spec, facts) for spec in specs)


def _spec(value: Any) -> InputSpec:
    """What an `onnxruntime.NodeArg` says of an input."""
    kind = value.type.removeprefix("tensor(").removesuffix(")") if value.type.startswith("tensor(") else value.type
    return InputSpec(value.name, kind, tuple(value.shape), any_rank=not value.shape)


def _informed(spec: InputSpec, facts: InputFacts) -> InputSpec:
    unranked = spec.name in facts.unranked
    return replace(spec, dims=None if unranked else spec.dims, any_rank=unranked, words=facts.words or WORDS)


def load_npz(path: Path) -> dict[str, Array]:
    """Read an .npz file with one array for each input.

    Raises:
        ModelError: no such file, not an .npz file, or an array of Python objects.
    """
    try:
        if not zipfile.is_zipfile(path) and path.exists():
            raise ModelError(f"{path}: {'is a folder; name' if path.is_dir() else 'not'} an .npz file")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path}: cannot be read as an .npz file: {error}") from error


def load_inputs(path: Path) -> list[dict[str, Array]]:
    """The runs of an .npz file, or of every .npz file of a folder, by name.

    Raises:
        ModelError: no such file, a folder without one, or one that cannot be read.
    """
    if not path.is_dir():
        return [load_npz(path)]
    files = sorted(path.glob("*.npz"))
    if not files:
        raise ModelError(f"{path}: no .npz file in this folder")
    return [load_npz(file) for file in files]


def make_feeds(
    specs: Sequence[InputSpec],
    inputs: Mapping[str, Array] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    symbols: Mapping[str, int] | None = None,
    known: InputSizes = NOTHING,
) -> dict[str, Array]:
    """One array for each input: those given, checked, or else random ones.

    A symbol has one size in all inputs: that given for it, that of the shape given for an input, what the model's own
    operators make of it (`known`), or a small default. Random floats are standard normal, integers are ids of 0 and 1,
    an input with `mask` in its name is all ones, and booleans are True.

    Raises:
        ModelError: a given array has a name, type or shape that the model does not have; the message names the input.
        SettingError: a shape or a symbol is none of the model's.
    """
    if inputs is None:
        return _random_feeds(specs, shapes or {}, seed, symbols or {}, known)
    if shapes or symbols:
        raise SettingError("shapes and sizes are for random inputs, and inputs were given")
    _check_names(specs, inputs, "inputs", ModelError)
    missing = [spec for spec in specs if spec.name not in inputs]
    if missing:
        raise ModelError(f"input {missing[0].name!r}: not among the given arrays; the model needs {missing[0]}")
    sizes: dict[str, int] = {}
    for spec in specs:
        _bind(spec, np.shape(inputs[spec.name]), sizes, ModelError)
    return {spec.name: _converted(spec, np.asarray(inputs[spec.name])) for spec in specs}


def _random_feeds(
    specs: Sequence[InputSpec],
    shapes: Mapping[str, Sequence[int]],
    seed: int,
    symbols: Mapping[str, int],
    facts: InputSizes,
) -> dict[str, Array]:
    _check_names(specs, shapes, "shapes", SettingError)
    known = {dim for spec in specs for dim in spec.dims or () if isinstance(dim, str)}
    known |= {term for terms in facts.sums.values() for term in terms if not term.isdecimal()}
    known |= {symbol for _, symbol in facts.multiples.values()}
    for symbol in symbols.keys() - known:
        raise SettingError(f"the model has no dynamic axis {symbol!r}; it has {', '.join(sorted(known)) or 'none'}")
    sizes = dict(symbols)
    for spec in specs:
        if spec.name in shapes:
            _bind(spec, shapes[spec.name], sizes, SettingError)
    sizes = _completed(sizes, facts)
    random = np.random.default_rng(seed)
    made = {
        spec.name: _drawn(spec, tuple(shapes[spec.name]) if spec.name in shapes else _shape(spec, sizes), random)
        for spec in specs
    }
    for name, (terms, added) in facts.values.items():
        made[name] = np.full_like(made[name], _sum(terms, sizes) + added)
    return made


def _completed(given: Mapping[str, int], facts: InputSizes) -> dict[str, int]:
    """The sizes given, and what follows from them; a total that is given leaves its first open term the rest."""
    sizes = _with_multiples({**facts.fixed, **given}, facts)
    for pair in facts.one_of:
        open_ones = [symbol for symbol in pair if symbol not in sizes]
        if open_ones and 1 not in (sizes.get(symbol) for symbol in pair):
            sizes[open_ones[0]] = 1
    for total, terms in facts.sums.items():
        missing = [term for term in terms if not term.isdecimal() and term not in sizes]
        if total in given and missing:
            others = list(terms)
            others.remove(missing[0])
            sizes[missing[0]] = max(given[total] - _sum(others, sizes), 0)
    return {total: _sum(terms, sizes) for total, terms in facts.sums.items()} | sizes


def _with_multiples(sizes: Mapping[str, int], facts: InputSizes) -> dict[str, int]:
    """The same with each multiple and the symbol that it is one of; by default the largest multiple is small."""
    known = dict(sizes)
    for multiple, (factor, symbol) in facts.multiples.items():
        if multiple in sizes:
            known.setdefault(symbol, sizes[multiple] // factor)
    for factor, symbol in sorted(facts.multiples.values(), reverse=True):
        known.setdefault(symbol, min(_size(symbol, 1, {}), max(SYMBOL_SIZE // factor, BATCH_SIZE)))
    return {multiple: factor * known[symbol] for multiple, (factor, symbol) in facts.multiples.items()} | known


def _sum(terms: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum(int(term) if term.isdecimal() else _size(term, 1, sizes) for term in terms)


def _check_names(specs: Sequence[InputSpec], given: Mapping[str, Any], what: str, fault: type[OnnxfuseError]) -> None:
    known = [spec.name for spec in specs]
    for name in given:
        if name not in known:
            raise fault(f"{what}: the model has no input {name!r}; it has {', '.join(known) or 'none'}")


def _bind(spec: InputSpec, shape: Sequence[int], sizes: dict[str, int], fault: type[OnnxfuseError]) -> None:
    """Check a shape against the model, and note what it makes of the symbols."""
    if spec.dims is None or spec.any_rank:
        return
    text = ", ".join(map(str, shape))
    if len(shape) != len(spec.dims):
        raise fault(f"input {spec.name!r}: shape [{text}] has rank {len(shape)}; the model needs {spec}")
    for size, dim in zip(shape, spec.dims, strict=True):
        expected = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if expected is not None and size != expected:
            symbol = f" with {dim} = {expected}" if isinstance(dim, str) else ""
            raise fault(f"input {spec.name!r}: shape [{text}] does not fit; the model needs {spec}{symbol}")


def _shape(spec: InputSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if spec.dims is None:
        raise ModelError(
            f"input {spec.name!r}: the model does not say how many dimensions it has; give its shape with "
            f"--shape {spec.name}=2,77,768"
        )
    return tuple(_size(dim, index, sizes) for index, dim in enumerate(spec.dims))


def _size(dim: Dim, index: int, sizes: Mapping[str, int]) -> int:
    """The size of one dimension; a leading unknown one is taken for a batch."""
    if isinstance(dim, int):
        return dim
    batch = index == 0 if dim is None else "batch" in dim.lower()
    return sizes.get(dim or "", BATCH_SIZE if batch else SYMBOL_SIZE)


def _drawn(spec: InputSpec, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Random values; NumPy has an error for what memory does not hold, and one for what 64 bits do not count."""
    try:
        return _random(spec, shape, random)
    except (MemoryError, ValueError):
        raise SettingError(f"input {spec.name!r}: memory does not hold the shape {list(shape)}") from None


def _random(spec: InputSpec, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    if spec.dtype == np.bool_ or "mask" in spec.name.lower():
        return _converted(spec, np.ones(shape, np.float32 if spec.element == "bfloat16" else spec.dtype))
    if "float" in spec.element or spec.element == "double":
        drawn = random.standard_normal(shape, dtype=np.float32)
        return _converted(spec, drawn if spec.element == "bfloat16" else np.asarray(drawn, spec.dtype))
    if spec.element == STRING:
        return np.asarray(random.choice(np.array(spec.words, np.object_), shape), np.object_)
    return random.integers(0, IDS, shape).astype(spec.dtype)


def _converted(spec: InputSpec, array: Array) -> Array:
    """The array as the input takes it: contiguous; a float32 array for a bfloat16 input is rounded."""
    if spec.element == "bfloat16" and array.dtype == np.float32:
        array = to_bfloat16(array)
    if spec.element == STRING and array.dtype.kind in "US":  # as .npz files hold text
        array = array.astype(np.object_)
    if array.dtype != spec.dtype:
        raise ModelError(f"input {spec.name!r}: an array of {array.dtype}; the model needs {spec}")
    return np.asarray(array, order="C")


def to_bfloat16(array: Array) -> Array:
    """The bits, in uint16, of float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(array, np.float32, order="C").view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: Array) -> Array:
    """float32 values of bfloat16 bits in uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
