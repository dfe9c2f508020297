"""The seams: ``interface``, ``function`` and ``method`` for attention layers, and ``mixer`` for mixers."""
