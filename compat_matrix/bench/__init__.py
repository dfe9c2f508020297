"""Measure what packed batches cost and save: ``python -m compat_matrix.bench``."""

PARTS = (
    "startup",
    "syncs",
    "dry",
    "kernels",
    "overhead",
    "mixers",
    "training",
    "sharing",
    "embeddings",
    "packing",
    "collator",
    "compile",
)
"""The parts that run on a CPU, in the order of BENCH.md. Each has a result file of its name."""
