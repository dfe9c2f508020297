"""``apply``, ``revert`` and ``status``: from a model to its bindings, and the registry of architectures."""
