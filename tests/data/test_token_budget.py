"""A Trainer with a budget of tokens makes the steps of a padded one: losses, weights, and passes within the budget."""

from __future__ import annotations

import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from stage import furthest, losses_of, padded, tiny_llama, weights
from transformers import Trainer, TrainingArguments

import fa2patch
from fa2patch._torch import HAS_OPERATORS
from fa2patch.data import token_budget
from fa2patch.data.loss_shares import Share
from fa2patch.errors import BadArgument, PackingError, StaysPadded
from fa2patch.packing.passes import of_units
from fa2patch.packing.still_shapes import PLAIN

STEPS = 6


def dataset(count: int = 48) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 60, (count,), generator=generator).tolist()
    found = []
    for length in lengths:
        ids = torch.randint(3, 500, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
        found[-1]["labels"][1 : length // 3] = [-100] * (max(length // 3, 1) - 1)
    return found


def trained(base: Any, collate: Any = padded, model: Any = None, **options: Any) -> Any:
    # the precision of a process's first trainer is kept in both
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = TrainingArguments(
        **{
            "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 8, "max_steps": STEPS, "seed": 0,
            "learning_rate": 1e-4, "adam_epsilon": 1e-5,  # 1e-8 makes steps of gradients that are only rounding
            "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none",
            "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, **options,
        }
    )  # fmt: skip
    trainer = base(model=model or tiny_llama(), args=arguments, train_dataset=dataset(), data_collator=collate)
    trainer.remove_callback(transformers_printer())
    trainer.train()
    return trainer


def transformers_printer() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


def assert_same_steps(found: Any, expected: Any) -> None:
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)
    assert furthest(weights(found.model), weights(expected.model)) < 1e-5
    norms = [
        [entry["grad_norm"] for entry in one.state.log_history if "grad_norm" in entry] for one in (found, expected)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


COLLATORS = {
    "padded": padded,
    "packed": fa2patch.DataCollatorWithFlattening(),
    "packed, with lengths": fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}


STILL: dict[str, Any] = {"max_tokens": 80, "pad_to_multiple_of": 80, "max_documents": 4, "longest_document": 80}
"""A budget whose passes all have the same shapes."""


def with_weights(by: str) -> Any:
    """Return a collator of packed rows whose loss has weights: of documents, or of tokens by their ids."""
    collate = fa2patch.DataCollatorWithFlattening(loss_weights=by)

    def packed(features: Any) -> Any:
        weights = [{"loss_weights": [token % 5 / 2 for token in one["input_ids"]]} for one in features]
        return collate([{**one, **weight} for one, weight in zip(features, weights)] if by == "token" else features)

    return packed


class MeanOfDocuments(Trainer):
    """A loss that every document has the same weight in."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, inputs["labels"][:, 1:], reduction="none")
        counts = (inputs["labels"][:, 1:] != -100).sum(1)
        return (losses.sum(1) / counts.clamp(min=1)).mean()


class Noted(MeanOfDocuments):
    """Notes a metric for each computed loss, as TRL's trainers do, and how often the loss was computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.noted: dict[str, dict[str, list[float]]] = {"train": {"rows": []}, "eval": {"rows": []}}
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        length = float((inputs["labels"] != -100).sum(1).float().mean())
        self.noted["train" if model.training else "eval"]["rows"].append(length)
        inputs["labels"] = inputs.pop("labels")
        return super().compute_loss(model, inputs, *args, **kwargs)


class Compared(Trainer):
    """A loss that compares the documents of a batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        return logits.float().mean((1, 2)).sort().values.diff(prepend=logits.new_zeros(1)).square().mean()


@pytest.fixture(scope="module")
def reference() -> Any:
    """Padded training without fa2patch, by options; each is trained once."""
    found: dict[str, Any] = {}

    def of(base: Any = Trainer, **options: Any) -> Any:
        key = f"{base.__name__} {options}"
        if key not in found:
            found[key] = trained(base, **options)
        return found[key]

    return of


@pytest.fixture(autouse=True, scope="module")
def precision_of_no_trainer() -> Any:
    """Leave no precision behind for the tests of other files."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("kind", COLLATORS)
@pytest.mark.parametrize("budget", [70, 150, 1000])
def test_steps_are_those_of_padded_batches(reference: Any, kind: str, budget: int) -> None:
    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=budget), COLLATORS[kind])
    assert_same_steps(found, reference())
    passes = [entry["passes_per_batch"] for entry in found.state.log_history if "passes_per_batch" in entry]
    tokens = [sum(len(one["input_ids"]) for one in dataset())]
    assert len(passes) == STEPS and sum(passes) >= sum(tokens) / budget
    assert (max(passes) == 1) == (budget == 1000)


@pytest.mark.parametrize("kind", ["packed", "packed, with lengths"])
def test_passes_of_still_shapes_make_the_steps_of_padded_batches(reference: Any, kind: str) -> None:
    seen: set[Any] = set()

    class Seen(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            known = {name: getattr(value, "shape", value) for name, value in inputs.items() if name != "seq_idx"}
            seen.add(str(sorted(known.items())))
            return super().compute_loss(model, inputs, *args, **kwargs)

    found = trained(fa2patch.packed_trainer(Seen, **STILL), COLLATORS[kind])
    assert_same_steps(found, reference())
    assert len(seen) == 1, "what a loss is a mean of is tried with the same shapes"
    logs = [entry for entry in found.state.log_history if "padding_of_passes" in entry]
    tokens = sum(len(one["input_ids"]) for one in dataset())
    assert len(logs) == STEPS and all(0 < entry["padding_of_passes"] < 1 for entry in logs)
    paid = [1 / (1 - entry["padding_of_passes"]) for entry in logs]
    passes = sum(entry["passes_per_batch"] for entry in logs)
    assert sum(paid) / STEPS == pytest.approx(80 * passes / tokens, rel=0.05)


@pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")
def test_one_graph_computes_all_passes_of_still_shapes(reference: Any) -> None:
    """Shapes and numbers are constants of a graph (``dynamic=False``), as of a CUDA graph."""
    torch._dynamo.reset()
    graphs: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(torch.is_grad_enabled())
        return graph

    model = patched(tiny_llama())
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
    found = trained(fa2patch.packed_trainer(Trainer, **STILL), COLLATORS["packed"], model)
    torch._dynamo.reset()
    assert_same_steps(found, reference())
    assert sorted(graphs) == [False, True], "one for trying what the loss is a mean of, and one for training"


def test_shapes_of_padded_batches_depend_on_their_documents() -> None:
    with pytest.raises(PackingError, match="expected a packed row, .* found a padded batch. Collate with"):
        trained(fa2patch.packed_trainer(Trainer, **STILL))


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"pad_to_multiple_of": 8}, BadArgument, "expected max_tokens, too"),
        ({"max_tokens": 100, "pad_to_multiple_of": 64}, PackingError, "a number that divides max_tokens"),
        ({"max_tokens": 0}, PackingError, "expected a positive number of tokens"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        fa2patch.packed_trainer(Trainer, **options)


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}]
)
def test_steps_with_options_of_trainer(reference: Any, options: dict[str, Any]) -> None:
    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=100), **options)
    assert_same_steps(found, reference(**options))


@pytest.mark.parametrize("by", ["token", "document"])
def test_steps_with_weights_in_the_loss(by: str) -> None:
    """The passes of a batch count its tokens or documents together, as Trainer counts them."""
    whole = trained(Trainer, with_weights(by), patched(tiny_llama()))
    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=100), with_weights(by))
    assert_same_steps(found, whole)
    assert found.state.log_history[0]["passes_per_batch"] > 1


def patched(model: Any) -> Any:
    fa2patch.apply(model)
    return model


def test_in_bfloat16_passes_are_as_near_to_float32_as_padded_batches(reference: Any) -> None:
    trainers = (trained(fa2patch.packed_trainer(Trainer, max_tokens=100), bf16=True), reference(bf16=True), reference())
    found, as_padded, exact = (
        torch.cat([value.flatten() for value in weights(one.model).values()]) for one in trainers
    )
    assert 0 < float((found - exact).norm()) < 1.1 * float((as_padded - exact).norm())


def test_lora_in_passes(reference: Any) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0))

    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=100), model=adapted())
    assert_same_steps(found, trained(Trainer, model=adapted()))


def test_a_mean_over_documents(reference: Any) -> None:
    found = trained(fa2patch.packed_trainer(Noted, max_tokens=100))
    assert_same_steps(found, reference(Noted))
    assert found.token_budget.shares.share == Share(1, "units")


def test_what_a_trainer_notes_is_as_without_passes(reference: Any) -> None:
    """One number for each batch, weighed by documents; what was tried leaves none."""
    found, expected = trained(fa2patch.packed_trainer(Noted, max_tokens=100)), reference(Noted)
    assert found.noted["eval"] == expected.noted["eval"] == {"rows": []}
    assert found.noted["train"]["rows"] == pytest.approx(expected.noted["train"]["rows"], rel=1e-5)


class MeanOfTokens(Trainer):
    """The mean over the labels of a batch, which is no number if there are none."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].mT, inputs["labels"][:, 1:])


def only_some_learned(features: Any) -> Any:
    """Padded rows, of which the short ones and the longest ones have no labels."""
    batch = padded(features)
    tokens = batch["attention_mask"].sum(1)
    batch["labels"][(tokens < 25) | (tokens > 45)] = -100
    return batch


@pytest.mark.parametrize(
    ("base", "options"), [(Trainer, {}), (Trainer, {"label_smoothing_factor": 0.1}), (MeanOfTokens, {})]
)
def test_documents_without_labels(base: Any, options: dict[str, Any]) -> None:
    """A pass of such documents has no mean, and of what a loss is a mean is not seen by them."""
    found = trained(fa2patch.packed_trainer(base, max_tokens=70), only_some_learned, **options)
    assert found.token_budget.shares.share.group == 1
    assert_same_steps(found, trained(base, only_some_learned, **options))


def test_a_batch_without_labels_tells_nothing() -> None:
    """A mean over its labels is no number, which must not be taken for a loss that is no sum."""

    def collator() -> Any:
        numbers = iter(range(1000))

        def collate(features: Any) -> Any:
            batch = padded(features)
            if next(numbers) % 3 == 0:
                batch["labels"][:] = -100
            return batch

        return collate

    class Sum(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
            labels = inputs["labels"][:, 1:]
            return torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels, reduction="sum") / 200

    with pytest.warns(StaysPadded, match="none of them has labels"):
        found = trained(fa2patch.packed_trainer(Sum, max_tokens=100), collator())
    assert_same_steps(found, trained(Sum, collator()))
    assert found.token_budget.shares.share == Share(1, "sum")


@pytest.mark.parametrize("base", [Trainer, MeanOfDocuments, MeanOfTokens])
def test_batches_of_two_documents(base: Any) -> None:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    found = trained(fa2patch.packed_trainer(base, max_tokens=60), **options)
    assert_same_steps(found, trained(base, **options))
    assert any(entry.get("passes_per_batch", 1) > 1 for entry in found.state.log_history)


def test_a_loss_that_is_no_sum_is_refused() -> None:
    with pytest.raises(PackingError, match=r"expected a loss that is a sum, .* in batch 1 of PackedCompared: doc"):
        trained(fa2patch.packed_trainer(Compared, max_tokens=100))


def test_a_loss_that_becomes_no_sum_is_refused_later() -> None:
    class Later(MeanOfDocuments):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss + 0.1 * loss.detach().square() * min(self.state.global_step, 1)

    with pytest.raises(PackingError, match="found in batch 2 of PackedLater"):
        trained(fa2patch.packed_trainer(Later, max_tokens=100))


def test_router_losses_are_refused_with_the_remedy() -> None:
    from compat_matrix import tiny_models

    model = tiny_models.build("mixtral", "eager", output_router_logits=True, router_aux_loss_coef=0.1, vocab_size=512)
    with pytest.raises(PackingError, match="output_router_logits=False"):
        trained(fa2patch.packed_trainer(Trainer, max_tokens=100), model=model)


def test_pairs_stay_together(reference: Any) -> None:
    """The first half of the rows belongs to the second half, as chosen and rejected answers do."""

    class Pairs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            last = logits.float().mean(-1)[torch.arange(len(logits)), inputs["attention_mask"].sum(1) - 1]
            chosen, rejected = last.chunk(2)
            return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    found = trained(fa2patch.packed_trainer(Pairs, max_tokens=150))
    assert_same_steps(found, trained(Pairs))
    assert found.token_budget.shares.share == Share(2, "units")


@pytest.mark.parametrize("half", [False, True])
def test_losses_that_are_equal_at_first(half: bool, recwarn: pytest.WarningsRecorder) -> None:
    """While DPO's model is its reference, every pair has one loss; what it is a mean of is known all the same."""

    class Preferences(Trainer):
        reference: Any = None

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            def chosen_before_rejected(one: Any) -> torch.Tensor:
                logits = one(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.float()
                labels = inputs["labels"][:, 1:]
                taken = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(0)[..., None])[..., 0]
                chosen, rejected = (taken * (labels != -100)).sum(1).chunk(2)
                return chosen - rejected

            self.reference = self.reference or tiny_llama().to(next(model.parameters()).dtype).eval()
            with torch.no_grad():
                before = chosen_before_rejected(self.reference)
            return -torch.nn.functional.logsigmoid(0.1 * (chosen_before_rejected(model) - before)).mean()

    options = {"bf16": True} if half else {}
    found = trained(fa2patch.packed_trainer(Preferences, max_tokens=120), **options)
    assert not [each for each in recwarn if each.category is StaysPadded]
    assert found.token_budget.shares.share == Share(2, "units")
    assert found.state.log_history[0]["passes_per_batch"] > 1
    if not half:
        assert_same_steps(found, trained(Preferences))


def test_a_document_longer_than_the_budget() -> None:
    with pytest.raises(PackingError, match="longer than max_tokens=30"):
        trained(fa2patch.packed_trainer(Trainer, max_tokens=30))


def test_documents_alone(reference: Any) -> None:
    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=30, too_long="alone"))
    assert_same_steps(found, reference())


def test_losses_that_do_not_tell() -> None:
    class Zero(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            return model(**inputs).logits.sum() * 0

    with pytest.warns(StaysPadded, match="computed in one pass, because its documents do not tell"):
        trained(fa2patch.packed_trainer(Zero, max_tokens=100))


@pytest.mark.parametrize("documents", [1, 3])
def test_ranks_meet_as_often_while_nothing_is_known(documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with one document did not know either, and waited for ranks with several, which did not come."""
    meetings: list[Any] = []
    for module in (token_budget, sys.modules[of_units.__module__]):
        monkeypatch.setattr(module, "of_all_ranks", lambda value: meetings.append(value) or [value])
    budget = object.__new__(token_budget.TokenBudget)
    budget.max_tokens, budget.too_long, budget.trainer = 100, "error", SimpleNamespace(accelerator=None)
    budget.costs, budget.shapes = [], PLAIN
    budget.shares = SimpleNamespace(group=lambda batch: 1, look=lambda *asked: None, looked=1, more=1.0, undecided=True)
    cut = budget._cut(None, None, padded([{"input_ids": [1] * 90}] * documents))
    assert len(cut) == 1 and len(meetings) == 2, "work of ranks is exchanged with what they ask each other anyway"


def test_a_loop_of_its_own_is_refused() -> None:
    class OwnLoop(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return None

    class Wraps(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    with pytest.raises(BadArgument, match=r"found OwnLoop\.train, which is a loop of its own"):
        fa2patch.packed_trainer(OwnLoop, max_tokens=100)
    assert trained(fa2patch.packed_trainer(Wraps, max_tokens=100)).token_budget.shares.share is not None


def test_a_backward_that_passes_by_is_refused() -> None:
    """The first pass alone would be learned."""

    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=100)
            loss.backward()
            return loss.detach()

    with pytest.raises(fa2patch.Fa2PatchError, match=r"PackedOwn\.training_step has not called it"):
        trained(fa2patch.packed_trainer(Own, max_tokens=100))


def test_evaluation_is_not_cut() -> None:
    trainer = trained(fa2patch.packed_trainer(Trainer, max_tokens=100))
    assert trainer.evaluate(dataset(8))["eval_loss"] > 0
    assert trainer.token_budget.batches == 0


def test_an_error_in_a_pass_leaves_the_trainer_as_it_was() -> None:
    class Fails(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training and getattr(self, "computed", 0) > 2:
                raise RuntimeError("out of memory")
            self.computed = getattr(self, "computed", 0) + model.training
            return super().compute_loss(model, inputs, *args, **kwargs)

    made: list[Any] = []

    class Kept(Fails):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    with pytest.raises(RuntimeError, match="out of memory"):
        trained(fa2patch.packed_trainer(Kept, max_tokens=70))
    accelerator = made[0].accelerator
    assert "backward" not in vars(accelerator) and accelerator.gradient_state.sync_gradients
