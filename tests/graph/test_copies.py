"""Which transposes the runtime runs."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from onnxfuse.graph.operators import is_copy


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_matrix_that_is_read_transposed_is_no_copy(rank: int) -> None:
    tensor = np.empty((2, 3, 5, 7)[:rank])
    for perm in itertools.permutations(range(rank)):
        as_product_reads = np.transpose(tensor, perm).strides == np.swapaxes(tensor, -1, -2).strides
        assert is_copy(gs.Node("Transpose", attrs={"perm": list(perm)})) == (not as_product_reads)


def test_what_turns_all_axes_is_a_copy_and_other_ops_are_none() -> None:
    assert is_copy(gs.Node("Transpose"))
    assert not is_copy(gs.Node("Reshape"))
