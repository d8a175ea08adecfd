"""Values that no run changes: ONNX Runtime computes them once, as it loads a model, where it has a CPU kernel."""

from __future__ import annotations

from collections.abc import Set

from onnx import NodeProto, TensorProto

from onnxfuse.graph.functions import subgraphs
from onnxfuse.graph.scopes import Scope

# Of each run anew, or left as they are (a DequantizeLinear is for the kernel behind it); so are ops in other domains.
NOT_FOLDED = frozenset({"Bernoulli", "DequantizeLinear", "EyeLike", "Multinomial", "QuantizeLinear"})
RANDOM = "Random"
FOLDED_TYPES = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})  # that its products on x86 CPUs are of


def foldable_values(scope: Scope, overridable: Set[str]) -> frozenset[str]:
    """Those of a scope that its nodes compute from stored tensors alone, without the stored ones.

    Args:
        scope: with its nodes in the order in which they run.
        overridable: stored tensors that a run may replace.
    """
    fixed = {"", *(scope.stored - overridable)}
    for node in scope.nodes:
        if _is_folded(node) and fixed.issuperset(node.input):
            fixed.update(node.output)
    return frozenset(fixed - scope.stored - {""})


def _is_folded(node: NodeProto) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type in NOT_FOLDED or node.op_type.startswith(RANDOM):
        return False
    return not any(subgraphs(node))
