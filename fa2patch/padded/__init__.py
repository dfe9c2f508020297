"""Padded batches: where their tokens are, and the hooks that compute them as one packed row."""
