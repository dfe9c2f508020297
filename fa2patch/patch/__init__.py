"""``apply``, ``revert`` and ``status``: from a model to its bindings."""
