"""Padded pairs that an encoder-decoder computes packed: the losses, gradients and outputs are those of padded ones."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from pairs import FAMILIES, SPOKEN, alone, built, gradients, pairs

import fa2patch
from compat_matrix.check import reads
from compat_matrix.check.compare import assert_same_gradients
from fa2patch.errors import NothingPacked, PackingNotIsolated, StaysPadded
from fa2patch.patch.padding import of_model, pack_padded_batches
from fa2patch.upstream.forward import SAY_AFTER
from fa2patch.upstream.step import MARK

WRITTEN = [family for family in FAMILIES if family not in SPOKEN]


def computed(model, batch, **how):
    model.zero_grad()
    output = model(**batch, **how)
    output.loss.backward()
    return output, gradients(model)


def assert_as_without(model, padded, **how):
    """The loss and the gradients of a padded batch before ``apply`` and after it."""
    before, expected = computed(model, padded)
    fa2patch.apply(model, padded_batches=True, **{"prove": False, **how})
    output, found = computed(model, padded)
    assert output.loss.item() == pytest.approx(before.loss.item(), rel=1e-5)
    assert_same_gradients(found, expected, 1e-4, 0.01)


def of_real(output, batch):
    return output.logits[batch["labels"] != -100]


def padded_of(family, model, batch):
    padded = batch.padded(model.config.pad_token_id)
    if family in SPOKEN:
        padded.pop("attention_mask")
        padded["input_features"] = torch.cat(batch.sources)
    return padded


def tallies(model):
    stacks = fa2patch.status(model).stacks
    return [(stack.tally.cells, stack.tally.tokens) for stack in stacks]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_pairs_are_computed_packed_in_both_stacks(family, training):
    model, batch = built(family).train(training), pairs(family)
    expected = alone(model, batch)
    padded = padded_of(family, model, batch)
    fa2patch.apply(model, padded_batches=True, prove=False)
    output, found = computed(model, padded)
    assert output.loss.item() == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(of_real(output, padded), expected[1], rtol=1e-4, atol=1e-4)
    assert_same_gradients(found, expected[2], 1e-4, 0.01)
    assert output.logits.shape[:2] == padded["labels"].shape
    # sounds are sources of one length: only their targets are packed
    assert tallies(model) == [(45, 22), (35, 21)][-1 if family in SPOKEN else 0 :]


@pytest.mark.parametrize("family", WRITTEN)
def test_sources_padded_on_the_left(family):
    model, batch = built(family), pairs(family)
    padded = padded_of(family, model, batch)
    real = padded["attention_mask"] != 0
    padded["input_ids"] = torch.stack([torch.cat([ids[~own], ids[own]]) for ids, own in zip(padded["input_ids"], real)])
    padded["attention_mask"] = padded["attention_mask"].flip(1)
    before, expected = computed(model, padded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaysPadded)  # models with a table of positions count padding then
        fa2patch.apply(model, padded_batches=True, prove=False)
        output, found = computed(model, padded)
    assert output.loss.item() == pytest.approx(before.loss.item(), rel=1e-5)
    torch.testing.assert_close(of_real(output, padded), of_real(before, padded), rtol=1e-4, atol=1e-4)
    assert_same_gradients(found, expected, 1e-4, 0.01)
    assert tallies(model)[1] == (35, 21)


@pytest.mark.parametrize("family", ["t5", "bart", "mbart", "t5gemma"])
def test_targets_padded_on_the_left_see_their_padding(family):
    # of labels alone nobody knows that their first columns are padding: padded training computes them, too
    model, batch = built(family), pairs(family)
    padded = padded_of(family, model, batch)
    longest = padded["labels"].shape[1]
    rows = [torch.nn.functional.pad(target, (longest - target.shape[1], 0), value=-100) for target in batch.targets]
    padded["labels"] = torch.cat(rows)
    assert_as_without(model, padded)
    assert tallies(model) == [(45, 22), (0, 0)]


@pytest.mark.parametrize("family", ["t5", "bart", "mbart", "t5gemma"])
def test_a_mask_of_the_targets_says_where_they_end(family):
    # Trainer's label smoothing takes the labels out. Without a mask, all columns of the targets are computed.
    model, batch = built(family), pairs(family)
    padded = padded_of(family, model, batch)
    labels = padded.pop("labels")
    padded["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    before = model(**padded).logits
    fa2patch.apply(model, padded_batches=True, prove=False)
    found = model(**padded).logits
    torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-4)
    assert tallies(model) == [(45, 22), (0, 0)]
    found = model(**padded, decoder_attention_mask=(labels != -100).long()).logits
    torch.testing.assert_close(found[labels != -100], before[labels != -100], rtol=1e-4, atol=1e-4)
    assert tallies(model) == [(90, 44), (35, 21)]


def test_labels_that_padding_predicts_stay_padded():
    model, batch = built("bart"), pairs("bart")
    padded = padded_of("bart", model, batch)
    padded["decoder_attention_mask"] = (padded["labels"] != -100).long()
    padded["decoder_attention_mask"][0, -1] = 0
    padded["labels"][0] = 7  # also on what its mask hides
    before = model(**padded).loss
    fa2patch.apply(model, padded_batches=True, prove=False)
    with pytest.warns(StaysPadded, match="labels that only padding predicts"):
        assert model(**padded).loss.item() == pytest.approx(before.item(), rel=1e-6)
    assert tallies(model)[1] == (0, 0)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_everything_else_is_as_before(family):
    model, batch = built(family), pairs(family)
    padded = padded_of(family, model, batch)
    sources = {name: padded[name] for name in ("input_ids", "attention_mask")}
    whole = {"input_ids": sources["input_ids"], "labels": padded["labels"].abs() % 60}
    asked = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False}
    before = model(**whole).logits, model.generate(**sources, **asked), model.get_encoder()(**sources)[0]
    cached = model(**padded, use_cache=True)
    fa2patch.apply(model, padded_batches=True, prove=False)
    after = model(**whole).logits, model.generate(**sources, **asked), model.get_encoder()(**sources)[0]
    assert all(map(torch.equal, before, after))
    assert torch.equal(model(**padded, use_cache=True).logits, cached.logits)
    assert all(cells == 0 for cells, _ in tallies(model)[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaysPadded)
        packed = model(**batch.packed())  # packed pairs go on to be packed
    assert packed.loss.item() == pytest.approx(model(**padded).loss.item(), rel=1e-5)
    fa2patch.revert(model)
    assert of_model(model) is None and not [key for key in vars(model) if key.startswith("_fa2patch")]
    assert torch.equal(model(**whole).logits, before[0])


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_with_checkpointing(family):
    model, batch = built(family).train(), pairs(family)
    padded = padded_of(family, model, batch)
    before, expected = computed(model, padded)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fa2patch.apply(model, padded_batches=True, prove=False)
    output, found = computed(model, padded)
    assert output.loss.item() == pytest.approx(before.loss.item(), rel=1e-5)
    assert_same_gradients(found, expected, 1e-4, 0.01)
    assert tallies(model)[-1] == (35, 21)


def headed(name):
    config = built("bart").config
    config.num_labels = 3
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("BartForSequenceClassification", {"labels": torch.tensor([0, 2, 1, 1, 0])}),
        ("BartForQuestionAnswering", {"start_positions": torch.arange(5) % 2, "end_positions": torch.arange(5) % 2}),
        ("BartModel", {}),
    ],
)
def test_heads_get_padded_rows(name, more):
    model, batch = headed(name), pairs("bart")
    padded = {key: value for key, value in padded_of("bart", model, batch).items() if key != "labels"}
    ends = padded["attention_mask"].sum(1) - 1
    padded["input_ids"][padded["input_ids"] == 2] = 5
    padded["input_ids"][torch.arange(5), ends] = 2  # one eos in each row
    before = model(**padded, **more)
    fa2patch.apply(model, padded_batches=True, prove=False)
    after = model(**padded, **more)
    for one, other in zip(before.to_tuple(), after.to_tuple()):
        if isinstance(one, torch.Tensor) and one.shape[:2] != padded["input_ids"].shape:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    real = padded["attention_mask"] != 0
    torch.testing.assert_close(
        after.encoder_last_hidden_state[real], before.encoder_last_hidden_state[real], rtol=1e-4, atol=1e-4
    )
    assert tallies(model)[0] == (45, 22)


def test_a_loss_of_padding_is_an_error_in_the_backward():
    model, batch = built("bart"), pairs("bart")
    padded = padded_of("bart", model, batch)
    fa2patch.apply(model, padded_batches=True, prove=False)
    with pytest.raises(PackingNotIsolated, match="depends on hidden states of padding"):
        (model(**padded).logits - 1).square().mean().backward()


class Doubled(torch.nn.Linear):
    def forward(self, states):
        return super().forward(states) * 2


class Leaking(torch.nn.Linear):
    def forward(self, states):
        return super().forward(states + states.mean(1, keepdim=True))


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_unknown_code_is_proven_with_the_pairs_of_a_padded_batch(side):
    model, batch = built("bart"), pairs("bart")
    padded = padded_of("bart", model, batch)
    layer = getattr(model.model, side).layers[0].fc1
    layer.__class__ = Doubled
    before = model(**padded).loss
    fa2patch.apply(model, padded_batches=True)
    assert model(**padded).loss.item() == pytest.approx(before.item(), rel=1e-5)
    assert tallies(model) == [(45, 22), (35, 21)]
    layer.__class__ = Leaking
    with pytest.raises(PackingNotIsolated, match="Leaking"):
        model(**padded)


def test_a_head_that_no_packed_pairs_can_prove_gets_what_padded_training_computes():
    model, batch = headed("BartForSequenceClassification"), pairs("bart")
    padded = padded_of("bart", model, batch)
    padded["input_ids"][padded["input_ids"] == 2] = 5
    padded["input_ids"][torch.arange(5), padded["attention_mask"].sum(1) - 1] = 2
    padded["labels"] = torch.tensor([0, 2, 1, 1, 0])
    model.model.decoder.layers[0].fc1.__class__ = Doubled
    before = model(**padded).loss
    fa2patch.apply(model, padded_batches=True)
    with pytest.warns(StaysPadded, match="proven with packed pairs"):
        assert model(**padded).loss.item() == before.item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**padded)  # said once
    fa2patch.apply(model, prove=False)
    assert model(**padded).loss.item() == pytest.approx(before.item(), rel=1e-5)
    assert tallies(model)[0] == (45, 22)


def test_a_copy_and_a_pickle_compute_padded_pairs_packed():
    model, batch = built("t5"), pairs("t5")
    padded = padded_of("t5", model, batch)
    fa2patch.apply(model, padded_batches=True, prove=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(**padded)
        assert of_model(other).base is other and vars(other)[MARK].active
        assert [cells for cells, _ in tallies(other)] == [45, 35]


def test_the_option_is_switched_off_and_on():
    model, batch = built("t5"), pairs("t5")
    padded = padded_of("t5", model, batch)
    fa2patch.apply(model)
    model(**padded)
    assert tallies(model) == [(0, 0), (0, 0)]
    fa2patch.apply(model, padded_batches=True)
    model(**padded)
    fa2patch.apply(model)  # it keeps what was said
    model(**padded)
    assert tallies(model) == [(90, 44), (70, 42)]
    fa2patch.apply(model, padded_batches=False)
    model(**padded)
    assert tallies(model) == [(90, 44), (70, 42)]


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_what_a_step_reads_from_the_device(family):
    # nothing in a layer: once where the model looks for packed pairs, once for each stack's rows, once for the states
    model, batch = built(family).train(), pairs(family)
    padded = padded_of(family, model, batch)
    fa2patch.apply(model, padded_batches=True, prove=False)
    for _ in range(2):  # of the first ones it is tried whether the head reads padding
        model(**padded)
    with reads.counted() as found:
        model(**padded)
    ours = sum(number for where, number in found.where.items() if "in fa2patch" in where)  # BART of 4.43 reads, too
    assert ours == (1 if family in SPOKEN else 4)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_sources_and_targets_of_one_shape(family):
    # their padding is told apart all the same
    model, batch = built(family), pairs(family, (7, 2, 5), (3, 7, 6))
    padded = padded_of(family, model, batch)
    expected = alone(model, batch)
    fa2patch.apply(model, padded_batches=True)  # whether padding is read is tried
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaysPadded)
        output, found = computed(model, padded)
    assert output.loss.item() == pytest.approx(expected[0], rel=1e-5)
    assert_same_gradients(found, expected[2], 1e-4, 0.01)
    assert tallies(model) == [(21, 14), (21, 16)]


def test_a_target_without_labels_learns_nothing():
    model, batch = built("t5"), pairs("t5")
    padded = padded_of("t5", model, batch)
    padded["labels"][3] = -100
    assert_as_without(model, padded)
    assert tallies(model) == [(45, 22), (35, 20)]


@pytest.mark.parametrize("unknown", [False, True])
def test_a_source_without_tokens_stays_padded(unknown):
    model, batch = built("t5"), pairs("t5")
    padded = padded_of("t5", model, batch)
    padded["attention_mask"][3] = 0
    before = model(**padded).loss
    if unknown:
        model.encoder.block[0].layer[1].DenseReluDense.wi.__class__ = Doubled
        before = model(**padded).loss
    fa2patch.apply(model, padded_batches=True, prove=None if unknown else False)
    with pytest.warns(StaysPadded, match="a row is empty" if unknown else "encoder_attention_mask shows"):
        assert model(**padded).loss.item() == pytest.approx(before.item(), rel=1e-6)
    assert tallies(model) == [(0, 0), (0, 0)]


def test_targets_that_begin_alike_share_nothing():
    # their sources differ
    model = built("t5")
    fa2patch.apply(model.decoder, padded_batches=True, prove=False)
    pack_padded_batches(model.decoder, share_prompts=True)
    rows = torch.full((2, 40), 7)
    call = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "use_cache": False}
    call["attention_mask"][0, 35:] = 0
    call["encoder_hidden_states"] = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    call["encoder_attention_mask"] = torch.ones(2, 6, dtype=torch.long)
    found = model.decoder(**call)[0]
    assert fa2patch.status(model.decoder).tally.tokens == 75
    fa2patch.revert(model.decoder)
    expected = model.decoder(**call)[0]
    torch.testing.assert_close(found[0, :35], expected[0, :35], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_batches_that_are_computed_as_they_came_are_no_joined_rows():
    # label smoothing says nothing of where targets end, in any number of steps
    model, batch = built("bart").train(), pairs("bart")
    padded = padded_of("bart", model, batch)
    padded["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(padded.pop("labels"))
    fa2patch.apply(model, padded_batches=True, prove=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingPacked)
        for _ in range(SAY_AFTER + 1):
            model(**padded)
