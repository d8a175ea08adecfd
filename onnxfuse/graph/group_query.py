"""GroupQueryAttention of ONNX Runtime: its inputs by position, and what it takes where an attribute is missing."""

from __future__ import annotations

OP, DOMAIN = "GroupQueryAttention", "com.microsoft"
QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS, TOTAL, COSINES, SINES = range(9)
SINK, QUERY_NORM, KEY_NORM = 11, 14, 15
EPSILON = 1e-6  # of the norms of query and key
