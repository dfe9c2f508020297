"""Batches that resemble packed ones but are not: 4-D masks, filler ids at masked positions, caches, padding."""

import inspect

import pytest
import torch
from small_models import (
    DOCS,
    Result,
    alone,
    assert_right,
    assert_says_enough,
    class_of,
    config_of,
    llama,
    of_family,
    right_or_refused,
    small,
    told,
)

import fa2patch
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import documents
from fa2patch.upstream import calls

# A 4-D mask


TREE = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
"""The tokens that each token sees. The last three continue from the same position."""


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
    cls, config = of_family(family)
    batch = {"input_ids": DOCS[2][None, :6], "position_ids": torch.tensor([[0, 1, 2, 3, 3, 3]])}
    batch["attention_mask"] = tree(kind)
    model, reference = small(cls, config, implementation), small(cls, config, implementation)
    for one in (model, reference):
        one.train(training)
    try:
        expected = reference(**batch).logits
    except (ValueError, RuntimeError, TypeError) as error:
        pytest.skip(f"the unpatched model takes no such mask: {error}")
    fa2patch.apply(model)
    assert torch.equal(model(**batch).logits, expected)


# Ids at masked positions


ROWS = {
    "a hole before the last token": ([[0, 1, 2, 3, 4, 0, 0, 1]], [[1, 1, 1, 1, 1, 0, 0, 1]]),
    "ones in the hole": ([[0, 1, 2, 3, 4, 1, 1, 1]], [[1, 1, 1, 1, 1, 0, 0, 1]]),
    "the last token counted on": ([[0, 1, 2, 3, 4, 1, 1, 5]], [[1, 1, 1, 1, 1, 0, 0, 1]]),
    "two rows": ([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 0, 1]], [[1] * 8, [1, 1, 1, 1, 1, 0, 0, 1]]),
    "two short rows": ([[0, 0, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0]]),
    "padding on the left": ([[1, 1, 1, 0, 1, 2, 3, 4]], [[0, 0, 0, 1, 1, 1, 1, 1]]),
    "padding on the right": ([[0, 1, 2, 3, 4, 1, 1, 1]], [[1, 1, 1, 1, 1, 0, 0, 0]]),
}
"""Position ids with upstream's filler, and the mask."""

JUMPS_BEHIND_PADDING = ("a hole before the last token", "ones in the hole", "two rows")
"""After padding, ids neither continue nor restart at 0. In training this is ambiguous."""


def row_of(name):
    ids, mask = map(torch.tensor, ROWS[name])
    tokens = torch.stack([documents(ids.shape[1], seed=row)[0] for row in range(len(ids))])
    return {"input_ids": tokens, "position_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_filler_at_masked_places_is_computed_as_unpatched(family, name):
    cls, config = of_family(family)
    model, reference = small(cls, config), small(cls, config)
    fa2patch.apply(model)
    batch = row_of(name)
    seen = batch["attention_mask"].bool()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits[seen], reference(**batch).logits[seen])


@pytest.mark.parametrize("name", JUMPS_BEHIND_PADDING)
def test_filler_in_training_is_an_error_and_no_guess(name):
    model = llama().train()
    fa2patch.apply(model)
    with pytest.raises(fa2patch.Fa2PatchError) as caught:
        model(**row_of(name), labels=row_of(name)["input_ids"])
    assert_says_enough(caught.value)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("filler", [0, 1, 3])
def test_padding_between_packed_documents_isolates_them(filler, training):
    """After padding, a document starts where ids restart at 0, regardless of the ids at masked positions."""
    docs = documents(3, 2)
    row = torch.cat([docs[0], torch.tensor([9]), docs[1]])[None]
    ids, mask = torch.tensor([[0, 1, 2, filler, 0, 1]]), torch.tensor([[1, 1, 1, 0, 1, 1]])
    model = llama().train(training)
    fa2patch.apply(model)
    logits = model(input_ids=row, position_ids=ids, attention_mask=mask).logits[0, mask[0].bool()]
    assert_right(Result(logits.detach()), Result(alone(llama(), docs).logits))


# A cache under another name


@pytest.mark.parametrize("holes", [False, True], ids=["all seen", "padding in it"])
@pytest.mark.parametrize("counted", [False, True], ids=["without ids", "with ids"])
@pytest.mark.parametrize("new", [1, 3])
def test_mamba_2_goes_on_from_its_cache_as_unpatched(new, counted, holes):
    """The mask covers the cached and the new tokens."""
    cls = class_of("Mamba2ForCausalLM")
    config = config_of("mamba2")
    ids = torch.stack([documents(9)[0], documents(9, seed=3)[0]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if holes:
        mask[0, -1], positions[0, -1] = 0, 1
    takes = inspect.signature(cls.forward).parameters
    more = {"cache_position": torch.arange(9 - new, 9)} if "cache_position" in takes else {}
    if counted:
        if "position_ids" not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            pytest.skip("this version's Mamba 2 takes no ids")
        more["position_ids"] = positions[:, -new:]

    def continued(model):
        with torch.no_grad():
            first = model(input_ids=ids[:, :-new], attention_mask=mask[:, :-new], use_cache=True)
            cache = {"cache_params": first.cache_params, "use_cache": True}
            return model(input_ids=ids[:, -new:], attention_mask=mask, **cache, **more).logits

    try:
        expected = continued(small(cls, config))
    except RuntimeError as error:
        pytest.skip(f"the unpatched model cannot go on so: {error}")
    model = small(cls, config)
    fa2patch.apply(model)
    assert torch.equal(continued(model), expected)


# Padding in the last of the documents that lengths describe


@pytest.mark.parametrize("way", ["lengths alone", "lengths and ids"])
@pytest.mark.parametrize("family", ["bert:masked", "modernbert:masked", "llama"])
def test_masked_padding_in_the_last_document_is_not_attended_to(family, way):
    """Causal attention, as Llama's, never sees it anyway."""
    cls, config = of_family(family)
    padded = [*DOCS[:-1], torch.cat([DOCS[-1], torch.tensor([5, 6])])]
    batch = told(padded, "all lengths")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, -2:] = 0
    if way == "lengths alone":
        del batch["position_ids"]
    model = small(cls, config)
    with torch.no_grad():
        expected = torch.cat([model(input_ids=doc[None]).logits[0] for doc in DOCS])

    def run(padding):
        model = small(cls, config)
        fa2patch.apply(model)
        ids = batch["input_ids"].clone()
        ids[0, -2:] = torch.tensor(padding)
        with torch.no_grad():
            return Result(model(**{**batch, "input_ids": ids}).logits[0, :-2])

    if right_or_refused(lambda: run([5, 6]), Result(expected)) == "right":
        assert torch.equal(run([5, 6]).logits, run([70, 80]).logits), "other padding moved a token"
        assert_close(run([70, 80]).logits, expected, "logits")


# While a graph is captured


def test_two_tokens_may_be_two_documents_and_one_token_is_none(monkeypatch):
    """A graph may be captured for ``generate``'s single tokens, but a graph of two tokens would fix their documents."""

    def refuse(device):
        raise fa2patch.errors.PackingNotIsolated("a graph is being captured")

    model, reference = llama(), llama()
    fa2patch.apply(model)
    monkeypatch.setattr(calls, "_refuse_capture", refuse)
    one = {"input_ids": DOCS[1][None], "position_ids": torch.tensor([[0]])}
    assert torch.equal(model(**one).logits, reference(**one).logits)
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="captured"):
        model(input_ids=DOCS[0][None, :2], position_ids=torch.tensor([[0, 0]]))
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="captured"):
        model(input_ids=DOCS[1][None], cu_seq_lens_q=torch.tensor([0, 1]), max_length_q=1)
