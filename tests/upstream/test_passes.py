"""A batch in passes is the batch at once: outputs, losses and gradients, in every kind of model."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import span_cases
import torch
import transformers
from classification_cases import build, documents

import fa2patch
from compat_matrix import tiny_models
from fa2patch.documents.row_shape import RowShape
from fa2patch.errors import OverBudget, PackingError
from fa2patch.packing.passes import Counts
from fa2patch.patch.applying import budget_of
from fa2patch.patch.padding import pack_padded_batches

LENGTHS = (31, 7, 19, 25, 3, 12, 28, 9, 1)
BUDGET = 50

FAMILIES = (
    "llama", "mistral", "gemma2", "gemma3_text", "mixtral", "dbrx", "falcon", "gpt2", "gpt_neox", "gpt_bigcode",
    "opt", "phi3", "qwen2_moe", "gpt_oss", "bert:masked", "modernbert:masked", "mpnet:masked", "roberta:masked",
    "mamba", "mamba2", "jamba", "lfm2", "qwen3_next", "bamba", "rwkv", "qwen2_vl",
)  # fmt: skip


# Parts of these families compute in float32 inside of float64.
IN_FLOAT32 = {"gemma2", "gemma3_text", "rwkv", "jamba", "bamba", "qwen3_next", "mamba", "mamba2"}


def packed(lengths: tuple[int, ...] = LENGTHS, first: int = 0) -> dict[str, torch.Tensor]:
    docs = documents(*lengths)
    ids = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": torch.cat(docs)[None], "position_ids": ids + first}


def padded(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    docs = documents(*lengths)
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = (pad(each, batch_first=True) for each in (docs, [torch.ones_like(doc) for doc in docs]))
    return {"input_ids": ids, "attention_mask": mask}


def results(model: Any, batch: dict[str, Any], **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    # The gradients are those of a loss that is no sum over documents.
    model.zero_grad()
    cacheless = {"use_cache": False} if takes(model, "use_cache") else {}
    logits = model(**batch, **cacheless, **options).logits
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) != 0
    chosen = logits[real]
    weights = torch.randn(chosen.shape, generator=torch.Generator().manual_seed(5)).to(chosen)
    part = (chosen * weights).tanh()
    (part.sum() + part.mean() * part.square().sum()).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return logits[real].detach(), gradients


def takes(model: Any, name: str) -> bool:
    parameters = inspect.signature(type(model).forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def assert_same(found: Any, expected: Any, bound: float = 1e-9) -> None:
    logits, gradients = found
    assert (logits - expected[0]).abs().max() <= bound * expected[0].abs().max()
    assert len(gradients) == len(expected[1])
    scale = max(float(each.abs().max()) for each in expected[1])
    assert max(float((one - other).abs().max()) for one, other in zip(gradients, expected[1])) <= bound * scale


def made(family: str) -> Any:
    # Some of the model's code may compute in float32.
    sdpa = family != "gemma2" and getattr(tiny_models.model_class(family), "_supports_sdpa", False)
    model = tiny_models.build(family, "sdpa" if sdpa else "eager", torch.float64)
    for module in model.modules():  # dropout draws others for other rows
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "attention_probs_dropout_prob", "layerdrop"):
        for module in model.modules():
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model.train()


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_in_passes_is_the_batch_at_once(family: str, kind: str) -> None:
    if family not in tiny_models.architectures():
        pytest.skip(f"this release has no {family}")
    if (family, kind) == ("qwen2_vl", "padded"):
        pytest.skip("position ids on three axes stay padded")
    model = made(family)
    masked = "attention_mask" in inspect.signature(type(model).forward).parameters and family != "rwkv"
    if kind == "padded" and not masked:
        pytest.skip("it takes no mask, or ignores it, and computes padding as tokens")
    batch = packed(first=tiny_models.first_position(model)) if kind == "packed" else padded()
    fa2patch.apply(model, padded_batches=kind == "padded", prove=False)
    expected = results(model, batch)
    counts = counted(fa2patch.apply(model, max_tokens=BUDGET))
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverBudget)
        found = results(model, batch)
    assert_same(found, expected, 1e-5 if family in IN_FLOAT32 else 1e-9)
    assert (counts.batches, counts.passes, counts.tokens) == (1, 3, sum(LENGTHS))


def counted(patch: Any) -> Counts:
    patch.budget.counts = Counts()
    return patch.budget.counts


def test_a_document_longer_than_the_budget() -> None:
    model = made("llama")
    fa2patch.apply(model, padded_batches=True)
    expected = results(model, padded())
    fa2patch.apply(model, max_tokens=20)
    with pytest.raises(
        PackingError, match=r"3 of 9 documents are longer than max_tokens=20: the first is document 0 of 31"
    ):
        model(**padded(), use_cache=False)
    counts = counted(fa2patch.apply(model, max_tokens=20, too_long="alone"))
    assert_same(results(model, padded()), expected)
    assert counts.passes == 6


@pytest.mark.parametrize(("option", "value"), [("max_tokens", 0), ("max_tokens", "many"), ("too_long", "cut")])
def test_a_budget_that_cannot_be(option: str, value: Any) -> None:
    model = made("llama")
    with pytest.raises(PackingError, match=option):
        fa2patch.apply(model, **{"max_tokens": 10, option: value})
    assert fa2patch.status(model) is None


def test_rows_without_padding_and_without_a_mask() -> None:
    model = made("llama")
    batch = {"input_ids": padded((20,) * 6)["input_ids"]}
    fa2patch.apply(model, padded_batches=True)
    expected = results(model, batch)
    counts = counted(fa2patch.apply(model, max_tokens=BUDGET))
    assert_same(results(model, batch), expected)
    assert counts.passes == 3


def test_several_packed_rows() -> None:
    # Passes are filled from all rows.
    model, rows = made("mixtral"), [packed((30, 11)), packed((5, 16, 20)), packed((41,))]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    fa2patch.apply(model)
    expected = results(model, batch)
    counts = counted(fa2patch.apply(model, max_tokens=BUDGET))
    assert_same(results(model, batch), expected)
    assert counts.passes == 3


@pytest.mark.parametrize("budget", [40, 60, 1000])
def test_shared_prompts(budget: int) -> None:
    # Rows that share a prompt are in one pass, where it is computed once, if they fit; else each has its own.
    model, prompts = made("llama"), documents(20, 18)
    rows = [torch.cat([prompts[at // 4], end]) for at, end in enumerate(documents(5, 1, 9, 3, 12, 4, 7, 2))]
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": pad(rows, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }
    fa2patch.apply(model, padded_batches=True)
    expected = results(model, batch)
    pack_padded_batches(model, share_prompts=True)
    counts = counted(fa2patch.apply(model, max_tokens=budget))
    assert_same(results(model, batch), expected, 1e-6)  # attention to shared segments is merged in float32
    assert counts.passes == {40: 5, 60: 2, 1000: 1}[budget]


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_heads(task: str, kind: str) -> None:
    if not hasattr(transformers, f"LlamaFor{task}"):
        pytest.skip("this release has no such head")
    labels = [at % 2 for at in range(len(LENGTHS))]
    expected = found = None
    for options in ({}, {"max_tokens": BUDGET}):
        model = build("llama", task, num_labels=2).double().train()
        batch = padded() if kind == "padded" else packed()
        of_rows = task == "SequenceClassification"
        batch["labels"] = torch.tensor(labels) if of_rows else batch["input_ids"] % 2
        if kind == "padded" and not of_rows:
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        patch = fa2patch.apply(model, padded_batches=kind == "padded", **options)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        expected, found = found, (loss.detach()[None], [p.grad for p in model.parameters() if p.grad is not None])
    assert_same(found, expected, 1e-6)  # in 4.36, a part of the loss is in float32
    assert patch.budget is not None


def test_a_pooler_pools_documents() -> None:
    model = tiny_models.build("bert:masked", "eager", torch.float64)
    base = type(model.bert)(model.config).double().train()
    tiny_models.scale_up(base)
    for module in base.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    fa2patch.apply(base)
    expected = base(**packed()).pooler_output
    fa2patch.apply(base, max_tokens=BUDGET)
    found = base(**packed()).pooler_output
    assert found.shape == (len(LENGTHS), model.config.hidden_size)
    assert torch.allclose(found, expected, rtol=1e-9)


def test_hidden_states_and_router_logits_are_those_of_the_batch() -> None:
    model = made("mixtral")
    fa2patch.apply(model)
    asked = {"output_hidden_states": True, "output_router_logits": True, "use_cache": False}
    expected = model(**packed(), **asked)
    fa2patch.apply(model, max_tokens=BUDGET)
    found = model(**packed(), **asked)
    for name in ("hidden_states", "router_logits"):
        assert len(found[name]) == len(expected[name]) > 1
        assert all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(found[name], expected[name])), name
    assert torch.allclose(found.aux_loss, expected.aux_loss, rtol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_checkpoints_themselves(reentrant: bool) -> None:
    model = made("llama")
    fa2patch.apply(model, padded_batches=True)
    expected = results(model, padded())
    fa2patch.apply(model, max_tokens=BUDGET)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(results(model, padded()), expected)


def test_dropout_is_drawn_again_as_it_was() -> None:
    # The backward of a pass computes it again, with the random numbers of its forward.
    model = made("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: torch.dropout(output, 0.5, True))
    fa2patch.apply(model, padded_batches=True, max_tokens=BUDGET, prove=False)
    parameter = model.model.layers[0].mlp.down_proj.weight

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        return model(**padded(), use_cache=False).logits[padded()["attention_mask"] != 0].square().mean()

    (gradient,) = torch.autograd.grad(loss(), parameter)
    step = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double() * 1e-5
    with torch.no_grad():
        parameter += step
        up = loss()
        parameter -= 2 * step
        down = loss()
    assert float((gradient * step).sum() * 2) == pytest.approx(float(up - down), rel=1e-2)


def test_nothing_of_a_pass_is_kept_between_forward_and_backward() -> None:
    def kept(**options: Any) -> int:
        model, found = made("llama"), [0]
        fa2patch.apply(model, **options)

        def pack(value: torch.Tensor) -> torch.Tensor:
            found[0] += value.numel()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            hidden = model.model(**packed(), use_cache=False).last_hidden_state
        hidden.sum().backward()
        return found[0]

    assert kept(max_tokens=BUDGET) * 5 < kept()


@pytest.mark.parametrize("shapes", [{"pad_to_multiple_of": 50}, {"pad_to_multiple_of": "power", "max_documents": 4}])
def test_shapes_that_stand_still(shapes: dict[str, Any]) -> None:
    model = made("mixtral")
    batch = packed((31, 7, 19, 25, 3, 12, 28, 9))
    patch = fa2patch.apply(model)
    expected = results(model, batch)
    patch.budget = budget_of(BUDGET, "error", RowShape(**shapes, max_tokens=BUDGET))
    seen: set[Any] = set()
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.add(args[0].shape[1]))
    fa2patch.apply(model, prove=False)
    assert_same(results(model, batch), expected)
    assert seen <= {50, 32, 16}


def test_what_is_not_for_each_token_is_said() -> None:
    # A batch is computed at once if its parts are not known, and says so.
    model = made("llama")

    class Scaled(type(model.model)):  # type: ignore[misc]
        def forward(self, *args: Any, scale: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.last_hidden_state = output.last_hidden_state * scale.sum()
            return output

    model.model.__class__ = Scaled
    patch = fa2patch.apply(model.model, prove=False)
    scale = torch.arange(3.0).double()
    expected = model.model(**packed(), scale=scale, use_cache=False).last_hidden_state
    fa2patch.apply(model.model, max_tokens=BUDGET)
    with pytest.warns(OverBudget, match="scale is not for each token"):
        found = model.model(**packed(), scale=scale, use_cache=False).last_hidden_state
    assert torch.allclose(found, expected, rtol=1e-9) and patch.budget is not None


def test_an_output_for_the_row_is_said() -> None:
    model = made("llama")

    class Summed(type(model.model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output["total"] = output.last_hidden_state.mean()
            return output

    model.model.__class__ = Summed
    fa2patch.apply(model.model, prove=False)
    expected = model.model(**packed(), use_cache=False)
    fa2patch.apply(model.model, max_tokens=BUDGET)
    with pytest.warns(OverBudget, match=r"its base model returns total \[\], which is not for each token"):
        found = model.model(**packed(), use_cache=False)
    assert torch.allclose(found["total"], expected["total"], rtol=1e-9)


def test_copies_and_pickles_keep_the_budget() -> None:
    model = made("llama")
    fa2patch.apply(model, padded_batches=True)
    expected = results(model, padded())
    fa2patch.apply(model, max_tokens=BUDGET)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        counts = counted(fa2patch.status(other))
        assert_same(results(other, padded()), expected)
        assert counts.passes == 3


def test_generation_is_as_before() -> None:
    model = made("llama").eval()
    ids = documents(30)[0][None]
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    fa2patch.apply(model, padded_batches=True, max_tokens=BUDGET)
    assert torch.equal(model.generate(ids, max_new_tokens=30, do_sample=False), expected)


@pytest.mark.parametrize("family", span_cases.FAMILIES)
def test_pictures_that_see_themselves_in_both_directions(family: str) -> None:
    if not span_cases.is_present(family):
        pytest.skip(f"this release has no {family}")
    model, row = span_cases.build(family), span_cases.packed(span_cases.documents(family))
    fa2patch.apply(model)
    expected = span_cases.with_gradients(model, [model(**row, use_cache=False).logits[0]])
    counts = counted(fa2patch.apply(model, max_tokens=25))
    found = span_cases.with_gradients(model, [model(**row, use_cache=False).logits[0]])
    assert_same((found[0], [*found[1].values()]), (expected[0], [*expected[1].values()]), 1e-5)
    assert counts.passes > 1
