"""How a package is built, in numbers and names: ``python -m compat_matrix.structure``."""
