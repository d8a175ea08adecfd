"""ONNX in and out: models, scopes, graphs, shapes and known values, rewriting, saving."""
