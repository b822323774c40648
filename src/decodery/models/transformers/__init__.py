"""Models of the transformers package."""
