"""The IR of one token of each sequence over a cache of keys and values, as a language model decodes."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.fusion import Pointwise

ATTENDED, KEYS, VALUES = "attended", "keys", "values"  # what is stored


@dataclass(frozen=True)
class CachedAttention(Pointwise):
    """`out[b, q] = softmax_c(f(query[b, q] * keys[b, g, c])) * values[b, g, c]` over as many keys as the sequence has.

    Query and key of the token are turned by its position; key and value are stored in the cache before. The operands
    are the query, both caches, key and value of the token where they do not lie behind the query, the place of each
    sequence's last key, cosines and sines where something is turned, what the norms multiply by, the sink, and a tensor
    with as many columns as the longest sequence has keys. What is stored is the result and both caches. More tokens are
    left to the model's op.

    Attributes:
        heads: of the query.
        kv_heads: of keys and values.
        head: columns of one.
        rotary: columns of a head that are turned; 0 for none.
        interleaved: neighbours are turned together, not columns half of the turned ones apart.
        scale: of the scores.
        softcap: bound of the scores, by a tanh; 0 for none.
        window: keys that a token looks at, its own the last; 0 for all.
        epsilon: of the RMS norm of each head of query and key before they are turned; 0 for none.
        sink: each head has one more score, of which no value is.
        packed: key and value of the token lie behind its query.
        original: attributes of the model's op, which does what the kernel does not.
    """

    heads: int
    kv_heads: int
    head: int
    rotary: int
    interleaved: bool
    scale: float
    softcap: float
    window: int
    epsilon: float
    sink: bool
    packed: bool
    original: tuple[tuple[str, int | float], ...]

    def __str__(self) -> str:
        bound = f", bounded by {self.softcap:.6g}" if self.softcap else ""
        window = f", the last {self.window}" if self.window else ""
        norm = f"heads normalised, epsilon {self.epsilon:.6g}; " if self.epsilon else ""
        turned = f"{self.rotary} columns turned{' in pairs' if self.interleaved else ''}; " if self.rotary else ""
        sink = " beside a sink" if self.sink else ""
        text = f"{ATTENDED} = softmax(query * {KEYS} * {self.scale:.6g}{bound}{sink}) * {VALUES}{window}"
        head, *rows = super().__str__().split("\n")
        place = next(index for index, row in enumerate(rows) if row.startswith("out"))
        return "\n".join([head, *rows[:place], f"{'':<7} {norm}{turned}{text}", *rows[place:]])
