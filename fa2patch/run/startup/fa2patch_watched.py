"""What ``fa2patch run`` watches: for each module, what kind of class it defines and the class's name.

``models``: its class methods return Transformers models. ``trainers``: its objects train models. ``holders``: its
objects hold one Transformers model and make batches for it, so ``fa2patch.apply`` is called with the object.

This file is read by Pythons in which fa2patch is not imported yet, so it imports nothing.
"""

WATCHED = {
    "transformers.modeling_utils": "models:PreTrainedModel",
    "transformers.trainer": "trainers:Trainer",
    "sentence_transformers.SentenceTransformer": "holders:SentenceTransformer",
    "sentence_transformers.cross_encoder.CrossEncoder": "holders:CrossEncoder",
    "sentence_transformers.sparse_encoder.SparseEncoder": "holders:SparseEncoder",
    "sentence_transformers.base.model": "holders:BaseModel",
}
