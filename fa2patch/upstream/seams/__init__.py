"""The seams: ``interface`` and ``formula`` for attention layers, ``mixer`` for mixers, ``document`` for base models."""
