"""Makes tables, pages and upstream.json from the evidence: ``python -m compat_matrix.publish``."""
