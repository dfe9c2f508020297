"""What padding-free rows cost and save, measured: ``python -m compat_matrix.bench``."""
