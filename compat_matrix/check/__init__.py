"""The checks of a cell of the matrix. ``python -m compat_matrix.check`` runs them in its own environment."""
