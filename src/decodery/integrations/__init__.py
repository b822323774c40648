"""Use of this package from other projects."""
