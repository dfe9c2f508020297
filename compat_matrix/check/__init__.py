"""What a cell of the matrix is held to. ``python -m compat_matrix.check`` does it in the environment it runs in."""
