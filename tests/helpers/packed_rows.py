"""What every test of a packed row asks: it equals its documents alone, and nothing crosses from one into another."""

import contextlib

import pytest
import torch
import transformers

from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close, assert_same_gradients
from compat_matrix.check.rows import alone, gradients, loss_of, pack


def built(family, **changes):
    # The model is eager where there is no sdpa.
    if not tiny_models.is_present(family):
        pytest.skip(f"Transformers {transformers.__version__} has no {family} that can be patched")
    try:
        return tiny_models.build(family, "sdpa", **changes)
    except ValueError:
        return tiny_models.build(family, "eager", **changes)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def logits(model, docs):
    return model(**pack(docs)).logits[0]


def leaks(model, docs, expected):
    # Without a patch, a packed row is so far from its documents alone.
    return (logits(model, docs) - expected).abs().max() > 1e-2 * expected.abs().max()


def assert_equals_alone(model, reference, docs, *tolerances):
    expected = alone(reference, docs)
    loss_of(expected, docs).backward()
    right = gradients(reference)
    found = logits(model, docs)
    assert_close(found, expected, "logits")
    loss_of(found, docs).backward()
    assert_same_gradients(gradients(model), right, *tolerances)


def assert_nothing_crosses(model, docs, batch_of=pack, table=None, exactly=True):
    # Other tokens in one document must change no bit of another, and the gradient must stay in its document.
    # ``table`` is the embedding, if the model does not tell it. Without ``exactly``, rounding may differ: experts get
    # another number of tokens at a time.
    lengths = [len(doc) for doc in docs]
    before = model(**batch_of(docs)).logits[0].split(lengths)
    for at, doc in enumerate(docs):
        changed = [*docs[:at], 3 + (doc + 4) % 94, *docs[at + 1 :]]
        for number, (old, new) in enumerate(zip(before, model(**batch_of(changed)).logits[0].split(lengths))):
            if exactly or number == at:
                assert torch.equal(old, new) == (number != at), f"document {number} by another document {at}"
            else:
                assert_close(new, old, f"document {number} by another document {at}")
    batch = dict(batch_of(docs))
    embeddings = (table or model.get_input_embeddings())(batch.pop("input_ids")).detach().requires_grad_()
    for number in range(len(docs)):  # each in a forward of its own, because compiled ones free what a backward needs
        output = model(inputs_embeds=embeddings, **batch).logits[0].split(lengths)[number]
        (gradient,) = torch.autograd.grad(output.square().sum(), embeddings)
        reached = [piece.any(-1).unique().tolist() for piece in gradient[0].split(lengths)]
        assert reached == [[other == number] for other in range(len(docs))], f"the gradient of document {number}"
