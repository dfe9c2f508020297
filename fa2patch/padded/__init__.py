"""Padded batches: where their tokens are, and how a patched model computes them as one packed row."""
