"""A planned site becomes a node: what is compiled, its launch rule, the archive, the attributes."""
