"""What becomes of a model's conduct when it is compressed, or when drafts are accepted by a lossy rule."""
