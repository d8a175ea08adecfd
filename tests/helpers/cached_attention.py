"""One launch of the kernel of one token over a cache: its tensors and arguments, and what it should compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.dtypes import F16
from onnxfuse.schedule.cached_attention_tile import CachedAttentionSpec
from tests.helpers.kernel_problem import ARGUMENTS, NUMPY


@dataclass(frozen=True)
class Tokens:
    """The run-time side of a launch.

    Attributes:
        lengths: keys of each sequence, the token's own the last.
        room: keys that the cache has room for.
        packed: query, key and value of a token lie side by side.
    """

    lengths: tuple[int, ...]
    room: int
    packed: bool = True


@dataclass
class CachedProblem:
    """Tensors of a launch; `past` are copies of the cache before it."""

    spec: CachedAttentionSpec
    tokens: Tokens
    own: list[np.ndarray]  # of the token: packed, or query, key and value, each [batch, heads * head]
    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray
    cosines: np.ndarray
    sines: np.ndarray
    norms: list[np.ndarray]  # what those of query and key multiply by
    sink: np.ndarray
    out: np.ndarray
    past: tuple[np.ndarray, np.ndarray]

    @property
    def tensors(self) -> list[np.ndarray]:
        """All of them."""
        return [
            *self.own,
            self.keys,
            self.values,
            self.lengths,
            self.cosines,
            self.sines,
            *self.norms,
            self.sink,
            self.out,
        ]

    @property
    def written(self) -> list[np.ndarray]:
        """Those that the kernel writes."""
        return [self.keys, self.values, self.out]

    @property
    def tiles(self) -> int:
        """Groups of heads of all sequences."""
        return len(self.tokens.lengths) * self.spec.kv_heads

    def arguments(self, pointers: Sequence[int]) -> np.ndarray:
        """The kernel's argument; a pointer for each of the tensors."""
        filled, spec = np.zeros((), ARGUMENTS), self.spec
        widths = [spec.heads * spec.head, spec.kv_heads * spec.head, spec.kv_heads * spec.head]
        if self.tokens.packed:
            places = [pointers[0] + sum(widths[:index]) * spec.dtype.bytes for index in range(3)]
            pitches = [sum(widths)] * 3
        else:
            places, pitches = list(pointers[:3]), widths
        keys, values, *loads, out = pointers[len(self.own) :]
        filled["lhs"] = (places[0], pitches[0], 0, 1)
        filled["rhs"][0], filled["rhs"][1] = (keys, 0, 0, 1), (values, 0, 0, 1)
        filled["rhs"][2], filled["rhs"][3] = (places[1], pitches[1], 0, 1), (places[2], pitches[2], 0, 1)
        for index, load in enumerate(loads):
            filled["loads"][index] = (load, 0, 0, 1)
        filled["outs"][0] = (out, 0, 0, 1)
        filled["m"], filled["n"], filled["k"] = 1, self.tokens.room, self.tokens.room
        filled["batch"] = len(self.tokens.lengths)
        return filled

    def parts(self) -> list[np.ndarray]:
        """Query, key and value of the token in float64, `[batch, heads, head]`."""
        spec, heads = self.spec, (self.spec.heads, self.spec.kv_heads, self.spec.kv_heads)
        own = self.own
        if self.tokens.packed:
            own = np.split(own[0], np.cumsum([count * spec.head for count in heads[:2]]), axis=1)
        rows = [part.astype(np.float64) for part in own]
        return [part.reshape(len(part), count, spec.head) for part, count in zip(rows, heads, strict=True)]

    def turned(self, rows: np.ndarray, position: int, weights: np.ndarray) -> np.ndarray:
        """Rows of heads behind their norm and rotation, rounded as the model stores them."""
        spec = self.spec
        if spec.epsilon:
            rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + spec.epsilon) * weights.astype(np.float64)
        found = rows.copy()
        if spec.rotary:
            cosine, sine = (table[position].astype(np.float64) for table in (self.cosines, self.sines))
            first = slice(0, spec.rotary, 2) if spec.interleaved else slice(0, spec.rotary // 2)
            second = slice(1, spec.rotary, 2) if spec.interleaved else slice(spec.rotary // 2, spec.rotary)
            found[..., first] = rows[..., first] * cosine - rows[..., second] * sine
            found[..., second] = rows[..., second] * cosine + rows[..., first] * sine
        return found.astype(NUMPY[spec.dtype]).astype(np.float64)

    def reference(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The result `[batch, heads * head]`, and the cache of keys and of values."""
        spec, out = self.spec, np.zeros(self.out.shape)
        keys, values = (part.astype(np.float64) for part in self.past)
        query, key, value = self.parts()
        for batch, length in enumerate(self.tokens.lengths):
            keys[batch, :, length - 1] = self.turned(key[batch], length - 1, self.norms[1])
            values[batch, :, length - 1] = value[batch]
            first = max(length - spec.window, 0) if spec.window else 0
            q = self.turned(query[batch], length - 1, self.norms[0]).reshape(spec.kv_heads, -1, spec.head)
            scores = q @ keys[batch, :, first:length].swapaxes(-1, -2) * spec.scale
            scores = spec.softcap * np.tanh(scores / spec.softcap) if spec.softcap else scores
            greatest = scores.max(-1, keepdims=True)
            powers = np.exp(scores - greatest)
            sums = powers.sum(-1, keepdims=True)
            if spec.sink:
                sums += np.exp(self.sink.astype(np.float64).reshape(spec.kv_heads, -1, 1) - greatest)
            out[batch] = (powers / sums @ values[batch, :, first:length]).reshape(-1)
        return out, keys, values

    def check(self) -> None:
        """The cache has the token's row, off by no more than its rounding, and all others as they were."""
        out, keys, values = self.reference()
        unit = 2.0**-11 if self.spec.dtype == F16 else 2.0**-8
        largest = np.nanmax(np.abs(self.values.astype(np.float64)))
        # Turned rows may round to a neighbour, which moves scores; a probability and the result are rounded once.
        np.testing.assert_allclose(self.keys.astype(np.float64), keys, rtol=2 * unit, atol=2.0**-20)
        np.testing.assert_array_equal(self.values.astype(np.float64), values)
        np.testing.assert_allclose(self.out.astype(np.float64), out, rtol=0, atol=4 * unit * largest)


def make_tokens(spec: CachedAttentionSpec, tokens: Tokens, seed: int = 7) -> CachedProblem:
    """A problem with random numbers; what no sequence has is NaN in the cache."""
    rng, dtype = np.random.default_rng(seed), NUMPY[spec.dtype]
    batch = len(tokens.lengths)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    own = [drawn(batch, count * spec.head) for count in heads]
    own = [np.concatenate(own, axis=1)] if tokens.packed else own
    keys, values = (drawn(batch, spec.kv_heads, tokens.room, spec.head) for _ in range(2))
    for place, length in enumerate(tokens.lengths):
        keys[place, :, length - 1 :] = values[place, :, length - 1 :] = np.nan
    angles = np.outer(np.arange(tokens.room), 1000.0 ** -np.linspace(0, 1, max(spec.rotary // 2, 1)))
    lengths = np.array([length - 1 for length in tokens.lengths], np.int32)
    norms, sink = [drawn(spec.head) for _ in range(2)], drawn(spec.heads)
    out = np.full((batch, spec.heads * spec.head), np.nan, dtype)
    tables = [np.ascontiguousarray(table.astype(dtype)) for table in (np.cos(angles), np.sin(angles))]
    return CachedProblem(
        spec, tokens, own, keys, values, lengths, *tables, norms, sink, out, (keys.copy(), values.copy())
    )
