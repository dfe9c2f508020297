"""Collators that turn examples into packed batches, and packed computation of padded batches."""
