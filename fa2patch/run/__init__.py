"""``fa2patch run``: start an unchanged program with its models patched and, on request, its batches flattened."""
