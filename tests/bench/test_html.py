"""The page that bench writes, opened in a browser: nothing is cut off at any usual width of a window."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from onnxfuse.bench.html import html
from onnxfuse.bench.sites import SiteTimes
from tests.bench.test_chart import SITES, result

CHROMIUM = shutil.which("chromium")
# Chromium starts as root only without its sandbox, and would else look for hosts of its maker.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=2000",
)  # fmt: skip
# Every text of the page with the box that it is drawn in, and every bar; put into the page itself, which is printed.
MEASURE = """<script>
const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const range = document.createRange();
  range.selectNodeContents(walker.currentNode);
  for (const box of range.getClientRects())
    if (box.width && walker.currentNode.parentNode.tagName != "SCRIPT")
      texts.push([walker.currentNode.data, box.left, box.right]);
}
const bars = [...document.querySelectorAll(".bars i")].map(bar => bar.getBoundingClientRect().width);
const root = document.documentElement;
const seen = {window: innerWidth, client: root.clientWidth, scroll: root.scrollWidth, texts, bars};
document.body.insertAdjacentHTML("beforeend", "<pre id=seen></pre>");
document.getElementById("seen").textContent = JSON.stringify(seen);
</script>"""
LONG = SiteTimes("/down_blocks.0/attentions.0/transformer_blocks.0/ff/net.0/proj/MatMul" * 3, 12, ("MatMul",), 123456.7,
                 98765.4, 87654.3, "bytes", 10, 20)  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


def opened(page: str, width: int, folder: Path) -> dict:
    """What a window of a width shows."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"{MEASURE}</body>"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    environment = os.environ | {"HOME": str(folder)}
    done = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    return json.loads(unescape(re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


@pytest.mark.parametrize("width", [800, 1200, 1600])
def test_nothing_is_cut_off(width: int, tmp_path: Path) -> None:
    sites = (*SITES, LONG, replace(LONG, name="short"))
    seen = opened(html(result(*sites, warnings=("hot " * 60,)), "unet.onnx and unet.fused.onnx"), width, tmp_path)
    assert seen["window"] == width
    assert seen["scroll"] <= seen["client"], "no horizontal scrolling"
    shown = {text for text, *_ in seen["texts"]}
    for site in sites:
        for name in ("before", "after", "floor"):
            if getattr(site, name) is not None:
                assert f"{name} {getattr(site, name):.1f}" in shown
    assert all(0 <= left < right <= width for _, left, right in seen["texts"]), "every figure is inside"


def test_bars_take_the_width_that_is_left(tmp_path: Path) -> None:
    """They keep their proportions, and the longest grows with the window until the page is as wide as it gets."""
    times = [time for site in SITES for time in (site.before, site.after, site.floor) if time is not None]
    longest = []
    for width in (800, 1000):
        bars = opened(html(result(*SITES), "title"), width, tmp_path)["bars"]
        assert bars == pytest.approx([time / max(times) * max(bars) for time in times], abs=0.5)
        longest.append(max(bars))
    assert longest[1] - longest[0] == pytest.approx(200, abs=1)
    assert longest[0] > 400
