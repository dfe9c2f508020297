"""Losses that Trainer computes, on packed rows: ``losses_of_trainers.py CASE ...``.

Each case trains a patched model on packed rows and an unpatched one on padded rows, with the same examples, for some
steps of two accumulated batches. Prints a JSON object: for each case the largest relative differences of a loss and of
a weight, or the error that refused it.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import warnings

import torch
import transformers
from replaced_forwards import restored
from stage import Stage, furthest, largest_relative_difference, padded, tiny_llama, tokens, weights

import fa2patch

STEPS = 4


def packed(features, **options):
    return fa2patch.DataCollatorWithFlattening(**options)(tokens(features))


def by_document(features):
    return packed(features, loss_weights="document")


def weight(ids):
    # Weights of tokens in the loss are 0, 1/2, 1, 3/2 or 2.
    return torch.as_tensor(ids) % 5 / 2


def by_token(features):
    examples = [{**one, "loss_weights": weight(one["input_ids"]).tolist()} for one in tokens(features)]
    return fa2patch.DataCollatorWithFlattening(loss_weights="token")(examples)


def padded_by_token(features):
    batch = padded(features)
    return {**batch, "labels": batch["labels"].masked_fill(weight(batch["input_ids"]) == 0, -100)}


def weighed_by_hand(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    # ms-swift's trainer computes the loss in this way, in the place of Trainer's compute_loss.
    labels, weights = inputs["labels"][:, 1:], weight(inputs["input_ids"])[:, 1:]
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return (losses * weights).sum() / items


def own_loss(outputs, labels, num_items_in_batch=None):
    # ``compute_loss_func``: the squared distance of each label's probability from 1.
    logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
    chosen = logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    learned = labels != -100
    items = learned.sum() if num_items_in_batch is None else num_items_in_batch
    return ((1 - chosen) ** 2 * learned).sum() / items


def trained(stage, collate, patched, one_to_a_batch=False, kind=None, **options):
    model = tiny_llama()
    batch = 1 if one_to_a_batch else 4
    with restored():
        if patched:
            fa2patch.apply(model)
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch}
        rate = 0.05
        if one_to_a_batch and transformers.__version__.startswith("4.46."):
            rate /= 8  # this Trainer does not divide gradients by the number of accumulated batches
        settings = {"max_steps": STEPS, "max_grad_norm": 1e9, "optim": "sgd", "learning_rate": rate, **sizes, **options}
        trainer = stage.trainer(model, collate, kind=kind, **settings)
        if one_to_a_batch:  # the mean over batches, in every version
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, weights(model)


def compared(run, expected):
    try:
        losses, found = run()
    except fa2patch.Fa2PatchError as error:
        return {"refused": type(error).__name__, "message": error.message}
    assert len(losses) == STEPS
    return {"loss": largest_relative_difference(losses, expected[0]), "weight": furthest(found, expected[1])}


def plain(stage):
    # From 4.46 on the model's own loss is given num_items_in_batch.
    return compared(lambda: trained(stage, packed, True), trained(stage, padded, False))


def label_smoothing(stage):
    options = {"label_smoothing_factor": 0.2}
    return compared(lambda: trained(stage, packed, True, **options), trained(stage, padded, False, **options))


def compute_loss_func(stage):
    kind = _with(compute_loss_func=own_loss)
    if kind is None:
        return {"skipped": "this Trainer has no compute_loss_func"}
    return compared(lambda: trained(stage, packed, True, kind=kind), trained(stage, padded, False, kind=kind))


def document(stage):
    # The losses of documents that are trained one to a batch have equal weights.
    return compared(lambda: trained(stage, by_document, True), trained(stage, padded, False, one_to_a_batch=True))


def document_with_label_smoothing(stage, collate=by_document):
    return compared(lambda: trained(stage, collate, True, label_smoothing_factor=0.2), None)


def document_with_compute_loss_func(stage, collate=by_document):
    kind = _with(compute_loss_func=own_loss)
    if kind is None:
        return {"skipped": "this Trainer has no compute_loss_func"}
    return compared(lambda: trained(stage, collate, True, kind=kind), None)


def document_with_trainers_own_loss(stage):
    # SFTTrainer of TRL 1.x has the loss of Trainer in the place of its own.
    kind = _with_loss(stage, transformers.Trainer.compute_loss)
    expected = trained(stage, padded, False, one_to_a_batch=True, kind=kind)
    return compared(lambda: trained(stage, by_document, True, kind=kind), expected)


def chunked_nll(stage):
    return _with_loss_type(stage, "chunked_nll")


def dft(stage):
    return _with_loss_type(stage, "dft")


def document_with_dft(stage, collate=by_document):
    return compared(lambda: trained(stage, collate, True, loss_type="dft"), None)


def token(stage, kind=None):
    expected = trained(stage, padded_by_token, False, kind=_with_loss(stage, weighed_by_hand))
    return compared(lambda: trained(stage, by_token, True, kind=kind), expected)


def token_with_trainers_own_loss(stage):
    return token(stage, _with_loss(stage, transformers.Trainer.compute_loss))


def _with_loss(stage, compute_loss):
    if stage.trl:
        import trl
    return type("Plain", (trl.SFTTrainer if stage.trl else transformers.Trainer,), {"compute_loss": compute_loss})


token_with_label_smoothing = functools.partial(document_with_label_smoothing, collate=by_token)
token_with_compute_loss_func = functools.partial(document_with_compute_loss_func, collate=by_token)
token_with_dft = functools.partial(document_with_dft, collate=by_token)


def _with_loss_type(stage, name):
    options = {"loss_type": name}
    return compared(lambda: trained(stage, packed, True, **options), trained(stage, padded, False, **options))


def _with(**options):
    if not set(options) <= {*inspect.signature(transformers.Trainer.__init__).parameters}:
        return None
    return functools.partial(transformers.Trainer, **options)


def main(*cases):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        import trl  # noqa: F401
    except ImportError:
        stage = Stage(trl=False)
    else:
        import datasets

        datasets.disable_progress_bars()
        stage = Stage(trl=True)
    print(json.dumps({case: globals()[case](stage) for case in cases}))


if __name__ == "__main__":
    main(*sys.argv[1:])
