"""What was fused, what was not and why, in words, JSON and files."""
