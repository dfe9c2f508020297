"""Batches that resemble packed ones but are not: 4-D masks, filler ids at masked positions, padding."""

import warnings

import pytest
import torch
from small_models import (
    DOCS,
    Result,
    assert_right,
    llama,
    logits_alone,
    of_family,
    patched,
    refusal,
    right_or_refused,
    told,
)

import fa2patch
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import documents
from fa2patch import errors
from fa2patch.upstream import calls

# A 4-D mask


# The tokens that each token sees. The last three continue from the same position.
TREE = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]


def tree(kind):
    sees = torch.zeros(6, 6, dtype=torch.bool)
    for token, seen in enumerate(TREE):
        sees[token, seen] = True
    if kind == "booleans":
        return sees[None, None]
    return torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("kind", ["added to logits", "booleans"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_mask_of_four_dimensions_is_taken_as_it_came(implementation, family, kind, training):
    batch = {"input_ids": DOCS[2][None, :6], "position_ids": torch.tensor([[0, 1, 2, 3, 3, 3]])}
    batch["attention_mask"] = tree(kind)
    model, reference = of_family(family, implementation), of_family(family, implementation)
    for one in (model, reference):
        one.train(training)
    try:
        expected = reference(**batch).logits
    except (ValueError, RuntimeError, TypeError) as error:
        pytest.skip(f"the unpatched model takes no such mask: {error}")
    fa2patch.apply(model)
    assert torch.equal(model(**batch).logits, expected)


# Ids at masked positions


# Position ids with upstream's filler, and the mask.
ROWS = {
    "a hole before the last token": ([[0, 1, 2, 3, 4, 0, 0, 1]], [[1, 1, 1, 1, 1, 0, 0, 1]]),
    "ones in the hole": ([[0, 1, 2, 3, 4, 1, 1, 1]], [[1, 1, 1, 1, 1, 0, 0, 1]]),
    "the last token counted on": ([[0, 1, 2, 3, 4, 1, 1, 5]], [[1, 1, 1, 1, 1, 0, 0, 1]]),
    "two rows": ([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 0, 1]], [[1] * 8, [1, 1, 1, 1, 1, 0, 0, 1]]),
    "two short rows": ([[0, 0, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0]]),
    "padding on the left": ([[1, 1, 1, 0, 1, 2, 3, 4]], [[0, 0, 0, 1, 1, 1, 1, 1]]),
    "padding on the right": ([[0, 1, 2, 3, 4, 1, 1, 1]], [[1, 1, 1, 1, 1, 0, 0, 0]]),
}

# After padding, these ids neither continue nor restart at 0. In training this is ambiguous.
JUMPS_BEHIND_PADDING = ("a hole before the last token", "ones in the hole", "two rows")


def row_of(name):
    ids, mask = map(torch.tensor, ROWS[name])
    tokens = torch.stack([documents(ids.shape[1], seed=row)[0] for row in range(len(ids))])
    return {"input_ids": tokens, "position_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_filler_at_masked_places_is_computed_as_unpatched(family, name):
    model, reference = patched(of_family(family)), of_family(family)
    batch = row_of(name)
    seen = batch["attention_mask"].bool()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits[seen], reference(**batch).logits[seen])


@pytest.mark.parametrize("name", JUMPS_BEHIND_PADDING)
def test_filler_in_training_is_an_error_and_no_guess(name):
    model = patched(llama().train())
    with refusal():
        model(**row_of(name), labels=row_of(name)["input_ids"])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("filler", [0, 1, 3])
def test_padding_between_packed_documents_isolates_them(filler, training):
    # After padding, a document starts where ids restart at 0, regardless of the ids at masked positions.
    docs = documents(3, 2)
    row = torch.cat([docs[0], torch.tensor([9]), docs[1]])[None]
    ids, mask = torch.tensor([[0, 1, 2, filler, 0, 1]]), torch.tensor([[1, 1, 1, 0, 1, 1]])
    model = patched(llama().train(training))
    logits = model(input_ids=row, position_ids=ids, attention_mask=mask).logits[0, mask[0].bool()]
    assert_right(Result(logits.detach()), Result(logits_alone(llama(), docs)))


# Padding in the last of the documents that lengths describe


@pytest.mark.parametrize("way", ["lengths alone", "lengths and ids"])
@pytest.mark.parametrize("family", ["bert:masked", "modernbert:masked", "llama"])
def test_masked_padding_in_the_last_document_is_not_attended_to(family, way):
    # Causal attention, as Llama's, never sees the padding anyway.
    *before, last = DOCS
    batch = told([*before, torch.cat([last, torch.tensor([5, 6])])], "all lengths")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -2:] = 0
    if way == "lengths alone":
        del batch["position_ids"]
    expected = logits_alone(of_family(family))

    def run(padding):
        ids = batch["input_ids"].clone()
        ids[0, -2:] = torch.tensor(padding)
        with torch.no_grad():
            return Result(patched(of_family(family))(**{**batch, "input_ids": ids}).logits[0, :-2])

    if right_or_refused(lambda: run([5, 6]), Result(expected)) == "right":
        assert torch.equal(run([5, 6]).logits, run([70, 80]).logits), "other padding moved a token"
        assert_close(run([70, 80]).logits, expected, "logits")


# While a graph is captured


def test_two_tokens_may_be_two_documents_and_one_token_is_none(monkeypatch):
    # A graph may be captured for ``generate``'s single tokens, but a graph of two tokens would fix their documents.

    def refuse(*call):
        raise fa2patch.errors.PackingNotIsolated("a graph is being captured")

    model, reference = patched(), llama()
    monkeypatch.setattr(calls, "_refuse_capture", refuse)
    one = {"input_ids": DOCS[1][None], "position_ids": torch.tensor([[0]])}
    assert torch.equal(model(**one).logits, reference(**one).logits)
    for batch in (
        {"input_ids": DOCS[0][None, :2], "position_ids": torch.tensor([[0, 0]])},
        {"input_ids": DOCS[1][None], "cu_seq_lens_q": torch.tensor([0, 1]), "max_length_q": 1},
    ):
        with pytest.raises(fa2patch.errors.PackingNotIsolated, match="captured"):
            model(**batch)


# Ids that something has written over


def overwritten(docs=DOCS, **more):
    # The row's ids have become an arange.
    row = torch.cat(docs)[None]
    labels = row.clone()
    labels[0, torch.tensor([0, *map(len, docs[:-1])]).cumsum(0)] = -100
    return {"input_ids": row, "position_ids": torch.arange(row.shape[1])[None], "labels": labels, **more}


def said_of(model, *batches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            model(**batch)
    return [str(each.message) for each in caught if issubclass(each.category, errors.NothingPacked)]


def test_an_arange_over_a_row_whose_labels_start_several_times_is_warned_of_once():
    found = said_of(patched().train(), *[overwritten()] * 3)
    assert len(found) == 1 and "its labels start several times" in found[0] and "cu_seq_lens_q" in found[0]


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
def test_an_arange_after_batches_with_lengths_is_warned_of_once(labels):
    batch = overwritten()
    if not labels:
        del batch["labels"]
    found = said_of(patched().train(), told(DOCS, "all lengths"), batch, batch)
    assert len(found) == 1 and "earlier batches came with their documents' lengths" in found[0]


QUIET = {
    "one document": overwritten(labels=torch.cat(DOCS)[None]),
    "one document behind a prompt": overwritten(labels=torch.where(torch.arange(18) < 7, -100, torch.cat(DOCS))[None]),
    "no labels": {name: value for name, value in overwritten().items() if name != "labels"},
    "documents": told(DOCS, labels=overwritten()["labels"]),
    "a padded batch": {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
        "position_ids": torch.arange(6)[None],
        "labels": torch.tensor([[-100, 1, -100, 1, 1, 1], [1, 1, -100, 1, -100, -100]]),
    },
}


@pytest.mark.parametrize("batch", QUIET.values(), ids=QUIET)
def test_of_other_rows_nothing_is_said(batch):
    assert not said_of(patched().train(), *[batch] * 3)
    assert not said_of(patched(), *[overwritten()] * 3), "outside training"


def test_labels_are_looked_at_in_a_few_rows_only():
    model = patched().train()
    one, several = overwritten(labels=torch.cat(DOCS)[None]), overwritten()
    assert not said_of(model, *[one] * 16, several)
