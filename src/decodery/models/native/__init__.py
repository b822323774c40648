"""Quantized layers and the stack that runs them in native calls."""
