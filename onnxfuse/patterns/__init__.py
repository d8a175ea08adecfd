"""What onnxfuse looks for: products, what may grow after them, and what a match looks like and becomes."""

from __future__ import annotations

from onnxfuse.patterns.classify import PATTERNS
from onnxfuse.patterns.epilogue_match import match_epilogue
from onnxfuse.patterns.match import Match
from onnxfuse.patterns.matcher import Sites, match_site, match_sites
from onnxfuse.patterns.product import is_anchor

__all__ = ["PATTERNS", "Match", "Sites", "is_anchor", "match_epilogue", "match_site", "match_sites"]
