"""Problems drawn at random, as real models have them and around that, and the models that pose them. Needs no GPU.

The same seed gives the same problems, on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, helper

from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16, Builder

# Products of one input, or column ranges of one product, that the epilogue combines or stores.
PARTS = {"bias": 1, "gelu": 1, "residual": 1, "geglu": 2, "swiglu": 2, "dual": 2, "qkv": 3}
WIDTHS = (
    64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1920, 2048, 2304, 2560,
    2816, 3072, 3584, 4096, 4304, 4608, 5120, 5632, 6144, 6912, 8192, 9216, 11008, 12288, 14336, 18944,
)  # fmt: skip
MOST_ROWS, WIDEST, DEEPEST = 16384, 14336, 14336
MOST_PRODUCTS = 1.5e12  # multiplications of one site: 4 ms on an H200 in TF32
MOST_ELEMENTS = 3e8  # of one tensor
BATCHES = (1, 2, 3, 4, 8, 16, 32)
ELEMENT_NAMES: dict[int, str] = {FLOAT16: "f16", BFLOAT16: "bf16", FLOAT: "f32"}
RANDOM_ELEMENTS = 1 << 20  # drawn once and repeated


@dataclass(frozen=True)
class Drawn:
    """One product and what follows it.

    Attributes:
        kind: one of PARTS.
        m: rows, of all batches together.
        n: columns of one part.
        order: of the weight, `kn` or `nk`.
        element: ONNX element type.
        dynamic: the rows are known at run time alone.
        batch: 0 for lhs [m, k], else lhs is [batch, m / batch, k].
    """

    kind: str
    m: int
    k: int
    n: int
    order: str
    element: int
    dynamic: bool
    batch: int

    @property
    def parts(self) -> int:
        """Parts of the product, `n` columns each."""
        return PARTS[self.kind]

    @property
    def width(self) -> int:
        """Columns of the whole product."""
        return self.n * self.parts

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return helper.tensor_dtype_to_np_dtype(self.element).itemsize

    @property
    def is_bfloat16(self) -> bool:
        """Whether the elements have no NumPy type of their own."""
        return self.element == BFLOAT16

    @property
    def lhs_shape(self) -> tuple[int, ...]:
        """The shape of lhs."""
        return (self.batch, self.m // self.batch, self.k) if self.batch else (self.m, self.k)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of each output."""
        return (*self.lhs_shape[:-1], self.n)

    @property
    def outputs(self) -> int:
        """How many tensors are stored."""
        return 3 if self.kind == "qkv" else 1

    @property
    def bytes(self) -> int:
        """Bytes that one site reads and writes at least."""
        stored = self.outputs + (self.kind == "residual")
        return self.element_bytes * (self.m * self.k + self.k * self.width + stored * self.m * self.n)

    def __str__(self) -> str:
        rows = "x".join(map(str, self.lhs_shape[:-1])) + (" dynamic" if self.dynamic else "")
        return f"{rows}, {self.k}, {self.n} {self.kind} {ELEMENT_NAMES[self.element]} {self.order}"


def draw(seed: int, element: int = FLOAT16) -> Iterator[Drawn]:
    """Problems without end."""
    rng = np.random.default_rng([seed, element])
    while True:
        problem = _draw_one(rng, element)
        elements = max(problem.m * problem.k, problem.k * problem.width, problem.m * problem.width)
        if problem.m * problem.k * problem.width <= MOST_PRODUCTS and elements <= MOST_ELEMENTS:
            yield problem


def _draw_one(rng: np.random.Generator, element: int) -> Drawn:
    m = round(math.exp(rng.uniform(0, math.log(MOST_ROWS))))
    m = m | 1 if rng.random() < 0.25 else m  # odd ones
    k, n = _width(rng, DEEPEST), _width(rng, WIDEST)
    batch = int(rng.choice([0, *BATCHES])) if rng.random() < 0.7 else 0
    batch = batch if batch <= m else 0
    m = m // batch * batch if batch else m
    order = str(rng.choice(["kn", "nk"]))
    return Drawn(str(rng.choice(list(PARTS))), m, k, n, order, element, bool(rng.random() < 0.5), batch)


def _width(rng: np.random.Generator, most: int) -> int:
    """A width of real models, or near one: a multiple of 8, of 2, or odd."""
    width = int(rng.choice([width for width in WIDTHS if width <= most]))
    kind = rng.random()
    if kind < 0.65:
        return width
    moved = max(round(width * math.exp(rng.uniform(-0.3, 0.3))), 16)
    return min(moved // 8 * 8 if kind < 0.85 else moved // 2 * 2 if kind < 0.95 else moved | 1, most)


def model(problem: Drawn, sites: int, weights: int) -> ModelProto:
    """So many independent sites, each with an input of its own; weights are shared in turn; if none, inputs.

    Inputs are called `x0`, ... and `residual0`, ...; the outputs of a site follow each other.
    """
    b = Builder(problem.element)
    rows = ("batch", "tokens") if problem.batch else ("rows",)
    shape = (*rows, problem.k) if problem.dynamic else problem.lhs_shape
    read = [_stored(b, problem, index) for index in range(weights)] or [_asked(b, problem)]
    outputs: list[str] = []
    for index in range(sites):
        x = b.input(f"x{index}", shape)
        residual = b.input(f"residual{index}", (*shape[:-1], problem.n)) if problem.kind == "residual" else ""
        outputs += _site(b, problem, x, residual, *read[index % len(read)])
    return b.model(*outputs)


def shapes_of(problem: Drawn) -> tuple[tuple[int, ...], tuple[int, ...] | None, int]:
    """Of a stored weight and bias, and how many of each a site has."""
    products = problem.parts if problem.kind in ("dual", "qkv") else 1
    n = problem.width // products
    weight = (problem.k, n) if problem.order == "kn" else (n, problem.k)
    return weight, None if problem.kind in ("swiglu", "dual") else (n,), products


def stored(problem: Drawn, index: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The weights and biases that site `index` reads."""
    element = helper.tensor_dtype_to_np_dtype(problem.element)
    drawn = np.random.default_rng([problem.m, problem.k, problem.n]).standard_normal(RANDOM_ELEMENTS, np.float32)
    weight, bias, products = shapes_of(problem)
    scaled = (drawn / math.sqrt(problem.k)).astype(element)
    weights = [_repeated(scaled, weight, 7919 * index + part) for part in range(products)]
    return weights, [] if bias is None else [_repeated(drawn.astype(element), bias, part) for part in range(products)]


def _stored(b: Builder, problem: Drawn, index: int) -> tuple[list[str], list[str]]:
    """Names of the weights and of the biases, stored in the model."""
    weights, biases = stored(problem, index)
    return (
        [b.raw(value, f"weight{index}_{part}") for part, value in enumerate(weights)],
        [b.raw(value, f"bias{index}_{part}") for part, value in enumerate(biases)],
    )


def _asked(b: Builder, problem: Drawn) -> tuple[list[str], list[str]]:
    """Names of weights and biases that are inputs: a model to be planned needs no numbers."""
    weight, bias, products = shapes_of(problem)
    weights = [b.input(f"weight{part}", weight) for part in range(products)]
    return weights, [] if bias is None else [b.input(f"bias{part}", bias) for part in range(products)]


def _repeated(drawn: np.ndarray, shape: tuple[int, ...], start: int) -> np.ndarray:
    """The numbers over and over, from one of them on."""
    return np.resize(np.roll(drawn, -start), shape)


def _site(b: Builder, problem: Drawn, x: str, residual: str, weights: list[str], biases: list[str]) -> list[str]:
    """The outputs of one site, as an exporter writes it."""
    products = [_product(b, problem, x, weight) for weight in weights]
    if biases:
        products = [b("Add", product, bias) for product, bias in zip(products, biases, strict=True)]
    if problem.kind in ("bias", "qkv"):
        return products
    if problem.kind == "gelu":
        return [_gelu(b, *products)]
    if problem.kind == "residual":
        return [b("Add", residual, *products)]
    value, gate = products if problem.kind == "dual" else b("Split", *products, outputs=2, axis=-1, num_outputs=2)
    activated = _gelu(b, gate) if problem.kind == "geglu" else b("Mul", gate, b("Sigmoid", gate))
    return [b("Mul", activated, value)]


def _product(b: Builder, problem: Drawn, x: str, weight: str) -> str:
    if problem.order == "kn":
        return b("MatMul", x, weight)
    if problem.batch:
        return b("MatMul", x, b("Transpose", weight, perm=[1, 0]))
    return b("Gemm", x, weight, transB=1)


def _gelu(b: Builder, x: str) -> str:
    """As torch writes it for operator sets without Gelu."""
    erf = b("Add", b("Erf", b("Div", x, b.array(2**0.5))), b.array(1.0))
    return b("Mul", b("Mul", x, erf), b.array(0.5))
