"""Collators that turn examples into packed batches."""
