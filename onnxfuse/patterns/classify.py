"""Which column ranges of which products a match combines: what the pattern is called, and when a kernel can do it.

rotary_gemm    two halves of the columns, of a head for example, meet in both halves of one value (RoPE)
split_gemm     two halves of one product, or of a range of it (GEGLU, SwiGLU, GLU, ReGLU; Flux2 has q, k and v
beside them), or two products of one input (Llama's gate and up), meet in one value
gemm_epilogue  one product as it is: bias, scales, activation, residuals, casts
sibling_gemms  products of one input, each with an epilogue and an output of its own (q, k and v)
column_ranges  other equal ranges of one product, or more products; columns that nothing reads are not computed. Or one
range of any width, or several that meet
attention      two products and the softmax between them (attention.py)
normalisation  no product at all: rows less their mean, over their deviation (normalisation.py)
rotation       no product either: halves or pairs of a value's columns turn (rotation.py)
cached_attention  one token of each sequence over a cache of keys and values (cached_attention.py)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from onnxfuse.errors import NotFusable
from onnxfuse.limits import MAX_PARTS
from onnxfuse.patterns.epilogue_graph import ACC, Ref
from onnxfuse.patterns.match import Match, Operand, count_of, is_part, is_start
from onnxfuse.patterns.views import COLUMNS, Piece, is_column


def _is_rotation(match: Match) -> bool:
    """Whether two halves of one product meet in each of two that are stored as one value."""
    stored = [out.refs for out in match.live_outs if len(out.refs) > 1]
    return any(all(_are_two_halves(match, ref) for ref in refs) for refs in stored)


def _is_gate(match: Match) -> bool:
    """Whether two accumulators meet in one live-out value that are halves of one value, or of two products."""
    return any(_are_two_halves(match, ref) for ref in match.roots)


def _are_two_halves(match: Match, ref: Ref) -> bool:
    leaves = sorted((leaf.offset or 0, leaf.operand) for leaf in match.epilogue.leaves(ACC, (ref,)))
    if len(leaves) != 2:
        return False
    (start, first), (end, second) = leaves
    half = end - start
    return first != second or (half == match.columns and (first, start, 2 * half) in match.split)


def _all_columns(match: Match) -> bool:
    return len(match.ranges) == 1 and match.ranges[0][0].n == match.columns


def _are_siblings(match: Match) -> bool:
    """Whether every live-out value reads one product, and not all of them the same."""
    read = [{leaf.operand for leaf in match.epilogue.leaves(ACC, out.refs)} for out in match.live_outs]
    return all(len(names) == 1 for names in read) and len(match.products) > 1


PATTERNS: dict[str, Callable[[Match], bool]] = {
    "rotary_gemm": _is_rotation,
    "split_gemm": _is_gate,
    "gemm_epilogue": _all_columns,
    "sibling_gemms": _are_siblings,
    "column_ranges": lambda match: True,
    "attention": lambda match: True,  # two matches of one product each; never asked
    "normalisation": lambda match: not match.products,
    "rotation": lambda match: not match.products,  # never asked
    "cached_attention": lambda match: not match.products,  # never asked
}
"""What a match looks like, by the name of the pattern; the first that holds."""


def pattern_of(match: Match) -> str:
    """The pattern's name, for a match whose ranges are legal."""
    return next(name for name, looks_like in PATTERNS.items() if looks_like(match))


def check_parts(match: Match) -> None:
    """The ranges of all products are whole parts, and the operands are split as the products are.

    Raises:
        NotFusable: the first range that is not.
    """
    ranges, columns = match.ranges, match.columns
    if len(ranges) > MAX_PARTS:
        raise NotFusable("too_many_parts", match.label, f"{len(ranges)} column ranges; a kernel takes {MAX_PARTS}")
    packed = {product.n for product, _ in ranges if product.n != columns}
    _check_turns(match)
    if match.has_windows:
        _check_window(match, *packed)
        return
    if len(packed) > 1 or any(not is_part(product.n, start, columns) for product, start in ranges):
        texts = ", ".join(f"{columns} from {start} on of {product.n}" for product, start in ranges)
        raise NotFusable("not_equal_parts", match.label, f"the columns {texts} are not equal parts")
    if any(len(out.refs) not in (1, *(count_of(width, columns) for width in packed)) for out in match.live_outs):
        raise NotFusable("not_equal_parts", match.label, "stores a value that is neither a part nor all of the product")
    for leaf in match.reads:
        operand = match.operands[leaf.operand]
        split_alike = leaf.columns in (columns, *packed) and not _has_axis_of_parts(operand, leaf.columns, columns)
        split_alike = split_alike and operand.whole is None and is_start(leaf.offset or 0, columns)
        if leaf.offset is not None and not operand.is_window_of(columns) and not split_alike:
            raise NotFusable("operand_split_differs", match.label, f"{operand.name!r} is split unlike the product")


def _check_turns(match: Match) -> None:
    """Parts whose columns take turns are those of the match, or it takes none apart."""
    for product, _ in match.ranges:
        if product.turns > 1 and match.columns != product.n and count_of(product.n, match.columns) != product.turns:
            detail = f"takes {product.turns} parts apart whose columns take turns"
            raise NotFusable("not_equal_parts", match.label, detail)


def _has_axis_of_parts(operand: Operand, whole: int | str | None, columns: int | str) -> bool:
    """Whether a dimension of an operand counts parts and no other one columns; parts of one column are columns."""
    if not isinstance(columns, int) or not isinstance(whole, int):
        return False
    pieces = [piece for dim in operand.view for piece in dim if is_column(piece) and piece.size != 1]
    return any(piece.step >= columns > 1 for piece in pieces) and all(piece.step > 1 for piece in pieces)


def _check_window(match: Match, whole: int | str) -> None:
    """Windows share no columns; operands have those of one, or those of the product, all in one dimension."""
    starts = [start for _, start in match.ranges]
    if any(isinstance(match.columns, int) and later - first < match.columns for first, later in pairwise(starts)):
        raise NotFusable("not_equal_parts", match.label, f"{match.columns} columns each from {starts} on overlap")
    if any(len(out.refs) > 1 for out in match.live_outs):
        raise NotFusable(
            "not_equal_parts", match.label, "stores several ranges of a product, and not all, as one value"
        )
    for leaf in match.reads:
        operand = match.operands[leaf.operand]
        pieces = [piece for dim in operand.view for piece in dim if is_column(piece)]
        is_whole = leaf.columns == whole and pieces == [Piece(COLUMNS, whole)] and operand.whole is None
        is_own = leaf.columns == match.columns and leaf.offset == 0
        if leaf.offset is not None and not operand.is_window_of(match.columns) and not (is_whole or is_own):
            raise NotFusable("operand_split_differs", match.label, f"{operand.name!r} is split unlike the product")
