"""Measure what packed batches cost and save: ``python -m compat_matrix.bench``."""
