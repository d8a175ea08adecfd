"""A bench result as a PNG, for those who see images but no pages: a bar per site, before, after and floor.

Drawn by Pillow, which only this needs: the extra `onnxfuse[png]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

from onnxfuse.bench.bench import BenchResult
from onnxfuse.bench.html import BAR, BARS, GAP, WIDTH, cells, longest, microseconds
from onnxfuse.bench.sites import SiteTimes
from onnxfuse.errors import SettingError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

MARGIN, LINE, TEXT = 12, 18, 12  # pixels: around everything, from line to line of text, height of a letter
INK, PAPER = "#1f2933", "#ffffff"
LABEL = 140  # pixels for what stands behind a bar


def check_pillow() -> None:
    """Refuse before anything is measured.

    Raises:
        SettingError: Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise SettingError("a PNG needs Pillow, which is not installed: pip install pillow")


def png(result: BenchResult, title: str) -> bytes:
    """What `str(result)` says, and below it the sites' bars on one scale, as a PNG of as many pixels as it takes.

    Args:
        result: what was measured.
        title: names the models.

    Raises:
        SettingError: Pillow is not installed.
    """
    check_pillow()
    from PIL import Image, ImageDraw, ImageFont

    lines = [_drawable(text) for text in (title, *str(result).splitlines())]
    heads = [_drawable(_head(site)) for site in result.sites]
    font = ImageFont.load_default(TEXT)
    width = max(WIDTH + LABEL, *(round(font.getlength(text)) for text in (*lines, *heads))) + 2 * MARGIN
    height = 2 * MARGIN + LINE * (len(lines) + 1) + len(heads) * _site_height()
    image = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(image)
    draw.font = font
    _text(draw, MARGIN, lines)
    top = MARGIN + LINE * (len(lines) + 1)
    for index, (head, site) in enumerate(zip(heads, result.sites, strict=True)):
        _text(draw, top + index * _site_height(), [head])
        _bars(draw, top + index * _site_height() + LINE, site, longest(result.sites))
    data = BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def _head(site: SiteTimes) -> str:
    name, count, *_, ratio = cells(site)
    return f"{name}  {count} of them{f', {ratio} as fast' if ratio else ''}, microseconds"


def _drawable(text: str) -> str:
    """Pillow's own font has ASCII; it draws everything else as the same empty box."""
    return text.encode("ascii", "backslashreplace").decode()


def _site_height() -> int:
    return LINE * 2 + len(BARS) * (BAR + GAP)


def _text(draw: ImageDraw, top: int, lines: Sequence[str]) -> None:
    for index, line in enumerate(lines):
        draw.text((MARGIN, top + index * LINE), line, INK)


def _bars(draw: ImageDraw, top: int, site: SiteTimes, scale: float) -> None:
    """One row a bar; Pillow's corners belong to the rectangle, so a bar of no pixel is left out."""
    for index, (name, colour) in enumerate(BARS):
        time = getattr(site, name)
        y, length = top + index * (BAR + GAP), round((time or 0.0) / scale * WIDTH)
        if length:
            draw.rectangle((MARGIN, y, MARGIN + length - 1, y + BAR - 1), colour)
        draw.text((MARGIN + length + GAP, y), f"{name} {microseconds(time)}", INK)
