"""The only folder that knows how a Transformers version calls attention.

One batch's way: ``entry`` (the model's ``forward``) recognises a packed batch and puts a
:class:`~fa2patch.seams.packed_mask.PackedMask` where the attention mask was; ``masks`` lets it through the functions
that would make a 4-D mask; upstream's own code hands it, like any mask, to every attention layer, also in a
checkpoint's recompute; there ``interface``, ``function`` or ``method`` meet it and call ``packed_attention``.
A stock attention that is handed it fails loudly: it is no tensor.
"""
