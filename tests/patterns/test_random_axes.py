"""Normalisations drawn at random: of any axis and form, behind and in front of Transposes, operands of any axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto

from onnxfuse.ir.normalisation import Normalisation
from tests.helpers.matching import check_meaning
from tests.helpers.onnx_build import FLOAT, FLOAT16, Builder
from tests.patterns.test_normalisation import analysed
from tests.tools import sweep

SIZES = (1, 2, 3, 7, 8, 40)
COLUMNS = (2, 5, 8, 16, 24, 33)
MOST_BEHIND = 4
MODELS_OF_A_CASE = 20


class Drawn:
    """A model that is drawn node by node; `dims` and `sizes` are of the value that comes next, `axis` its columns."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.b = Builder(FLOAT if self._is() else FLOAT16, opset=17)
        rank = int(self.rng.integers(3, 6))
        self.axis = int(self.rng.integers(rank))
        self.sizes = [int(self.rng.choice(SIZES)) for _ in range(rank)]
        self.sizes[self.axis] = int(self.rng.choice(COLUMNS))
        of_run = [place != self.axis and self._is() for place in range(rank)]
        self.dims = [f"s{place}" if each else self.sizes[place] for place, each in enumerate(of_run)]
        self.values = dict(zip(self.dims, self.sizes, strict=True))
        self.value = self.b.input("x", self.dims)
        if self._is():
            self.turn()
        (self.centred, self.mean_square, self.length)[self.rng.integers(3)]()
        behind: tuple[Callable[[], None], ...] = (self.turn, self.scale, self.shift, self.gate, self.residual)
        for _ in range(self.rng.integers(MOST_BEHIND)):
            behind[self.rng.integers(len(behind))]()

    def _is(self) -> bool:
        return bool(self.rng.integers(2))

    def _reduced(self, op: str, value: str) -> str:
        """Along the columns, counted from either end."""
        axis = self.axis if self._is() else self.axis - len(self.dims)
        return self.b(op, value, axes=[axis], keepdims=1)

    def turn(self) -> None:
        perm = [int(place) for place in self.rng.permutation(len(self.dims))]
        self.value = self.b("Transpose", self.value, perm=perm)
        self.dims, self.sizes = ([each[place] for place in perm] for each in (self.dims, self.sizes))
        self.axis = perm.index(self.axis)

    def centred(self) -> None:
        own = self.b("Sub", self.value, self._reduced("ReduceMean", self.value))
        self._divided(own, self._reduced("ReduceMean", self.b("Mul", own, own)))

    def mean_square(self) -> None:
        self._divided(self.value, self._reduced("ReduceMean", self.b("Mul", self.value, self.value)))

    def _divided(self, rows: str, variance: str) -> None:
        self.value = self.b("Div", rows, self.b("Sqrt", self.b("Add", variance, self.b.array(1e-3))))

    def length(self) -> None:
        length = self._reduced("ReduceL2", self.value)
        self.value = self.b("Div", self.value, self.b("Clip", length, self.b.array(1e-2)))

    def _operand(self) -> str:
        """Of the columns, and of any other dimensions that the file tells."""
        told = [place == self.axis or (isinstance(dim, int) and self._is()) for place, dim in enumerate(self.dims)]
        shape = [size if each else 1 for each, size in zip(told, self.sizes, strict=True)]
        return self.b.array(self.rng.standard_normal(shape))

    def scale(self) -> None:
        self.value = self.b("Mul", self.value, self._operand())

    def shift(self) -> None:
        self.value = self.b("Add", self._operand(), self.value)

    def gate(self) -> None:
        self.value = self.b("Mul", self.value, self.b("Sigmoid", self.value))

    def residual(self) -> None:
        self.value = self.b("Add", self.value, self.b.input(f"residual{len(self.b.inputs)}", self.dims))

    def finished(self) -> tuple[ModelProto, dict[str, np.ndarray]]:
        """The model, and numbers for its inputs."""
        model, feed = self.b.model(self.value), {}
        for given in model.graph.input:
            shape = [dim.dim_value or self.values[dim.dim_param] for dim in given.type.tensor_type.shape.dim]
            feed[given.name] = (2 * self.rng.standard_normal(shape) + 0.3).astype(self.b.numpy)
        return model, feed


@pytest.mark.parametrize("case", range(5))
def test_it_is_a_kernel_that_means_the_model_and_its_nodes_have_the_bits(case: int) -> None:
    for seed in range(case * MODELS_OF_A_CASE, (case + 1) * MODELS_OF_A_CASE):
        model, feed = Drawn(seed).finished()
        analysis = analysed(model)
        fusions = [site.fusion for site in analysis.sites if isinstance(site.fusion, Normalisation)]
        assert len(fusions) == 1, seed
        assert not sweep.difference(model, sweep.rewritten(analysis), [feed]), seed
        if feed["x"].dtype == np.float32:
            check_meaning(model, fusions[0], feed, 1e-4)
