"""Rows that an engine splits over processes: its parts, what they send each other, and whole rows' boundaries.

An engine is known by what it does to a call (``upstream/engines.py``), and says which tokens each process holds.
Everything else is the same for all of them. Sharding, process groups, loaders and optimizers stay the engine's; its
attention is not called, because it hands no boundaries to a kernel.
"""
