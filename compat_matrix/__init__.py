"""Checks fa2patch on every architecture in every Transformers version. See ``python -m compat_matrix --help``."""
