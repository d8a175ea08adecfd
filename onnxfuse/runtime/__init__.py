"""What touches a GPU or runs a model: compiler, cache, sessions, verification, timing, and the C++ bridge."""
