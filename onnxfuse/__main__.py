"""`python -m onnxfuse`."""

from onnxfuse.cli import main

main()
