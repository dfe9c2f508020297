"""The only folder that knows how a Transformers version calls attention.

``forward`` recognises a packed batch in the model's ``forward`` and replaces its attention mask by a ``PackedMask``.
The functions that make 4-D masks return this object unchanged (``masks``), and upstream's own code hands it to every
attention layer like any mask, also when a checkpoint is recomputed. There one of the ``seams`` takes it and calls
``packed_attention``. A layer that is not patched raises an error, because the object is not a tensor.
"""
