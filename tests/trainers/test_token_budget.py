"""A Trainer with a budget of tokens makes the steps of a padded one, whatever its loss is: losses, weights, metrics."""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from stage import furthest, padded, tiny_llama, weights
from transformers import MixtralForCausalLM, Trainer, TrainingArguments

import fa2patch
from fa2patch._torch import HAS_OPERATORS
from fa2patch.errors import BadArgument, PackingError
from fa2patch.trainers import known_losses, token_budget

STEPS = 6
ARGUMENTS = inspect.signature(TrainingArguments).parameters


def dataset(count: int = 48, seed: int = 1) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
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
    trainer.losses = []  # the logs round them
    step = trainer.training_step

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        trainer.losses.append(float(loss))
        return loss

    trainer.training_step = noted
    trainer.train()
    return trainer


def transformers_printer() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


def assert_same_steps(found: Any, expected: Any) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
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


# The passes of this budget all have the same shapes.
STILL: dict[str, Any] = {"max_tokens": 80, "pad_to_multiple_of": 80, "max_documents": 4, "longest_document": 80}


def with_weights(by: str) -> Any:
    # The loss has weights of documents, or of tokens by their ids.
    collate = fa2patch.DataCollatorWithFlattening(loss_weights=by)

    def packed(features: Any) -> Any:
        weights = [{"loss_weights": [token % 5 / 2 for token in one["input_ids"]]} for one in features]
        return collate([{**one, **weight} for one, weight in zip(features, weights)] if by == "token" else features)

    return packed


class MeanOfDocuments(Trainer):
    # Every document has the same weight in the loss.

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, inputs["labels"][:, 1:], reduction="none")
        counts = (inputs["labels"][:, 1:] != -100).sum(1)
        return (losses.sum(1) / counts.clamp(min=1)).mean()


class Noted(MeanOfDocuments):
    # A metric is noted for each computed loss, as TRL's trainers do, and how often the loss was computed.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.noted: dict[str, dict[str, list[float]]] = {"train": {"rows": []}, "eval": {"rows": []}}
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        length = float((inputs["labels"] != -100).sum(1).float().mean())
        self.noted["train" if model.training else "eval"]["rows"].append(length)
        inputs["labels"] = inputs.pop("labels")
        return super().compute_loss(model, inputs, *args, **kwargs)


class Compared(Trainer):
    # The loss compares the documents of a batch.

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        seen = inputs["attention_mask"][..., None]
        means = (logits.float() * seen).sum((1, 2)) / seen.sum((1, 2))
        return means.sort().values.diff(prepend=logits.new_zeros(1)).square().mean()


@pytest.fixture(scope="module")
def reference() -> Any:
    # Padded training without fa2patch, by options. Each is trained once.
    found: dict[str, Any] = {}

    def of(base: Any = Trainer, **options: Any) -> Any:
        key = f"{base.__name__} {options}"
        if key not in found:
            found[key] = trained(base, **options)
        return found[key]

    return of


@pytest.fixture(autouse=True, scope="module")
def precision_of_no_trainer() -> Any:
    # The precision must not stay behind for the tests of other files.
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


class Exact(Trainer):
    # Trainer's own loss in code that is not known, so that it sees the whole batch.

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


# Passes that are computed once, and passes that are checkpoints.
EACH_WAY = pytest.mark.parametrize("base", [Trainer, Exact])


def rows_of_ids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    # The shapes of ids that are embedded from now on. A hook would be code that is not known.
    seen: list[tuple[int, ...]] = []
    own = torch.nn.functional.embedding

    def embedding(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(tuple(ids.shape))
        return own(ids, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "embedding", embedding)
    return seen


def of_the_way(found: Any, base: Any) -> bool:
    # Whether batches were computed in the way that the trainer's class takes. Before 4.46 there is one way.
    once = base is Trainer and "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters
    return (found.token_budget.why_exact == "") == once


@pytest.mark.parametrize("kind", COLLATORS)
@pytest.mark.parametrize("budget", [70, 150, 1000])
def test_steps_of_a_loss_that_sees_the_whole_batch(reference: Any, kind: str, budget: int) -> None:
    found = trained(fa2patch.packed_trainer(Exact, max_tokens=budget), COLLATORS[kind])
    assert_same_steps(found, reference())
    assert "PackedExact.compute_loss is not one that is known" in found.token_budget.why_exact
    logs = [entry for entry in found.state.log_history if "passes_per_batch" in entry]
    assert len(logs) == STEPS and (max(entry["passes_per_batch"] for entry in logs) == 1) == (budget == 1000)
    assert all((entry["padding_avoided"] > 0.1) == (kind == "padded") for entry in logs)


def test_the_log_says_once_which_way_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []  # not caplog: another test's package may have switched loggers off in this process
    monkeypatch.setattr(token_budget.logger, "warning", lambda text, *values: told.append(text % values))
    found = trained(fa2patch.packed_trainer(Exact, max_tokens=100))
    (said,) = told
    assert "PackedExact computes its batches in passes of at most 100 tokens, each of them twice" in said
    assert "compute_loss is not one that is known" in said
    assert "at most 100 tokens" in repr(found.token_budget)


@EACH_WAY
@pytest.mark.parametrize("kind", ["packed", "packed, with lengths"])
def test_passes_of_still_shapes_make_the_steps_of_padded_batches(
    reference: Any, kind: str, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, seen = reference(), rows_of_ids(monkeypatch)
    found = trained(fa2patch.packed_trainer(base, **STILL), COLLATORS[kind])
    assert_same_steps(found, expected)
    assert of_the_way(found, base) and {*seen} == {(1, 80)}
    logs = [entry for entry in found.state.log_history if "padding_of_passes" in entry]
    tokens = sum(len(one["input_ids"]) for one in dataset())
    assert len(logs) == STEPS and all(0 < entry["padding_of_passes"] < 1 for entry in logs)
    paid = [1 / (1 - entry["padding_of_passes"]) for entry in logs]
    passes = sum(entry["passes_per_batch"] for entry in logs)
    assert sum(paid) / STEPS == pytest.approx(80 * passes / tokens, rel=0.05)


@pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")
@pytest.mark.skipif(known_losses.digest(Trainer.compute_loss) not in known_losses.COMPUTE_LOSS, reason="before 4.46")
def test_one_graph_computes_all_passes_of_still_shapes(reference: Any) -> None:
    # Shapes and numbers are constants of a graph (``dynamic=False``), as of a CUDA graph.
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
    assert set(graphs) == {True}
    assert len(graphs) == 1 or len(graphs) == STEPS  # up to 4.48, the step's number of labels is a constant of a graph


@pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")
def test_torch_compiles_some_passes_and_not_others(reference: Any) -> None:
    # After so many shapes torch computes a frame as it is, and a graph that is compiled says nothing of its loss.
    torch._dynamo.reset()
    model = patched(tiny_llama())
    model.forward = torch.compile(model.forward, backend="aot_eager", dynamic=False)
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({limit: 1}):
        found = trained(fa2patch.packed_trainer(Trainer, max_tokens=100), COLLATORS["packed"], model)
    torch._dynamo.reset()
    assert_same_steps(found, reference())


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


@EACH_WAY
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"label_smoothing_factor": 0.1},
    ],
    ids=str,
)
def test_steps_with_options_of_trainer(reference: Any, options: dict[str, Any], base: Any) -> None:
    if "gradient_checkpointing_kwargs" in options and "gradient_checkpointing_kwargs" not in ARGUMENTS:
        pytest.skip("this release has no gradient_checkpointing_kwargs")
    found = trained(fa2patch.packed_trainer(base, max_tokens=100), **options)
    assert_same_steps(found, reference(**options))


@pytest.mark.parametrize("by", ["token", "document"])
def test_steps_with_weights_in_the_loss(by: str) -> None:
    # The passes of a batch count its tokens or documents together, as Trainer counts them.
    whole = trained(Trainer, with_weights(by), patched(tiny_llama()))
    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=100), with_weights(by))
    assert_same_steps(found, whole)
    assert found.state.log_history[0]["passes_per_batch"] > 1


def patched(model: Any) -> Any:
    fa2patch.apply(model)
    return model


@EACH_WAY
def test_in_bfloat16_passes_are_as_near_to_float32_as_padded_batches(reference: Any, base: Any) -> None:
    trainers = (trained(fa2patch.packed_trainer(base, max_tokens=100), bf16=True), reference(bf16=True), reference())
    found, as_padded, exact = (
        torch.cat([value.flatten() for value in weights(one.model).values()]) for one in trainers
    )
    assert 0 < float((found - exact).norm()) < 1.1 * float((as_padded - exact).norm())


@EACH_WAY
def test_lora_in_passes(base: Any) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0))

    found = trained(fa2patch.packed_trainer(base, max_tokens=100), model=adapted())
    assert_same_steps(found, trained(Trainer, model=adapted()))


def test_what_a_trainer_notes_is_as_without_passes(reference: Any) -> None:
    found, expected = trained(fa2patch.packed_trainer(Noted, max_tokens=100)), reference(Noted)
    assert_same_steps(found, expected)
    assert found.noted == expected.noted


class MeanOfTokens(Trainer):
    # The mean over the labels of a batch is no number if there are none.

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].mT, inputs["labels"][:, 1:])


def only_some_learned(features: Any) -> Any:
    # The short rows and the longest ones have no labels.
    batch = padded(features)
    tokens = batch["attention_mask"].sum(1)
    batch["labels"][(tokens < 25) | (tokens > 45)] = -100
    return batch


@pytest.mark.parametrize(
    ("base", "options"), [(Trainer, {}), (Trainer, {"label_smoothing_factor": 0.1}), (MeanOfTokens, {})]
)
def test_documents_without_labels(base: Any, options: dict[str, Any]) -> None:
    # A pass of such documents has no mean.
    found = trained(fa2patch.packed_trainer(base, max_tokens=70), only_some_learned, **options)
    assert_same_steps(found, trained(base, only_some_learned, **options))


@pytest.mark.parametrize("base", [Trainer, MeanOfDocuments, MeanOfTokens])
def test_batches_of_two_documents(base: Any) -> None:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    found = trained(fa2patch.packed_trainer(base, max_tokens=60), **options)
    assert_same_steps(found, trained(base, **options))
    assert any(entry.get("passes_per_batch", 1) > 1 for entry in found.state.log_history)


class Becomes(MeanOfDocuments):
    # A term comes to the loss in a later batch.

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + 0.1 * loss.detach().square() * loss * (self.state.global_step > 2)


class InTraining(MeanOfDocuments):
    # Only training has the second term.

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + loss.square() if model.training else loss


class Stateful(MeanOfDocuments):
    # The loss is scaled by a mean of those before.

    mean = 6.0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.mean = 0.5 * self.mean + 0.5 * float(loss)
        return loss * loss / self.mean


class OtherGradient(MeanOfDocuments):
    # The value is a mean, and the gradient is not that of the mean.

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        square = loss.square()
        return loss.detach() + square - square.detach()


class Pairs(Trainer):
    # The first half of the rows belongs to the second half, as chosen and rejected answers do.

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        last = logits.float().mean(-1)[torch.arange(len(logits)), inputs["attention_mask"].sum(1) - 1]
        chosen, rejected = last.chunk(2)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


class Contrasted(Trainer):
    # A contrastive loss: each document is told from all others of the batch by its last hidden state.

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        mask = inputs["attention_mask"]
        states = model(input_ids=inputs["input_ids"], attention_mask=mask, output_hidden_states=True).hidden_states[-1]
        last = states[torch.arange(len(mask)), mask.sum(1) - 1].float()
        last = torch.nn.functional.normalize(last, dim=-1)
        others = torch.arange(len(last), device=last.device).roll(1)
        return torch.nn.functional.cross_entropy(last @ last.T * 10, others)


@pytest.mark.parametrize(
    "base", [Compared, MeanOfTokens, MeanOfDocuments, Becomes, InTraining, Stateful, OtherGradient, Pairs, Contrasted]
)
@pytest.mark.parametrize("budget", [70, 150])
def test_any_loss(base: Any, budget: int) -> None:
    found = trained(fa2patch.packed_trainer(base, max_tokens=budget))
    assert_same_steps(found, trained(base))
    assert found.token_budget.why_exact
    assert any(entry.get("passes_per_batch", 1) > 1 for entry in found.state.log_history)


def routed(coefficient: float, implementation: str = "eager") -> Any:
    # The router loss is a mean over all tokens times another one.
    from compat_matrix import tiny_models

    options = {"output_router_logits": True, "router_aux_loss_coef": coefficient, "vocab_size": 512}
    return tiny_models.build("mixtral", implementation, **options)


@pytest.mark.parametrize("coefficient", [0.001, 0.1])
def test_router_losses(coefficient: float) -> None:
    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=100), model=routed(coefficient))
    assert found.token_budget.why_exact
    assert_same_steps(found, trained(Trainer, model=routed(coefficient)))


@pytest.mark.skipif(not MixtralForCausalLM._supports_sdpa, reason="the eager code rounds elsewhere")
@pytest.mark.parametrize("coefficient", [0.001, 0.003, 0.1])
def test_router_losses_in_bfloat16(coefficient: float) -> None:
    # The gates' gradients of a batch must be as near to float32 as those of the padded batch are.

    def gradients(half: bool, **budget: Any) -> torch.Tensor:
        model, found = routed(coefficient, "sdpa").train(), []  # eager code rounds elsewhere
        if budget:
            fa2patch.apply(model, padded_batches=True, **budget)
        for seed in range(8):  # in one batch, chance decides
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                model(**padded(dataset(16, seed))).loss.backward()
            found += [p.grad.flatten().clone() for name, p in model.named_parameters() if "gate" in name]
        return torch.cat(found)

    exact, at_once = gradients(False), gradients(False, max_tokens=10_000)
    assert float((gradients(False, max_tokens=100) - at_once).norm() / at_once.norm()) < 1e-5
    as_padded, found = gradients(True) - exact, gradients(True, max_tokens=100) - exact
    assert 0 < float(found.norm()) < 1.1 * float(as_padded.norm())


def test_a_changed_line_of_a_known_loss_is_not_known() -> None:
    compute = Trainer.compute_loss
    source = inspect.getsource(compute)
    lines: dict[str, Any] = {}
    exec(
        compile("if True:\n" + source.replace("loss", "loss", 1), "changed", "exec"),
        vars(inspect.getmodule(compute)),
        lines,
    )
    counts_the_step = "num_items_in_batch" in inspect.signature(compute).parameters  # from 4.46 on
    assert (known_losses.digest(compute) in known_losses.COMPUTE_LOSS) == counts_the_step
    assert known_losses.digest(lines["compute_loss"]) not in known_losses.COMPUTE_LOSS


def test_a_document_longer_than_the_budget() -> None:
    with pytest.raises(PackingError, match="longer than max_tokens=30"):
        trained(fa2patch.packed_trainer(Trainer, max_tokens=30))


def test_documents_alone(reference: Any) -> None:
    found = trained(fa2patch.packed_trainer(Trainer, max_tokens=30, too_long="alone"))
    assert_same_steps(found, reference())


def test_a_loop_of_its_own() -> None:
    # Passes are made by the model, so that any loop is served.

    class OwnLoop(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            for batch in self.get_train_dataloader():
                batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
                self.model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    found, expected = trained(fa2patch.packed_trainer(OwnLoop, max_tokens=100)), trained(OwnLoop)
    assert furthest(weights(found.model), weights(expected.model)) < 1e-5


class Own(Trainer):
    # The step calls backward itself.

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


def test_a_backward_of_its_own() -> None:
    found = trained(fa2patch.packed_trainer(Own, max_tokens=100))
    assert_same_steps(found, trained(Own))


def test_evaluation_is_computed_in_passes(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, expected = trained(fa2patch.packed_trainer(Trainer, max_tokens=100)), reference().evaluate(dataset(8))
    seen = rows_of_ids(monkeypatch)
    assert trainer.evaluate(dataset(8))["eval_loss"] == pytest.approx(expected["eval_loss"])
    assert len(seen) > 1 and all(rows == 1 and length <= 100 for rows, length in seen)
    assert trainer.token_budget.counts.batches == 0


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


def test_the_methods_of_a_packed_trainer_are_found_by_their_names() -> None:
    # datasets hashes the trainer with what it maps. Functions made in a function are pickled with all that they reach.
    packed = fa2patch.packed_trainer(Trainer, max_tokens=64)
    made = [value for value in vars(packed).values() if callable(value) and not isinstance(value, type)]
    assert not made and packed.__init__.__qualname__ == "_Packing.__init__"
    assert fa2patch.packed_trainer(Trainer).token_budget is None


def test_a_budget_without_its_name_is_an_error() -> None:
    with pytest.raises(BadArgument, match="share_prompts: expected True or False, found 512"):
        fa2patch.packed_trainer(Trainer, 512)
