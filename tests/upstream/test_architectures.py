"""Models of the installed Transformers that need more than an ordinary seam."""

import copy

import pytest
import torch
import transformers

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close, assert_same_gradients
from compat_matrix.check.rows import alone, documents, gradients, loss_of, pack
from fa2patch import errors
from fa2patch.upstream import architectures


def present(name):
    return pytest.mark.skipif(not tiny_models.is_present(name), reason=f"no {name} in {transformers.__version__}")


def gradients_of(model):
    # They are not reset.
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def docs():
    return documents(5, 9, 1, 7)


@present("qwen2_vl")
def test_ids_of_an_image_change_nothing_in_a_row_of_one_document():
    model = tiny_models.build("qwen2_vl", "sdpa")
    ids = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])[:, None]
    batch = {"input_ids": documents(8)[0][None], "position_ids": ids}
    before = model(**batch).logits
    with fa2patch.apply(model):
        assert torch.equal(model(**batch).logits, before)


@present("qwen2_vl")
@pytest.mark.parametrize("axes", [None, 3, 4])
def test_every_shape_of_ids_of_several_axes(docs, axes):
    model = tiny_models.build("qwen2_vl", "sdpa")
    expected, batch = alone(model, docs), pack(docs)
    if axes:
        batch["position_ids"] = batch["position_ids"].expand(axes, -1, -1)
    with fa2patch.apply(model):
        assert_close(model(**batch).logits[0], expected, f"{axes} axes")


@present("gemma3n_text")
def test_layers_that_share_keys_find_them(docs):
    model = tiny_models.build("gemma3n_text", "sdpa")
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).logits[0], alone(tiny_models.build("gemma3n_text", "eager"), docs), "logits")


@present("gemma3")
def test_a_padded_batch_whose_masks_are_a_dict_as_flash_attention_has_them(monkeypatch):
    # The model around the base model makes masks [batch, length] for each kind of layer.

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        seen = seen if attention_mask is None else seen & attention_mask[:, None, None, :].bool()
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, seen, scale=kwargs["scaling"], enable_gqa=True
        )
        return out.transpose(1, 2), None

    masking_utils = pytest.importorskip("transformers.masking_utils")
    makes = masking_utils.flash_attention_mask
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "two_dims", attend)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "two_dims", makes)
    model = tiny_models.build("gemma3", "two_dims")
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    batch = {"input_ids": torch.stack(documents(7, 7)).clamp(max=90), "attention_mask": mask}
    batch["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    before = model(**batch).logits[mask.bool()]
    with fa2patch.apply(model):
        assert torch.equal(model(**batch).logits[mask.bool()], before)


@present("ministral3")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_queries_of_ministral_3_are_scaled_by_the_position_in_the_document(docs, compiled, monkeypatch):
    # From 5.0 to 5.3 a layer takes ``cache_position`` in the place of ``position_ids``.
    modeling = tiny_models.modeling("ministral3")
    model = tiny_models.build("ministral3", "sdpa")
    rows = [documents(5, 9), documents(8, 6, seed=1)]
    batch = {name: torch.cat([pack(docs)[name] for docs in rows]) for name in pack(docs)}
    expected, of_rows = alone(model, docs), torch.stack([alone(model, docs) for docs in rows])
    if hasattr(modeling, "get_llama_4_attn_scale"):  # from 5.4 on
        scale = modeling.get_llama_4_attn_scale

        def along_the_row(positions, *settings):
            return scale(torch.arange(positions.shape[-1])[None], *settings)

        monkeypatch.setattr(modeling, "get_llama_4_attn_scale", along_the_row)
        monkeypatch.setattr(architectures, "_takes_cache_position", lambda cls: True)
    assert_close(alone(model, docs), expected, "logits of documents alone")
    with fa2patch.apply(model):
        run = torch.compile(model, backend="eager") if compiled else model
        assert_close(run(**pack(docs)).logits[0], expected, "logits")
        assert_close(run(**batch).logits, of_rows, "logits of two rows")


@present("phi3")
def test_longrope_whose_tables_are_made_for_the_row_is_refused_and_the_model_is_left_as_it_was(docs):
    # PhiMoE from 4.46 to 4.57 is so: its rotary module takes no ``position_ids``.
    factors = {name: [1.0 + i for i in range(4)] for name in ("short_factor", "long_factor")}
    scaling = {"rope_type": "longrope", "type": "longrope", "rope_theta": 1e4, **factors}
    known = tiny_models.parameters(tiny_models.config_class("phi3"))
    name = "rope_parameters" if "rope_parameters" in known else "rope_scaling"
    model = tiny_models.build("phi3", "sdpa", original_max_position_embeddings=16, **{name: scaling})

    class ForTheRow(torch.nn.Module):
        def forward(self, x, seq_len=None):
            return x

    rotary, model.model.rotary_emb = model.model.rotary_emb, ForTheRow()
    with pytest.raises(errors.UnsupportedModel, match="found that it takes the row's length only"):
        fa2patch.apply(model)
    model.model.rotary_emb = rotary
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).logits[0], alone(model, docs), "logits")


def test_a_layer_that_takes_cache_position_is_seen():
    class UpTo53(torch.nn.Module):
        def forward(self, hidden_states, attention_mask, cache_position=None, **kwargs):
            pass

    class From54(torch.nn.Module):
        def forward(self, hidden_states, attention_mask, position_ids, **kwargs):
            pass

    assert architectures._takes_cache_position(UpTo53) and not architectures._takes_cache_position(From54)


@pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpForCausalLM"), reason="no Qwen4-exp in this Transformers")
def test_embeddings_of_several_tokens_are_refused():
    # Such embeddings look at the ids before a token, also those of another document. No layer gets a mask for that.
    config = transformers.Qwen4ExpTextConfig(
        **{**tiny_models._small(transformers.Qwen4ExpTextConfig), "num_hidden_layers": 2},
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2,
        hc_count=2, hc_lowrank=8, ple_layer_ids=[1], ple_embed_dim=8, ngram_size=3, heads_per_ngram=2,
        ngram_vocab_size_base=50,
    )  # fmt: skip
    with pytest.raises(errors.UnsupportedModel, match="may look at more than boundaries can say"):
        fa2patch.apply(transformers.Qwen4ExpForCausalLM(config))


class TestLocalLayersOfGptNeo:
    # Every second layer sees a window of tokens. Transformers' eager code has it; its flash class forgets it.

    WINDOW = 4

    def models(self, implementation, **changes):
        changes = {"window_size": self.WINDOW, **changes}
        return (tiny_models.build("gpt_neo", name, **changes) for name in ("eager", implementation))

    @pytest.mark.parametrize("kinds", [["global", "local"], ["local"], ["global"]], ids="-".join)
    def test_packed_rows_have_the_window_that_eager_code_has(self, docs, kinds):
        reference, model = self.models("eager", attention_types=[[kinds, 2 // len(kinds)]])
        expected = alone(reference, docs)
        wide = tiny_models.build("gpt_neo", attention_types=[[kinds, 2 // len(kinds)]], window_size=64)
        assert torch.equal(alone(wide, docs), expected) == ("local" not in kinds)
        with fa2patch.apply(model):
            assert_close(model(**pack(docs)).logits[0], expected, "logits")

    def test_the_window_stays_with_a_copy_and_through_a_recomputed_backward(self, docs):
        reference, model = self.models("eager")
        expected = alone(reference, docs)
        loss_of(expected, docs).backward()
        with fa2patch.apply(model):
            for patched in (model, copy.deepcopy(model)):
                patched.gradient_checkpointing_enable()
                patched.enable_input_require_grads()
                found = patched.train()(**pack(docs)).logits[0]
                assert_close(found, expected, "logits")
                loss_of(found, docs).backward()
                assert_same_gradients(gradients(patched), gradients_of(reference), 5e-5, floor=0.01)

    @pytest.mark.slow
    def test_the_window_is_in_a_compiled_graph(self, docs):
        reference, model = self.models("eager")
        expected = alone(reference, docs)
        torch._dynamo.reset()
        with fa2patch.apply(model), torch.no_grad():
            assert_close(torch.compile(model, backend="eager")(**pack(docs)).logits[0], expected, "compiled at once")
            assert_close(model(**pack(docs)).logits[0], expected, "then not compiled")


class TestPromptsInOneRow:
    # A cache of a packed row mixes documents. Transformers' continuous batching keeps one for each document.

    def test_generate_refuses_a_packed_row(self, docs):
        model = tiny_models.build("llama", "sdpa")
        with fa2patch.apply(model), pytest.raises(errors.PackedWithCache, match="documents one by one"):
            model.generate(**pack(docs), max_new_tokens=2)

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(transformers.LlamaForCausalLM, "generate_batch"), reason="no continuous batching")
    def test_continuous_batching_goes_on_as_it_did(self, docs):
        prompts = [doc.tolist() for doc in docs]
        model = tiny_models.build("llama", "sdpa")
        wanted = transformers.GenerationConfig(
            max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0, num_blocks=64, max_batch_tokens=64
        )
        expected = [
            model.generate(doc[None], max_new_tokens=4, do_sample=False, eos_token_id=None)[0, len(doc) :].tolist()
            for doc in docs
        ]
        with fa2patch.apply(model):
            found = model.generate_batch(inputs=prompts, generation_config=wanted)
        assert [result.generated_tokens for result in found.values()] == expected
