"""Decisions: which family of kernels, tile and accesses, by a cost model. Pure."""
