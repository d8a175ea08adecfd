"""How fast a fused model is beside the original."""
