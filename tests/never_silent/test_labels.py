"""A document's last token never learns the next document's first token, whichever code computes the loss."""

import importlib
import inspect

import pytest
import torch
import transformers
from small_models import (
    DOCS,
    WAYS,
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
    refusal,
    right_or_refused,
    shifted,
    small,
    told,
    with_gradients,
)

import fa2patch

# The first label of each document: its first token, or another one. Neither is learned.
FIRST_LABELS = [None, 7]

# One layer compiles in half the time and has the same labels.
ONE_LAYER = {"num_hidden_layers": 1}

# Derived from the ids, and given explicitly: slow cases compile only these ways.
SEEN = ("position_ids", "all lengths")

# The least distance to the right loss of a loss that learns documents' first labels.
WRONG_IN_A_ROW = 1e-3


@pytest.fixture(autouse=True)
def nothing_compiled_is_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_forward(model, how, backend):
    if how == "torch.compile":
        return torch.compile(model, backend=backend)
    if not hasattr(model, "compile"):
        pytest.skip("this torch has no Module.compile")
    model.compile(backend=backend)
    return model


def right_or_refused_packed(make, batch, compiled=lambda model: model, expected=None):
    def run():
        model = patched(make())
        return called(model, batch, compiled(model))

    return right_or_refused(run, alone(make()) if expected is None else expected)


def compiled_eagerly(model):
    return torch.compile(model, backend="eager")


# The rule itself


def test_the_plain_model_is_right_and_not_refused():
    expected = alone(llama())
    for way in WAYS:
        for first in FIRST_LABELS:
            assert_right(called(patched(), told(way=way, labels=labels_of(DOCS, first))), expected)


def test_a_loss_that_learns_first_labels_is_seen():
    model, expected = patched(), alone(llama())
    logits = model(**told()).logits
    wrong = torch.nn.functional.cross_entropy(logits[0, :-1], torch.cat(DOCS)[1:])
    assert abs(wrong - expected.loss) > WRONG_IN_A_ROW
    with pytest.raises(AssertionError, match="loss"):
        right_or_refused(lambda: Result(logits[0], wrong), expected)


def test_an_error_that_says_too_little_does_not_pass():
    def refuse():
        raise fa2patch.Fa2PatchError("no")

    with pytest.raises(AssertionError, match="says too little"):
        right_or_refused(refuse, alone(llama()))
    with pytest.raises(AssertionError, match="says too little"), refusal("no"):
        refuse()


# Compiled


QUICK = [("torch.compile", "position_ids")]
# ``model.compile()`` differs only in how the model is called.
COMPILED = [("torch.compile", way) for way in WAYS] + [("model.compile", way) for way in SEEN]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how, way", [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in COMPILED if each not in QUICK)]
)
def test_compiled(how, way, backend):
    right_or_refused_packed(
        lambda: llama(**ONE_LAYER), labelled(way), lambda model: compiled_forward(model, how, backend)
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", SEEN)
def test_compiled_a_layer_that_missed_the_boundaries_is_an_error(way, backend):
    # Attention that is replaced in a layer after ``apply`` does not get the packed mask.
    model = patched()
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def without_mask(*args, **kwargs):
        kwargs["attention_mask"] = None
        return own(*args[:1], **kwargs)

    attention.forward = without_mask
    with refusal():
        torch.compile(model, backend=backend)(**labelled(way))


# Classes of any name


class MyModel(transformers.LlamaForCausalLM):
    pass


class RewardScorer(transformers.LlamaForCausalLM):
    pass


class CallsSuper(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        more = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
        return super().forward(input_ids=input_ids, **more, **kwargs)


class OwnLoss(transformers.LlamaForCausalLM):
    forward = own_forward


class Wrapped(transformers.LlamaForCausalLM):
    # Its labels never reach the forward that it inherits.

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), shifted(labels).flatten())
            output = transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=output.logits)
        return output


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [MyModel, RewardScorer, CallsSuper, OwnLoss, Wrapped])
def test_a_subclass(cls, way):
    expected = alone(llama(cls))
    for first in FIRST_LABELS:
        batch = told(way=way, labels=labels_of(DOCS, first))
        right_or_refused_packed(lambda: llama(cls), batch, expected=expected)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MyModel, OwnLoss, Wrapped])
def test_a_subclass_compiled(cls):
    right_or_refused_packed(lambda: llama(cls, **ONE_LAYER), labelled(), compiled_eagerly)


@pytest.mark.parametrize("derived", [False, True], ids=["itself", "a subclass"])
@pytest.mark.parametrize("way", ["position_ids", "seq_idx", "all lengths"])
def test_a_model_with_two_heads(way, derived):
    cls = class_of("GPT2DoubleHeadsModel")
    cls = type("Ours", (cls,), {}) if derived else cls
    right_or_refused_packed(
        lambda: small(cls, config_of("gpt2", summary_first_dropout=0.0, num_labels=1)), labelled(way)
    )


# Labels of several codebooks


class TwoBooks(transformers.LlamaForCausalLM):
    # Labels are [batch, length, 2], one for each codebook, like audio models'.

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        logits = super().forward(input_ids=input_ids, **given).logits
        books = labels[:, 1:].flatten(0, 1).unbind(-1)
        losses = [torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), book) for book in books]
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=sum(losses) / 2, logits=logits)


@pytest.mark.parametrize("way", WAYS)
def test_labels_of_several_codebooks(way):
    labels = labels_of()[..., None].expand(-1, -1, 2)
    assert_right(called(patched(llama(TwoBooks)), told(way=way, labels=labels)), alone(llama()))


@pytest.mark.parametrize("labels", [torch.rand(1, sum(map(len, DOCS)), 2), torch.zeros(1, 3, 2, dtype=torch.int64)])
def test_labels_that_cannot_be_masked_are_refused(labels):
    model = patched(llama(TwoBooks))
    with pytest.raises(fa2patch.errors.BadBatch, match="one for each token"):
        model(**told(labels=labels))


# Labels of the tokens themselves


def of_tokens(model, docs, labels):
    # Labels belong to the tokens themselves.
    logits = torch.cat([model(input_ids=doc[None]).logits[0] for doc in docs])
    loss = torch.nn.functional.cross_entropy(logits, labels[0])
    return Result(logits.detach(), *with_gradients(model, loss))


@pytest.mark.parametrize("derived", [False, True], ids=["itself", "a subclass"])
@pytest.mark.parametrize(
    "way, compiled",
    [("position_ids", False), ("all lengths", False), pytest.param("position_ids", True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ["GPT2ForTokenClassification", "LlamaForTokenClassification"])
def test_a_token_classifier_keeps_first_labels(name, way, compiled, derived):
    # Some versions choose the loss of a Llama's tagger by the class name alone, which the subclass keeps.
    cls = class_of(name)
    cls = type("Tagger" if "GPT2" in name else f"Our{name}", (cls,), {}) if derived else cls
    config = config_of("gpt2" if "GPT2" in name else "llama", num_labels=3, classifier_dropout=0.0, hidden_dropout=0.0)
    labels = labels_of() % 3
    expected = of_tokens(small(cls, config), DOCS, labels)
    compile_it = compiled_eagerly if compiled else lambda model: model
    verdict = right_or_refused_packed(
        lambda: small(cls, config), told(way=way, labels=labels), compile_it, expected=expected
    )
    assert verdict == "right"


@pytest.mark.parametrize("derived", [False, True], ids=["itself", "a subclass"])
@pytest.mark.parametrize("way", WAYS)
def test_a_masked_lm_keeps_first_labels(way, derived):
    config = config_of("bert:masked")
    cls = class_of("BertForMaskedLM")
    cls = type("Filler", (cls,), {}) if derived else cls
    expected = of_tokens(small(cls, config), DOCS, labels_of())
    right_or_refused_packed(lambda: small(cls, config), told(way=way, labels=labels_of()), expected=expected)


# Labels at the positions that predict them


def takes_shift_labels():
    # Whether this version's causal LM loss takes them. Transformers imports the loss module lazily.
    try:
        losses = importlib.import_module("transformers.loss.loss_utils")
    except ImportError:
        return False
    return "shift_labels" in inspect.signature(losses.ForCausalLMLoss).parameters


LONG_AND_SHORT = [(way, False) for way in WAYS] + [pytest.param(way, True, marks=pytest.mark.slow) for way in SEEN]


@pytest.mark.parametrize("way, compiled", LONG_AND_SHORT)
@pytest.mark.parametrize("cls", [None, MyModel], ids=["itself", "a subclass"])
def test_shift_labels_beside_labels(cls, way, compiled):
    # If ``shift_labels`` are given, upstream's loss uses them, and ``labels`` only request a loss.
    if not takes_shift_labels():
        pytest.skip(f"the loss of Transformers {transformers.__version__} takes no shift_labels")
    labels = labels_of()
    compile_it = compiled_eagerly if compiled else lambda model: model
    right_or_refused_packed(lambda: llama(cls), told(way=way, labels=labels, shift_labels=shifted(labels)), compile_it)


@pytest.mark.parametrize("way, compiled", LONG_AND_SHORT)
def test_shift_labels_alone(way, compiled):
    # The forward computes its own loss from nothing else, as under sequence parallelism.
    right_or_refused_packed(
        lambda: llama(OwnLoss),
        told(way=way, shift_labels=shifted(labels_of())),
        lambda model: torch.compile(model, backend="aot_eager") if compiled else model,
    )


# Nothing says where documents start


@pytest.mark.parametrize("labelled", [False, True], ids=["without labels", "with labels"])
@pytest.mark.parametrize("cls", [None, MyModel, OwnLoss], ids=["itself", "a subclass", "a loss of its own"])
def test_training_without_ids_is_warned_about(cls, labelled):
    model = patched(llama(cls).train())
    row = torch.cat(DOCS)[None]
    with pytest.warns(fa2patch.errors.NothingPacked):
        for _ in range(16):
            model(input_ids=row, **({"labels": row} if labelled else {}))


def test_training_with_ids_is_not_warned_about(recwarn):
    model = patched(llama().train())
    for _ in range(20):
        model(**labelled())
    assert not [warning for warning in recwarn if warning.category is fa2patch.errors.NothingPacked]


@pytest.mark.parametrize("masked", [False, True], ids=["without a mask", "with a mask of ones"])
def test_trainer_with_a_collator_that_gives_no_ids_is_warned_about(masked, tmp_path):
    pytest.importorskip("accelerate")
    model = patched()

    def collate(features):
        row = torch.cat([feature["input_ids"] for feature in features])[None]
        return {"input_ids": row, "labels": row, **({"attention_mask": torch.ones_like(row)} if masked else {})}

    cpu = {"use_cpu": True} if "use_cpu" in inspect.signature(transformers.TrainingArguments).parameters else {}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=4, save_strategy="no", report_to=[],
        disable_tqdm=True, **cpu,
    )  # fmt: skip
    examples = [{"input_ids": doc} for doc in DOCS * 20]
    trainer = transformers.Trainer(model, arguments, train_dataset=examples, data_collator=collate)
    with pytest.warns(fa2patch.errors.NothingPacked):
        trainer.train()
