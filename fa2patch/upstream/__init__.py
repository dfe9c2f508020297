"""The only folder that knows how a Transformers version calls attention.

A batch takes this way. ``forward`` recognises a packed batch in the model's ``forward`` and replaces its attention mask
by a :class:`~fa2patch.upstream.packed_mask.PackedMask`. ``traits.masks`` returns this object from the functions that
would make a 4-D mask of it. Upstream's own code hands it, like any mask, to every attention layer, also when a
checkpoint is recomputed. There one of the ``seams`` takes it and calls ``packed_attention``. An attention layer that is
not patched raises an error, because the object is not a tensor.
"""
