"""How often a model is computed in order to prove a batch, and that what is computed less often hides no leak."""

import types

import pytest
import torch
from adapters import LORA
from small_models import DOCS, assert_right, called, labelled, llama, padded, patched, refusal
from torch.nn.functional import cross_entropy, log_softmax, pad
from transformers.modeling_outputs import CausalLMOutput

import fa2patch
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import documents, pack
from fa2patch.errors import PackingNotIsolated


@pytest.fixture
def times(monkeypatch):
    """How often each layer was computed since the last question."""
    counted, silu = [], torch.nn.functional.silu

    def counting(*args, **kwargs):
        counted.append(1)
        return silu(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "silu", counting)

    def asked(model):
        found = len(counted) / model.config.num_hidden_layers
        counted.clear()
        return found

    return asked


def around(change, **given):
    # A forward of the user's own on the object, with `change` between the base model and the head.
    def replace(model):
        def forward(self, input_ids=None, labels=None, **kwargs):
            kwargs.update(given)
            hidden = change(self.model(input_ids=input_ids, **{**kwargs, "use_cache": False})[0])
            logits = self.lm_head(hidden)
            loss = None if labels is None else cross_entropy(logits[0, :-1], labels[0, 1:])
            return CausalLMOutput(loss=loss, logits=logits)

        model.forward = types.MethodType(forward, model)

    return replace


def nothing(hidden):
    return hidden


def test_a_known_base_model_is_computed_once_for_all_runs_of_what_is_around_it(times):
    model = patched(change=around(nothing)).train()
    model(**labelled())
    assert times(model) == 2  # for the proof, and for the batch
    model(**labelled())  # batch 2 is proven, too
    assert times(model) == 2
    model(**labelled())
    assert times(model) == 1


def test_the_loss_of_such_a_model_is_right():
    model, reference = patched(change=around(nothing)), patched()
    assert_right(called(model, labelled()), called(reference, labelled()))


MIXING = {
    "the next token": lambda hidden: hidden + hidden.roll(1, 1),
    "a sum from the left": lambda hidden: hidden.cumsum(1),
    "the mean of the row": lambda hidden: hidden - hidden.mean(1, keepdim=True),
    "the gradient alone": lambda hidden: hidden + (hidden.roll(1, 1) - hidden.roll(1, 1).detach()),
}


@pytest.mark.parametrize("change", MIXING.values(), ids=MIXING)
def test_mixing_around_the_base_model_is_refused(change):
    model = patched(change=around(change))
    with refusal("the model itself", PackingNotIsolated):
        model.train()(**pack(DOCS))


def test_a_head_that_reads_the_length_of_the_row_is_refused():
    model = patched(change=around(lambda hidden: hidden * hidden.shape[1] ** -0.5))
    with refusal("length of the row", PackingNotIsolated):
        model(**pack(DOCS))


def scaled_in_long_rows(more):
    def replace(model):
        def forward(self, input_ids=None, **kwargs):
            hidden = self.model(input_ids=input_ids, **kwargs)[0]
            return {"logits": hidden * (1 + more * (hidden.shape[1] > max(map(len, DOCS))))}

        model.forward = types.MethodType(forward, model)

    return replace


def test_one_rounding_is_no_difference_where_nothing_shows_rounding():
    # The runs with other rounding show none: the base model is not computed again, and this head has no product. TRL's
    # fused loss was refused so, for a document of two tokens.
    patched(change=scaled_in_long_rows(2**-23))(**pack(DOCS))
    with refusal("length of the row", PackingNotIsolated):
        patched(change=scaled_in_long_rows(2**-18))(**pack(DOCS))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [512, 4096, 16384])
def test_long_sums_round_otherwise_in_a_row_of_another_length(size, seed):
    # A kernel adds up in another order for few tokens. Such a head was refused on one processor, with 16,384 numbers.
    draw = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(shape, generator=draw) for shape in ((32, size), (size, 32)))
    patched(change=around(lambda hidden: torch.sin(hidden @ up) @ down / size**0.5))(**pack(DOCS))


def embedding_mixed(model):
    def forward(self, input_ids=None, **kwargs):
        embedded = self.model.embed_tokens(input_ids)
        return self.model(inputs_embeds=embedded + embedded.roll(1, 1), **kwargs)

    model.forward = types.MethodType(forward, model)


def embedding_beside(model):
    def forward(self, input_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)[0]
        return {"logits": self.lm_head(hidden + self.model.embed_tokens(input_ids).roll(1, 1))}

    model.forward = types.MethodType(forward, model)


def other_tokens(model):
    def forward(self, input_ids=None, **kwargs):
        return self.model(input_ids=96 - input_ids, **kwargs)

    model.forward = types.MethodType(forward, model)


def twice(model):
    def forward(self, input_ids=None, **kwargs):
        first = self.model(input_ids=input_ids, **kwargs)[0]
        return {"logits": self.lm_head(first + self.model(input_ids=input_ids, **kwargs)[0].roll(1, 1))}

    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("replace", [embedding_mixed, embedding_beside, twice])
def test_what_reaches_the_base_model_otherwise_is_refused(replace):
    model = patched(change=replace)
    with pytest.raises(PackingNotIsolated):
        model(**pack(DOCS))


def test_with_other_tokens_the_whole_model_is_proven(times):
    model = patched(change=other_tokens)
    model(**pack(documents(4, 4, 4)))
    assert times(model) > 5


def of_the_next_token(change):
    # As TRL's fused head, it returns one log-probability less than there are tokens, and no logits.
    def replace(model):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids, **{**kwargs, "use_cache": False})[0]
            probabilities = log_softmax(self.lm_head(change(hidden)), -1)[:, :-1]
            found = probabilities.gather(-1, input_ids[:, 1:, None])[..., 0]
            return {"log_probs": torch.where(pad(labels, (0, 1))[:, 1:-1] == -100, 0.0, found)}

        model.forward = types.MethodType(forward, model)

    return replace


def test_predictions_without_one_for_the_last_token_are_compared():
    patched(change=of_the_next_token(nothing))(**labelled())
    for change in MIXING.values():
        model = patched(change=of_the_next_token(change))
        with refusal("the model itself", PackingNotIsolated):
            model.train()(**labelled())


# What is called may be a part of the patched model


def test_a_padded_batch_is_packed_below_what_is_unknown_so_that_nothing_is_proven(times):
    model = patched(change=around(nothing), padded_batches=True).train()
    model(**padded())
    assert times(model) == 1 + 1  # and once to look for what reads padding
    model(**pack(DOCS))  # and this one is
    assert times(model) == 2


def test_what_is_unknown_below_is_proven_in_a_padded_batch():
    def change(model):
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda hidden, own=mlp.forward: own(hidden) + hidden.cumsum(1)

    model = patched(change=change, padded_batches=True)
    with refusal("layers.0.mlp", PackingNotIsolated):
        model(**padded())


# Repeats, and adapters


def test_a_repeat_takes_five_runs_and_one_document(times):
    def change(model):
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda hidden, own=mlp.forward: own(hidden)

    model = patched(change=change).train()
    model(**pack(DOCS))
    first = times(model) - 1
    model(**pack(DOCS))
    assert first == 5 + 2 * 2 + len(DOCS)
    assert times(model) - 1 == 5 + 1


@pytest.mark.parametrize("more", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
def test_lora_s_own_layers_are_known(more, times):
    peft = pytest.importorskip("peft")
    if more and "use_dora" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip(f"PEFT {peft.__version__} has no DoRA")
    model = peft.get_peft_model(llama(), peft.LoraConfig(**{**LORA, **more}))
    fa2patch.apply(model)
    model.train()(**pack(DOCS))
    assert (times(model) == 1) is (not more)


@pytest.mark.parametrize("change", [around(nothing), lambda model: own_mlp(model)], ids=["around", "inside"])
def test_a_document_of_padding_with_zero_embeddings_is_no_reason(change):
    # axolotl pads its rows so. The fifth document is alone in one of the exchanged sets.
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
    model = patched(model, change)
    with torch.no_grad():
        model(**pack([*documents(4, 3, 5, 3), torch.zeros(6, dtype=torch.int64)]))


def own_mlp(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda hidden, own=mlp.forward: own(hidden)


def twice_padded(model):
    # The second call has other tokens.
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        given = {"attention_mask": attention_mask, "use_cache": False}
        hidden = self.model(input_ids=input_ids, **given)[0] + self.model(input_ids=96 - input_ids, **given)[0]
        logits = self.lm_head(hidden)
        return CausalLMOutput(loss=cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits=logits)

    model.forward = types.MethodType(forward, model)


def test_only_the_first_call_of_a_base_model_is_the_same_in_both_runs_of_a_trial(times, recwarn):
    model, reference = patched(change=twice_padded, padded_batches=True), llama()
    twice_padded(reference)
    expected = reference(**padded()).loss
    times(model)
    assert_close(model(**padded()).loss, expected, "loss")
    assert times(model) == 2 * (2 + 1) + 2  # each call is tried in two runs
    assert not [each for each in recwarn if issubclass(each.category, fa2patch.errors.StaysPadded)]


def test_a_compiled_padded_batch_says_that_it_stays_padded():
    model = torch.compile(patched(padded_batches=True), backend="eager")
    with pytest.warns(fa2patch.errors.StaysPadded, match="torch.compile cannot choose"):
        model(**padded())
    assert "torch.compile" in fa2patch.status(model).tally.why
