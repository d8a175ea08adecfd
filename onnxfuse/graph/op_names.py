"""Names of fused ops: a body has a name of its own, out of a pool that the bridge registers.

A runtime finds a node's fallback body by the op's domain and name. ONNX could tell several bodies of one name apart by
`overload` (IR version 10), but ONNX Runtime before 1.27 and onnx.reference ignore it and run one node by the body of
another. (OpenVINO knows no functions of a model at all.) So fused nodes with different bodies differ in their names,
`FusedGemm_0`, `FusedGemm_1` and so on, and those with equal bodies share one. The bridge has to know every name
beforehand, which bounds their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from onnx import FunctionProto

from onnxfuse.graph.functions import DOMAIN

FUSED_GEMM = "FusedGemm"
FUSED_POINTWISE = "FusedPointwise"
FUSED_ATTENTION = "FusedAttention"
# By the architecture for which alone a node has kernels: the bridge registers such names where every GPU is of it, and
# elsewhere the node's body runs.
FUSED_GEMM_ON = {"sm_90a": "FusedGemm90"}
FUSED_CACHE = "FusedCache90"  # likewise
# Names of each kind. 50 ops cost 3.7 ms as a session loads, beside an H200; a UNet has 12 bodies.
POOL_SIZE = 24


def kind_of(op_type: str) -> str:
    """The name of a fused op without its number: one of the above."""
    return op_type.partition("_")[0]


class OpNames:
    """The names of a model's fused ops.

    Attributes:
        names: the op's name by the bytes of its body, which is named after its kind there.
    """

    def __init__(self, functions: Iterable[FunctionProto]) -> None:
        """Of a model with these functions, those of other domains among them."""
        fused = [function for function in functions if function.domain == DOMAIN]
        self.names = {_identity(function): function.name for function in fused}
        self._taken = {function.name for function in fused}

    def add(self, body: FunctionProto) -> str | None:
        """The name of a body, a new one where no equal body has one; None where none is left.

        Args:
            body: named after its kind.
        """
        identity = _identity(body)
        if identity not in self.names:
            pool = (f"{body.name}_{number}" for number in range(POOL_SIZE))
            name = next((name for name in pool if name not in self._taken), None)
            if name is None:
                return None
            self.names[identity] = name
            self._taken.add(name)
        return self.names[identity]


def named(functions: Iterable[FunctionProto], bodies: Sequence[FunctionProto]) -> list[bool]:
    """Which of some bodies get a name; where names run out, those that most nodes have come first.

    What ends at a Gemm saves least, and comes last.

    Args:
        functions: that the model already has.
        bodies: of the nodes to come, named after their kinds.
    """
    names = OpNames(functions)
    identities = [_identity(body) for body in bodies]
    by_identity = dict(zip(identities, bodies, strict=True))
    frequent = [identity for identity, _ in Counter(identities).most_common()]
    for identity in sorted(frequent, key=lambda identity: by_identity[identity].node[-1].op_type == "Gemm"):
        names.add(by_identity[identity])
    return [identity in names.names for identity in identities]


def _identity(function: FunctionProto) -> bytes:
    body = FunctionProto()
    body.CopyFrom(function)
    body.name = kind_of(function.name)
    return bytes(body.SerializeToString(deterministic=True))
