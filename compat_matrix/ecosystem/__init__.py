"""fa2patch with the packages around Transformers, in real versions: ``python -m compat_matrix.ecosystem``."""
