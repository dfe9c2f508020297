"""``apply(model, padded_batches=True)``, and the objects that imply it, because they make batches themselves."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from padded_cases import layers_tokens
from transformers import BertConfig, BertForSequenceClassification, BertModel

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from fa2patch import errors

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def build(cls: Any = BertForSequenceClassification) -> Any:
    torch.manual_seed(0)
    model = cls(BertConfig(**SIZES, max_position_embeddings=64, num_labels=3))
    tiny_models.scale_up(model)
    return model.eval()


def padded(*lengths: int, left: bool = False) -> dict[str, Any]:
    columns, sizes = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    mask = (columns >= max(lengths) - sizes if left else columns < sizes).long()
    ids = torch.randint(3, 99, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


class Embedder(torch.nn.Sequential):
    # It makes batches of texts itself, as the models of sentence-transformers do, and runs no hooks of the model.

    tokenizer = "a tokenizer"

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        states = self[0].forward(**batch)[0]
        mask = batch["attention_mask"][..., None]
        mean: torch.Tensor = (states * mask).sum(1) / mask.sum(1)
        return mean


def test_a_head_of_rows_is_given_padded_states() -> None:
    batch, labels = padded(5, 9, 1, 3), torch.tensor([0, 2, 1, 1])
    expected = build()
    expected(**batch, labels=labels).loss.backward()
    model = build()
    fa2patch.apply(model, padded_batches=True)
    seen = layers_tokens(model)
    found = model(**batch, labels=labels)
    found.loss.backward()
    assert seen == [18]
    assert_close(found.logits, expected(**batch).logits, "logits")
    for (name, parameter), same in zip(model.named_parameters(), expected.parameters()):
        assert torch.allclose(parameter.grad, same.grad, atol=1e-6), name


def test_arguments_may_come_by_position() -> None:
    # ConvBERT's heads up to 4.57 call their base model so.
    model, batch = build(BertModel), padded(5, 9, 1, 3)
    real = batch["attention_mask"].bool()
    expected = model(**batch).last_hidden_state[real]
    fa2patch.apply(model, padded_batches=True)
    seen = layers_tokens(model)
    found = model(batch["input_ids"], batch["attention_mask"]).last_hidden_state[real]
    assert seen == [18]
    assert_close(found, expected, "states")


@pytest.mark.parametrize("family", ["bert:masked", "gpt2", "gpt_neo", "llama", "opt", "roberta:masked"])
def test_padding_on_the_left(family: str) -> None:
    # A model with a table of positions counts padding there, so its batch stays padded without position ids.
    model, batch = tiny_models.build(family, "eager").eval(), padded(9, 5, 2, left=True)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, model.config.pad_token_id or 0)
    real = batch["attention_mask"][..., None]
    options = {} if "bert" in family else {"use_cache": False}
    expected = model(**batch, **options).logits * real
    fa2patch.apply(model, padded_batches=True)
    assert_close(model(**batch, **options).logits * real, expected, "logits")


def test_rows_of_one_token_that_are_padded() -> None:
    # They stay padded, because there are as many pooled vectors as tokens.
    ids = torch.tensor([[7, 0, 0], [8, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    model = build()
    expected = model(**batch).logits
    fa2patch.apply(model, padded_batches=True)
    seen = layers_tokens(model)
    assert_close(model(**batch).logits, expected, "logits")
    assert seen == [6]


def test_a_head_of_rows_is_refused_without_padded_batches_and_refuses_packed_ones() -> None:
    model = build()
    with pytest.raises(errors.UnsupportedModel, match="padded_batches=True"):
        fa2patch.apply(model)
    fa2patch.apply(model, padded_batches=True)
    packed = {"input_ids": torch.arange(5, 13)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    with pytest.raises(errors.PackingNotIsolated, match="Hand it padded batches"):
        model(**packed)
    assert model.bert(**packed).pooler_output.shape[0] == 2
    assert fa2patch.verify(model).ok
    with pytest.raises(errors.UnsupportedModel, match="padded_batches=True"):
        fa2patch.apply(model, padded_batches=False)


def test_it_is_kept_switched_and_reverted() -> None:
    model, batch = build(BertModel), padded(5, 9, 1, 3)
    before = dict(model.__dict__)
    seen = layers_tokens(model)

    def computed() -> int:
        model(**batch)
        return seen[-1]

    patch = fa2patch.apply(model)
    assert computed() == 36
    for given, tokens in ((True, 18), (None, 18), (False, 36), (None, 36), (True, 18)):
        assert fa2patch.apply(model, kernel="reference", padded_batches=given) is patch
        assert computed() == tokens
    patch.revert()
    assert computed() == 36
    assert model.__dict__.keys() == before.keys()
    with fa2patch.apply(model, padded_batches=True):
        assert computed() == 18
    assert computed() == 36
    fa2patch.apply(model)
    assert computed() == 36
    with pytest.raises(errors.BadArgument, match="padded_batches='yes'"):
        fa2patch.apply(model, padded_batches="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_own(copied: Any) -> None:
    model, batch = build(), padded(5, 9, 1, 3)
    expected = model(**batch).logits
    fa2patch.apply(model, padded_batches=True)
    other = copied(model)
    fa2patch.revert(model)
    seen, of_other = layers_tokens(model), layers_tokens(other)
    for each in (model, other):
        assert_close(each(**batch).logits, expected, "logits")
    fa2patch.revert(other)
    other(**batch)
    assert (seen, of_other) == ([36], [18, 36])


def test_an_object_with_a_tokenizer_makes_padded_batches() -> None:
    embedder, batch = Embedder(build(BertModel)), padded(5, 9, 1, 3)
    expected = embedder(batch)
    seen = layers_tokens(embedder)
    with fa2patch.apply(embedder) as patch:
        assert fa2patch.status(embedder) is patch is fa2patch.status(embedder[0])
        assert_close(embedder(batch), expected, "embeddings")
        assert fa2patch.verify(embedder).ok
    assert fa2patch.status(embedder) is None
    embedder(batch)
    assert [seen[0], seen[-1]] == [18, 36]
    for given, tokens in ((False, 36), (None, 36), (True, 18), (None, 18)):
        fa2patch.apply(embedder, padded_batches=given)
        embedder(batch)
        assert seen[-1] == tokens


def test_it_is_implied_for_a_model_that_was_patched_by_itself_before() -> None:
    embedder = Embedder(build(BertModel))
    seen = layers_tokens(embedder)
    assert not fa2patch.apply(embedder[0]).facts.padded
    assert not fa2patch.apply(torch.nn.Sequential(embedder[0])).facts.padded
    fa2patch.apply(embedder, prove=False)  # the hook only looks
    embedder(padded(5, 9, 1, 3))
    assert seen == [18]


def test_batches_without_padding_are_no_reason_for_a_warning() -> None:
    embedder = Embedder(build(BertModel)).train()
    fa2patch.apply(embedder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.NothingPacked)
        for _ in range(20):
            embedder(padded(5, 5))


def test_a_compiled_padded_batch_is_as_before() -> None:
    embedder, batch = Embedder(build(BertModel)), padded(5, 9, 1, 3)
    expected = embedder(batch)
    fa2patch.apply(embedder)
    compiled = torch.compile(embedder, backend="eager")
    assert torch.equal(compiled(batch), expected)


def test_several_models_are_named() -> None:
    router = torch.nn.ModuleDict({"query": Embedder(build(BertModel)), "document": Embedder(build(BertModel))})
    with pytest.raises(errors.NotAModel, match=r"found 2 .* 0\.query\.0 \(BertModel\), 0\.document\.0 \(BertModel\)"):
        fa2patch.apply(Embedder(router))
    shared = Embedder(build(BertModel))
    assert fa2patch.apply(torch.nn.ModuleDict({"query": shared, "document": shared})).model is shared[0]


class OfAnotherRuntime:
    # A model of ONNX Runtime or OpenVINO, as optimum makes them.

    config = SimpleNamespace()

    def __call__(self, **batch: Any) -> None: ...


def test_a_model_that_torch_does_not_compute() -> None:
    holder = torch.nn.Module()
    holder.auto_model = OfAnotherRuntime()
    with pytest.raises(errors.NotAModel, match="found Embedder around a OfAnotherRuntime.*backend 'torch'"):
        fa2patch.apply(Embedder(holder))


def test_modules_that_read_padding_are_refused() -> None:
    convolution = torch.nn.Conv1d(32, 32, 3)
    with pytest.raises(errors.UnsupportedModel, match="1 .Conv1d., which mixes each token with its neighbours"):
        fa2patch.apply(Embedder(build(BertModel), convolution))
    holder = torch.nn.Sequential(build(BertModel))
    holder.query_expansion = {"strategy": "fixed", "attend": False, "length": 32}
    embedder = Embedder(holder)
    with pytest.raises(errors.UnsupportedModel, match="which scores padding"):
        fa2patch.apply(embedder)
    assert fa2patch.status(embedder) is None
    holder.query_expansion["attend"] = True
    fa2patch.apply(embedder)
