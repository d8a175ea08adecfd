"""CUDA text: hand-written templates and one generated epilogue functor."""
