"""Measure how a package is built: ``python -m compat_matrix.structure``."""
