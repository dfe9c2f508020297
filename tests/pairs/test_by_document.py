"""Stacks of encoder-decoders with local, sparse, merged or n-gram attention: each document is computed by itself."""

from __future__ import annotations

import pytest
import torch
import transformers
from pairs import FAMILIES as EVERY
from pairs import VOCABULARY, Pairs, alone, counted, embedded, gradients, pairs, scaled_up

import fa2patch
from compat_matrix.check.compare import assert_same_gradients
from fa2patch.errors import PackingNotIsolated, UnsupportedModel

_BART, _T5, _GEMMA = (values[2] for values in map(EVERY.get, ("bart", "t5", "t5gemma")))
_LONG = {**_T5, "local_radius": 3, "global_block_size": 2}
_SHORT = {name: value for name, value in _BART.items() if name != "max_position_embeddings"}
_LED = {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
_BIG_BIRD = {**_BART, "block_size": 1, "num_random_blocks": 1}

# The class of the model without ForConditionalGeneration, and the config's values
FAMILIES = {
    "local LongT5": ("LongT5", {**_LONG, "encoder_attention_type": "local"}),
    "global LongT5": ("LongT5", {**_LONG, "encoder_attention_type": "transient-global"}),
    "LED": ("LED", {**_SHORT, **_LED}),
    "sparse BigBirdPegasus": ("BigBirdPegasus", {**_BIG_BIRD, "attention_type": "block_sparse"}),
    "full BigBirdPegasus": ("BigBirdPegasus", {**_BIG_BIRD, "attention_type": "original_full"}),
    "PegasusX": ("PegasusX", {**_BART, "block_size": 4, "num_global_tokens": 2}),
    "T5Gemma2": ("T5Gemma2", {}),
}  # fmt: skip
# Sparse attention of BigBirdPegasus is full attention up to 7 blocks.
SOURCES, TARGETS = (9, 12, 10, 17), (5, 1, 7, 6)


def config_of(name, values):
    if name != "T5Gemma2":
        return getattr(transformers, f"{name}Config")(**values)
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sight, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
    text = {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}
    encoder = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    return transformers.T5Gemma2Config(
        encoder=encoder, decoder={**text}, vocab_size=VOCABULARY, eoi_token_index=VOCABULARY - 1
    )


def built(family):
    name, values = FAMILIES[family]
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    return scaled_up(getattr(transformers, f"{name}ForConditionalGeneration")(config_of(name, values)))


def batch_of() -> Pairs:
    return pairs("t5", SOURCES, TARGETS)


def apart(model):
    stacks = (model.get_encoder(), model.get_decoder())
    return [all(layer.seam == "document" for layer in fa2patch.status(stack).layers) for stack in stacks]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_pair_is_computed_as_alone(family, training):
    model, batch = built(family).train(training), batch_of()
    loss, logits, expected = alone(model, batch)
    fa2patch.apply(model, prove=False)
    assert apart(model)[0] or family == "full BigBirdPegasus"
    model.zero_grad()
    output = model(**batch.packed())
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(output.logits[0], logits, rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients(model), expected, 1e-4, 0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_crosses_from_one_pair_to_another(family):
    model, batch, changed = built(family), batch_of(), batch_of()
    fa2patch.apply(model, prove=False)
    before = model(**batch.packed()).logits[0].split(TARGETS)
    changed.sources[2] = changed.sources[2].roll(1, -1)
    changed.targets[2] = (changed.targets[2] + 5) % 60 + 3
    after = model(**changed.packed()).logits[0].split(TARGETS)
    moved = [(one - other).abs().max().item() for one, other in zip(before, after)]
    assert moved[2] > 0.01 and [value for at, value in enumerate(moved) if at != 2] == [0, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_gradient_crosses(family):
    model, batch = built(family), batch_of()
    fa2patch.apply(model, prove=False)
    leaves = embedded(model)
    logits = model(**batch.packed()).logits[0].split(TARGETS)
    found = torch.autograd.grad(logits[2].square().sum(), leaves, allow_unused=True)  # what is padded with is not used
    for lengths in (SOURCES, TARGETS):
        # of a row, or of the documents, where the stack embeds each by itself
        of_row = [of for of in found if of is not None and of.shape[1] == sum(lengths)]
        pieces = of_row[0][0].split(lengths) if of_row else _in_order(found, leaves, lengths)
        sizes = [0.0 if piece is None else piece.abs().max().item() for piece in pieces]
        assert sizes[2] > 0 and [size for at, size in enumerate(sizes) if at != 2] == [0, 0, 0]


def _in_order(found, leaves, lengths):
    seen = [each.shape[1] for each in leaves]
    at = next(at for at in range(len(seen)) if tuple(seen[at : at + len(lengths)]) == lengths)
    return found[at : at + len(lengths)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_batch_is_proven(family):
    # also where a source that is embedded by itself is as long as all targets
    model, batch = built(family), pairs("t5", SOURCES, (5, 1, 7, 4))
    expected = alone(model, batch)
    fa2patch.apply(model, prove=True)
    torch.testing.assert_close(model(**batch.packed()).logits[0], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["LED", "local LongT5", "T5Gemma2"])
def test_dense_batches_and_generation_are_as_before(family):
    model, batch = built(family), batch_of()
    padded = batch.padded(model.config.pad_token_id if family != "T5Gemma2" else 0)
    asked = {"max_new_tokens": 4, "attention_mask": padded["attention_mask"]}
    before, generated = model(**padded).logits, model.generate(padded["input_ids"], **asked)
    fa2patch.apply(model, prove=False)
    assert torch.equal(model(**padded).logits, before)
    assert torch.equal(model.generate(padded["input_ids"], **asked), generated)
    fa2patch.revert(model)
    assert torch.equal(model(**padded).logits, before)


def test_global_attention_of_led_is_that_of_each_source():
    model, batch = built("LED"), batch_of()
    first = [torch.zeros_like(source) for source in batch.sources]
    for mask in first:
        mask[0, 0] = 1
    each = [model(**batch.alone(at), global_attention_mask=mask).logits[0] for at, mask in enumerate(first)]
    fa2patch.apply(model, prove=False)
    found = model(**batch.packed(), global_attention_mask=torch.cat(first, 1)).logits[0]
    torch.testing.assert_close(found, torch.cat(each), rtol=1e-4, atol=1e-4)


def test_a_stack_that_changes_itself_is_refused():
    # for good: BigBirdPegasus has full attention from the first short source on
    model, batch = built("sparse BigBirdPegasus"), pairs("t5", (9, 3, 12), (2, 2, 2))
    fa2patch.apply(model, prove=False)
    with pytest.raises(PackingNotIsolated, match="changed its own attention_type from 'block_sparse' to 'original_ful"):
        model(**batch.packed())


def test_a_decoder_of_no_direction_sees_no_later_tokens_alone_either():
    # Pegasus X's layers say that they are a decoder's and that they are not causal.
    model, batch = built("PegasusX"), batch_of()
    decoder = model.get_decoder()
    states = [torch.randn(1, length, 32) for length in SOURCES]
    each = [decoder(input_ids=ids, encoder_hidden_states=of)[0] for ids, of in zip(batch.targets, states)]
    fa2patch.apply(decoder, prove=False)
    numbers = torch.cat([torch.full((1, length), at + 1) for at, length in enumerate(SOURCES)], 1)
    sources = {"encoder_hidden_states": torch.cat(states, 1), "encoder_attention_mask": numbers}
    found = decoder(input_ids=torch.cat(batch.targets, 1), position_ids=counted(batch.targets), **sources)[0]
    torch.testing.assert_close(found, torch.cat(each, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, sizes, reason",
    [
        ("ProphetNet", {"num_encoder_layers": 1, "num_decoder_layers": 1}, "computes 2 streams of states"),
        (
            "FSMT",
            {"encoder_layers": 1, "decoder_layers": 1},
            "FSMTForConditionalGeneration holds FSMTEncoder, which is no Transformers model",
        ),
    ],
)
def test_what_cannot_be_computed_by_document_is_refused_by_name(name, sizes, reason):
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(
            getattr(transformers, f"{name}Config")(**sizes)
        )
    with pytest.raises(UnsupportedModel, match=reason):
        fa2patch.apply(model)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), world_size=1, rank=0)
    yield
    torch.distributed.destroy_process_group()


def test_no_rank_of_a_sharded_model_waits_for_documents_of_others(one_rank):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no FSDP2")
    model = built("local LongT5")
    fa2patch.apply(model, prove=False)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for block in model.encoder.block:
        fsdp.fully_shard(block, mesh=mesh)
    with pytest.raises(PackingNotIsolated, match="computes each document by itself, and its parameters are sharded"):
        model(**batch_of().packed())


def test_a_target_of_one_token():
    # LED's decoder makes no mask of a row of one token
    model, batch = built("LED"), pairs("t5", (9,), (1,))
    expected = alone(model, batch)
    fa2patch.apply(model, prove=False)
    ids = torch.zeros(1, 1, dtype=torch.long)
    ends = {f"decoder_cu_seq_lens_{side}": torch.tensor([0, 1], dtype=torch.int32) for side in "qk"}
    of_sources = {f"cu_seq_lens_{side}": torch.tensor([0, 9], dtype=torch.int32) for side in "qk"}
    said = {**ends, **of_sources, "decoder_max_length_q": 1, "decoder_max_length_k": 1, "max_length_q": 9}
    output = model(**{**batch.packed(), **said, "max_length_k": 9, "decoder_position_ids": ids})
    assert output.loss.item() == pytest.approx(expected[0], rel=1e-5)


def test_a_decoder_of_no_direction_is_packed_with_eager_attention_only():
    # Pegasus X's layers say is_causal=False from 4.53 on, which all attention but eager goes by.
    model, batch = built("PegasusX"), batch_of()
    layer = model.model.decoder.layers[0].self_attn
    expected = alone(model, batch)
    fa2patch.apply(model, prove=False)
    if getattr(layer, "is_causal", None) is not False:
        return  # an older release
    model.model.decoder.config._attn_implementation = "sdpa"
    with pytest.raises(PackingNotIsolated, match="is_causal=False: with sdpa, its tokens see later ones"):
        model(**batch.packed())
    model.model.decoder.config._attn_implementation = "eager"
    assert model(**batch.packed()).loss.item() == pytest.approx(expected[0], rel=1e-5)
