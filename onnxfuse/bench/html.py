"""A bench result for people: one HTML page with a bar per site, and the same table on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from onnxfuse.bench.bench import MEASURES, BenchResult
from onnxfuse.bench.sites import SiteTimes

FLOOR = (
    "The floor is the larger of two times: every byte of a site's inputs and outputs once, at the rate at which ONNX "
    "Runtime's Neg read and wrote a large tensor in this run; and the operations of its products, at the rate of ONNX "
    "Runtime's MatMul of two large square matrices of the same type in this run."
)
SITES = (
    "Each distinct fused node beside the original nodes that it stands for, with random weights, in models of several "
    "copies that together miss the cache."
)
BARS = (("before", "#9aa5b1"), ("after", "#2f7d4f"), ("floor", "#c9a227"))  # attributes of a site, and their colours
WIDTH, BAR, GAP = 520, 14, 3  # pixels
CELLS = 24  # of a terminal's bar

_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:66em;padding:0 1em;color:#1f2933}"
    "h1,p,li,td:first-child{overflow-wrap:anywhere}table{border-collapse:collapse;margin:1em 0;width:100%}"
    "th,td{padding:.3em .6em;text-align:right;vertical-align:top;border-bottom:1px solid #ddd;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left;padding-left:0;white-space:normal}"
    ".sites tbody tr:nth-child(odd) td{border-bottom:0}.warning{background:#fdecea;padding:.5em 1em;margin:.3em 0}"
    # The figure behind a bar stands in the padding where the bar takes all the width that is left.
    ".bars div{font-size:11px;line-height:1.5;white-space:nowrap;padding-right:12em}"
    f".bars i{{display:inline-block;height:{BAR}px;margin-right:4px;vertical-align:middle}}small{{color:#616e7c}}"
)


def html(result: BenchResult, title: str) -> str:
    """A page that needs nothing but itself.

    Args:
        result: what was measured.
        title: names the models.
    """
    about = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    inputs = ", ".join(f"{name}[{', '.join(map(str, shape))}]" for name, shape in result.shapes.items())
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(result.device)}; {escape(about)}<br>{escape(inputs)}; {result.runs} runs of each, in turn</p>",
        *(f'<p class="warning">Warning: {escape(warning)}</p>' for warning in result.warnings),
        _measures(result),
        _sites(result.sites),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _measures(result: BenchResult) -> str:
    how = "".join(
        f"<li>{measure.name}: {escape(MEASURES[measure.name])}"
        f"{'' if not measure.why_not else f'. Not measured: {escape(measure.why_not)}'}</li>"
        for measure in result.comparisons
    )
    counts = ["not counted" if count is None else str(count) for count in result.launches]
    rows = "".join(map(_row, _figures(result)))
    table = _table(["measure", "model", "median ms", "p10", "p90", "p99", "faster"], rows, "models")
    return f"<h2>Models</h2>{table}<ul>{how}<li>kernels launched by one run: {counts[0]} → {counts[1]}</li></ul>"


def _figures(result: BenchResult) -> list[list[str]]:
    """Two rows of cells for each measure."""
    rows = []
    for measure in result.comparisons:
        for label, time in (("original", measure.original), ("optimised", measure.optimized)):
            figures = ["", "", "", ""] if time is None else [time.median, time.p10, time.p90, time.p99]
            rows.append([measure.name, label, *map(_milliseconds, figures)])
        rows[-1].append("" if measure.ratio is None else f"{measure.ratio:.2f}x")
        rows[-2].append("")
    return rows


def _milliseconds(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


def _sites(sites: Sequence[SiteTimes]) -> str:
    if not sites:
        return ""
    heads = ["site", "times", "before us", "after us", "floor us", "floor by", "faster"]
    rows = "".join(
        f'{_row(cells(site))}<tr><td colspan="{len(heads)}">{_bars(site, longest(sites))}</td></tr>' for site in sites
    )
    return f"<h2>Sites</h2><p>{SITES}</p><p><small>{FLOOR}</small></p>{_table(heads, rows, 'sites')}"


def cells(site: SiteTimes) -> list[str]:
    """What reports say of a site: name, count, before, after, floor, what bounds it, how many times as fast."""
    times = [microseconds(getattr(site, name)) for name, _ in BARS]
    return [site.name, str(site.count), *times, site.bound_by, "" if site.ratio is None else f"{site.ratio:.2f}x"]


def microseconds(value: float | None) -> str:
    """A time of a site; None is that of a model that does not run."""
    return "fails" if value is None else f"{value:.1f}"


def longest(sites: Iterable[SiteTimes]) -> float:
    """The time that all bars are drawn on the scale of; 1 where none was measured."""
    times = (time for site in sites for time in (site.before, site.after, site.floor) if time is not None)
    return max(times, default=1.0)


def _bars(site: SiteTimes, longest: float) -> str:
    """The three times on one scale for all sites: the longest is as long as the page has room for."""
    rows = []
    for name, colour in BARS:
        time = getattr(site, name)
        if time is not None:
            bar = f'<i style="width:{time / longest:.3%};background:{colour}"></i>'
            rows.append(f"<div>{bar}<span>{name} {microseconds(time)}</span></div>")
    label = f"{site.name}: {', '.join(f'{name} {microseconds(getattr(site, name))} us' for name, _ in BARS)}"
    return f'<div class="bars" role="img" aria-label="{escape(label)}">{"".join(rows)}</div>'


def _table(heads: Sequence[str], rows: str, kind: str) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _row(texts: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"


SITES_TITLE = "sites, microseconds: # after, . before"
SITE_HEADINGS = ("site", "times", "before", "after", "floor", "floor by", "faster", "")


def site_rows(sites: Sequence[SiteTimes]) -> list[list[str]]:
    """The sites for a terminal: the page's figures, and a bar in which `#` is after, and `.` what before had more."""
    return [[*cells(site), _text_bar(site, longest(sites))] for site in sites]


def _text_bar(site: SiteTimes, longest: float) -> str:
    after, before = (round((time or 0.0) / longest * CELLS) for time in (site.after, site.before))
    return "#" * after + "." * (before - after)
