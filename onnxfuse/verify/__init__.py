"""Whether a fused model computes what the original does."""
