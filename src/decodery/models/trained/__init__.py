"""Small trained parts of models, as artifacts."""
