"""Custom heads and forwards around the layers: replaced on the object or the class, pooling, spans."""

import functools
import re
import types

import pytest
import torch
import transformers
from adapters import with_lora
from small_models import (
    DOCS,
    Result,
    alone,
    assert_right,
    called,
    class_of,
    config_of,
    labelled,
    labels_of,
    llama,
    own_forward,
    patched,
    replaced,
    right_or_refused,
    small,
    told,
    with_gradients,
)
from torch.nn.functional import cross_entropy

import fa2patch

BATCHES = ("position_ids", "all lengths")


# A forward that replaces the causal LM's and computes its own loss, like fused losses


def on_the_object(model):
    model.forward = types.MethodType(own_forward, model)


def as_a_closure(model):
    model.forward = lambda *args, **kwargs: own_forward(model, *args, **kwargs)


def as_a_partial(model):
    model.forward = functools.partial(own_forward, self=model)


def as_an_object(model):
    class Forward:
        def __call__(self, *args, **kwargs):
            return own_forward(model, *args, **kwargs)

    model.forward = Forward()


def under_other_names(model):
    # The arguments are handed on in tuples and dictionaries of any name.
    model.forward = lambda *given, **named: own_forward(model, *given, **named)


def through_the_class_s(model):
    # Only the loss is changed. The forward that was replaced is called.
    inner = model.forward

    def forward(input_ids=None, labels=None, **kwargs):
        output = inner(input_ids=input_ids, **kwargs)
        if labels is not None:
            output["loss"] = cross_entropy(output.logits[0, :-1], labels[0, 1:], ignore_index=-100)
        return output

    model.forward = forward


def called_through(how, model, batch):
    return called(model, batch, model.forward if how == "model.forward(...)" else model)


REPLACED = [on_the_object, as_a_closure, as_a_partial, as_an_object, under_other_names, through_the_class_s]
CALLS = ("model(...)", "model.forward(...)", pytest.param("PEFT", marks=pytest.mark.slow))  # PEFT calls model(...)


@pytest.mark.parametrize("way", BATCHES)
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("order", ["before apply", "after apply"])
@pytest.mark.parametrize("replace", REPLACED)
def test_a_forward_replaced_on_the_object(replace, order, how, way):
    def run():
        model = llama()
        if order == "after apply":
            fa2patch.apply(model)
        replace(model)
        outer = with_lora(model) if how == "PEFT" else model
        if order == "before apply":
            fa2patch.apply(outer)
        return called_through(how, outer, labelled(way))

    reference = llama()
    right_or_refused(run, alone(with_lora(reference) if how == "PEFT" else reference))


@pytest.mark.parametrize("way", BATCHES)
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("order", ["before apply", pytest.param("after apply", marks=pytest.mark.slow)])
def test_a_forward_replaced_on_the_class(order, how, way):
    cls, model, reference = transformers.LlamaForCausalLM, llama(), llama()
    expected = alone(with_lora(reference) if how == "PEFT" else reference)

    def run():
        outer = with_lora(model) if how == "PEFT" else model
        batch = labelled(way)
        if order == "before apply":
            with replaced(cls, own_forward), fa2patch.apply(outer):
                return called_through(how, outer, batch)
        with fa2patch.apply(outer), replaced(cls, own_forward):
            return called_through(how, outer, batch)

    untouched = vars(cls)["forward"]
    right_or_refused(run, expected)
    assert vars(cls)["forward"] is untouched


@pytest.mark.parametrize("how", CALLS)
def test_one_that_nobody_replaced_is_right(how):
    model, reference = patched(), llama()
    if how == "PEFT":
        model, reference = with_lora(model), with_lora(reference)
    assert_right(called_through(how, model, labelled()), alone(reference))


def test_a_replaced_forward_computes_dense_batches_as_before():
    # The error is for packed batches only: a padded batch and a single document are computed.
    model, reference = patched(), llama()
    for one in (model, reference):
        on_the_object(one)
    rows = torch.stack([DOCS[2], DOCS[2].flip(0)])
    assert torch.equal(model(input_ids=rows, labels=rows).loss, reference(input_ids=rows, labels=rows).loss)


# One vector for each document


def by_document(model):
    # The documents' vectors [documents, n] of the unpatched model.
    return Result(torch.cat([logits_of(model(input_ids=doc[None])) for doc in DOCS]).detach())


def logits_of(output):
    return output.logits if hasattr(output, "logits") else output


def vectors(model, batch):
    return Result(logits_of(model(**batch)).detach())


class RewardModel(transformers.LlamaForSequenceClassification):
    pass


def hidden_of(model, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
    return model.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)[0]


class PoolsItself(transformers.LlamaForSequenceClassification):
    # It returns one vector per row, from its last token.

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        logits = self.score(hidden_of(self, input_ids, attention_mask, position_ids, **kwargs)[:, -1])
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(logits=logits)


class PoolsAMean(PoolsItself):
    # It returns one vector per row, from all its tokens.

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        logits = self.score(hidden_of(self, input_ids, attention_mask, position_ids, **kwargs).mean(1))
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(logits=logits)


class Scorer(transformers.LlamaPreTrainedModel):
    # A custom head on Llama's layers. Its output is a tensor [batch, 3].

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.head = torch.nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return self.head(hidden_of(self, input_ids, attention_mask, position_ids, **kwargs)[:, -1])


class CausalLMThatPools(transformers.LlamaForCausalLM):
    # A language model's class that nevertheless returns one vector per row.

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        logits = self.lm_head(hidden_of(self, input_ids, attention_mask, position_ids, **kwargs)[:, -1])
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(logits=logits)


POOLING = [RewardModel, PoolsItself, PoolsAMean, Scorer, CausalLMThatPools]


@pytest.mark.parametrize("way", ["position_ids", "seq_idx", "document numbers in the mask", "all lengths"])
@pytest.mark.parametrize("cls", POOLING)
def test_one_vector_for_each_document(cls, way):
    def run():
        return vectors(patched(llama(cls, num_labels=3)), told(way=way))

    right_or_refused(run, by_document(llama(cls, num_labels=3)))


@pytest.mark.parametrize("cls", [None, *POOLING])
def test_pooled_one_document_is_no_packed_row(cls):
    # A dense batch is computed as before with every head.
    cls = cls or transformers.LlamaForSequenceClassification
    model, reference = llama(cls, num_labels=3), llama(cls, num_labels=3)
    row = {"input_ids": DOCS[2][None]}
    expected = logits_of(reference(**row))
    try:
        fa2patch.apply(model)
    except fa2patch.Fa2PatchError:
        return
    assert torch.equal(logits_of(model(**row)), expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_reward_model_s_rows_compiled_too(compiled):
    def run():
        model = patched(llama(RewardModel, num_labels=1))
        return vectors(torch.compile(model, backend="eager") if compiled else model, told())

    right_or_refused(run, by_document(llama(RewardModel, num_labels=1)))


# A span in each row


@pytest.mark.parametrize("way", ["position_ids", "seq_idx", "all lengths"])
@pytest.mark.parametrize("asked", [False, True], ids=["logits", "a loss"])
@pytest.mark.parametrize("derived", [False, True], ids=["itself", "a subclass"])
@pytest.mark.parametrize("name", ["LlamaForQuestionAnswering", "GPT2ForQuestionAnswering"])
def test_question_answering(name, derived, asked, way):
    # Logits belong to single tokens. The loss is over a row's tokens, so it is right for one document or refused.
    cls = class_of(name)
    cls = type(f"Our{name}", (cls,), {}) if derived else cls  # upstream chooses the loss by the class name
    config = config_of("gpt2" if "GPT2" in name else "llama", num_labels=2)
    starts, ends = torch.tensor([1]), torch.tensor([3])

    def loss_alone(model):
        output = model(input_ids=DOCS[0][None])
        loss = (cross_entropy(output.start_logits, starts) + cross_entropy(output.end_logits, ends)) / 2
        return with_gradients(model, loss)

    def spans(output):
        return torch.stack([output.start_logits[0], output.end_logits[0]], dim=-1).detach()

    def run():
        model = patched(small(cls, config))
        more = {"start_positions": starts, "end_positions": ends} if asked else {}
        output = model(**told(DOCS, way, **more))
        return Result(spans(output), *(with_gradients(model, output.loss) if asked else ()))

    model = small(cls, config)
    expected = Result(torch.cat([spans(model(input_ids=doc[None])) for doc in DOCS]))
    if asked:  # start and end are in the row's first document
        expected = Result(expected.logits, *loss_alone(model))
    right_or_refused(run, expected)


@pytest.mark.parametrize("copies", [1, 2], ids=["one for each document", "two for each document"])
def test_an_argument_with_a_value_for_each_document_goes_on_to_the_head(copies):
    # Such an argument fits the documents of the row, so it is not refused.
    kinds = torch.arange(len(DOCS) * copies).view(len(DOCS), copies).squeeze(-1)

    class Kinds(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, kinds=None, **kwargs):
            self.given = kinds
            return own_forward(self, input_ids, attention_mask, position_ids, labels, **kwargs)

    model = patched(llama(Kinds))
    found = called(model, told(labels=labels_of(DOCS), kinds=kinds))
    assert model.given is kinds
    assert_right(found, alone(llama(Kinds)))


WRONG_SHAPES = [(documents, *more) for documents in (0, len(DOCS) - 1, len(DOCS) + 1) for more in ((), (3,))]


@pytest.mark.parametrize("shape", [*WRONG_SHAPES, (1, 18), ()])
def test_labels_for_another_number_of_documents_are_refused(shape):
    model = patched(llama(transformers.LlamaForSequenceClassification, num_labels=3))
    labels = torch.zeros(shape, dtype=torch.float32 if shape[-1:] == (3,) and len(shape) > 1 else torch.int64)
    with pytest.raises(
        fa2patch.errors.BadBatch,
        match=rf"labels: expected one for each of the batch's {len(DOCS)} documents.*found {re.escape(str([*shape]))}",
    ):
        model(**told(labels=labels))


# The arguments of a forward that was set on the object


@pytest.mark.parametrize("way", BATCHES)
@pytest.mark.parametrize("order", ["before apply", "after apply"])
def test_a_closure_s_arguments_without_names_are_known_by_their_places(order, way):
    # Positional arguments must reach the forward on the object as they would without fa2patch.
    model, expected = llama(), alone(llama())

    def replace():
        def forward(input_ids, attention_mask=None, position_ids=None, labels=None, **kwargs):
            return own_forward(model, input_ids, attention_mask, position_ids, labels, **kwargs)

        model.forward = forward

    batch = labelled(way)
    places = [batch.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids", "labels")]
    if order == "after apply":
        fa2patch.apply(model)
    replace()
    if order == "before apply":
        fa2patch.apply(model)
    assert_right(called(model, batch, lambda **named: model(*places, **named)), expected)
