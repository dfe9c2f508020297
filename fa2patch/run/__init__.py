"""``fa2patch run``: a program of somebody else, started with its models patched and its batches flattened."""
