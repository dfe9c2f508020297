"""Trainers whose padded batches are computed packed, in passes of a budget of tokens."""
