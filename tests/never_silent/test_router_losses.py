"""The loss of routers counts real tokens: not the padding of a collator, and not document k by k."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packed_rows import built
from small_models import padded, patched, refusal, told, with_gradients

import fa2patch
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import documents
from fa2patch.preference import DataCollatorForPreferenceFlattening

Batch = dict[str, Any]

# A batch of them has no padding, so any version's loss counts real tokens in it.
EQUAL = documents(7, 7, 7)

UNEQUAL = documents(6, 1, 9, 4)
MULTIPLE = 32
TEMPLATE = 2

FAMILIES = ("mixtral", "qwen2_moe", "dbrx", "jamba", "gpt_oss")
FURTHER = (
    "olmoe", "granitemoe", "granitemoe_swa", "jetmoe", "phimoe", "minimax", "qwen3_moe", "qwen3_next", "flex_olmo",
    "ernie4_5_moe", "granitemoehybrid", "granitemoeshared", "laguna", "mellum", "minimax_m2", "qwen3_5_moe",
    "qwen3_vl_moe",
)  # fmt: skip
ALL = [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in FURTHER)]


def with_router_loss(family: str) -> Any:
    model = built(family)
    if "output_router_logits" not in inspect.signature(type(model).forward).parameters:
        pytest.skip(f"{family} of Transformers {transformers.__version__} returns no router logits")
    if not any(
        gradient.abs().max() > 1e-6 for gradient in router_loss(model, {"input_ids": EQUAL[0][None]})[1].values()
    ):
        pytest.skip(f"the router loss of {family} in Transformers {transformers.__version__} is a constant")
    return model


def router_loss(model: Any, batch: Batch, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model(**batch, output_router_logits=True, use_cache=False, **more)
    return with_gradients(model, output.aux_loss)


def weighs_the_mask(model: Any) -> bool:
    # Whether this version's loss leaves the padding of a padded batch out.
    batch = padded(UNEQUAL)
    other = {**batch, "input_ids": batch["input_ids"] + 5 * (1 - batch["attention_mask"])}
    with torch.no_grad():
        losses = [model(**each, output_router_logits=True, use_cache=False).aux_loss for each in (batch, other)]
    return bool((losses[0] - losses[1]).abs() < 1e-6)


def examples(docs: list[torch.Tensor]) -> list[Batch]:
    return [{"input_ids": doc.tolist()} for doc in docs]


def preference(docs: list[torch.Tensor], **options: Any) -> Batch:
    # The pairs of a chosen and a rejected document share no prompt.
    chosen, rejected = docs[: len(docs) // 2], docs[len(docs) // 2 :]
    pairs = [
        {"prompt_ids": [], "chosen_ids": one.tolist(), "rejected_ids": other.tolist()}
        for one, other in zip(chosen, rejected)
    ]
    return DataCollatorForPreferenceFlattening(**options)(pairs)


def completions(docs: list[torch.Tensor], **options: Any) -> Batch:
    template = docs[0][:1].tolist()
    collate = fa2patch.DataCollatorForCompletionOnlyLM(
        template, padding_free=True, return_flash_attn_kwargs=True, **options
    )
    with pytest.warns(UserWarning, match="not found"):
        return dict(collate(examples(docs)))


def flattening(**always: Any) -> Callable[..., Batch]:
    return lambda docs, **options: fa2patch.DataCollatorWithFlattening(**always, **options)(examples(docs))


COLLATORS: dict[str, Callable[..., Batch]] = {
    "position ids": flattening(),
    "lengths": flattening(return_flash_attn_kwargs=True),
    "seq_idx": flattening(return_seq_idx=True, return_position_ids=False),
    "completions": completions,
    "preference": preference,
    "shared prompts": lambda docs, **options: preference(docs, share_prompts=True, **options),
}


def masked(batch: Batch) -> Batch:
    # Only a mask of the user's own tells the row's padding.
    real = batch.pop("real_tokens")
    return {**batch, "attention_mask": real}


def assert_same(found: Any, expected: Any) -> None:
    (loss, gradients), (right, of_right) = found, expected
    assert_close(loss, right, f"router loss {loss} ({right})")
    largest = max(float(one.abs().max()) for one in of_right.values())
    assert gradients.keys() == of_right.keys()
    for name, gradient in of_right.items():
        assert float((gradients[name] - gradient).abs().max()) <= 1e-4 * largest, name


@pytest.mark.parametrize("family", ALL)
def test_a_collators_padding_is_not_counted(family: str) -> None:
    model = with_router_loss(family)
    together = {"input_ids": torch.stack(EQUAL)}
    expected = router_loss(model, together)
    fa2patch.apply(model)
    for name in ("position ids", "lengths"):
        row = COLLATORS[name](EQUAL, pad_to_multiple_of=MULTIPLE)
        assert row["input_ids"].shape == (1, MULTIPLE)
        assert_same(router_loss(model, row), expected)
    assert_same(router_loss(model, masked(row)), expected)
    counted = {key: value for key, value in row.items() if key != "real_tokens"}
    assert abs(router_loss(model, counted)[0] - expected[0]) > 1e-4, "padding is not seen here"


@pytest.mark.parametrize("name", COLLATORS)
def test_every_collator_tells_its_padding(name: str) -> None:
    model = with_router_loss("mixtral")
    docs = documents(7, 5, 6, 3)
    fa2patch.apply(model)
    expected = router_loss(model, COLLATORS[name](docs))
    row = COLLATORS[name](docs, pad_to_multiple_of=MULTIPLE)
    assert row["real_tokens"].tolist() == [[1] * 21 + [0] * 11]
    assert_same(router_loss(model, row), expected)


@pytest.mark.slow
def test_the_collator_of_pictures_tells_its_padding() -> None:
    model = patched(with_router_loss("qwen3_vl_moe"))
    special = {value for name, value in vars(model.config).items() if name.endswith("token_id")}
    text = [token for token in range(3, 60) if token not in special]
    docs = [{"input_ids": ids, "mm_token_type_ids": [0] * len(ids)} for ids in (text[:7], text[20:25])]
    rows = [fa2patch.DataCollatorForMultimodalFlattening(model, pad_to_multiple_of=n)(docs) for n in (None, MULTIPLE)]
    assert_same(*(router_loss(model, row) for row in reversed(rows)))


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    "how", ["no padding", "padding", "a mask", "ones", "document numbers", "padding and document numbers"]
)
def test_the_loss_is_that_of_the_padded_batch(family: str, how: str) -> None:
    model = with_router_loss(family)
    if not weighs_the_mask(model):
        pytest.skip(f"the padded loss of Transformers {transformers.__version__} counts padding")
    with torch.no_grad():
        expected = model(**padded(UNEQUAL), output_router_logits=True, use_cache=False)
    fa2patch.apply(model)
    row = COLLATORS["position ids"](UNEQUAL, pad_to_multiple_of=MULTIPLE if how in ("padding", "a mask") else None)
    if how == "a mask":
        row = masked(row)
    if how == "ones":
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    if how == "document numbers":
        row = told(UNEQUAL, "document numbers in the mask", labels=row["labels"])
    if how == "padding and document numbers":
        row = COLLATORS["position ids"](UNEQUAL, pad_to_multiple_of=MULTIPLE)
        row["attention_mask"] = (row["position_ids"] == 0).cumsum(-1)
    with torch.no_grad():
        found = model(**row, output_router_logits=True, use_cache=False)
    assert_close(found.aux_loss, expected.aux_loss, f"router loss {found.aux_loss} ({expected.aux_loss})")
    assert_close(found.loss, expected.loss, f"loss {found.loss} ({expected.loss})")


@pytest.mark.parametrize("how", ["two rows", "a tuple", "one document", "a full row", "compiled"])
def test_other_rows(how: str) -> None:
    model = with_router_loss("mixtral")
    expected = router_loss(model, {"input_ids": torch.stack(EQUAL)})[0]
    fa2patch.apply(model)
    row = COLLATORS["lengths"](EQUAL, pad_to_multiple_of=21 if how == "a full row" else MULTIPLE)
    asked = {"output_router_logits": True, "use_cache": False}
    row.pop("labels")
    with torch.no_grad():
        if how == "a tuple":
            found = model(**row, **asked, return_dict=False)[0]
        elif how == "two rows":
            rows = [COLLATORS["position ids"](docs, pad_to_multiple_of=16) for docs in (EQUAL[:2], EQUAL[2:])]
            found = model(**{key: torch.cat([each[key] for each in rows]) for key in rows[0]}, **asked).aux_loss
        elif how == "one document":
            expected = model(input_ids=EQUAL[0][None], **asked).aux_loss
            found = model(**COLLATORS["position ids"](EQUAL[:1], pad_to_multiple_of=16), **asked).aux_loss
        elif how == "compiled":
            found = torch.compile(model, backend="eager")(**row, **asked).aux_loss
        else:
            found = model(**row, **asked).aux_loss
    assert_close(found, expected, f"router loss {found} ({expected})")


@pytest.mark.parametrize("real", [torch.ones(1, 31).long(), torch.ones(32).long(), [1] * 32])
def test_what_does_not_tell_every_token_is_an_error(real: Any) -> None:
    model = patched()
    row = {**COLLATORS["lengths"](EQUAL, pad_to_multiple_of=MULTIPLE), "real_tokens": real}
    with refusal(r"real_tokens: expected a tensor \[1, 32\]", fa2patch.errors.BadBatch):
        model(**row)


def test_models_without_routers_do_not_change() -> None:
    model = patched()
    row = COLLATORS["position ids"](EQUAL, pad_to_multiple_of=MULTIPLE)
    found, without = model(**row), model(**{key: value for key, value in row.items() if key != "real_tokens"})
    assert torch.equal(found.logits, without.logits)
    assert torch.equal(found.loss, without.loss)
    assert fa2patch.verify(model, batch=row).ok
