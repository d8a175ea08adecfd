"""Facts about a fusion: which axes a kernel walks, and how wide it may read and write."""
