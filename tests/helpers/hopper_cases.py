"""Kernels for tests of sm_90a: tiles in both schedules, clusters, split k, orders, parts, operand kinds, outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from onnxfuse.device import ARCHITECTURES
from onnxfuse.dtypes import F32, DType
from onnxfuse.kernels.hopper import emit
from onnxfuse.schedule.hopper import HOPPER
from onnxfuse.schedule.hopper_tile import HopperTile, is_served, why_not
from onnxfuse.schedule.kernel_family import Launch
from onnxfuse.schedule.kernel_spec import Tile
from tests.helpers.kernel_problem import Size, TiledSpec, make_spec

DEVICE = ARCHITECTURES["sm_90a"]
PORTABLE = Tile(128, 16, 32, 2, 1, 2)  # a test's spec carries one; this kernel does not look at it

# Columns are those of all parts together.
SHAPES = (
    (128, 160, True), (128, 192, True), (64, 256, True), (128, 128, True), (64, 160, True), (64, 64, True),
    (128, 256, False), (256, 128, False), (128, 192, False), (256, 64, False),
)  # fmt: skip
CLUSTERS = ((1, 1), (2, 1), (1, 2))


@dataclass(frozen=True)
class HopperCase:
    """One kernel and the sizes that it runs at: all allow the widths of the first."""

    name: str
    spec: TiledSpec
    tile: HopperTile
    sizes: tuple[Size, ...]

    @property
    def source(self) -> str:
        """The kernel's text."""
        return emit(self.spec, self.tile, DEVICE.shared_bytes)

    @property
    def launch(self) -> Launch:
        """How it is launched."""
        return HOPPER.launch(self.spec, self.tile, DEVICE)


WIDE = [
    (1, 8, 8), (2, 16, 2560), (7, 328, 520), (16, 256, 128), (17, 264, 136), (31, 1032, 48), (48, 400, 112),
    (63, 8, 96),
    (64, 64, 64), (65, 200, 160), (96, 96, 96), (127, 120, 56), (128, 128, 64), (129, 136, 72), (130, 24, 1024),
    (200, 160, 80), (255, 512, 40), (256, 248, 1280), (300, 72, 24), (333, 64, 8), (504, 136, 248), (505, 136, 248),
    (512, 1280, 64), (1, 640, 320), (1000, 320, 640), (77, 768, 16), (128, 8, 8), (8, 128, 4096), (129, 1288, 200),
]  # fmt: skip


def tile_of(shape: tuple[int, int, bool], parts: int, cluster: tuple[int, int], ahead: bool, groups: int) -> HopperTile:
    rows, width, pingpong = shape
    return HopperTile(rows, max(width // parts // 16, 1) * 16, pingpong, *cluster, operands_ahead=ahead, groups=groups)


# Heads that TMA stores and that threads copy, m contiguous, merged heads, and both at once.
WALKED = (
    ("heads", (Size(130, 192, 128, batch=3, n_run=64), Size(77, 64, 320, n_run=64))),
    ("heads", (Size(200, 320, 72, batch=2, n_run=32, pad=8), Size(16, 160, 64, n_run=32))),
    ("heads", (Size(129, 120, 56, batch=2, n_run=40), Size(300, 640, 40, n_run=40))),
    ("heads", (Size(66, 45, 64, n_run=15),)),
    ("transposed", (Size(136, 96, 72, batch=2), Size(504, 136, 248), Size(8, 72, 64, pad=8))),
    ("transposed", (Size(77, 72, 64), Size(131, 40, 40))),
    ("images", (Size(96, 72, 64, batch=2, m_run=24), Size(640, 136, 128, m_run=64))),
    ("both", (Size(96, 64, 64, m_run=24, n_run=32), Size(640, 96, 128, m_run=128, n_run=32))),
    ("both", (Size(195, 64, 128, batch=2, m_run=13, n_run=64), Size(333, 192, 64, m_run=9, n_run=64))),
    ("both", (Size(77, 64, 64, m_run=1, n_run=64), Size(260, 128, 192, m_run=65, n_run=64, pad=8))),
    ("swapped rows", (Size(96, 72, 64, batch=2, m_run=24), Size(300, 136, 128, m_run=20))),
    ("plain", (Size(130, 72, 256, batch=3, k_run=64), Size(257, 328, 128, batch=2, k_run=128))),
    ("heads", (Size(130, 128, 192, batch=2, k_run=64, n_run=64),)),
)


def walked_cases() -> Iterator[HopperCase]:
    """Tensors in two levels and transposed ones, with every kind of epilogue and several shapes of tiles."""
    turn = 0
    for layout, sizes in WALKED:
        for shape in SHAPES[::3]:
            for parts in (1, 2):
                turn += 1
                kind, order, math = (
                    ("plain", "residual", "mixed")[turn % 3],
                    ("nk", "kn")[turn % 2],
                    ("f16", "bf16")[turn // 2 % 2],
                )
                outs: tuple[DType | None, ...] = ((None,), (None, F32), (None,))[turn % 3]
                fitting = [size for size in sizes if order == "nk" or size.n % 8 == 0]
                if not fitting:
                    continue
                spec = make_spec(math, parts, order, PORTABLE, fitting[0], kind, outs, layout=layout)
                tiles = [tile_of(shape, parts, (1, 1), False, groups) for groups in (4, 2)]
                legal = [tile for tile in tiles[turn // 2 % 2 :] if why_not(spec, tile, DEVICE.shared_bytes) is None]
                for tile in legal[:1]:
                    name = f"{layout}-{math}-{order}-{parts}x-{tile}-{kind}-{turn}"
                    yield HopperCase(name.replace(" ", "-"), spec, tile, tuple(fitting))


BATCH_RUNS = (
    Size(130, 136, 64, 6, 8, False, lhs_batch_run=3, rhs_batch_run=3),
    Size(257, 72, 320, 4, 0, False, lhs_batch_run=2, rhs_batch_run=4),
    Size(72, 40, 72, 6, 8, False, lhs_batch_run=3, rhs_batch_run=2, same_runs=True),
)


def batch_runs_cases() -> Iterator[HopperCase]:
    """Batches of lhs and of rhs, or of one of them, in runs, as heads lie before they are split."""
    turn = 0
    for shape in SHAPES[1::2]:
        for lhs, rhs in ((True, True), (True, False), (False, True)):
            turn += 1
            order, lhs_order = ("nk", "kn")[turn % 2], ("mk", "km")[turn % 4 == 3]
            sizes = tuple(
                replace(
                    size,
                    m=size.m // 8 * 8,
                    lhs_batch_run=lhs * size.lhs_batch_run,
                    rhs_batch_run=rhs * size.rhs_batch_run,
                )
                for size in BATCH_RUNS
            )
            kind = ("residual", "plain")[turn % 2]
            spec = make_spec(("f16", "bf16")[turn % 2], 1, order, PORTABLE, sizes[0], kind, lhs_order=lhs_order)
            tile = tile_of(shape, 1, (1, 1), False, 2)
            if why_not(spec, tile, DEVICE.shared_bytes) is None:
                name = f"batch-runs-{spec.math}-{lhs_order}-{order}-{tile}-{kind}-{turn}"
                yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)


def copied_cases() -> Iterator[HopperCase]:
    """Rhs [k, n] as it lies behind a copy: n ends anywhere, and rows begin on 16 bytes, past what `pad` adds."""
    sizes = (Size(130, 49, 72, batch=2, pad=7), Size(77, 201, 136, pad=7), Size(256, 1, 64, pad=7))
    for turn, shape in enumerate(SHAPES[::2]):
        parts, kind = 1 + turn % 2, ("plain", "residual")[turn % 2]
        spec = make_spec(("f16", "bf16")[turn % 2], parts, "kn", PORTABLE, sizes[0], kind)
        spec = replace(spec, copied=("rhs",), lhs_width=8)
        tile = tile_of(shape, parts, (1, 1), False, 2)
        if why_not(spec, tile, DEVICE.shared_bytes) is None:
            name = f"copied-{spec.math}-{tile}-{kind}-{turn}"
            yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)


def tall_cases() -> Iterator[HopperCase]:
    """M is the contiguous axis of lhs, with both orders of rhs."""
    sizes = (Size(136, 96, 72, batch=2), Size(504, 136, 248), Size(8, 72, 64, pad=8), Size(256, 200, 1280))
    turn = 0
    for shape in SHAPES[::2]:
        for parts in (1, 2):
            for order in ("kn", "nk"):
                for cluster in CLUSTERS[:: 1 + turn % 2]:
                    turn += 1
                    math, kind = ("f16", "bf16")[turn % 2], ("plain", "residual", "mixed")[turn % 3]
                    layout = ("plain", "transposed")[turn // 2 % 2]
                    spec = make_spec(math, parts, order, PORTABLE, sizes[0], kind, layout=layout, lhs_order="km")
                    tile = tile_of(shape, parts, cluster, False, 2)
                    if why_not(spec, tile, DEVICE.shared_bytes) is None:
                        name = f"tall-{layout}-{math}-{order}-{parts}x-{tile}-{kind}-{turn}"
                        yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)


def small_m_cases() -> Iterator[HopperCase]:
    """Lhs in boxes of a few rows, some of which have none; the rows end in every part of a box."""
    sizes = (
        Size(1, 8, 8), Size(17, 264, 136), Size(16, 96, 256), Size(33, 40, 72, batch=3, pad=8), Size(63, 136, 640),
        Size(64, 64, 64), Size(100, 328, 136), Size(129, 48, 72),
    )  # fmt: skip
    turn = 0
    shapes = [(shape, 1, rows) for shape in ((64, 32, True), (64, 128, True), (128, 64, False), (128, 128, True))
              for rows in (8, 16, 32)]  # fmt: skip
    shapes += [((128, columns, False), splits, rows) for columns in (64, 80) for splits in (2, 4) for rows in (32, 64)]
    for shape, splits, rows in shapes:
        for parts in (1, 2):
            turn += 1
            order, math = ("nk", "kn")[turn % 2], ("f16", "bf16", "tf32")[turn % 3]
            kind = ("residual", "mixed")[turn % 2] if splits > 1 else ("plain", "residual", "mixed")[turn // 2 % 3]
            spec = make_spec(math, parts, "nk" if math == "tf32" else order, PORTABLE, sizes[0], kind)
            tile = replace(tile_of(shape, parts, (1, 1), False, 2), lhs_rows=rows, splits=splits)
            if why_not(spec, tile, DEVICE.shared_bytes) is None:
                name = f"few-{math}-{spec.rhs_order}-{parts}x-{tile}-{kind}-{turn}"
                yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)


def cases() -> Iterator[HopperCase]:
    """Every shape with every number of parts; orders, dtypes, clusters and operand kinds take turns."""
    turn = 0
    for shape in SHAPES:
        for parts in (1, 2, 3, 4):
            for cluster in CLUSTERS:
                turn += 1
                order, math = ("nk", "kn")[turn % 2], ("f16", "bf16", "tf32")[turn // 5 % 3]
                kind = ("plain", "residual", "plain", "mixed")[turn // 2 % 4]
                outs: tuple[DType | None, ...] = ((None,), (None, F32))[turn % 7 == 3]
                sizes = tuple(Size(*WIDE[(turn * 5 + index) % len(WIDE)]) for index in range(5))
                if turn % 6 == 0:
                    sizes = (Size(65, 72, 40, batch=3, pad=8, broadcast_rhs=turn % 12 == 0), *sizes[1:])
                if order == "nk" and turn % 8 == 0:  # n is then free: no output or row operand has wide accesses
                    odd = (replace(size, n=size.n + 1 + index) for index, size in enumerate(sizes))
                    sizes = (Size(67, 45, 72), *odd)
                spec = make_spec(math, parts, order, PORTABLE, sizes[0], kind, outs)
                tiles = [tile_of(shape, parts, cluster, turn % 5 == 0 and kind == "plain", groups) for groups in (4, 2)]
                legal = [tile for tile in tiles[turn // 3 % 2 :] if why_not(spec, tile, DEVICE.shared_bytes) is None]
                for tile in legal[:1]:
                    name = f"{math}-{order}-{parts}x-{tile}-{kind}-{turn}"
                    yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)


def three_groups_cases() -> Iterator[HopperCase]:
    """Tiles of 192 rows, one wgmma and two for all columns, with and without tile operands; k whole, split, shared."""
    sizes = (
        Size(154, 264, 136), Size(1, 8, 8), Size(192, 224, 640), Size(193, 72, 64, batch=2, pad=8), Size(385, 328, 72),
        Size(129, 136, 1000), Size(600, 448, 256),
    )  # fmt: skip
    turn = 0
    for columns in (224, 192, 128, 80, 64):
        for splits, cluster in ((1, (1, 1)), (2, (1, 1)), (4, (1, 1)), (1, (2, 1)), (1, (1, 2))):
            for parts in (1, 2):
                turn += 1
                order, math = ("nk", "kn")[turn // 2 % 2], ("f16", "bf16", "tf32")[turn % 3]
                kind = ("plain", "residual", "mixed")[turn % 3 if columns <= 128 else 0]
                spec = make_spec(math, parts, "nk" if math == "tf32" else order, PORTABLE, sizes[0], kind)
                tile = replace(tile_of((192, columns, False), parts, cluster, False, 3), splits=splits)
                if why_not(spec, tile, DEVICE.shared_bytes) is None:
                    name = f"three-{math}-{spec.rhs_order}-{parts}x-{tile}-{kind}-{turn}"
                    yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)
    for cluster in ((2, 1), (1, 2)):  # two pieces of rhs of which each block has a half
        spec, tile = make_spec("f16", 2, "nk", PORTABLE, sizes[0]), tile_of((192, 224, False), 2, cluster, False, 3)
        yield HopperCase(f"three-pieces-{tile}".replace(" ", "-"), spec, tile, sizes)


def served_cases() -> Iterator[HopperCase]:
    """Outputs whose slabs producers store, with and without an operand whose place they take; all slabs, or two."""
    sizes = (
        Size(300, 328, 72, batch=2, broadcast_tiles=True), Size(1, 8, 8), Size(129, 72, 200, batch=3, pad=8),
        Size(640, 264, 136), Size(64, 1288, 64), Size(513, 96, 640),
    )  # fmt: skip
    shapes = ((128, 128, True, 2), (128, 160, True, 2), (64, 160, True, 2), (128, 256, False, 2), (128, 96, False, 2),
              (192, 160, False, 3), (192, 64, False, 3), (128, 128, True, 4), (256, 64, False, 4))  # fmt: skip
    turn = 0
    for *shape, groups in shapes:
        for parts in (1, 2):
            for kind in ("plain", "residual"):
                turn += 1
                order, math = ("nk", "kn")[turn // 2 % 2], ("f16", "bf16")[turn // 4 % 2]
                spec = make_spec(math, parts, order, PORTABLE, sizes[0], kind)
                tile = replace(tile_of((*shape,), parts, (1, 1), turn % 3 == 0, groups), whole_slabs=turn % 4 > 0)
                if why_not(spec, tile, DEVICE.shared_bytes) is None and is_served(spec, tile):
                    name = f"served-{math}-{order}-{parts}x-{tile}-{kind}-{turn}"
                    yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)


def kept_cases() -> Iterator[HopperCase]:
    """Rhs that stays: one row of tiles and many, fewer blocks than columns, other columns, batches of other weights."""
    sizes = (
        Size(700, 72, 320), Size(1, 8, 8), Size(1100, 136, 264, pad=8), Size(520, 328, 72, batch=2),
        Size(330, 40, 136, batch=3, broadcast_rhs=False), Size(200, 648, 64),
    )  # fmt: skip
    shapes = ((128, 192, True, 2), (128, 160, True, 2), (128, 128, True, 4), (64, 160, True, 2), (128, 96, True, 2),
              (192, 192, False, 3), (192, 96, False, 3))  # fmt: skip
    turn = 0
    for *shape, groups in shapes:
        for parts in (1, 2):
            for kind in ("plain", "residual"):
                turn += 1
                order, math = ("nk", "kn")[turn // 2 % 2], ("f16", "bf16", "tf32")[turn % 3]
                spec = make_spec(math, parts, "nk" if math == "tf32" else order, PORTABLE, sizes[0], kind)
                kept = 160 if math == "tf32" else 320
                tile = replace(tile_of((*shape,), parts, (1, 1), turn % 4 == 0, groups), group_rows=1, kept_k=kept)
                if why_not(spec, tile, DEVICE.shared_bytes) is None:
                    name = f"kept-{math}-{spec.rhs_order}-{parts}x-{tile}-{kind}-{turn}"
                    own = tuple(size for size in sizes if size.k <= kept)
                    yield HopperCase(name.replace(" ", "-"), spec, tile, own)


# Masks of every kind and width, in rows, down columns and in runs of heads.
MASKED = (
    ("masks", "plain", (Size(130, 96, 128, batch=3), Size(504, 144, 248), Size(1, 16, 64, pad=16))),
    ("masked", "plain", (Size(77, 136, 72), Size(300, 72, 64, batch=2, pad=8))),
    ("masks", "plain", (Size(67, 45, 72),)),
    ("masks", "transposed", (Size(144, 72, 64), Size(16, 136, 320, batch=2))),
    ("masked", "transposed", (Size(77, 72, 64),)),
    ("masks", "heads", (Size(129, 128, 128, batch=2, n_run=64), Size(300, 320, 64, n_run=64))),
    ("masked", "images", (Size(96, 72, 64, batch=2, m_run=24),)),
)


def masked_cases() -> Iterator[HopperCase]:
    """Operands of type bool with several shapes of tiles and one or two parts."""
    turn = 0
    for kind, layout, sizes in MASKED:
        for shape in SHAPES[1::3]:
            for parts in (1, 2):
                turn += 1
                order = "nk" if layout == "transposed" or any(size.n % 8 for size in sizes) else ("nk", "kn")[turn % 2]
                outs: tuple[DType | None, ...] = ((None,), (None, F32))[turn % 5 == 0]
                spec = make_spec(
                    ("f16", "bf16")[turn // 2 % 2], parts, order, PORTABLE, sizes[0], kind, outs, layout=layout
                )
                tile = tile_of(shape, parts, CLUSTERS[turn % 3], False, 2)
                if why_not(spec, tile, DEVICE.shared_bytes) is None:
                    name = f"{kind}-{layout}-{spec.math}-{order}-{parts}x-{tile}-{turn}"
                    yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)


# Columns are those of all parts together.
SPLIT_SHAPES = ((128, 160), (128, 128), (128, 64), (128, 80), (128, 256), (256, 128), (256, 64))
# k of one step of 64 elements and of fewer steps than blocks, odd numbers of steps, steps that end early.
SPLIT_SIZES = (
    Size(1, 8, 8), Size(130, 136, 64), Size(77, 168, 128), Size(129, 264, 200, pad=8), Size(260, 72, 320),
    Size(300, 328, 448), Size(128, 1280, 1000), Size(65, 72, 264, batch=3, pad=8), Size(512, 160, 1288),
    Size(200, 96, 72, batch=2, broadcast_rhs=False), Size(16, 640, 2560), Size(385, 40, 576),
)  # fmt: skip
SPLIT_WALKED = (
    ("plain", (Size(130, 72, 256, batch=3, k_run=64), Size(66, 136, 320, batch=2, k_run=64))),
    ("plain", (Size(257, 328, 128, batch=2, k_run=128), Size(70, 72, 384, batch=3, k_run=128))),
    ("heads", (Size(130, 192, 328, batch=3, n_run=64), Size(77, 64, 64, n_run=64))),
    ("both", (Size(195, 64, 200, batch=2, m_run=13, n_run=64), Size(96, 192, 512, m_run=24, n_run=64))),
    ("transposed", (Size(136, 96, 200, batch=2), Size(504, 136, 648))),
)


def split_cases() -> Iterator[HopperCase]:
    """K split by 2 and 4: every shape; parts, orders, dtypes, layouts and operand kinds take turns."""
    turn = 0
    plain = [("plain", SPLIT_SIZES[start::3]) for start in range(3)]
    for splits in (2, 4):
        for shape in SPLIT_SHAPES:
            for layout, sizes in (plain[turn % 3], SPLIT_WALKED[turn % len(SPLIT_WALKED)]):
                turn += 1
                parts, order = 1 + turn // 2 % 2, ("nk", "kn")[turn // 3 % 2]
                kind = ("residual", "plain", "mixed")[turn // 2 % 3]
                math = ("f16", "bf16", "tf32")[turn % 3 if order == "nk" and layout == "plain" else turn % 2]
                tall = math != "tf32" and all(size.m % 8 == 0 for size in sizes)
                lhs_order = "km" if tall else "mk"
                outs: tuple[DType | None, ...] = ((None,), (None, F32))[turn % 5 == 0]
                tile = replace(tile_of((*shape, False), parts, (1, 1), False, 2), splits=splits)
                spec = make_spec(math, parts, order, PORTABLE, sizes[0], kind, outs, layout=layout, lhs_order=lhs_order)
                if why_not(spec, tile, DEVICE.shared_bytes) is None:
                    name = f"{layout}-{lhs_order}-{math}-{order}-{parts}x-{tile}-{kind}-{turn}"
                    yield HopperCase(name.replace(" ", "-"), spec, tile, sizes)
