"""What a GPU is needed for, by the value of its steps: ``python -m compat_matrix.gpu``."""
