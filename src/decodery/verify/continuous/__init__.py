"""Rules for models of continuous values, which verify vectors in place of tokens. One file per rule."""
