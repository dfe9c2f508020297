"""Models that ``apply`` refuses with what it found and what to do, or patches correctly, before any forward."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import transformers
from small_models import llama

import fa2patch
from compat_matrix import tiny_configs, tiny_models
from compat_matrix.check.rows import documents, pack
from fa2patch import errors
from fa2patch.upstream.find_models import token_embeddings

DOCS = documents(7, 3, 9, seed=5)


def named(*names):
    # This version may not have all of them.
    return [name for name in names if hasattr(transformers, name)]


def tiny(name, implementation=None, **settings):
    # The model is as small as its config allows.
    cls = getattr(transformers, name)
    small = {
        **tiny_models._small(cls.config_class),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        **dict.fromkeys(("max_target_positions", "max_source_positions"), 64),
    }
    config = tiny_configs.made(cls.config_class, {**small, **settings})
    model = tiny_models._load(cls, config, implementation) if implementation else cls(config)
    tiny_models.scale_up(model)
    return model.eval()


def as_it_was(model):
    # A refused ``apply`` must leave nothing behind.
    return fa2patch.status(model) is None and all("fa2patch" not in type(m).forward.__module__ for m in model.modules())


def refused(model, *said, error=errors.Fa2PatchError):
    with pytest.raises(error) as caught:
        fa2patch.apply(model)
    message = str(caught.value)
    assert all(words in message for words in said), message
    assert "padded" in message or "pip install" in message, f"what to do? {message}"
    assert as_it_was(model)
    return message


PICTURES = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                      "image_size": 16, "patch_size": 4},
    "qformer_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                       "encoder_hidden_size": 32, "vocab_size": 64},
}  # fmt: skip
SMALL_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    "name", named(*(f"{each}ForConditionalGeneration" for each in ("InstructBlip", "InstructBlipVideo", "Blip2")))
)
def test_a_text_side_that_is_an_encoder_decoder(name):
    # The outer config of InstructBLIP does not say so. Its padded batches were an error, with and without packing.
    cls = getattr(transformers, name)
    config = cls.config_class(**PICTURES, text_config={"model_type": "t5", **SMALL_T5}, num_query_tokens=4)
    refused(cls(config), "an encoder-decoder", name)


DECODERS = named(
    "BartForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "MarianForCausalLM", "MBartForCausalLM",
    "MusicgenForCausalLM", "PegasusForCausalLM", "PLBartForCausalLM", "WhisperForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_that_was_made_to_stand_behind_an_encoder(name):
    settings = {"decoder_start_token_id": 1} if name == "WhisperForCausalLM" else {}
    model = tiny(name, **settings)
    tokens = [doc[None] for doc in DOCS]
    expected = None if name == "MusicgenForCausalLM" else torch.cat([model(doc).logits[0] for doc in tokens])
    try:
        fa2patch.apply(model, prove=False)
    except errors.Fa2PatchError as error:
        said = str(error)
        assert "replaced after" not in said and expected is None
        assert any(words in said for words in ("codebooks", "position_ids", "found 0 such layers", "embeds token ids"))
        return
    if expected is not None:
        torch.testing.assert_close(model(**pack(DOCS)).logits[0], expected, rtol=1e-4, atol=1e-4)


def with_states(model, hidden, numbers=True):
    """The outputs of packed targets that see packed sources, and of each target alone with its own."""
    drawn = torch.Generator().manual_seed(2)
    states = [torch.randn(1, length, hidden, generator=drawn) for length in (3, 8, 5, 2)[: len(DOCS)]]
    model.eval()
    expected = torch.cat([model(doc[None], encoder_hidden_states=each)[0][0] for doc, each in zip(DOCS, states)])
    fa2patch.apply(model, prove=False)
    said = torch.cat([torch.full((1, each.shape[1]), at + 1) for at, each in enumerate(states)], 1)
    given = {"encoder_attention_mask": said} if numbers else {}
    return model(**pack(DOCS), encoder_hidden_states=torch.cat(states, 1), **given)[0][0], expected


@pytest.mark.parametrize("name", named("GPT2LMHeadModel", "BertLMHeadModel"))
def test_attention_to_an_encoder_in_a_decoder_that_can_have_it(name):
    settings = {"add_cross_attention": True, **({"is_decoder": True} if name == "BertLMHeadModel" else {})}
    try:
        found, expected = with_states(tiny(name, **settings), 32)
    except errors.LayerNotPatchable as error:
        assert "found 0 such layers" in str(error)  # GPT-2 up to 4.37
        return
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.BadBatch, match="number of the document of each source token"):
        with_states(tiny(name, **settings), 32, numbers=False)


class Counting(transformers.GPT2Model):
    # Bart's decoder in 5.x does so: positions are counted along the row, regardless of keyword arguments.

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return self.of(input_ids, attention_mask)

    def of(self, input_ids, attention_mask):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


class HandingOn(transformers.GPT2Model):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


OF_UDOP = ("packed attention has no way to say", "positions are embedded in cell_2d_embedding")
T5 = [name for name in ("T5", "MT5", "UMT5", "LongT5", "SwitchTransformers", "Udop") if named(f"{name}Model")]


def of_t5(name):
    # A model with two stacks of a kin of T5, whose blocks hold their parts in a list.
    sizes = {"d_kv": 8, "num_decoder_layers": 2, "dropout_rate": 0.0, "num_experts": 2, "router_jitter_noise": 0.0}
    taken = tiny_models.parameters(getattr(transformers, name).config_class)
    return tiny(name, d_model=32, d_ff=48, **{key: value for key, value in sizes.items() if key in taken})


@pytest.mark.parametrize("name", T5)
def test_a_decoder_of_t5_gives_no_document_the_states_of_another(name):
    # Up to 4.48 each document was given the states of all sources, or those at its own places in the row.
    model = of_t5(f"{name}Model").decoder
    try:
        found, expected = with_states(model, 32)
    except errors.UnsupportedModel as error:
        assert name == "Udop" and any(words in str(error) for words in OF_UDOP)
        return
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    fa2patch.revert(model)
    with pytest.raises(errors.BadBatch, match="number of the document of each source token"):
        with_states(model, 32, numbers=False)


STACKS = named("T5EncoderModel", "UMT5EncoderModel", "LongT5EncoderModel", "SwitchTransformersEncoderModel")


@pytest.mark.parametrize("name", [*STACKS, *(f"{name}Model" for name in T5), "BartModel", "M2M100Model"])
def test_an_encoder_alone_is_packed_or_refused_by_true_words(name):
    whole = tiny(name) if name in ("BartModel", "M2M100Model") else of_t5(name)
    stack = getattr(whole, "encoder", whole) if name not in STACKS else whole
    with torch.no_grad():
        expected = None if "Udop" in name else torch.cat([stack(input_ids=doc[None])[0][0] for doc in DOCS])
    try:
        fa2patch.apply(stack)
    except errors.LayerNotPatchable as error:
        assert "LongT5" in name and "looked in every layer" in str(error)  # its local attention
    except errors.UnsupportedModel as error:
        assert "Udop" in name and any(words in str(error) for words in OF_UDOP)
    else:
        torch.testing.assert_close(stack(**pack(DOCS))[0][0].detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not named("UdopModel"), reason="no Udop")
def test_pictures_of_an_encoder_that_computes_documents_apart_are_refused():
    # Udop's encoder puts patches behind the tokens of every document that it is called for.
    stack = of_t5("UdopModel").encoder
    try:
        fa2patch.apply(stack)
    except errors.UnsupportedModel:
        return  # from 4.49 on
    row = pack(DOCS)
    boxes, picture = torch.rand(1, row["input_ids"].shape[1], 4), torch.randn(1, 3, 32, 32)
    with pytest.raises(errors.PackingNotIsolated, match="pixel_values .*expected one entry for each token"):
        stack(**row, bbox=boxes, pixel_values=picture)


@pytest.mark.parametrize("name", named("BloomForCausalLM", "MptForCausalLM"))
def test_alibi_that_is_handed_to_no_kernel_is_named(name):
    refused(tiny(name), "adds alibi (build_", error=errors.LayerNotPatchable)


@pytest.mark.skipif(not named("LukeModel"), reason="no LUKE")
@pytest.mark.parametrize("entities", [2, 19])
def test_entities_of_their_own_beside_a_packed_row_are_refused(entities):
    model = tiny("LukeModel", entity_vocab_size=50, entity_emb_size=16)
    fa2patch.apply(model)
    numbers = torch.randint(1, 50, (1, entities), generator=torch.Generator().manual_seed(0))
    places = torch.zeros(1, entities, 2, dtype=torch.long)
    with pytest.raises(errors.PackingNotIsolated):
        model(**pack(DOCS), entity_ids=numbers, entity_position_ids=places)


@pytest.mark.skipif(not tiny_models.is_present("gpt2"), reason="GPT-2 has no flash attention in this version")
def test_a_forward_that_swallows_position_ids():
    model = tiny_models.build("gpt2")
    model.transformer.__class__ = HandingOn
    with fa2patch.apply(model):
        pass
    model.transformer.__class__ = Counting
    fa2patch.apply(model, prove=False)
    with pytest.raises(errors.PackingNotIsolated, match="counts positions in wpe"):
        model(**pack(DOCS))


BOTH_WAYS = {"gemma3_text": True, "gemma4_text": "all"}


def sees_later_tokens(name):
    if not tiny_models.is_present(name):
        return False
    return "use_bidirectional_attention" in inspect.getsource(tiny_models.modeling(name))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(filter(sees_later_tokens, BOTH_WAYS)))
class TestADecoderWhoseTokensSeeLaterOnes:
    # EmbeddingGemma is one: its windows, of seven and eight tokens around each token, end inside the documents.

    def model(self, name, implementation):
        return tiny_models.build(name, implementation, use_bidirectional_attention=BOTH_WAYS[name], sliding_window=8)

    def test_computes_each_document_as_alone(self, name, implementation):
        model, docs = self.model(name, implementation), DOCS
        alone = torch.cat([model(input_ids=doc[None], use_cache=False).logits[0] for doc in docs])
        with fa2patch.apply(model):
            packed = model(**pack(docs)).logits[0]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5 * alone.abs().max().item())

    def test_sees_later_tokens_and_no_other_document(self, name, implementation):
        model, docs = self.model(name, implementation), DOCS
        changed = [*docs[:2], docs[2].clone()]
        changed[2][1] = (changed[2][1] + 1) % 90 + 3
        with torch.no_grad(), fa2patch.apply(model):
            before, after = (model(**pack(given)).logits[0] for given in (docs, changed))
        assert torch.equal(before[:10], after[:10]), "other documents"
        assert not torch.equal(before[10], after[10]), "the token before"

    def test_sends_no_gradient_to_another_document(self, name, implementation):
        model, docs = self.model(name, implementation), DOCS
        embedded = model.get_input_embeddings()(pack(docs)["input_ids"]).detach().requires_grad_()
        ids = pack(docs)["position_ids"]
        extra = {"input_ids": pack(docs)["input_ids"]} if name == "gemma4_text" else {"inputs_embeds": embedded}
        handle = model.get_input_embeddings().register_forward_hook(lambda *_: embedded)
        try:
            with fa2patch.apply(model, prove=False):  # the hook gives the same embeddings in each run
                model(position_ids=ids, **extra).logits[0, 7:10].square().sum().backward()
        finally:
            handle.remove()
        reached = embedded.grad[0].abs().sum(-1) > 0
        assert reached.tolist() == [False] * 7 + [True] * 3 + [False] * 9


CONTRADICTORY = {
    "gemma": {"use_bidirectional_attention": True},
    "gemma2": {"use_bidirectional_attention": True},
    "gemma3": {"use_bidirectional_attention": True},
    "llama": {"is_causal": False},
}


def is_read(name):
    if not tiny_models.is_present(name):
        return False
    (setting,) = CONTRADICTORY[name]
    if setting == "is_causal":
        make = getattr(tiny_models.modeling(name), "create_causal_mask", None)
        return make is not None and setting in inspect.unwrap(make).__code__.co_consts
    return setting in inspect.getsource(tiny_models.modeling(name))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(filter(is_read, CONTRADICTORY)))
def test_masks_that_say_another_direction_than_the_layers(name, implementation):
    # Eager follows the mask, and sdpa without a mask follows the layer, so the logits depend on the implementation.
    if name == "gemma2":
        implementation = "eager"  # the only one it supports
    model = tiny_models.build(name, implementation, **CONTRADICTORY[name])
    if name != "gemma3" or "token_type_ids" not in inspect.signature(tiny_models.build(name).model.forward).parameters:
        refused(model, "later ones", "is_causal", error=errors.UnsupportedModel)
        return
    fa2patch.apply(model)  # a batch may say which tokens see each other
    with pytest.raises(errors.PackingNotIsolated, match="(?s)later ones.*no token_type_ids"):
        model(input_ids=torch.tensor([[5, 6, 7, 8]]), position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=False)


@pytest.mark.skipif(not tiny_models.is_present("esm:masked"), reason="no ESM")
def test_esm_is_taken_where_its_class_for_flash_attention_calls_a_method_that_was_removed():
    # The class is that of 4.54 and 4.55. Packed rows are computed by the eager code.
    docs, model = DOCS, tiny_models.build("esm:masked")
    expected = torch.cat([model(doc[None]).logits[0] for doc in docs])
    with fa2patch.apply(model):
        assert torch.allclose(model(**pack(docs)).logits[0], expected, atol=1e-4)


def partly(original):
    return functools.partialmethod(original, output_attentions=False)


@pytest.mark.parametrize("where", ["the model", "its base model", "an attention layer", "an MLP"])
def test_a_forward_that_is_no_function(where):
    model = tiny_models.build("llama")
    layer = model.model.layers[0]
    module = {"the model": model, "its base model": model.model, "an attention layer": layer.self_attn,
              "an MLP": layer.mlp}[where]  # fmt: skip
    cls = type(module)
    module.__class__ = type(f"Partial{cls.__name__}", (cls,), {"forward": partly(cls.forward)})
    message = refused(model, "partialmethod", f"Partial{cls.__name__}", error=errors.LayerNotPatchable)
    assert "def forward" in message


HEADS = named(
    "RobertaForSequenceClassification", "RobertaForMultipleChoice", "RobertaForQuestionAnswering",
    "BertForNextSentencePrediction", "BertForPreTraining", "BertForSequenceClassification",
    "ModernBertForSequenceClassification", "ModernBertForMultipleChoice", "GPT2DoubleHeadsModel",
    "LlamaForQuestionAnswering", "Qwen2ForQuestionAnswering", "AlbertForPreTraining", "DistilBertForQuestionAnswering",
)  # fmt: skip


def handing_on(self, *args, **kwargs):
    return super(type(self), self).forward(*args, **kwargs)


@pytest.mark.parametrize("way", ["itself", "a subclass", "a subclass with a forward"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_makes_one_result_of_a_row(name, way):
    model = tiny(name)
    if way != "itself":
        forward = {} if way == "a subclass" else {"forward": handing_on}
        model.__class__ = type("Mine", (type(model),), forward)
    refused(model)


TOKEN_HEADS = named(
    "RobertaForTokenClassification", "BertForMaskedLM", "LlamaForTokenClassification", "ElectraForPreTraining",
    "LlamaForSequenceClassification", "GPT2ForSequenceClassification",
)  # fmt: skip


@pytest.mark.parametrize("name", TOKEN_HEADS)
def test_a_head_that_reads_every_token_or_the_last_is_not_taken_for_one_of_rows(name):
    try:
        patch = fa2patch.apply(tiny(name))
    except errors.Fa2PatchError as error:
        assert "whole row" not in str(error) and "one vector" not in str(error), error
    else:
        patch.revert()


NO_TOKEN_IDS = named(
    "ASTModel", "BeitModel", "CLIPVisionModel", "DecisionTransformerModel", "Dinov2Model", "HubertModel",
    "PixtralVisionModel", "SegformerModel", "SiglipVisionModel", "SwinModel", "VJEPA2Model", "VideoMAEModel",
    "ViTForImageClassification", "ViTModel", "Wav2Vec2Model",
)  # fmt: skip
COMPARING = named("AltCLIPModel", "CLIPModel", "CLIPSegModel", "ChineseCLIPModel", "SiglipModel", "XCLIPModel")


def on_meta(name):
    # A model of the default size without memory is enough for a refusal.
    cls = getattr(transformers, name)
    linspace = torch.linspace

    def on_cpu(*args, **kwargs):  # up to 4.52, some models read drop rates out of it while they are built
        return linspace(*args, **{**kwargs, "device": "cpu"})

    with pytest.MonkeyPatch.context() as patching, torch.device("meta"):
        patching.setattr(torch, "linspace", on_cpu)
        return cls(cls.config_class())


@pytest.mark.parametrize("name", NO_TOKEN_IDS)
def test_a_model_without_token_ids_is_refused_as_verify_refuses_it(name):
    model = on_meta(name)
    message = refused(model, "embeds token ids", name, error=errors.NotAModel)
    with pytest.raises(errors.NotAModel) as caught:
        token_embeddings(model)  # what verify calls
    assert str(caught.value) == message and as_it_was(model)


def test_a_whisper_encoder_is_refused():
    with torch.device("meta"):
        encoder = transformers.WhisperModel(transformers.WhisperConfig()).get_encoder()
    refused(encoder, "embeds token ids", error=errors.NotAModel)


@pytest.mark.parametrize("name", COMPARING)
def test_a_model_that_compares_texts_with_images_is_refused(name):
    model = on_meta(name)
    refused(model, "pools one vector per row", "texts with images", error=errors.UnsupportedModel)
    assert as_it_was(model)


def test_a_language_model_without_get_input_embeddings_is_not_refused_for_that():
    class Remote(transformers.LlamaForCausalLM):
        def get_input_embeddings(self):
            raise NotImplementedError

    with fa2patch.apply(Remote(tiny_models.config_of("llama"))) as patch:
        assert patch.layers


def test_attention_that_another_package_has_replaced_is_named(monkeypatch):
    # Unsloth does so on a GPU: its functions are the forwards of Transformers' classes.

    def their_forward(self, hidden_states, **rest):
        return hidden_states, None

    their_forward.__module__ = "faster.llama"
    if {layer.seam for layer in fa2patch.apply(llama()).attention} != {"interface"}:
        pytest.skip("packed rows are computed by the class for flash attention, which nobody has replaced here")
    model = llama()
    for cls in {type(layer.self_attn) for layer in model.model.layers}:
        monkeypatch.setattr(cls, "forward", their_forward)
    with pytest.raises(
        fa2patch.errors.LayerNotPatchable, match=r"Attention\w* is not Transformers' own but that of faster"
    ):
        fa2patch.apply(model)
