"""Trainers that compute a loss from fewer values than a row has tokens.

ms-swift cuts the labels to the logits that it asks for (``logits_to_keep``). TRL replaces the forward by one that
returns the log-probability of each predicted token, ``[batch, length - 1]``.
"""

import inspect
import types

import pytest
import torch
import transformers
from small_models import DOCS, WAYS, alone, assert_close, llama, patched, refusal, told

import fa2patch

TOKENS = torch.cat(DOCS)
LENGTHS = [len(doc) for doc in DOCS]
STARTS = [0, *torch.tensor([len(doc) for doc in DOCS]).cumsum(0).tolist()[:-1]]
IGNORED = -100


def fewer(**kept):
    # The argument has another name in some versions.
    takes = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    (value,) = kept.values()
    name = next((name for name in ("logits_to_keep", "num_logits_to_keep") if name in takes), None)
    if name is None or (isinstance(value, torch.Tensor) and name != "logits_to_keep"):
        pytest.skip(f"LlamaForCausalLM.forward of Transformers {transformers.__version__} takes no such argument")
    return {name: value}


def predicted(learned: torch.Tensor) -> torch.Tensor:
    # Only learned tokens that have a token before them in their document have a loss.
    inside = learned.clone()
    inside[STARTS] = False
    logits = alone(llama()).logits
    at = inside.nonzero().flatten()
    return torch.nn.functional.cross_entropy(logits[at - 1], TOKENS[at])


def packed_loss(labels: torch.Tensor, kept: dict) -> torch.Tensor:
    model = patched()
    with torch.no_grad():
        return model(**told(labels=labels), **kept, use_cache=False).loss


@pytest.mark.parametrize("many", [1, 3, 4, 10, len(TOKENS)])
def test_the_last_logits_of_a_row(many):
    kept = fewer(many=many)
    learned = torch.arange(len(TOKENS)) > len(TOKENS) - many
    expected = predicted(learned)
    found = packed_loss(TOKENS[None, -many:], kept)
    assert_close(found, expected, f"loss {found} ({expected})") if many > 1 else None
    assert bool(found.isnan()) == bool(expected.isnan())


@pytest.mark.parametrize("first", [True, False], ids=["first labels too", "no first labels"])
def test_the_logits_that_predict_a_label(first):
    # The kept tokens are those in front of a label, and the row's last. The labels get one more in front of them.
    learned = torch.arange(len(TOKENS)) % 3 != 1
    learned[STARTS] = first
    learned[0] = False
    kept = fewer(mask=torch.cat([learned[1:], torch.tensor([True])]))
    labels = torch.cat([torch.tensor([IGNORED]), TOKENS[learned]])[None]
    expected = predicted(learned)
    found = packed_loss(labels, kept)
    assert_close(found, expected, f"loss {found} ({expected})")


GAPS = {
    "no gap": list(range(3, 17)),
    "a document is left out": [at for at in range(18) if at != 5],
    "ends are left out": [0, 1, 2, 6, 7, 8, 9, 15, 16],
    "an end and two starts are left out": [2, 3, 10, 11, 16, 17],
}


@pytest.mark.parametrize("first", [True, False], ids=["first labels too", "no first labels"])
@pytest.mark.parametrize("case", GAPS)
def test_the_kept_tokens_own_labels(case, first):
    # The labels are cut by the tensor that chooses the logits. A gap of it does not join two documents.
    at = torch.tensor(GAPS[case])
    labels = TOKENS.clone()
    labels[STARTS] = labels[STARTS] if first else IGNORED
    logits, document = alone(llama()).logits, torch.repeat_interleave(torch.arange(len(DOCS)), torch.tensor(LENGTHS))
    inside = document[at[1:]] == document[at[:-1]]
    expected = torch.nn.functional.cross_entropy(logits[at[:-1]][inside], TOKENS[at[1:]][inside])
    found = packed_loss(labels[at][None], fewer(mask=at))
    assert_close(found, expected, f"loss {found} ({expected})")


def test_a_label_behind_a_gap_that_no_token_has_is_an_error():
    at = torch.tensor(GAPS["ends are left out"])
    labels = TOKENS[at] - 1
    with refusal("leaves out the end of a document.*Keep every", fa2patch.errors.BadBatch):
        packed_loss(labels[None], fewer(mask=at))
    labels[3] = labels[7] = IGNORED
    assert packed_loss(labels[None], fewer(mask=at)).isfinite()


def test_labels_behind_a_gap_of_embeddings_are_an_error():
    at = torch.tensor(GAPS["ends are left out"])
    kept, model = fewer(mask=at), patched()
    batch = told(labels=TOKENS[at][None])
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    with pytest.raises(fa2patch.errors.BadBatch, match="leaves out the end of a document"):
        model(**batch, **kept, use_cache=False)


def test_labels_and_logits_of_other_numbers_are_an_error():
    kept = fewer(mask=torch.arange(len(TOKENS)) > 2)
    with pytest.raises(fa2patch.errors.BadBatch, match="one for each logit that the call asks for"):
        packed_loss(TOKENS[None, 1:], kept)


def log_probs_of(self, labels, **batch):
    # TRL's forward is like this: the log-probabilities of the labels, 0 where a label is ignored.
    logits = self.lm_head(self.model(**batch).last_hidden_state)
    rest = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return {"log_probs": -rest, "learned": (labels[:, 1:] != IGNORED).sum()}


@pytest.mark.parametrize("where", ["on the object", "on the class"])
@pytest.mark.parametrize("way", WAYS)
def test_a_value_for_each_predicted_token(way, where):
    own_class = type("Own", (transformers.LlamaForCausalLM,), {})
    model = patched(llama(own_class))
    if where == "on the object":
        model.forward = types.MethodType(log_probs_of, model)
    else:
        own_class.forward = log_probs_of
    with torch.no_grad():
        found = model(**told(DOCS, way, labels=TOKENS[None]), use_cache=False)
    assert found["learned"] == len(TOKENS) - len(DOCS)
    learned = torch.ones(len(TOKENS), dtype=torch.bool)
    loss, expected = -found["log_probs"].sum() / found["learned"], predicted(learned)
    assert_close(loss, expected, f"loss {loss} ({expected})")


def test_a_value_for_each_row_is_still_refused():
    model = patched()
    model.forward = types.MethodType(lambda self, **batch: {"scores": self.model(**batch)[0][:, 0, :4]}, model)
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="one for each row"):
        model(**told(), use_cache=False)
