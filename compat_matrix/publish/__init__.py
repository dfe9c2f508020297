"""What is made from the evidence: the tables, the pages, upstream.json. ``python -m compat_matrix.publish``."""
