"""Small neural networks that say the logarithm of a factor for an estimate.

Those of kernels are fitted by `python -m tests.perf.learn`, those of the library's products by
`python -m tests.perf.learn_library`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from onnxfuse.schedule.calibration import FOLDER

# BLAS multiplies no more than 2**18 numbers in one thread: threads of several processes would wait for each other.
ROWS_AT_ONCE = 96


@dataclass(frozen=True)
class Networks:
    """Networks of equal shape: two hidden layers, each followed by max(x, 0), and one output.

    Attributes:
        names: of the features, in their order.
        means: of each feature, f32[features]; what features are less, and divided by `scales`.
        scales: f32[features].
        widest: how far from 0 a feature may then be; beyond, it counts as this far.
        weights: of each layer, f32[networks, inputs, outputs].
        biases: f32[networks, 1, outputs].
    """

    names: tuple[str, ...]
    means: NDArray[np.float32]
    scales: NDArray[np.float32]
    widest: float
    weights: tuple[NDArray[np.float32], ...]
    biases: tuple[NDArray[np.float32], ...]

    def __call__(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Their mean for [rows, features], f64[rows]."""
        rows, inputs = features.shape
        values = np.zeros((-(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE, inputs), np.float32)
        values[:rows] = np.clip((features - self.means) / self.scales, -self.widest, self.widest)
        values = values.reshape(-1, 1, ROWS_AT_ONCE, inputs)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = np.matmul(values, weight)
            values += bias
            if index < len(self.weights) - 1:
                np.maximum(values, 0, out=values)
        mean: NDArray[np.float64] = values[..., 0].mean(axis=1, dtype=np.float64).ravel()[:rows]
        return mean


@cache
def networks(name: str) -> Networks | None:
    """What was learnt of an architecture or of its library; None where nothing was timed."""
    path = FOLDER / f"{name}.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as stored:
        names = tuple(map(str, stored["names"]))
        arrays = {name: stored[name].astype(np.float32) for name in stored.files if name != "names"}
    layers = range(sum(name.startswith("weight") for name in arrays))
    return Networks(
        names, arrays["means"], arrays["scales"], float(arrays["widest"]),
        tuple(arrays[f"weight{layer}"] for layer in layers), tuple(arrays[f"bias{layer}"] for layer in layers),
    )  # fmt: skip
