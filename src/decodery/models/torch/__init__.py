"""The layers of a transformer in PyTorch."""
