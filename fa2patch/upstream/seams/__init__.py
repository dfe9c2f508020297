"""The three seams through which attention is replaced: ``interface``, ``function`` and ``method``."""
