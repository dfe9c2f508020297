"""The only folder that knows how a Transformers version calls attention.

``forward`` recognises a packed batch in the model's ``forward`` and replaces its attention mask by a
:class:`~fa2patch.upstream.packed_mask.PackedMask`. The functions that make 4-D masks return this object unchanged
(``masks``). Upstream's own code hands it to every attention layer like any mask, also when a checkpoint is
recomputed. In the layer, one of the ``seams`` takes it and calls ``packed_attention``. An attention layer that is not
patched raises an error, because the object is not a tensor.
"""
