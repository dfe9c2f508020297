"""Encoder-decoders packed: sources in one row, targets in another, each pair as it is alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from pairs import FAMILIES, SPOKEN, VOCABULARY, alone, built, embedded, gradients, pairs, scaled_up

import fa2patch
from compat_matrix.check.compare import assert_same_gradients
from fa2patch.documents.boundaries import Boundaries
from fa2patch.errors import BadBatch, PackingNotIsolated
from fa2patch.upstream.packed_mask import PackedMask
from fa2patch.upstream.seams.counting import StackOfRow

INTERFACE = hasattr(transformers.models.bart.modeling_bart, "ALL_ATTENTION_FUNCTIONS")  # layers return two outputs then
WRITTEN = [family for family in FAMILIES if family not in SPOKEN]


def computed(model, batch):
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output.loss.item(), output.logits[0].detach(), gradients(model)


def assert_equal(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    assert_same_gradients(found[2], expected[2], 1e-4, 0.01)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_pair_is_computed_as_alone(family, implementation):
    if family == "t5gemma" and implementation == "sdpa":
        return  # its sdpa leaves the softcap out, which the definition has
    try:
        model = built(family, implementation)
    except ValueError as error:
        pytest.skip(str(error))  # upstream has no sdpa
    batch = pairs(family)
    expected = alone(model, batch)
    fa2patch.apply(model, prove=False)
    assert_equal(computed(model, batch.packed()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_crosses_from_one_pair_to_another(family):
    # in no attention: that of sources, that of targets, and that of targets to sources
    model, batch = built(family), pairs(family)
    fa2patch.apply(model, prove=False)
    before = model(**batch.packed()).logits[0]
    changed = pairs(family)
    changed.sources[2] = changed.sources[2].roll(1, -1)
    changed.targets[2] = (changed.targets[2] + 5) % 60 + 3
    after = model(**changed.packed()).logits[0]
    lengths = [target.shape[1] for target in batch.targets]
    moved = [(one - other).abs().max().item() for one, other in zip(before.split(lengths), after.split(lengths))]
    assert moved[2] > 0.01
    assert [value for at, value in enumerate(moved) if at != 2] == [0, 0, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_crosses(family):
    # of one pair's outputs to the embeddings of others
    model, batch = built(family), pairs(family)
    fa2patch.apply(model, prove=False)
    leaves = embedded(model)
    lengths = [[row.shape[1] for row in rows] for rows in (batch.sources, batch.targets)]
    logits = model(**batch.packed()).logits[0].split(lengths[1])
    found = torch.autograd.grad(logits[2].square().sum(), leaves)
    assert len(found) == (1 if family in SPOKEN else 2)
    for gradient, rows in zip(found, lengths[-len(found) :]):
        sizes = [piece.abs().max().item() for piece in gradient[0].split(rows)]
        assert sizes[2] > 0 and [size for at, size in enumerate(sizes) if at != 2] == [0, 0, 0, 0]


@pytest.mark.parametrize("family", WRITTEN)
def test_dense_batches_and_generation_are_as_before(family):
    model, batch = built(family), pairs(family)
    padded = batch.padded(model.config.pad_token_id)
    before = computed(model, padded)
    asked = {"max_new_tokens": 5, "num_beams": 2, "attention_mask": padded["attention_mask"]}
    generated = model.generate(padded["input_ids"], **asked)
    fa2patch.apply(model, prove=False)
    after = computed(model, padded)
    assert after[0] == before[0] and torch.equal(after[1], before[1])
    assert torch.equal(model.generate(padded["input_ids"], **asked), generated)


def numbers(rows):
    return torch.cat([torch.full((row.shape[1],), at + 1) for at, row in enumerate(rows)])[None]


def lengths_of(rows, prefix=""):
    ends = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0, dtype=torch.int32)
    longest = max(row.shape[1] for row in rows)
    said = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {prefix + name: value for name, value in said.items()}


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_documents_are_said_by_positions_or_lengths_or_numbers(family):
    model, batch = built(family), pairs(family)
    fa2patch.apply(model, prove=False)
    packed = batch.packed()
    tokens = {name: packed[name] for name in ("input_ids", "labels")}
    expected = model(**packed).logits
    by_length = {**lengths_of(batch.sources), **lengths_of(batch.targets, "decoder_")}
    by_number = {"attention_mask": numbers(batch.sources), "decoder_attention_mask": numbers(batch.targets)}
    for said in (by_length, by_number):
        assert torch.equal(model(**tokens, **said).logits, expected)


@pytest.mark.parametrize("family", ["t5", "bart", "mbart"])
def test_decoder_inputs_may_be_given(family):
    model, batch = built(family), pairs(family)
    shift = model.prepare_decoder_input_ids_from_labels
    given = torch.cat([shift(labels=target) for target in batch.targets], 1)
    fa2patch.apply(model, prove=False)
    packed = batch.packed()
    assert torch.equal(model(**packed, decoder_input_ids=given).logits, model(**packed).logits)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_sources_that_were_encoded_before(family):
    model, batch = built(family), pairs(family)
    fa2patch.apply(model, prove=False)
    packed = batch.packed()
    encoded = model.get_encoder()(input_ids=packed["input_ids"], position_ids=packed["position_ids"])
    expected = model(**packed).logits
    del packed["input_ids"]
    assert torch.equal(model(**packed, encoder_outputs=encoded).logits, expected)


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize(
    "changed, says",
    [
        ({"decoder_position_ids": None}, "its targets are not: expected decoder_position_ids"),
        ({"position_ids": None}, "its sources are not: expected position_ids"),
        ({"position_ids": torch.tensor([[*range(8), *range(14)]])}, "found 2 sources and 5 targets"),
    ],
)
def test_pairs_that_do_not_fit_are_an_error(family, changed, says):
    model, batch = built(family), pairs(family)
    fa2patch.apply(model, prove=False)
    with pytest.raises(BadBatch, match=says):
        model(**{**batch.packed(), **changed})


def test_a_decoder_that_is_not_told_whose_its_sources_are():
    model, batch = built("bart"), pairs("bart")
    decoder = model.get_decoder()
    fa2patch.apply(decoder, prove=False)
    packed = batch.packed()
    states = torch.randn(1, packed["input_ids"].shape[1], 32)
    call = {"input_ids": packed["labels"], "position_ids": packed["decoder_position_ids"]}
    with pytest.raises(BadBatch, match="the number of the document of each source token"):
        decoder(**call, encoder_hidden_states=states)
    told = decoder(**call, encoder_hidden_states=states, encoder_attention_mask=numbers(batch.sources))[0]
    rows = torch.zeros(5, 9, 32)
    for row, piece in zip(rows, states[0].split([source.shape[1] for source in batch.sources])):
        row[: len(piece)] = piece
    mask = torch.arange(9) < torch.tensor([[source.shape[1]] for source in batch.sources])
    by_row = decoder(**call, encoder_hidden_states=rows, encoder_attention_mask=mask.long())[0]
    torch.testing.assert_close(by_row, told, rtol=0, atol=0)
    fa2patch.apply(decoder, prove=True)
    with pytest.raises(PackingNotIsolated, match="Patch the encoder-decoder around it"):
        decoder(**call, encoder_hidden_states=states, encoder_attention_mask=numbers(batch.sources))


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_bias_goes_on_where_a_prompt_is_shared(family):
    # also where a document is as long as the longest path
    decoder = built(family).get_decoder()
    drawn = torch.Generator().manual_seed(3)
    root, one, other, lone = (torch.randint(3, VOCABULARY, (1, length), generator=drawn) for length in (4, 3, 2, 12))
    expected = [decoder(input_ids=torch.cat(path, 1))[0] for path in ([root, one], [root, other], [lone])]
    fa2patch.apply(decoder, prove=False)
    rows, ends = torch.cat([root, one, other, lone], 1), torch.tensor([0, 4, 7, 9, 21], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
    parents = torch.tensor([-1, 0, 0, -1], dtype=torch.int32)
    found = decoder(input_ids=rows, segment_parents=parents, **lengths)[0]
    torch.testing.assert_close(found[:, :7], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[:, 7:9], expected[1][:, 4:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[:, 9:], expected[2], rtol=1e-4, atol=1e-4)


def test_a_decoder_that_stands_behind_no_encoder():
    # Its layers of cross attention do not run.
    model, batch = built("bart"), pairs("bart")
    decoder = model.get_decoder()
    alone = torch.cat([decoder(input_ids=target)[0] for target in batch.targets], 1)
    fa2patch.apply(decoder)
    packed = batch.packed()
    found = decoder(input_ids=packed["labels"], position_ids=packed["decoder_position_ids"])[0]
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    decoder.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None, ())[
        : 2 if INTERFACE else 3
    ]
    with pytest.raises(PackingNotIsolated, match="not layers.1.self_attn"):
        decoder(input_ids=packed["labels"], position_ids=packed["decoder_position_ids"])


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_layer_that_was_missed_is_named(family):
    model, batch = built(family), pairs(family)
    fa2patch.apply(model, prove=False)
    model(**batch.packed())
    decoder, outputs = model.get_decoder(), {"t5": 3, "bart": 2 if INTERFACE else 3}
    name = "block.1.layer.1.EncDecAttention" if family == "t5" else "layers.1.encoder_attn"
    cross = decoder.get_submodule(name)
    cross.forward = lambda *args, **kwargs: ([*args, kwargs.get("hidden_states")][0], None, ())[: outputs[family]]
    with pytest.raises(PackingNotIsolated, match=f"not {name}"):
        model(**batch.packed())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_model_of_the_class(family):
    # What the first one was found to need, it needs too, and so does a patch that is renewed.
    first, second, batch = built(family), built(family), pairs(family)
    expected = alone(first, batch)
    for model in (first, second):
        fa2patch.apply(model, prove=False)
        fa2patch.apply(model)
    for model in (first, second):
        assert model(**batch.packed()).loss.item() == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_copies_and_pickles_are_patched_and_a_revert_leaves_nothing(family):
    model, batch = built(family), pairs(family)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    patch = fa2patch.apply(model, prove=False)
    expected = computed(model, batch.packed())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert computed(other, batch.packed())[0] == expected[0]
        fa2patch.revert(other)
    assert computed(model, batch.packed())[0] == expected[0]
    patch.revert()
    assert fa2patch.status(model) is fa2patch.status(model.get_decoder()) is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == {
        name: set(known) for name, known in before.items()
    }


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_gradient_checkpointing(family, reentrant):
    model, batch = built(family).train(), pairs(family)
    fa2patch.apply(model, prove=False)
    expected = computed(model, batch.packed())
    try:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    except TypeError:
        model.gradient_checkpointing_enable()  # 4.34
    model.enable_input_require_grads()
    assert_equal(computed(model, batch.packed()), expected)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_bfloat16_is_near_float32(family):
    model, batch = built(family), pairs(family)
    fa2patch.apply(model, prove=False)
    exact = model(**batch.packed()).loss.item()
    assert model.bfloat16()(**batch.packed()).loss.item() == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_lora(family):
    peft = pytest.importorskip("peft")
    names = ["q", "v"] if family == "t5" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
    model = peft.get_peft_model(built(family), config).eval()
    batch = pairs(family)
    expected = alone(model, batch)
    fa2patch.apply(model, prove=False)
    assert expected[2] and all("lora" in name for name in expected[2])
    assert_equal(computed(model, batch.packed()), expected)


@pytest.mark.parametrize("family", ["t5", "bart", pytest.param("whisper", marks=pytest.mark.slow)])
def test_a_compiled_model(family):
    model, batch = built(family), pairs(family)
    expected = alone(model, batch)
    fa2patch.apply(model, prove=False)
    compiled = torch.compile(model, backend="aot_eager")
    assert_equal(computed(model, batch.packed()), expected)
    model.zero_grad()
    output = compiled(**batch.packed())
    output.loss.backward()
    assert_equal((output.loss.item(), output.logits[0].detach(), gradients(model)), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("start", [0, 5])
def test_inputs_that_a_model_hides_are_an_error(start):
    # BERT as both stacks: what is made of labels and is the padding's token is hidden in padded training
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    stacks = (
        transformers.BertConfig(**sizes),
        transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True),
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*stacks)
    config.pad_token_id, config.decoder_start_token_id = 0, start
    model, batch = scaled_up(transformers.EncoderDecoderModel(config)), pairs("bart")
    expected = alone(model, batch)
    fa2patch.apply(model, prove=False)
    packed = batch.packed()
    if start:
        assert_equal(computed(model, packed), expected)
        padding = {"labels": -100, "input_ids": 0}
        for name in packed:  # a document of padding in both rows
            more = torch.full((1, 3), padding[name]) if name in padding else torch.arange(3)[None]
            packed[name] = torch.cat([packed[name], more], 1)
        assert model(**packed).loss.item() == pytest.approx(expected[0], rel=1e-5)
        packed["labels"][0, 1] = 0
    with pytest.raises(PackingNotIsolated, match="hides those that are pad_token_id=0"):
        model(**packed)


class Counted(torch.nn.Embedding):
    def forward(self, tokens, past=0, position_ids=None):
        return super().forward(torch.arange(tokens.shape[1]).expand(tokens.shape))


@pytest.mark.parametrize("handed", [input, torch.zeros(1, 8, dtype=torch.long)], ids=["no tokens", "tokens"])
def test_positions_are_counted_in_each_document_whatever_is_handed_over(handed):
    # BART of 5.8 hands over Python's own `input`, beside position ids along the row
    table = Counted(20, 4)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    stack = torch.nn.ModuleDict({"positions": table})
    row = StackOfRow(stack, PackedMask(Boundaries(ends, 5), None, (1, 8), 5), ("positions",))
    found = row.positions(handed, 0, position_ids=torch.arange(8))
    assert torch.equal(found[0], torch.cat([table.weight[:3], table.weight[:5]]))
