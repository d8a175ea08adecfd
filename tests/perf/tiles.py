"""Tiles of drawn problems, each at several numbers of rows: what `tests.perf.learn` learns from.

    python -m tests.perf.tiles --seeds 1 2 --seconds 400 --out results/h200-drawn-tiles.json.xz

Of a drawn site (tests/perf/drawn.py) the rows are drawn again, so that a kernel which was compiled once is timed for
several of them. Each number of rows has the tiles that are estimated near the best there or at one of the others, and
a far one. Kernels are timed by themselves in captured graphs, with cold buffers, in turn (tests/perf/every_tile.py).
Weights are inputs of the models that are planned, but those that only initializers bring together.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import astuple, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from onnxfuse.device import ARCHITECTURES, CACHE_LINE
from onnxfuse.ir.fusion import Fusion
from onnxfuse.schedule.cost_model import saved_of_last_wave
from onnxfuse.schedule.hopper import LONGEST_KEPT_ROW
from onnxfuse.schedule.kernel_family import Candidate, Problem
from onnxfuse.schedule.plan import replan
from onnxfuse.schedule.small_m import SMALL_M
from onnxfuse.schedule.variant import ProductPlan
from tests.helpers.onnx_build import BFLOAT16, FLOAT, FLOAT16
from tests.perf.anywhere import sizes
from tests.perf.compare import origin
from tests.perf.drawn import MOST_ELEMENTS, MOST_PRODUCTS, MOST_ROWS, PARTS, Drawn, draw
from tests.perf.every_tile import Choice, Planned, compile_tiles, order_of, plan_as_it_lies, plan_padded, time_tiles
from tests.perf.result_file import write_result

DEVICE = ARCHITECTURES["sm_90a"]
STREAMS = (
    (0, FLOAT16),
    (0, FLOAT),
    (1000, FLOAT16),
    (1000, FLOAT),
    (0, BFLOAT16),
)  # added to a seed, of which elements
ALL = (FLOAT16, BFLOAT16, FLOAT)
FEW = {"few": (FLOAT16, BFLOAT16), "few-fp32": (FLOAT,)}  # elements, by the kinds of few rows
# Width of a transformer and of its MLP, which may be of two parts.
LAYERS = (
    (2048, 5632), (2048, 8192), (2560, 6912), (3072, 8192), (3584, 18944), (4096, 11008), (4096, 14336), (5120, 13824),
    (320, 1280), (640, 2560), (768, 3072), (1024, 4096), (1152, 4304), (1280, 5120),
)  # fmt: skip
KINDS = {
    "layers": "products of transformers' layers",
    "fp32": "drawn problems of fp32 alone",
    "kn": "the same that TMA reaches, of weights [k, n], as they lie",
    "qkv": "drawn queries, keys and values alone",
    "residual": "drawn products with a residual alone",
    "narrow": "drawn problems of few columns and deep k, the worst beside cuBLAS",
    "shallow": "drawn problems of many rows whose weight a block may keep, and the tiles that do",
    "few": "drawn problems and layers of 16 bits and 16 rows and fewer, and all tiles for few rows",
    "few-fp32": "the same of fp32",
    "padded": "drawn problems whose rows of k begin on no cache line, with zeros behind those of the weight",
}
MOST_OF_FEW = 16  # rows
FEWEST_OF_SHALLOW = 256  # rows, and up to four times as many as others have at most
NARROW, DEEP = 2048, 4  # columns of all parts at most, and times as many elements of k at least
ROWS, ODD = 4, 0.3  # numbers of rows of a site, and how many of them are made odd
NEAR, NEAREST, FAR, MOST = 1.5, 6, 2.2, 13  # of a number of rows: times the best estimate, and how many tiles
NEAR_LAST, LASTS = 1.1, 4  # the same of tiles that share a last wave, where they alone are wanted
SHORTER = 0.4  # of MOST_PRODUCTS: longer kernels are timed as precisely, but for long
LARGEST_STACKED = 5e7  # elements of q's, k's and v's weights, which are initializers
TURNED = 5  # of weights in fp32, plans store most [n, k]: all but those whose k this divides are drawn so
CHUNK = 4  # elements of fp32 in 16 bytes
WAITING = 40  # sites whose kernels are being compiled
PROCESSES = 15


@dataclass(frozen=True)
class AtRows:
    """A site at one number of rows: its plan, and all tiles with their estimates."""

    drawn: Drawn
    fusion: Fusion
    plan: ProductPlan
    tiles: tuple[tuple[float, Candidate], ...]

    def within(self, factor: float) -> list[str]:
        """The tiles that are estimated at no more than this times the best."""
        return [str(entry.tile) for us, entry in self.tiles if us <= factor * self.tiles[0][0]]

    @property
    def for_few_rows(self) -> list[str]:
        """The tiles of the kernel for few rows, the best first."""
        return [str(entry.tile) for _, entry in self.tiles if entry.family is SMALL_M]

    @property
    def keep_rhs(self) -> list[str]:
        """Those near the best that keep rhs, the best first."""
        near = {*self.within(NEAR)}
        names = [str(entry.tile) for _, entry in self.tiles if getattr(entry.tile, "kept_k", 0)]
        return [name for name in names if name in near]

    @property
    def splits_last_wave(self) -> list[str]:
        """The tiles not far from the best that share a last wave along k, the best first."""
        problem = Problem(self.drawn.m, self.drawn.n, self.drawn.k)
        return [
            str(entry.tile)
            for us, entry in self.tiles
            if us <= NEAR_LAST * self.tiles[0][0]
            and getattr(entry.tile, "last_wave_splits", 1) > 1
            and saved_of_last_wave(entry.tile, problem, DEVICE) > 0
        ]

    def of(self, names: set[str], most: int = MOST) -> Planned:
        """Those of these tiles that are not too far from the best."""
        near = names.intersection(self.within(FAR))
        pairs = [(us, entry) for us, entry in self.tiles if str(entry.tile) in near][:most]
        choices = tuple(Choice(us, replan(self.plan, entry).variants[0]) for us, entry in pairs)
        return Planned(self.fusion, order_of(self.fusion), str(pairs[0][1].tile), choices)


WANTED: dict[str, Callable[[AtRows], list[str]]] = {
    "shallow": lambda each: each.keep_rhs[:NEAREST],
    **dict.fromkeys(FEW, lambda each: each.for_few_rows),
}


def layers(seed: int) -> Iterator[Drawn]:
    """Products of transformers' layers, without end: there a few per cent count most, and drawn sites are few."""
    rng = random.Random(seed)
    while True:
        hidden, wide = rng.choice(LAYERS)
        kind = rng.choice(("swiglu", "dual", "geglu", "gelu", "residual", "residual", "residual"))
        k, n = (hidden, wide) if kind != "residual" else rng.choice(((wide, hidden), (wide, hidden), (hidden, hidden)))
        rows = round(math.exp(rng.uniform(0, math.log(MOST_ROWS))))
        element = rng.choice((FLOAT16, FLOAT16, FLOAT16, FLOAT))
        yield Drawn(kind, rows, k, n, rng.choice(("kn", "nk")), element, False, 0)


def sites(seeds: Sequence[int], kind: str = "") -> Iterator[Drawn]:
    """Drawn problems in turn, without end, of one of KINDS or all that are drawn."""
    elements = (FLOAT,) if kind in ("fp32", "kn") else ALL
    drawn = [draw(seed + more, element) for seed in seeds for more, element in STREAMS if element in elements]
    of_layers = [layers(seed) for seed in seeds]
    both = [*of_layers, *drawn]
    streams = {"layers": of_layers, "few": both, "few-fp32": both}.get(kind, drawn)
    for stream in itertools.cycle(streams):
        site = _of_kind(next(stream), kind)
        if site is not None and (site.kind != "qkv" or site.k * site.width <= LARGEST_STACKED):
            yield site


def _of_kind(site: Drawn, kind: str) -> Drawn | None:
    """The site with its weight as the kind has it; None where it is none of them."""
    if kind == "kn":
        return None if site.k % CHUNK or site.n % CHUNK else replace(site, order="kn")
    if kind == "shallow" and site.k * site.element_bytes > LONGEST_KEPT_ROW:
        return None
    if kind in FEW and site.element not in FEW[kind]:
        return None
    if kind == "narrow" and (site.width > NARROW or site.k < DEEP * site.width):
        return None
    if kind in PARTS and site.kind != kind:
        return None
    if kind == "padded":
        return replace(site, order="nk") if site.k * site.element_bytes % CACHE_LINE else None
    return replace(site, order="nk") if site.element == FLOAT and site.k % TURNED else site


def rows_of_site(site: Drawn, kind: str = "") -> list[int]:
    """The site's own rows and others, log-uniform, as many as are not too long a kernel."""
    rng = random.Random(str(site))
    most = min(MOST_ROWS, SHORTER * MOST_PRODUCTS / (site.k * site.width), MOST_ELEMENTS / max(site.k, site.width))
    ranges = {"shallow": (FEWEST_OF_SHALLOW, 4 * most), **dict.fromkeys(FEW, (1, MOST_OF_FEW))}
    least, most = ranges.get(kind, (1, most))
    found = {site.m} if least <= site.m <= most else set()
    while len(found) < ROWS:
        rows = round(math.exp(rng.uniform(math.log(least), math.log(most))))
        found.add(rows | 1 if rng.random() < ODD and rows < most else rows)
    return sorted(found)


def at_rows(site: Drawn, rows: int, kind: str) -> AtRows | None:
    drawn = replace(site, m=rows, batch=0, dynamic=False)
    found = (plan_padded if kind == "padded" else plan_as_it_lies)(drawn, DEVICE)
    if found is None:
        return None
    tiles = tuple(pair for pair in found[1].ranked[0].tiles if math.isfinite(pair[0]))
    return AtRows(drawn, *found, tiles)


def prepare(site: Drawn, folder: Path, kind: str, of_last_waves: bool) -> list[tuple[Drawn, Planned]]:
    """What to time of a site, compiled into a folder: work for a process that sees no GPU."""
    rng = random.Random(str(site))
    known = [each for rows in rows_of_site(site, kind) if (each := at_rows(site, rows, kind)) is not None]
    if of_last_waves:
        known = [each for each in known if each.splits_last_wave]
    wanted = WANTED.get(kind)
    if wanted is not None:
        known = [each for each in known if wanted(each)]
    names: set[str] = set()
    for each in known:
        names.update(each.within(NEAR)[:NEAREST])
        names.update(each.splits_last_wave[:LASTS] if of_last_waves else ())
        names.update(wanted(each) if wanted is not None else ())
        names.update(rng.sample(far := each.within(FAR)[NEAREST:], min(1, len(far))))
    most = len(names) if kind in FEW else MOST
    found = [(each.drawn, each.of(names, most)) for each in known]
    for _, tiles in found:
        compile_tiles(tiles, DEVICE, folder)
    return found


def prepared(
    source: Iterator[Drawn], folder: Path, seconds: float, kind: str, of_last_waves: bool
) -> Iterator[tuple[Drawn, Planned]]:
    """What to time, site by site as they get ready, for so long."""
    end = time.monotonic() + seconds
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        waiting: set[Future[list[tuple[Drawn, Planned]]]] = set()
        while time.monotonic() < end:
            waiting |= {
                pool.submit(prepare, next(source), folder, kind, of_last_waves) for _ in range(WAITING - len(waiting))
            }
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in ready:
                if time.monotonic() < end:
                    yield from each.result()
        pool.shutdown(cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=400)
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in KINDS.items():
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="", help=text)
    parser.add_argument("--last-wave", action="store_true", help="only where a tile is near that shares a last wave")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cubins", type=Path, default=Path("/tmp/cubins"), help="folder of compiled kernels")
    options = parser.parse_args()
    options.cubins.mkdir(parents=True, exist_ok=True)
    names: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    source = sites(options.seeds, options.kind)
    known = {"padded": True} if options.kind == "padded" else {}
    for drawn, tiles in prepared(source, options.cubins, options.seconds, options.kind, options.last_wave):
        times = time_tiles(drawn, tiles, *sizes(drawn), DEVICE, options.cubins)
        us = {names.setdefault(tile, len(names)): us for tile, (us, _) in times.items()}
        rows.append({"drawn": astuple(drawn), "us": us, **known})
    seeds = " ".join(map(str, options.seeds)) + f" --{options.kind}" * bool(options.kind)
    seeds += " --last-wave" * options.last_wave
    command = f"python -m tests.perf.tiles --seeds {seeds} --seconds {options.seconds:.0f} --out {options.out}"
    write_result(options.out, {**origin(command), "early": True, "names": [*names], "rows": rows})


if __name__ == "__main__":
    main()
