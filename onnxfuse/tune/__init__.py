"""Choosing by measurement."""
