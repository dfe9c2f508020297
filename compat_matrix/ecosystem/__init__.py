"""Check fa2patch with other packages around Transformers, in real versions: ``python -m compat_matrix.ecosystem``."""
