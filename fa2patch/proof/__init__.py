"""What a user asks for: ``verify``, ``doctor`` and a preview of a batch, with results that can be printed."""
