"""``padded_batches=True`` where a head, a loss or an argument reads padding, which a packed row does not have.

The result must be that of padded training, loss and gradients: computed packed, or padded with a warning. Where a loss
of one's own reads padding, its backward is an error.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from small_models import assert_says_enough, class_of, of_family, patched, refusal, small, with_gradients
from torch.nn.functional import cross_entropy

import fa2patch
from compat_matrix.check.compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from fa2patch.documents import tensors
from fa2patch.errors import BadBatch, LayerNotPatchable, PackingNotIsolated, StaysPadded

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip

DROPOUTS_OF_GPT2 = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **dict.fromkeys(DROPOUTS_OF_GPT2, 0)},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "Roberta": {"pad_token_id": 1},
    "XLMRoberta": {"pad_token_id": 1},
    "MPNet": {"pad_token_id": 1},
    "ModernBert": {"reference_compile": False},
    "Electra": {"embedding_size": 32},
}

PAD, IGNORED = 2, -100
WIDTH = 8


def model_of(family: str, head: str, **more: Any) -> Any:
    labels = {"num_labels": 2} if "Question" in head else {}
    config = class_of(f"{family}Config")(**{**SIZES, **labels, **OTHER_SIZES.get(family, {}), **more})
    return small(class_of(f"{family}{head}"), config)


def batch_of(left: bool = False, pad: int = PAD, counted: bool = False, lengths: tuple[int, ...] = (3, 6)) -> Any:
    column, sizes = torch.arange(WIDTH), torch.tensor(lengths)[:, None]
    mask = (column >= WIDTH - sizes if left else column < sizes).long()
    ids = torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask}
    if counted:
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batch


def as_labels(batch: Any, first: bool = True) -> torch.Tensor:
    # Padding has no label. ``first``: whether a row's first token has one.
    real = batch["attention_mask"].bool()
    kept = real if first else real & (real.cumsum(1) > 1)
    labels: torch.Tensor = batch["input_ids"].masked_fill(~kept, IGNORED)
    return labels


def results(model: Any, batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    # The outputs are those of real tokens and of rows. The gradients are those of the loss, or of a sum of these
    # outputs.
    model.zero_grad()
    output, real = model(**batch), batch["attention_mask"].bool()
    found = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
    of_real = {name: value[real] if value.shape[:2] == real.shape else value for name, value in found.items()}
    loss = output.loss if output.get("loss") is not None else sum(value.sin().sum() for value in of_real.values())
    return {name: value.detach() for name, value in of_real.items()}, with_gradients(model, loss)[1]


@contextmanager
def nothing_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaysPadded)
        yield


def stays_padded(model: Any, batch: Any, **options: Any) -> bool:
    # Requires the results of the unpatched model. Returns whether a warning said that the batch stays padded.
    expected, gradients = results(copy.deepcopy(model), batch)
    try:
        fa2patch.apply(model, padded_batches=True, **options)
    except LayerNotPatchable as error:  # GPT-2 up to 4.46
        pytest.skip(f"this version's model is refused: {error.message[:60]}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, others = results(model, batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, name)
    assert_same_gradients(others, gradients, GRADIENT_TOLERANCE, 0.01)
    said = [str(each.message) for each in caught if isinstance(each.message, StaysPadded)]
    assert len(said) <= 1, said
    return bool(said)


SPANS = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([2, 4])}

LEFT, RIGHT = batch_of(True, counted=True), batch_of(counted=True)
CLASSES = {"labels": torch.tensor([0, 2])}
TYPES = (torch.arange(WIDTH) > 2).long()
SHAPES = {"[1, length]": TYPES[None], "[rows, 1]": torch.tensor([[0], [1]]), "[length]": TYPES}
OF_A_VECTORS_LENGTH = (torch.arange(40) < SIZES["hidden_size"]).long()[None]


def case(what: str, stays: bool, family: str, head: str, batch: Any, slow: bool = False, **more: Any) -> Any:
    return pytest.param(stays, family, head, batch, more, id=f"{what}, {family}", marks=[pytest.mark.slow] * slow)


def questions() -> Iterator[Any]:
    for family in ("Bert", "Roberta", "DistilBert", "Llama"):
        yield case("a softmax over the row", True, family, "ForQuestionAnswering", {**batch_of(), **SPANS})
    for family in ("Electra", "ModernBert", "Qwen2", "GPT2", "MPNet", "XLMRoberta", "Mistral"):
        yield case("a softmax over the row", True, family, "ForQuestionAnswering", {**batch_of(), **SPANS}, slow=True)
    yield case("without a loss over the row", False, "Bert", "ForQuestionAnswering", batch_of())


def labels() -> Iterator[Any]:
    for family, head in (("Llama", "ForCausalLM"), ("GPT2", "LMHeadModel")):
        first = {**LEFT, "labels": as_labels(LEFT)}
        yield case("the last token of padding predicts the first real one", True, family, head, first)
        yield case("the same in training", True, family, head, first, slow=True, training=True)
        for side, batch in (("left", LEFT), ("right", RIGHT)):
            given = {**batch, "labels": as_labels(batch, first=side == "right")}
            yield case(f"labels that real tokens predict, {side}", False, family, head, given)
    of_tokens: list[Any] = [("Bert", "ForMaskedLM", {}), ("Bert", "ForTokenClassification", {"num_labels": 97})]
    for side, batch in (("left", LEFT), ("right", RIGHT)):
        for family, head, more in [("Llama", "ForCausalLM", {}), *of_tokens]:
            given = {**batch, "labels": batch["input_ids"]}
            yield case(f"labels on padding, {side}, {head}", True, family, head, given, **more)
        for family, head, more in of_tokens:
            given = {**batch, "labels": as_labels(batch)}
            yield case(f"labels of real tokens, {side}, {head}", False, family, head, given, **more)
    # Electra's discriminator counts the tokens of the mask only, so its labels on padding say nothing.
    given = {**batch_of(), "labels": batch_of()["input_ids"] % 2}
    yield case("labels on padding that a head leaves out", False, "Electra", "ForPreTraining", given)


def embeddings() -> Iterator[Any]:
    for shape, types in SHAPES.items():
        # With as many real tokens as a row is long, a shape that was made for a row fits the packed row too.
        for what, lengths in (("other", (3, 6)), ("equal", (3, 5))):
            given = {**batch_of(lengths=lengths), "token_type_ids": types}
            yield case(f"token types {shape}, {what}", shape != "[1, length]", "Bert", "Model", given)
    for left in (False, True):
        for what, filler, real in (("a real token with the pad's id", 1, 1), ("padding without it", 7, 9)):
            batch = batch_of(left, pad=filler)
            batch["input_ids"][1, 3] = real
            yield case(f"{what}, {left}", left or filler == 1, "Roberta", "ForMaskedLM", batch)
        yield case(f"ordinary padding, {left}", False, "Roberta", "ForMaskedLM", batch_of(left, pad=1))
        yield case(f"a pooler with positions, {left}", left, "Bert", "Model", batch_of(left, counted=True))


def heads_of_rows() -> Iterator[Any]:
    for family in ("Bert", "Roberta", "DistilBert", "XLMRoberta"):
        slow = family in ("DistilBert", "XLMRoberta")
        for left in (False, True):
            given = {**batch_of(left, pad=int("Roberta" in family)), **CLASSES}
            yield case(f"the first token, {left}", left, family, "ForSequenceClassification", given, slow=slow)
    for left in (False, True):
        given = {**batch_of(left, pad=0, counted=True), **CLASSES}
        yield case(f"the last token, {left}", False, "Llama", "ForSequenceClassification", given)
    # It looks for the pad's id, and this batch is padded with another.
    given = {**batch_of(pad=7), **CLASSES}
    yield case("padding for the last token", True, "Llama", "ForSequenceClassification", given)
    given = {**batch_of(pad=0), "labels": torch.tensor([0, 1])}
    yield case("next sentence", False, "Bert", "ForNextSentencePrediction", given)
    given = {"input_ids": torch.arange(3, 43)[None], "attention_mask": OF_A_VECTORS_LENGTH}
    yield case("a pooled vector is no row of tokens", False, "Bert", "Model", given)


@pytest.mark.parametrize("stays, family, head, batch, more", [*questions(), *labels(), *embeddings(), *heads_of_rows()])
def test_what_reads_padding_stays_padded(stays: bool, family: str, head: str, batch: Any, more: Any) -> None:
    more = dict(more)
    training = more.pop("training", False)
    batch = {name: value.clone() for name, value in batch.items()}
    assert stays_padded(model_of(family, head, **more).train(training), batch) is stays


def test_what_a_call_asks_for_decides() -> None:
    # The first batches have no loss, so that nothing reads padding. Of the next ones, every other one has a loss.
    model = model_of("Bert", "ForQuestionAnswering")
    reference = copy.deepcopy(model)
    fa2patch.apply(model, padded_batches=True)
    for _ in range(3):
        model(**batch_of())
    batch = {**batch_of(), **SPANS}
    with pytest.warns(StaysPadded, match="BertForQuestionAnswering reads hidden states of padding"):
        assert_close(model(**batch).loss, reference(**batch).loss, "loss")
    with torch.no_grad():
        assert_close(model(**batch).loss, reference(**batch).loss, "loss without gradients")
    assert_close(model.train()(**batch).loss, reference.train()(**batch).loss, "loss in training")


def test_a_later_batch_with_labels_on_padding() -> None:
    # Labels are looked at in each batch, in the one read that a forward makes.
    model = model_of("Llama", "ForCausalLM")
    reference = copy.deepcopy(model)
    fa2patch.apply(model, padded_batches=True)
    batch = batch_of()
    for _ in range(5):
        model(**batch, labels=as_labels(batch))
    with pytest.warns(StaysPadded, match="labels that only padding predicts"):
        found = model(**batch, labels=batch["input_ids"]).loss
    assert_close(found, reference(**batch, labels=batch["input_ids"]).loss, "loss")


def test_labels_need_no_read_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = patched(model_of("Llama", "ForCausalLM"), padded_batches=True, prove=False), batch_of()
    read, reads = tensors.read, []
    monkeypatch.setattr(tensors, "read", lambda tensor: reads.append(tensor.shape) or read(tensor))
    model(**batch)
    without = len(reads)
    model(**batch, labels=as_labels(batch))
    assert len(reads) == 2 * without > 0


def test_roberta_with_embeddings_counts_padding_on_the_left() -> None:
    model, batch = model_of("Roberta", "ForMaskedLM"), batch_of(True, pad=1)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    assert stays_padded(model, batch)


def test_rows_of_several_choices_are_packed() -> None:
    model = model_of("Bert", "ForMultipleChoice")
    choices = {name: value[:, None].expand(2, 2, WIDTH).contiguous() for name, value in batch_of(pad=0).items()}
    choices["input_ids"][:, 1, 2] = 50
    expected = copy.deepcopy(model)(**choices, labels=torch.tensor([0, 1])).loss
    fa2patch.apply(model, padded_batches=True)
    with nothing_said():
        assert_close(model(**choices, labels=torch.tensor([0, 1])).loss, expected, "loss")


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_moe", "olmoe"))]
)
def test_router_losses_are_those_of_padding(family: str) -> None:
    # Releases that give their router loss no mask count padding in it: their batches stay padded.
    model = of_family(family, output_router_logits=True, router_aux_loss_coef=1.0)
    batch = batch_of(pad=0)
    stays_padded(model, {**batch, "labels": as_labels(batch)})


def test_a_base_model_that_pools_the_last_column() -> None:
    config = class_of("SiglipTextConfig")(**{**SIZES, "projection_size": 32, "num_labels": 2}, attention_dropout=0.0)
    model, batch = small(class_of("SiglipTextModel"), config), batch_of()
    expected = copy.deepcopy(model)(**batch).pooler_output
    try:
        fa2patch.apply(model, padded_batches=True)
    except fa2patch.Fa2PatchError as error:
        return assert_says_enough(error)
    with pytest.warns(StaysPadded, match="makes a vector of each row by itself"):
        assert_close(model(**batch).pooler_output, expected, "pooled")
    assert_close(model(**batch).pooler_output, expected, "pooled")


def test_the_step_after_a_padded_batch_that_filled_no_cache() -> None:
    # Its mask is longer than its tokens. The token alone would be computed, without those before it.
    model, batch = patched(model_of("Llama", "ForCausalLM"), padded_batches=True), batch_of()
    longer = torch.cat([batch["attention_mask"], torch.ones(2, 1).long()], 1)
    model(**batch)
    with refusal(r"found \[2, 9\] and no cache of earlier tokens.*use_cache=True", BadBatch):
        model(input_ids=torch.tensor([[5], [6]]), attention_mask=longer)


def test_logits_of_the_last_tokens() -> None:
    # Some of the last logits of rows that are padded on the right are of padding.
    model, name = model_of("Llama", "ForCausalLM"), "num_logits_to_keep"
    taken = inspect.signature(type(model).forward).parameters
    name = "logits_to_keep" if "logits_to_keep" in taken else name
    if name not in taken:
        pytest.skip("this version computes all logits")
    assert not stays_padded(model, {**batch_of(True, counted=True), name: 2})
    reference, batch = copy.deepcopy(model), {**batch_of(), name: 4}
    fa2patch.apply(model, padded_batches=True)
    with nothing_said():
        found, real = model(**batch).logits, batch["attention_mask"][:, -4:].bool()
    assert_close(found[real], reference(**batch).logits[real], "logits")


@pytest.mark.parametrize("way", ["inference mode", "autocast"])
def test_the_callers_mode_is_the_trials(way: str) -> None:
    model, batch = model_of("Llama", "ForCausalLM"), batch_of()
    batch["labels"] = batch["input_ids"]
    reference = copy.deepcopy(model)
    fa2patch.apply(model, padded_batches=True)
    if way == "inference mode":
        with torch.inference_mode(), pytest.warns(StaysPadded):
            assert_close(model(**batch).loss, reference(**batch).loss, "loss")
        return
    batch["labels"] = as_labels(batch)
    fa2patch.apply(reference, padded_batches=True, prove=False)
    gradients = []
    for each in (model, reference):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(**batch).loss
        gradients.append(with_gradients(each, loss)[1])
    assert_same_gradients(*gradients)


def test_autocast_ends_behind_a_forward_that_is_run_within_itself() -> None:
    # accelerate puts one autocast object around ``forward``. Entered twice, it forgot that autocast was off before.
    model, batch = model_of("Llama", "ForCausalLM"), batch_of()
    batch["labels"] = as_labels(batch)
    fa2patch.apply(model, padded_batches=True)
    autocast = torch.autocast("cpu", torch.bfloat16)
    model.forward = autocast(model.forward)
    before = vars(autocast).copy()
    loss = model(**batch).loss
    assert not torch.is_autocast_enabled("cpu") and loss.isfinite()
    with autocast:
        assert vars(autocast).keys() >= before.keys()
    assert not torch.is_autocast_enabled("cpu")


class SendsNothing(torch.autograd.Function):
    # It reads hidden states and sends them no gradient, as Liger's loss does for what it has differentiated itself.

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ctx.shape = logits.shape
        return logits.sum() + 0 * states.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient.expand(ctx.shape)


def test_a_loss_that_sends_no_gradient_to_some_outputs() -> None:
    model, batch = model_of("Llama", "ForCausalLM"), batch_of()
    reference = copy.deepcopy(model)
    fa2patch.apply(model, padded_batches=True)
    gradients = []
    for each in (model, reference):
        found = each(**batch, output_hidden_states=True)
        real = batch["attention_mask"].bool()
        loss = SendsNothing.apply(found.hidden_states[1], found.logits[real])  # type: ignore[no-untyped-call]
        gradients.append(with_gradients(each, loss)[1])
    assert_same_gradients(*gradients)


def test_threads_wait_for_what_is_found() -> None:
    # Only one thread tries the head. The others must not compute meanwhile as if it read no padding.
    model, batch = model_of("Bert", "ForQuestionAnswering"), {**batch_of(), **SPANS}
    expected = model(**batch).loss.detach()
    fa2patch.apply(model, padded_batches=True)

    def loss(_: int) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(**batch).loss
            return found

    with warnings.catch_warnings(), ThreadPoolExecutor(4) as pool:
        warnings.simplefilter("ignore", StaysPadded)
        for found in pool.map(loss, range(12)):
            assert_close(found, expected, "loss")


class Pooling(torch.nn.Module):
    # A user's own head around a base model. fa2patch does not look at it.

    def __init__(self, base: Any, masked: bool) -> None:
        super().__init__()
        self.base, self.masked = base, masked

    def forward(self, **batch: Any) -> torch.Tensor:
        states = self.base(**batch).last_hidden_state
        if not self.masked:
            return states.mean(1).sin()
        mask = batch["attention_mask"][..., None]
        mean: torch.Tensor = (states * mask).sum(1) / mask.sum(1)
        return mean.sin()


@pytest.mark.parametrize("masked", [True, False])
def test_a_head_of_ones_own_that_pools_rows(masked: bool) -> None:
    base = model_of("Llama", "Model")
    reference = Pooling(copy.deepcopy(base), masked)
    model = patched(Pooling(base, masked), padded_batches=True)
    reference(**batch_of()).sum().backward()
    loss = model(**batch_of()).sum()
    if not masked:
        with refusal("depends on hidden states of padding", PackingNotIsolated):
            loss.backward()
        return
    loss.backward()
    for (name, one), other in zip(model.named_parameters(), reference.parameters()):
        assert_close(one.grad, other.grad, name, GRADIENT_TOLERANCE)


def test_logits_of_padding_in_a_loss_of_ones_own() -> None:
    model, batch = patched(model_of("Llama", "ForCausalLM"), padded_batches=True), batch_of(True, counted=True)
    logits, labels = model(**batch).logits, as_labels(batch)
    with pytest.raises(PackingNotIsolated, match="give -100 to labels on padding"):
        cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    labels = as_labels(batch, first=False)
    cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()


def test_overflow_is_the_gradient_scalers_matter() -> None:
    # A loss scaled beyond the largest number gives gradients that are no numbers, also where a mask is zero.
    model, batch = patched(model_of("Llama", "Model"), padded_batches=True), batch_of()
    masked = model(**batch).last_hidden_state * batch["attention_mask"][..., None]
    (masked.sum() * float("inf")).backward()


class LargestOfTheRow(transformers.BertPreTrainedModel):
    # Remote code takes the maximum over a row. A gradient goes to padding only where it is the largest.

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.score = torch.nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):  # type: ignore[no-untyped-def]
        states = self.bert(input_ids, attention_mask=attention_mask, position_ids=position_ids)[0]
        logits = self.score(states.max(1).values)
        loss = None if labels is None else cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_maximum_over_the_row(gradients: bool) -> None:
    model, batch = small(LargestOfTheRow, transformers.BertConfig(**SIZES)), batch_of()
    with torch.set_grad_enabled(gradients):
        expected = copy.deepcopy(model)(**batch).logits
        fa2patch.apply(model, padded_batches=True)
        with pytest.warns(StaysPadded, match="LargestOfTheRow reads hidden states of padding"):
            assert_close(model(**batch).logits, expected, "logits")


def test_a_model_that_is_not_to_be_proven_raises_in_the_backward() -> None:
    model = patched(model_of("Bert", "ForQuestionAnswering"), padded_batches=True, prove=False)
    with pytest.raises(PackingNotIsolated, match="depends on hidden states of padding"):
        model(**batch_of(), **SPANS).loss.backward()
    batch = batch_of()
    causal = model_of("Llama", "ForCausalLM")
    assert stays_padded(causal, {**batch, "labels": batch["input_ids"]}, prove=False)


class Jitter(torch.nn.Module):
    # It returns other numbers in every call, as a nondeterministic kernel does.

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values * (1 + 1e-6 * (self.calls % 3))


def test_what_a_head_changes_by_itself_does_not_count() -> None:
    batch = batch_of()
    model = model_of("Llama", "ForTokenClassification")
    model.score = torch.nn.Sequential(model.score, Jitter())
    fa2patch.apply(model, padded_batches=True)
    with nothing_said():
        model(**batch, labels=as_labels(batch).clamp(max=2))


def test_dropout_and_the_random_state_are_as_without_a_trial() -> None:
    batch = batch_of()
    batch["labels"] = as_labels(batch)
    losses = []
    for prove in (False, None):
        model = patched(
            model_of("Llama", "ForCausalLM", attention_dropout=0.5).train(), padded_batches=True, prove=prove
        )
        torch.manual_seed(5)
        losses += [model(**batch).loss, torch.rand(())]
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])


def test_a_copy_tries_its_own_head_and_nothing_is_left_after_revert() -> None:
    model, batch = model_of("Bert", "ForQuestionAnswering"), {**batch_of(), **SPANS}
    before = dict(model.__dict__), dict(model.bert.__dict__)
    expected = copy.deepcopy(model)(**batch).loss
    fa2patch.apply(model, padded_batches=True)
    copied = copy.deepcopy(model)
    fa2patch.revert(model)
    assert (model.__dict__.keys(), model.bert.__dict__.keys()) == tuple(held.keys() for held in before)
    with pytest.warns(StaysPadded):
        assert_close(copied(**batch).loss, expected, "loss")
    fa2patch.revert(copied)
    with nothing_said():
        assert_close(copied(**batch).loss, expected, "loss")
