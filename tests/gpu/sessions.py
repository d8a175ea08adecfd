"""What every way to run a fused node has to stand: replays of a captured graph with other inputs, and threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

THREADS = 8
TURNS = (0, 0, 1, 2, 3, 0)


def check_replays(
    plain: Any, live: Any, inputs: Sequence[np.ndarray], turns: Iterable[int] = TURNS, device: str = "cuda"
) -> None:
    """A session that captures its first run has the bits of a plain one, whatever lies in its input by then."""
    import onnxruntime

    expected = [plain.run(None, {"x": x})[0] for x in inputs]
    bound = onnxruntime.OrtValue.ortvalue_from_numpy(inputs[0].copy(), device, 0)
    shape, dtype = list(expected[0].shape), expected[0].dtype
    out = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, dtype, device, 0)
    binding = live.io_binding()
    binding.bind_ortvalue_input("x", bound)
    binding.bind_ortvalue_output(live.get_outputs()[0].name, out)
    for which in turns:
        bound.update_inplace(inputs[which])
        live.run_with_iobinding(binding)
        np.testing.assert_array_equal(out.numpy(), expected[which])


def check_threads(problems: Sequence[tuple[Any, np.ndarray]], runs: int = 400) -> None:
    """Sessions with an input each give the bits that they give alone, run by threads in any order."""
    expected = [live.run(None, {"x": x})[0].tobytes() for live, x in problems]

    def agrees(index: int) -> bool:
        live, x = problems[index % len(problems)]
        return bool(live.run(None, {"x": x})[0].tobytes() == expected[index % len(problems)])

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(agrees, range(runs)))
