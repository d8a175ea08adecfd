"""Random graphs around products: gates, residuals, norms, shape arithmetic, values that many read."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from onnx import ModelProto

from tests.onnx_build import Builder

WIDTH = 8
WIDER = (16, 24, 32)
FEED = {
    name: np.random.default_rng(seed).standard_normal((2, rows, WIDTH)).astype(np.float32)
    for seed, (name, rows) in enumerate({"x": 3, "y": 3, "scale": 1}.items())
}


class RandomGraph:
    """Grows a graph value by value; every value is `[B, S, width]`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.b = Builder()
        self.widths = {self.b.input(name, ("B", "S", WIDTH)): WIDTH for name in ("x", "y")}
        self.b.input("scale", ("B", 1, WIDTH))

    def model(self) -> ModelProto:
        for _ in range(self.random.randint(4, 22)):
            names = list(self.widths)
            value = self.random.choice(names[-6:] if self.random.random() < 0.7 else names)
            self.random.choice(STEPS)(self, value)
        made = list(self.widths)[2:] or [self.b("Identity", "x")]
        return self.b.model(*dict.fromkeys([made[-1], *self.random.choices(made, k=self.random.randint(0, 2))]))

    def add(self, name: str, width: int) -> None:
        self.widths[name] = width

    def peer(self, width: int) -> str:
        return self.random.choice([name for name, other in self.widths.items() if other == width])

    def array(self, *shape: int) -> str:
        count = len(self.b.initializers)
        return self.b.array(0.5 * np.random.default_rng(count).standard_normal(shape), f"w{count}")

    def product(self, value: str) -> None:
        self.add(self.b("MatMul", value, self.array(self.widths[value], WIDTH)), WIDTH)

    def packed(self, value: str) -> None:
        width = self.random.choice(WIDER)
        packed = self.b("MatMul", value, self.array(self.widths[value], width))
        for half in self.b("Split", packed, outputs=width // WIDTH, axis=-1, num_outputs=width // WIDTH)[:2]:
            self.add(half, WIDTH)
        if self.random.random() < 0.3:
            self.add(packed, width)

    def unary(self, value: str) -> None:
        self.add(self.b(self.random.choice(["Tanh", "Sigmoid", "Relu", "Neg", "Abs"]), value), self.widths[value])

    def binary(self, value: str) -> None:
        op = self.random.choice(["Add", "Mul", "Sub", "Max"])
        self.add(self.b(op, value, self.peer(self.widths[value])), self.widths[value])

    def scaled(self, value: str) -> None:
        if self.widths[value] == WIDTH:
            self.add(self.b("Mul", "scale", value), WIDTH)

    def biased(self, value: str) -> None:
        self.add(self.b("Add", value, self.array(self.widths[value])), self.widths[value])

    def sliced(self, value: str) -> None:
        start = self.random.randrange(0, self.widths[value], WIDTH)
        bounds = (self.b.integers(start), self.b.integers(start + WIDTH), self.b.integers(-1))
        self.add(self.b("Slice", value, *bounds), WIDTH)

    def opaque(self, value: str) -> None:
        self.add(self.b("Softmax", value), self.widths[value])

    def joined(self, value: str) -> None:
        if self.widths[value] == WIDTH:
            self.add(self.b("Concat", value, value, axis=-1), 2 * self.widths[value])

    def normalised(self, value: str) -> None:
        mean = self.b("ReduceMean", self.b("Mul", value, value), self.b.integers(-1))
        self.add(self.b("Div", value, self.b("Sqrt", self.b("Add", mean, self.b.array(1.0)))), self.widths[value])

    def half_by_shape(self, value: str) -> None:
        last = self.b("Gather", self.b("Shape", value), self.b.integers(-1), axis=0)
        if self.widths[value] % (2 * WIDTH):
            target = self.b("Concat", self.b.integers(0, 0), last, axis=0)
            self.add(self.b("Reshape", self.b("Softmax", value), target), self.widths[value])
        else:
            half = self.b("Div", last, self.b.integers(2))
            self.add(self.b("Slice", value, self.b.integers(0), half, self.b.integers(-1)), self.widths[value] // 2)


Step = Callable[[RandomGraph, str], None]
STEPS: list[Step] = [
    RandomGraph.product, RandomGraph.product, RandomGraph.packed, RandomGraph.packed, RandomGraph.unary,
    RandomGraph.unary, RandomGraph.binary, RandomGraph.binary, RandomGraph.binary, RandomGraph.scaled,
    RandomGraph.biased, RandomGraph.sliced, RandomGraph.opaque, RandomGraph.joined, RandomGraph.normalised,
    RandomGraph.half_by_shape,
]  # fmt: skip
