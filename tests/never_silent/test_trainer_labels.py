"""Trainer's own use of labels: it counts them before a forward, and computes losses outside of the model.

Rows that were packed beforehand come through a collator that masks nothing. What Trainer logs must then be what it logs
for the documents padded in the same version.
"""

import dataclasses
import gc
import inspect
import warnings

import pytest
import torch
import transformers
from small_models import IGNORED, config_of, documents, llama, padded, patched, small, takes_any_name

import fa2patch
from compat_matrix.check.rows import pack

pytest.importorskip("accelerate")

LENGTHS = (5, 4, 7)
ROWS = [documents(*LENGTHS, seed=seed) for seed in range(4)]

# Trainer logs four digits. Labels across boundaries, or their number, change the loss by more than 10 %.
TOLERANCE = 1e-3


def of_padded(features):
    return padded([doc for feature in features for doc in feature["input_ids"].split(list(LENGTHS))])


def of_packed(features):
    # Transformers' default collator does so: rows are stacked, and no label is masked.
    return {name: torch.stack([feature[name] for feature in features]) for name in features[0]}


def rows():
    made = []
    for docs in ROWS:
        row = {name: values[0] for name, values in pack(docs).items()}
        made.append({**row, "labels": row["input_ids"].clone()})
    return made


def arguments(tmp_path, **options):
    cls = transformers.TrainingArguments
    takes = inspect.signature(cls).parameters
    cpu = {"use_cpu": True} if "use_cpu" in takes else {"no_cuda": True}
    common = {
        "output_dir": str(tmp_path), "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 1,
        "logging_steps": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "optim": "sgd",
        "gradient_accumulation_steps": 2, "max_grad_norm": 1e9, "remove_unused_columns": False,
    }  # fmt: skip
    if any(name not in takes for name in options):
        pytest.skip(f"Trainer of Transformers {transformers.__version__} takes no {', '.join(options)}")
    return cls(**{**common, **cpu, **options})


def logged(trainer):
    trainer.train()
    return next(float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def trainer_of(collate, tmp_path, patched, kind=transformers.Trainer, options=None, **more):
    model = llama()
    trainer = kind(
        model, arguments(tmp_path, **(options or {})), train_dataset=rows(), eval_dataset=rows(), data_collator=collate,
        **more,
    )  # fmt: skip
    if patched:
        fa2patch.apply(model)
    return trainer


def assert_as_padded(found, expected):
    assert abs(found - expected) <= TOLERANCE * abs(expected), (found, expected)


def compared(tmp_path, run=logged, collate=of_packed, **more):
    found = run(trainer_of(collate, tmp_path, True, **more))
    assert_as_padded(found, run(trainer_of(of_padded, tmp_path, False, **more)))


def shifted_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="mean")


class OwnLoss(transformers.Trainer):
    # Many people write such a Trainer, which computes the loss by itself.

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = shifted_loss(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


@dataclasses.dataclass
class WithoutHash(transformers.Trainer):
    # A dataclass compares its objects by their fields, so they have no hash (TRL's experimental KTOTrainer).

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def moved(trainer):
    # How far the weights are after a step.
    trainer.train()
    return float((trainer.model.lm_head.weight - llama().lm_head.weight).detach().norm())


def evaluated(trainer):
    return trainer.evaluate()["eval_loss"]


def counted(prediction):
    # Metrics get the logits and labels of whole rows. Labels across boundaries do not count in them.
    logits, labels = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
    found, counted = logits[:, :-1].argmax(-1), labels[:, 1:] != -100
    return {"counted": float(counted.sum()), "right": float((found == labels[:, 1:])[counted].sum())}


def metrics(trainer):
    found = trainer.evaluate()
    return found["eval_counted"] + 1000 * found["eval_right"]


QUICK = {
    "the number of labels": {},
    "a loss of one's own": {"kind": OwnLoss},
    "the number of labels of a dataclass": {"kind": WithoutHash},
    "the loss of an evaluation": {"run": evaluated},
}
SLOW = {
    "the number of labels on one batch": {"options": {"gradient_accumulation_steps": 1}},
    "the weights after a step": {"run": moved, "options": {"learning_rate": 0.1}},
    "label smoothing": {"options": {"label_smoothing_factor": 0.3}},
    "a loss of one's own in evaluation": {"run": evaluated, "kind": OwnLoss},
    "labels of metrics": {"run": metrics, "compute_metrics": counted},
}


@pytest.mark.parametrize("what", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_trainer_makes_of_labels_is_as_padded(what, tmp_path):
    compared(tmp_path, **{**QUICK, **SLOW}[what])


def test_compute_loss_func(tmp_path):
    if "compute_loss_func" not in inspect.signature(transformers.Trainer).parameters:
        pytest.skip(f"Trainer of Transformers {transformers.__version__} takes no compute_loss_func")

    def loss(outputs, labels, num_items_in_batch=None):
        total = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return total / num_items_in_batch

    compared(tmp_path, compute_loss_func=loss)


def test_labels_that_are_shifted_beforehand(tmp_path):
    # Releases that know ``shift_labels`` count them as they are.
    if not takes_any_name(llama()):
        pytest.skip(f"Llama of Transformers {transformers.__version__} takes no shift_labels")

    def with_shifted(features):
        batch = of_packed(features)
        return {**batch, "shift_labels": torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}

    compared(tmp_path, collate=with_shifted)


@pytest.mark.slow
def test_rows_that_say_it_by_lengths(tmp_path):
    # Also under another framework's name.

    def with_lengths(features):
        batch = of_packed(features)
        ends = torch.tensor([*LENGTHS] * len(features)).cumsum(0)
        del batch["position_ids"]
        return {**batch, "cu_seqlens": torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)}

    compared(tmp_path, collate=with_lengths)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"label_smoothing_factor": 0.3}, marks=pytest.mark.slow)], ids=["plain", "smoothed"]
)
def test_dense_batches_are_as_before(tmp_path, options):
    found, expected = (logged(trainer_of(of_padded, tmp_path, patched, options=options)) for patched in (True, False))
    assert found == expected


OF_THEIR_OWN = [cls for cls in ("LlamaForTokenClassification", "BertForMaskedLM") if hasattr(transformers, cls)]


def test_transformers_own_flattening_collator_cannot_keep_first_labels(tmp_path):
    if not all(hasattr(transformers, name) for name in ("DataCollatorWithFlattening", OF_THEIR_OWN[0])):
        pytest.skip("this Transformers has no such collator")
    trainer = trainer_of(transformers.DataCollatorWithFlattening(), tmp_path, patched=False)
    trainer.model = patched(small(getattr(transformers, OF_THEIR_OWN[0]), config_of("llama")))
    with pytest.warns(UserWarning, match="drops the first label.*Use fa2patch.DataCollatorWithFlattening"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_a_flattening_collator_keeps_first_labels_that_are_of_their_own_tokens(tmp_path, name):
    # These are README's lines for a Trainer, with a model that does not shift its labels.
    cls = getattr(transformers, name)
    collate = fa2patch.DataCollatorWithFlattening()
    given = [{"input_ids": doc.tolist(), "labels": (doc % 3).tolist()} for docs in ROWS for doc in docs]
    found = {}
    for way in ("padded", "packed"):
        model = small(cls, config_of("llama" if "Llama" in name else "bert", num_labels=3, classifier_dropout=0.0))
        try:
            patch = fa2patch.apply(model)
        except fa2patch.Fa2PatchError as error:  # BERT up to 4.57
            pytest.skip(str(error))
        if way == "padded":
            patch.revert()
        trainer = transformers.Trainer(
            model, arguments(tmp_path, per_device_train_batch_size=6), train_dataset=given, eval_dataset=given,
            data_collator=collate if way == "packed" else rows_of_their_own,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            found[way] = logged(trainer), trainer.evaluate()["eval_loss"]
        assert collate.separator_id == IGNORED, "the collator that was given is another one's, too"
    for one, other in zip(*found.values()):
        assert_as_padded(one, other)


def rows_of_their_own(features):
    # The rows are padded, and their labels are of their own tokens.
    batch = padded([torch.tensor(feature["input_ids"]) for feature in features])
    labels = [torch.tensor(feature["labels"]) for feature in features]
    batch["labels"] = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return batch


@pytest.mark.slow
def test_our_collator_is_as_before(tmp_path):
    # Our collator's labels are masked already, so Trainer counts what is predicted.
    collate = fa2patch.DataCollatorWithFlattening()
    given = [{"input_ids": doc} for docs in ROWS for doc in docs]
    model = patched()
    options = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    trainer = transformers.Trainer(model, arguments(tmp_path, **options), train_dataset=given, data_collator=collate)
    found = logged(trainer)
    expected = shifted_mean(llama(), [doc for docs in ROWS for doc in docs])
    assert_as_padded(found, expected)


def shifted_mean(model, docs):
    losses = [shifted_loss(model(input_ids=doc[None]).logits, doc[None]) * (len(doc) - 1) for doc in docs]
    return float(sum(losses).detach()) / sum(len(doc) - 1 for doc in docs)


def test_a_trainer_of_another_model_is_left_alone(tmp_path):
    other = patched()  # it is held, because a patch that is forgotten is gone
    trainer = trainer_of(of_packed, tmp_path, False)
    batch = of_packed(rows()[:2])
    assert torch.equal(trainer._prepare_inputs(batch)["labels"], batch["labels"])
    fa2patch.apply(trainer.model)
    assert int((trainer._prepare_inputs(batch)["labels"] == -100).sum()) == 2 * len(LENGTHS)
    fa2patch.revert(trainer.model)
    assert torch.equal(trainer._prepare_inputs(batch)["labels"], batch["labels"])
    assert fa2patch.status(other).active


def test_a_trainer_of_a_model_that_is_not_transformers_is_left_alone(tmp_path):
    fa2patch.apply(llama())
    trainer = trainer_of(of_packed, tmp_path, False)
    trainer.model = torch.nn.Linear(2, 2)
    batch = of_packed(rows()[:2])
    assert torch.equal(trainer._prepare_inputs(batch)["labels"], batch["labels"])


def test_columns_that_never_reach_the_model_are_no_error(tmp_path):
    # A Trainer of one's own may take them out. If they reach the model, its forward says what is wrong with them.
    trainer = trainer_of(of_packed, tmp_path, True)
    batch = {**of_packed(rows()[:2]), "seq_lengths": torch.tensor([3])}
    assert torch.equal(trainer._prepare_inputs(batch)["labels"], batch["labels"])
    with pytest.raises(fa2patch.Fa2PatchError):
        trainer.model(**batch)
    without = {name: value for name, value in batch.items() if name == "labels"}
    assert torch.equal(trainer._prepare_inputs(without)["labels"], batch["labels"])


def test_revert_leaves_no_trace():
    gc.collect()  # what covers a binding of another test may be gone, and not collected
    before = dict(vars(transformers.Trainer))
    model = patched()
    assert vars(transformers.Trainer)["_prepare_inputs"] is not before["_prepare_inputs"]
    fa2patch.revert(model)
    assert dict(vars(transformers.Trainer)) == before
