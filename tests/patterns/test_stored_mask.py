"""Masks that the model stores: their diagonal is the furthest key that any row has, in whatever part a run takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxfuse.device import ARCHITECTURES
from onnxfuse.ir.attention import Attention, Diagonal
from onnxfuse.pipeline import analyse_model
from tests.helpers.attention_graphs import HEAD, HEADS, merged, number, scores
from tests.helpers.onnx_build import FLOAT16, Builder

ROWS, KEYS = 40, 72


def band(rows: int, keys: int, first: int | None, last: int) -> np.ndarray:
    """Whether a row has a key."""
    distance = np.arange(keys) - np.arange(rows)[:, None]
    return (distance <= last) & (distance >= (-np.inf if first is None else first))


def attention_of(b: Builder, mask: str, rows: int | str = ROWS, keys: int | str = KEYS) -> Attention:
    p = b("Softmax", b("Add", scores(b, rows, keys), mask), axis=-1)
    sites = analyse_model(b.model(*merged(b, p, keys)), [ARCHITECTURES["sm_90a"]]).sites
    (fusion,) = [site.fusion for site in sites if isinstance(site.fusion, Attention)]
    return fusion


def added(there: np.ndarray, fill: float) -> np.ndarray:
    return np.where(there, 0.0, fill).astype(np.float16)


@pytest.mark.parametrize("fill", [-np.inf, -65504.0])
@pytest.mark.parametrize(("first", "last"), [(None, 0), (None, -1), (None, 32), (-8, 0), (-5, 6)])
def test_numbers_are_as_good_as_what_makes_them(first: int | None, last: int, fill: float) -> None:
    b = Builder(FLOAT16)
    mask = b.raw(added(band(ROWS, KEYS, first, last), fill), "mask")
    assert attention_of(b, mask).diagonal == Diagonal(last, False, fill, first)


def test_a_condition_that_is_stored() -> None:
    b = Builder(FLOAT16)
    s, there = scores(b, ROWS, KEYS), b.mask(band(ROWS, KEYS, None, 0)[None, None])
    p = b("Softmax", b("Where", there, s, number(b, -np.inf)), axis=-1)
    (site,) = analyse_model(b.model(*merged(b, p, KEYS)), [ARCHITECTURES["sm_90a"]]).sites
    assert site.fusion.diagonal == Diagonal(0, False, -np.inf)


def test_a_constant_node_is_no_view() -> None:
    """It has no inputs."""
    for there, found in ((band(ROWS, KEYS, None, 0), Diagonal(0, False, -np.inf)), (np.ones((ROWS, KEYS)), None)):
        b = Builder(FLOAT16)
        mask = b("Constant", value=numpy_helper.from_array(added(there, -np.inf)))
        assert attention_of(b, mask).diagonal == found


@pytest.mark.parametrize("found", [True, False])
def test_a_constant_node_whose_numbers_lie_in_a_file(tmp_path: Path, found: bool) -> None:
    """They are read beside the model, and unknown where there is no such file."""
    b = Builder(FLOAT16)
    mask = b("Constant", value=numpy_helper.from_array(added(band(ROWS, KEYS, None, 0), -np.inf)))
    p = b("Softmax", b("Add", scores(b, ROWS, KEYS), mask), axis=-1)
    path = tmp_path / "model.onnx"
    model = b.model(*merged(b, p, KEYS))
    onnx.save(model, path, save_as_external_data=True, location="mask.bin", size_threshold=1024, convert_attribute=True)
    if not found:
        (tmp_path / "mask.bin").unlink()
    (site,) = analyse_model(path, [ARCHITECTURES["sm_90a"]]).sites
    assert site.fusion.diagonal == (Diagonal(0, False, -np.inf) if found else None)


def test_what_any_head_sees_counts() -> None:
    there = np.stack([band(ROWS, KEYS, None, last) for last in (0, 3)])
    there[:, 7] = False  # a row of nothing
    b = Builder(FLOAT16)
    assert attention_of(b, b.raw(added(there, -np.inf), "mask")).diagonal == Diagonal(3, False, -np.inf)


@pytest.mark.parametrize("there", [(0, KEYS - 1), (slice(None), KEYS - 1)], ids=str)
def test_one_key_that_is_furthest_away_leaves_no_diagonal(there: tuple[int | slice, int]) -> None:
    mask = band(ROWS, KEYS, None, 0)
    mask[there] = True
    b = Builder(FLOAT16)
    assert attention_of(b, b.raw(added(mask, -np.inf), "mask")).diagonal is None


def test_nothing_is_left_of_rows_of_nothing() -> None:
    b = Builder(FLOAT16)
    mask = b.raw(added(np.zeros((ROWS, KEYS)), -np.inf), "mask")
    assert attention_of(b, mask).diagonal is None


def test_a_part_of_a_table_for_the_longest_input() -> None:
    """As old decoders have it: `bias[:, :, :tokens, :tokens]`; what is longer than the table fails in either model."""
    b = Builder(FLOAT16)
    q, k, v = (b.input(name, ("batch", "tokens", HEADS * HEAD)) for name in ("query", "key", "value"))
    tokens = b("Shape", q, start=1, end=2)

    def heads(x: str, *perm: int) -> str:
        return b("Transpose", b("Reshape", x, b.integers(0, 0, HEADS, HEAD)), perm=perm)

    there = b.mask(band(128, 128, None, 0)[None, None], "bias")
    for axis in (2, 3):
        there = b("Slice", there, b.integers(0), tokens, b.integers(axis), b.integers(1))
    s = b("Where", there, b("MatMul", heads(q, 0, 2, 1, 3), heads(k, 0, 2, 3, 1)), number(b, -65504.0))
    out = b("Transpose", b("MatMul", b("Softmax", s, axis=-1), heads(v, 0, 2, 1, 3)), perm=(0, 2, 1, 3))
    model = b.model(b("Identity", b("Reshape", out, b.integers(0, 0, HEADS * HEAD))))
    (site,) = analyse_model(model, [ARCHITECTURES["sm_90a"]]).sites
    assert isinstance(site.fusion, Attention)
    assert site.fusion.diagonal == Diagonal(0, False, -65504.0)


def test_rows_at_the_end_of_a_table() -> None:
    """The last rows of a part of it: they begin as far behind its first key as the table says."""
    b = Builder(FLOAT16)
    table = b.raw(added(band(128, 128, None, 0), -np.inf), "table")
    mask = b("Slice", table, b.integers(KEYS - ROWS, 0), b.integers(KEYS, KEYS), b.integers(0, 1), b.integers(1, 1))
    assert attention_of(b, mask).diagonal == Diagonal(KEYS - ROWS, False, -np.inf)
