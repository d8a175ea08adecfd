"""The image that bench writes: bars in the figures' proportion, read back from its pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from onnxfuse.bench import chart
from onnxfuse.bench.bench import BenchResult, Comparison, Latency
from onnxfuse.bench.chart import png
from onnxfuse.bench.html import BAR, BARS, WIDTH
from onnxfuse.bench.sites import SiteTimes
from onnxfuse.errors import SettingError

SITES = (
    SiteTimes("gate", 3, ("MatMul",), 40.0, 10.0, 5.0, "bytes", 10, 20),
    SiteTimes("a name that is far longer than any bar " * 5, 1, ("MatMul",), None, 0.004, 7.25, "flops", 10, 20),
    SiteTimes("Größe [b]", 1, ("MatMul",), 12.5, 12.5, 12.5, "bytes", 10, 20),
)
TIMED = Comparison("latency", Latency(2, 1, 3, 4), Latency(1, 1, 1, 1))


def result(*sites: SiteTimes, warnings: tuple[str, ...] = ()) -> BenchResult:
    return BenchResult((TIMED,), (9, 4), sites, 7, {"x": (2, 5)}, "H200", {"CUDA": "13.0"}, warnings)


def bars(data: bytes) -> list[tuple[str, int]]:
    """Each solid rectangle of a bar's colour from top to bottom, as its name and length; all are BAR pixels high."""
    image = Image.open(BytesIO(data)).convert("RGB")
    names: Mapping[tuple[int, ...], str] = {tuple(bytes.fromhex(colour[1:])): name for name, colour in BARS}
    pixels = image.load()
    rows = []
    for y in range(image.height):
        row = [(x, names[pixels[x, y]]) for x in range(image.width) if pixels[x, y] in names]
        if row:
            (name,) = {name for _, name in row}
            assert row[-1][0] - row[0][0] + 1 == len(row), "no hole"
            rows.append((name, len(row)))
    assert len(rows) % BAR == 0
    found = rows[::BAR]
    assert rows == [bar for bar in found for _ in range(BAR)]
    return found


def test_bars_are_as_long_as_the_figures_say() -> None:
    """On one scale for all sites; a site that does not run and a time below a pixel have no bar."""
    times = [(name, getattr(site, name)) for site in SITES for name, _ in BARS]
    lengths = [(name, round(time / 40.0 * WIDTH)) for name, time in times if time is not None]
    assert bars(png(result(*SITES), "title")) == [(name, length) for name, length in lengths if length]


def test_colours_of_text_and_bars_differ() -> None:
    """What is no site has no bar, so the reader of pixels above finds bars and nothing else."""
    assert bars(png(result(warnings=("it is hot",)), "title")) == []


def test_everything_that_is_written_lies_inside() -> None:
    """A frame of the paper's colour is left around all of it, however long a name or a warning is."""
    for each in (result(*SITES), result(SITES[0], warnings=("hot and shared " * 30,)), result()):
        image = Image.open(BytesIO(png(each, "a and b"))).convert("RGB")
        inside = image.convert("L").point(lambda value: 255 - value).getbbox()
        assert inside is not None
        left, top, right, bottom = inside
        assert min(left, top, image.width - right, image.height - bottom) >= chart.MARGIN // 2


def test_every_figure_is_in_the_text() -> None:
    """Bars of the same length whose figures differ below a pixel are different images."""
    first, second = (png(result(replace(SITES[0], before=before)), "title") for before in (40.0, 40.1))
    assert bars(first) == bars(second)
    assert first != second


def test_names_that_differ_in_what_the_font_lacks_are_drawn_differently() -> None:
    images = {png(result(replace(SITES[0], name=name)), "title") for name in ("größe", "grüße", "grße", "層")}
    assert len(images) == 4


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install pillow"):
        png(result(*SITES), "title")


def test_the_readme_names_an_extra_that_is_there() -> None:
    root = Path(__file__).parents[2]
    assert '\npng = ["pillow' in (root / "pyproject.toml").read_text()
    assert "pip install '.[png]'" in (root / "README.md").read_text()
