"""``fa2patch run``: start an unchanged program with its models patched, and with padded batches packed."""
