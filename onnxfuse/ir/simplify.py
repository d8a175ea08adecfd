"""Cheaper steps that mean the same: exporters spell activations out, and a GPU has an instruction for some of them.

Each rule is an identity over the reals, for any constant, so a constant that an fp16 export rounded stays as it is:

    x / c                              ->  x * (1 / c)
    1 / (1 + exp(-u))                  ->  sigmoid(u)
    0.5 * (1 + tanh(u))                ->  sigmoid(2 u)
    0.5 * x * (1 + erf(c * x))         ->  gelu(s * x) / s     with s = c * sqrt(2)

A product counts in any order and nesting; what a rule takes apart must have no other reader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from onnxfuse.ir.fusion import Fusion, Step, Value, step_name

Steps = dict[str, Step]


def simplify(fusion: Fusion) -> Fusion:
    """The fusion with cheaper steps, renumbered."""
    steps = {step.result: step for step in fusion.steps}
    for rule in (_multiply_by_reciprocal, _sigmoid_of_exp, _halved_tanh, _gelu_of_erf):
        for name in list(steps):
            if name in steps:
                rule(steps, name, _readers(steps, fusion))
    return _renumbered(fusion, steps)


def _readers(steps: Steps, fusion: Fusion) -> Counter[Value]:
    """How often each value is read, by steps and by outputs."""
    reads = Counter(value for step in steps.values() for value in step.inputs)
    reads.update(out.value for out in fusion.outs)
    return reads


def _multiply_by_reciprocal(steps: Steps, name: str, readers: Counter[Value]) -> None:
    step = steps[name]
    divisor = step.inputs[1] if step.op == "div" else None
    if isinstance(divisor, float) and math.isfinite(divisor) and divisor != 0.0 and math.isfinite(1.0 / divisor):
        steps[name] = Step(name, "mul", (step.inputs[0], 1.0 / divisor))


def _sigmoid_of_exp(steps: Steps, name: str, readers: Counter[Value]) -> None:
    step = steps[name]
    denominator = None
    if step.op == "reciprocal":
        denominator = step.inputs[0]
    elif step.op == "div" and step.inputs[0] == 1.0:
        denominator = step.inputs[1]
    exponential = _inner(steps, _one_plus(steps, denominator, readers), "exp", readers)
    negated = _inner(steps, exponential, "neg", readers)
    if negated is not None:
        steps[name] = Step(name, "sigmoid", (negated,))


def _halved_tanh(steps: Steps, name: str, readers: Counter[Value]) -> None:
    """From `1 + tanh(u)` outwards to the product that halves it."""
    argument = _inner(steps, _one_plus(steps, name, None), "tanh", readers)
    top = None if argument is None else _product_with(steps, name, (0.5,), readers)
    if argument is None or top is None:
        return
    steps[f"{name}:u"] = Step(f"{name}:u", "mul", (argument, 2.0))
    steps[f"{name}:s"] = Step(f"{name}:s", "sigmoid", (f"{name}:u",))
    _rebuild(steps, top, (name, 0.5), (f"{name}:s",))


def _gelu_of_erf(steps: Steps, name: str, readers: Counter[Value]) -> None:
    """From `1 + erf(c * x)` outwards to the product that has x and 0.5 in it too."""
    scaled = steps.get(str(_inner(steps, _one_plus(steps, name, None), "erf", readers)))
    if scaled is None or scaled.op != "mul":
        return
    x, c = scaled.inputs if isinstance(scaled.inputs[1], float) else scaled.inputs[::-1]
    if not isinstance(c, float) or c == 0.0:
        return
    top = _product_with(steps, name, (0.5, x), readers)
    if top is None:
        return
    scale = c * math.sqrt(2.0)
    steps[f"{name}:x"] = Step(f"{name}:x", "mul", (x, scale))
    steps[f"{name}:g"] = Step(f"{name}:g", "gelu", (f"{name}:x",))
    _rebuild(steps, top, (name, 0.5, x), (f"{name}:g", 1.0 / scale))


def _one_plus(steps: Steps, name: Value | None, readers: Counter[Value] | None) -> Value | None:
    """The other term of a step `1 + u`; with `readers`, of one that nobody else reads."""
    step = steps.get(str(name))
    if step is None or step.op != "add" or 1.0 not in step.inputs or (readers is not None and readers[step.result] > 1):
        return None
    return step.inputs[1] if step.inputs[0] == 1.0 else step.inputs[0]


def _inner(steps: Steps, name: Value | None, op: str, readers: Counter[Value]) -> Value | None:
    """The argument of a step of one op that nobody else reads."""
    step = steps.get(str(name))
    return step.inputs[0] if step is not None and step.op == op and readers[step.result] == 1 else None


def _product_with(steps: Steps, name: str, wanted: Iterable[Value], readers: Counter[Value]) -> str | None:
    """The innermost product around a value that has all the wanted factors too."""
    current = name
    while readers[current] == 1:
        outer = next((step for step in steps.values() if current in step.inputs), None)
        if outer is None or outer.op != "mul":
            return None
        current = outer.result
        if not Counter((name, *wanted)) - Counter(_factors(steps, current, readers, name)):
            return current
    return None


def _factors(steps: Steps, name: Value, readers: Counter[Value], keep: str, top: bool = True) -> list[Value]:
    """The factors of a product, through nested products that nobody else reads; `keep` is not taken apart."""
    step = steps.get(str(name))
    if step is None or name == keep or step.op != "mul" or (not top and readers[step.result] > 1):
        return [name]
    return [factor for value in step.inputs for factor in _factors(steps, value, readers, keep, top=False)]


def _rebuild(steps: Steps, top: str, taken: tuple[Value, ...], given: tuple[Value, ...]) -> None:
    """The product `top` again, with some factors replaced by others."""
    readers = Counter(value for step in steps.values() for value in step.inputs)
    left = Counter(_factors(steps, top, readers, str(taken[0])))
    left.subtract(Counter(taken))
    factors = [*given, *left.elements()]
    product = factors[0]
    for index, factor in enumerate(factors[1:-1]):
        steps[f"{top}:{index}"] = Step(f"{top}:{index}", "mul", (product, factor))
        product = f"{top}:{index}"
    last = factors[-1] if len(factors) > 1 else 1.0
    steps[top] = Step(top, "mul", (product, last))


def _renumbered(fusion: Fusion, steps: Steps) -> Fusion:
    """Drop what nothing reads any more, order the rest by need, and name it t0, t1, ..."""
    names: dict[Value, Value] = {}
    ordered: list[Step] = []

    def visit(value: Value) -> Value:
        step = steps.get(value) if isinstance(value, str) else None
        if step is None:
            return value
        if value not in names:
            inputs = tuple(visit(argument) for argument in step.inputs)
            if step.op == "mul" and 1.0 in inputs:
                names[value] = inputs[1] if inputs[0] == 1.0 else inputs[0]
            else:
                ordered.append(Step(step_name(len(ordered)), step.op, inputs))
                names[value] = ordered[-1].result
        return names[value]

    outs = tuple(replace(out, value=str(visit(out.value))) for out in fusion.outs)
    return replace(fusion, steps=tuple(ordered), outs=outs)
