"""What the library's product takes: terms, times what small networks learnt of timed products.

The terms know what is multiplied and moved. Which of its many kernels the library takes, and how well that suits a
size, they do not: networks are fitted to what they leave by `python -m tests.perf.learn_library`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from onnxfuse.device import SECTOR, DeviceSpec
from onnxfuse.dtypes import F32
from onnxfuse.schedule import cost_model
from onnxfuse.schedule.calibration import calibration
from onnxfuse.schedule.kernel_family import Amount, Problem
from onnxfuse.schedule.kernel_spec import KernelSpec
from onnxfuse.schedule.networks import networks

ALIGNMENT = 16  # bytes that the pitches of the library's fastest kernels are multiples of
FP32_BYTES = 4
LONGEST_GRANULE = 256  # bytes that a pitch is looked at as a multiple of
TILES = ((64, 64), (128, 128), (128, 256))  # rows and columns, as the library's kernels have them
MOST = 0.8  # of the logarithm: a product unlike all that were timed is near what the terms say
LONGEST = 250  # microseconds: longer products are as fast as the chip's power allows, and the terms say that well


def library(spec: KernelSpec, problem: Problem, products: int, device: DeviceSpec) -> Amount | None:
    """Microseconds in which the library makes a kernel's product; None where nothing is known of it.

    Args:
        spec: the kernel that would multiply by itself.
        problem: its sizes.
        products: that the library makes one after the other, each of as many columns.
        device: to plan for.
    """
    if spec.math not in calibration(device).library_products and spec.quantization is None:
        return None
    each = replace(problem, n=problem.n * spec.parts // products)
    terms = of_floats(spec, each, device)
    if spec.quantization is not None:
        return products * _of_integers(spec, each, terms, device)
    multiplying = products * terms * factor(spec, each, terms, device)
    return multiplying * _sustained(spec, replace(each, n=each.n * products), multiplying, device)


def _sustained(spec: KernelSpec, problem: Problem, us: Amount, device: DeviceSpec) -> Amount:
    """How many times as long products of so many microseconds take where the chip's power has slowed its clock.

    Kernels' estimates are of that clock, and both ways are compared.
    """
    known = calibration(device).library_sustained
    long = np.clip(np.log(us / known["first"]) / math.log(known["last"] / known["first"]), 0.0, 1.0)
    return 1.0 + (known["most"] - 1.0) * long * np.minimum(_at_full_pace(spec, problem, device) / us, 1.0)


def _at_full_pace(spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """Microseconds of multiplying alone."""
    pace = calibration(device).products[_units(spec)] * device.multiprocessors
    return problem.batch * problem.m * problem.n * problem.k / pace


def _of_integers(spec: KernelSpec, problem: Problem, terms: Amount, device: DeviceSpec) -> Amount:
    """The same of ONNX Runtime's MatMulNBits, in the faster of its modes: by itself, or behind unpacking all of rhs."""
    known, rows = calibration(device).library_quantized, problem.m * problem.batch
    reading = cost_model.from_memory(problem.n * cost_model.column_bytes(spec, problem.k), device)
    floats = cost_model.from_memory(problem.n * problem.k * spec.dtype.bytes, device)
    if spec.dtype == F32:
        by_itself = reading * (known["read"] + known["row of fp32"] * rows)
        return known["launch"] + np.minimum(by_itself, known["unpacked to fp32"] * floats + terms)
    crowd = np.sqrt(np.maximum(rows / known["few"], 1.0))
    by_itself = reading * (known["read"] + known["row"] * np.sqrt(rows)) * crowd
    return known["launch"] + np.minimum(by_itself, known["unpacked"] * floats + terms)


def _units(spec: KernelSpec) -> str:
    """By what the library multiplies."""
    return "tf32" if spec.dtype.bytes == FP32_BYTES else spec.dtype.name


def of_floats(spec: KernelSpec, problem: Problem, device: DeviceSpec) -> Amount:
    """One product by the terms: of a vector, in the library's fastest kernels, or in those that any address suits."""
    known, size, units = calibration(device), spec.dtype.bytes, _units(spec)
    m, n, k, granule = problem.m, problem.n, problem.k, known.library_granule
    whole = problem.batch * np.ceil(m / granule) * np.ceil(n / granule) * granule**2
    pace = known.library_products.get(spec.math, known.products[units])
    computing = whole * k / device.multiprocessors / pace
    memory = cost_model.from_memory(cost_model.lhs_bytes(spec, problem) + problem.batch * (k + m) * n * size, device)
    turned = known.library_turned.get(f"{units} {spec.rhs_order}", 1.0)
    is_vector = ((m == 1) | (n == 1)) & (problem.batch == 1)
    in_sectors = np.where(k * size % SECTOR > 0, known.library_in_sectors, 1.0)
    alignment = functools.reduce(np.gcd, (k * size, n * size), ALIGNMENT)
    slower = sum((alignment == int(each)) * factor for each, factor in known.library_misaligned.items())
    ways = {
        "vector": np.hypot(computing, memory),
        units: np.hypot(computing * turned, memory) * in_sectors,
        "misaligned": computing * slower + memory * known.library_misaligned_memory,
    }
    vector, aligned, misaligned = (
        known.library_launch[way] + known.library_depth[way] * np.sqrt(k) + busy for way, busy in ways.items()
    )
    return np.where(is_vector, vector, np.where(alignment == ALIGNMENT, aligned, misaligned))


def learnt(arch: str) -> str:
    """The name of what was learnt of an architecture's library."""
    return f"{arch}.library"


def factor(spec: KernelSpec, problem: Problem, terms: Amount, device: DeviceSpec) -> Amount:
    """How many times as long as by the terms a product takes; 1 where none like it was timed.

    Args:
        spec: the kernel that would multiply by itself.
        problem: the sizes, arrays or numbers.
        terms: microseconds by `of_floats`.
        device: to plan for.
    """
    known = networks(learnt(device.arch))
    if known is None or spec.lhs_order != "mk":
        return 1.0
    sizes = np.stack(np.broadcast_arrays(problem.m, problem.n, problem.k, problem.batch, terms))
    found = np.ones(sizes.shape[1:])
    alike = (sizes > 0).all(axis=0) & (sizes[3] == 1) & (sizes[4] <= LONGEST)
    m, n, k, _, us = sizes[:, alike]
    said = known(np.stack([*features(spec, Problem(m, n, k), us, device).values()], axis=-1))
    found[alike] = np.exp(np.clip(said, -MOST, MOST))
    return found


def features(
    spec: KernelSpec, problem: Problem, terms: NDArray[np.float64], device: DeviceSpec
) -> dict[str, NDArray[np.float64]]:
    """What the networks see of products, by name, f64[products] each; sizes and times as logarithms to the base of 2.

    Args:
        spec: the kernel that would multiply by itself.
        problem: m, n and k, f64[products] each.
        terms: microseconds by `of_floats`, f64[products].
        device: to plan for.
    """
    size, m, n, k = spec.dtype.bytes, problem.m, problem.n, problem.k
    memory = cost_model.from_memory((m * k + k * n + m * n) * size, device) / terms
    tiles = {f"{rows}x{columns}": np.ceil(m / rows) * np.ceil(n / columns) for rows, columns in TILES}
    waves = {name: each / device.multiprocessors for name, each in tiles.items()}
    seen = {
        "m": np.log2(m), "n": np.log2(n), "k": np.log2(k), "terms": np.log2(terms),
        "fp32": size == FP32_BYTES, "rhs [n, k]": spec.rhs_order == "nk", "vector": m == 1,
        "granule of k": np.log2(np.gcd((k * size).astype(np.int64), LONGEST_GRANULE)),
        "granule of n": np.log2(np.gcd((n * size).astype(np.int64), LONGEST_GRANULE)),
        "moving": memory, "log of moving": np.log2(memory), "multiplying": _at_full_pace(spec, problem, device) / terms,
        **{f"waves of {name}": np.log2(each) for name, each in waves.items()},
        **{f"last wave of {name}": each / np.ceil(each) for name, each in waves.items()},
        **{f"rows in {block}": cost_model.filled(m, block) for block in (64, 128)},
        "columns in 128": cost_model.filled(n, 128),
    }  # fmt: skip
    return {name: np.broadcast_to(np.asarray(value, np.float64), np.shape(terms)) for name, value in seen.items()}
