"""Altered archives and attributes, thousands of them, against the bridge built with sanitizers.

    python -m tests.tools.bridge_fuzz [--rounds N | --seconds S] [--seed N]

The library is built first, and the process starts itself again with the compiler's libasan.so in LD_PRELOAD. A fault
that a sanitizer finds ends it with its report and an exit code other than 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from onnxfuse.graph.archive import Flavour, Library, Record, pack
from tests.helpers.bridge_build import sanitized_library, sanitizer_environment
from tests.helpers.bridge_hooks import Arguments, Bridge, BridgeError, Node, load
from tests.tools.fuzz_archive import mended

RECORD = Record(
    kernel="ab12", entry="gemm", capability=90, flavour=Flavour.SPECIFIC, min_m=0, max_m=4096, block_m=64, block_n=64,
    threads=128, shared_bytes=4096, lhs_alignment=16, rhs_alignment=16, load_alignments=(4, 4), out_alignments=(16,),
    image=b"\x7fELF\x02\x01" + bytes(34) + (64).to_bytes(8, "little") + bytes(10) + b"\x40\0\x01\0" + bytes(66),
)  # fmt: skip
NODE = Node(
    axes="b m k, k (p n), (p n) -> b m n", sizes="p=2 n=16 k=32", problem="m=b*m n=n k=k", out_types="f16",
    arguments="lhs=0 rhs=1[p=0],1[p=1] loads=2[p=0],2[p=1] outs=0",
)  # fmt: skip
SHAPES = ((2, 3, 32), (32, 32), (32,))
LIBRARY = "FUZZED_LIBRARY"  # variable with its path, in the process that has the sanitizers
INTERESTING = (0, 1, 8, 63, 64, 127, 128, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def altered_archive(source: random.Random, data: bytes) -> bytes:
    """A few fields overwritten, sometimes cut, with a size and checksum that match again most of the time."""
    bytes_now = bytearray(data)
    for _ in range(source.randint(1, 4)):
        width = source.choice((1, 2, 4, 8))
        position = source.randrange(0, len(bytes_now) - width)
        value = source.choice((source.getrandbits(64), *INTERESTING)) % 256**width
        bytes_now[position : position + width] = value.to_bytes(width, "little")
    if source.random() < 0.3:
        del bytes_now[source.randrange(0, len(bytes_now)) :]
    altered = bytes(bytes_now)
    return mended(altered) if source.random() < 0.9 else altered


def altered_node(source: random.Random) -> Node:
    name = source.choice(("kernel", "axes", "sizes", "problem", "arguments", "out_types", "in_types", "original"))
    text = NODE.attributes[name]
    start = source.randint(0, len(text))
    end = min(len(text), start + source.choice((0, 1, 5)))
    junk = "".join(source.choice(" ,()[]=*->0123456789bmknp\u00e9") for _ in range(source.randint(0, 8)))
    altered: dict[str, Any] = {name: text[:start] + junk + text[end:]}
    return dataclasses.replace(NODE, **altered)


def one_round(bridge: Bridge, source: random.Random, data: bytes) -> None:
    archive, node = altered_archive(source, data), altered_node(source)
    with contextlib.suppress(BridgeError):
        bridge.archive(archive)
    with contextlib.suppress(BridgeError):
        bridge.choose(archive, NODE, Arguments(m=6, n=16, k=32, batch=1))
    shapes = [[source.choice((dim, *INTERESTING[:11])) for dim in shape] for shape in SHAPES]
    with contextlib.suppress(BridgeError):
        bridge.arguments(node, source.choice((SHAPES, shapes)))
    with contextlib.suppress(BridgeError):
        bridge.library(NODE, bridge.arguments(NODE, source.choice((SHAPES, shapes)))[0], Library.F16)
    with contextlib.suppress(BridgeError):
        bridge.infer(node, [" ".join(source.choice((str(dim), "?", "M")) for dim in shape) for shape in shapes])


def fuzz(bridge: Bridge, first: int, rounds: int, seconds: float) -> int:
    """So many rounds, or as many as fit into the time; returns how many."""
    behind_library = dataclasses.replace(RECORD, load_alignments=(4,) * 4, library=Library.F16, max_m=100)
    packed = pack([behind_library, RECORD, dataclasses.replace(RECORD, flavour=Flavour.PTX, image=b"ptx")])
    end = time.monotonic() + seconds
    seed = first
    while seed < first + rounds if rounds else time.monotonic() < end:
        one_round(bridge, random.Random(seed), packed)
        seed += 1
    return seed - first


def main() -> None:
    """The command line; without sanitizers in the process it becomes one that has them."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.bridge_fuzz", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=0, help="by default as many as fit in --seconds")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    library = os.environ.get(LIBRARY)
    if library is None:
        again = {**os.environ, **sanitizer_environment(), LIBRARY: str(sanitized_library())}
        os.execve(sys.executable, [sys.executable, "-m", "tests.tools.bridge_fuzz", *sys.argv[1:]], again)
    print(f"{fuzz(load(Path(library)), arguments.seed, arguments.rounds, arguments.seconds)} rounds without a fault")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
