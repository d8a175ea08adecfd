"""Branches that every run takes: what they make has a shape, their products are fused, and runs make the same bits."""

from __future__ import annotations

import itertools

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from onnxfuse.device import resolve
from onnxfuse.graph import symbolic
from onnxfuse.graph.functions import walk
from onnxfuse.graph.graph import all_graphs, load_model
from onnxfuse.pipeline import Analysis, analyse_model
from tests.helpers.matching import draw
from tests.helpers.onnx_build import run
from tests.tools.sweep import rewritten

STORED = {
    "w": draw(16, 16).astype(np.float32) / 4, "bias": draw(16).astype(np.float32),
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "four": np.array(4), "axis": np.array([1]),
    "yes": np.array(True),
}  # fmt: skip
SIZES = "dims = Shape(x) b = Gather(dims, zero) s = Gather(dims, one) k = Gather(dims, two)"
BEHIND = "p = MatMul(t, w) r = Add(p, bias) y = Tanh(r)"
BRANCHES = """<then_branch = then () => (float[] kept) { kept = Neg(x) },
               else_branch = other () => (float[] longer) { longer = Unsqueeze(x, axis) }>"""


def model(nodes: str, behind: str = BEHIND) -> ModelProto:
    text = f"""
        <ir_version: 9, opset_import: ["" : 20]>
        chosen (float[b, s, 16] x, bool flag) => (float[] y) {{ {SIZES} {nodes} {behind} }}"""
    made = onnx.parser.parse_model(text)
    read = {name for node in walk(made.graph.node) for name in node.input}
    made.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in STORED.items() if name in read
    )
    return made


def analysed(made: ModelProto) -> Analysis:
    return analyse_model(made, resolve("sm_90a", list))


def products(analysis: Analysis) -> int:
    return sum(len(site.match.products) for site in analysis.sites)


def ifs(made: ModelProto) -> int:
    return sum(node.op_type == "If" for node in walk(made.graph.node))


def check_same_bits(made: ModelProto, fused: ModelProto) -> None:
    for sizes, flag in itertools.product([(2, 3), (3, 1)], [True, False]):  # of one row: docs/limits.md
        feed = {"x": draw(*sizes, 16, seed=1).astype(np.float32), "flag": np.array(flag)}
        for before, after in zip(run(made, feed), run(fused, feed), strict=True):
            assert before.tobytes() == after.tobytes()


CONDITIONS = {
    "a size that the model fixes": ("c = Less(four, k)", True),
    "a size less itself": ("d = Sub(s, s) c = Greater(d, zero)", False),
    "a size that has grown": ("d = Add(s, two) c = Greater(d, one)", True),
    "a size that cannot be": ("d = Add(s, two) c = Equal(d, one)", False),
    "no size is negative": ("c = GreaterOrEqual(s, zero)", True),
    "the opposite of what is false": ("e = Less(s, zero) c = Not(e)", True),
    "one that decides for both": ("e = Equal(b, s) f = Less(k, two) c = And(e, f)", False),
    "either of both": ("e = Equal(b, s) f = Less(two, k) c = Or(e, f)", True),
    "a scalar that is stored": ("c = Identity(yes)", True),
    "a cast to bool": ("e = LessOrEqual(k, four) c = Cast<to = 9>(e)", False),
}
OPEN = {
    "two sizes": "c = Equal(b, s)",
    "a size that may be none": "c = Greater(s, zero)",
    "both of which one is open": "e = Equal(b, s) f = Less(two, k) c = And(e, f)",
    "what a run is given": "c = Identity(flag)",
    "a difference, which may be negative": "d = Sub(b, four) e = Neg(two) c = Equal(d, e)",
    "a negative multiple": "e = Neg(two) d = Mul(b, e) c = Less(d, e)",
    "a quotient by less than nothing": "e = Neg(two) f = Mul(b, two) d = Div(f, e) c = GreaterOrEqual(d, zero)",
    "the length of a range": "l = Sub(b, two) range = Range(zero, l, one) n = Size(range) c = Equal(n, l)",
}


@pytest.mark.parametrize("case", CONDITIONS)
def test_a_known_branch_is_taken_and_fused_behind(case: str) -> None:
    condition, is_first = CONDITIONS[case]
    made = model(f"{condition} t = If(c) {BRANCHES}")
    analysis = analysed(made)
    assert analysis.graphs[0].shape("t") == (("b", "s", 16) if is_first else ("b", 1, "s", 16))
    fused = rewritten(analysis)
    assert (products(analysis), ifs(fused)) == (1, 0)
    check_same_bits(made, fused)


@pytest.mark.parametrize("case", OPEN)
def test_what_only_the_run_knows_stays(case: str) -> None:
    made = model(f"{OPEN[case]} t = If(c) {BRANCHES}", f"{BEHIND} q = MatMul(x, w) v = Tanh(q)")
    made.graph.output.add(name="v")
    analysis = analysed(made)
    fused = rewritten(analysis)
    assert analysis.graphs[0].shape("t") is None
    assert (products(analysis), ifs(fused)) == (1, 1)


def test_nothing_is_taken_where_nothing_is_fused() -> None:
    made = model(f"c = Less(four, k) t = If(c) {BRANCHES}", "y = Tanh(t)")
    assert rewritten(analysed(made)) == made


NESTED = """t = If(c) <
    then_branch = then () => (float[] u) {
        m = MatMul(x, w) n = Add(m, bias) u = If(c) <
            then_branch = first () => (float[] o) { m2 = Relu(n) o = Add(m2, x) },
            else_branch = second () => (float[] m2) { m2 = Unsqueeze(n, axis) }> },
    else_branch = other () => (float[] m) { m = Unsqueeze(x, axis) }>"""
FORMS = {
    "one inside of another": (NESTED, BEHIND, 2),
    "two values": (
        "t, u = If(c) <then_branch = then () => (float[] a, float[] d) { a = Neg(x) d = Abs(a) }, "
        "else_branch = other () => (float[] e, float[] f) { e = Unsqueeze(x, axis) f = Neg(e) }>",
        "p = MatMul(t, w) r = Add(p, u) y = Tanh(r)", 1),
    "names that come again": (
        "t1 = If(c) <then_branch = a () => (float[] o) { i = Neg(x) o = Abs(i) }, "
        "else_branch = b () => (float[] o) { i = Unsqueeze(x, axis) o = Abs(i) }>"
        "t = If(c) <then_branch = a () => (float[] o) { i = Exp(t1) o = Neg(i) }, "
        "else_branch = b () => (float[] o) { i = Unsqueeze(t1, axis) o = Abs(i) }>", BEHIND, 1),
    "a branch around a loop": (
        "t = If(c) <then_branch = a () => (float[] o) { o = Loop(two, , x) <body = body "
        "(int64 i, bool go, float[] h) => (bool on, float[] h2) { on = Identity(go) q = MatMul(h, w) h2 = Tanh(q) }> },"
        "else_branch = b () => (float[] o) { o = Unsqueeze(x, axis) }>", BEHIND, 2),
    "a number that a branch stores": (
        "t = If(c) <then_branch = a () => (float[] o) <float[1] half = {0.5}> { o = Mul(x, half) }, "
        "else_branch = b () => (float[] o) <float[1] half = {0.25}> { i = Mul(x, half) o = Unsqueeze(i, axis) }>",
        BEHIND, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_branches_of_any_form_keep_their_meaning(case: str) -> None:
    nodes, behind, count = FORMS[case]
    made = model(f"c = Less(four, k) {nodes}", behind)
    analysis = analysed(made)
    fused = rewritten(analysis)
    assert (products(analysis), ifs(fused)) == (count, 0)
    assert not any(node.op_type == "Less" for node in fused.graph.node)
    names = [name for node in walk(fused.graph.node) for name in node.output]
    assert len(names) == len(set(names))
    check_same_bits(made, fused)


def test_a_branch_with_a_weight_of_its_own_stays_around_it() -> None:
    made = model(f"c = Less(four, k) t = If(c) {BRANCHES}", "y = Tanh(t)")
    choice = next(node for node in made.graph.node if node.op_type == "If")
    branch = choice.attribute[0].g
    branch.initializer.append(numpy_helper.from_array(draw(32, 16).astype(np.float32), "own"))
    assert all_graphs(load_model(made))[0].scope.branches == ()


MANY = range(12)  # sizes of S


def symbols() -> dict[symbolic.Size, tuple[int, ...]]:
    """Numbers and symbols by what they are for each size, by Python's own arithmetic, two operations deep."""
    found: dict[symbolic.Size, tuple[int, ...]] = {"S": tuple(MANY)}
    found |= {number: (number,) * len(MANY) for number in range(-3, 4)}
    for _ in range(2):
        for size, own in list(found.items()):
            made = [(symbolic.negative(size), [-s for s in own]), (symbolic.at_most(size, 2), [min(s, 2) for s in own])]
            for number in range(-3, 4):
                made.append((symbolic.add(size, number), [s + number for s in own]))
                made.append((symbolic.multiply([size, number]), [s * number for s in own]))
            if isinstance(size, str):
                made.append((symbolic.function("/", size, 2), [int(s / 2) for s in own]))
            found |= {key: tuple(values) for key, values in made}
    return found


def test_what_is_known_of_sizes_is_so_in_every_run() -> None:
    found, known = symbols(), 0
    for size, own in found.items():
        assert not symbolic.is_never_negative(size) or min(own) >= 0, size
    for first, second in itertools.product(found, repeat=2):
        is_less = symbolic.is_less(first, second)
        known += is_less is not None
        assert is_less is None or all((a < b) == is_less for a, b in zip(found[first], found[second], strict=True)), (
            first, second
        )  # fmt: skip
    assert known > 100  # the pairs of numbers and of sums alone are 98
    assert symbolic.is_never_negative("(+ past length)")
    assert symbolic.is_never_negative("2*(/ (slice S 1 (+ S -2) 1) 4)")
