"""What can be learnt about a model by running it on a batch. This package does not import :mod:`fa2patch.patch`."""
