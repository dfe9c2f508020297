"""Which Transformers version and which architecture: checked, not claimed. ``python -m compat_matrix --help``."""
