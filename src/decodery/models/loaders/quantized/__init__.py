"""Formats of quantized weights in safetensors folders: one file each, and a registry (`formats`)."""
