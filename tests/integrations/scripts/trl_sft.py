"""Train TRL's SFTTrainer on rows that it packs itself, and on the same documents padded: ``trl_sft.py OPTION``.

Run by test_trl.py. The option is ``padding_free``, or a packing strategy. Prints a JSON object:

- ``columns``: what the patched model is given, and the shape or value of each.
- ``documents``: the lengths of all documents of the trainer's dataset.
- ``alone``: the largest difference between the logits of the untrained patched model for a batch and those of each
  document alone, by the unpatched model, as a part of the largest logit; and the same for the batch's ids only.
- ``losses``: of the ways ``packed`` (patched) and ``padded`` (unpatched).
- ``said``: the names of the warnings.
- ``refused``: what ``packed_trainer`` says, which takes padded batches only.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from typing import Any

import datasets
import torch
import transformers
import trl
from trl_noting import Noting, config, model, text, tokenizer

import fa2patch

LONGEST, ROWS, STEPS = 48, 4, 30


def examples() -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)
    return datasets.Dataset.from_list([{"text": text(generator, 90 if at % 4 == 0 else 30)} for at in range(300)])


def trainer(policy: Any, option: str, base: Any = trl.SFTTrainer, **others: Any) -> Any:
    packing = {"packing": True, "packing_strategy": option, "max_length": LONGEST}
    if option == "padding_free":
        packing = {"padding_free": True, "max_length": None}
    args = config(
        "SFTConfig",
        dataset_text_field="text",
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=2e-3,
        **{**packing, **others.pop("config", {})},
    )
    return base(policy, args, **{"train_dataset": examples(), "processing_class": tokenizer(), **others})


def documents(row: dict[str, Any]) -> list[list[int]]:
    # A row that does not say where documents start is one document.
    ids = row["input_ids"]
    lengths = [len(ids)]
    if "seq_lengths" in row:
        lengths = row["seq_lengths"]
    elif "position_ids" in row:
        starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], len(ids)])]
    return [document.tolist() for document in torch.tensor(ids).split(list(lengths))]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    each = [torch.tensor(document) for row in rows for document in documents(row)]
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = pad(each, batch_first=True), pad([torch.ones_like(ids) for ids in each], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@torch.no_grad()
def alone(policy: Any, batch: dict[str, Any], rows: list[list[int]]) -> list[float]:
    # The logits are also compared without what says where documents start.
    unpatched, patched = copy.deepcopy(policy), copy.deepcopy(policy)
    unpatched.config._attn_implementation = patched.config._attn_implementation = "sdpa"
    fa2patch.apply(patched)
    expected = torch.cat([unpatched(input_ids=torch.tensor([ids])).logits[0] for ids in rows])
    given = {name: value for name, value in batch.items() if name != "labels"}
    both = [patched(**call).logits.flatten(0, 1) for call in (given, {"input_ids": batch["input_ids"]})]
    return [float((found - expected).abs().max() / expected.abs().max()) for found in both]


def main(option: str) -> None:
    policy = model(0, len(tokenizer()))
    if trl.__version__ < "0.20" and option != "wrapped":  # it returns position_ids for this attention only
        policy.config._attn_implementation = "flash_attention_2"
    noting, found = Noting(), {}

    def packed(generated: Any) -> Any:
        patched = copy.deepcopy(policy)
        fa2patch.apply(patched)
        made = trainer(patched, option)
        found["dataset"] = dataset = list(made.train_dataset)
        found["documents"] = [len(document) for row in dataset for document in documents(row)]
        rows = dataset[-ROWS - 1 : -1]  # the last row may be shorter
        batch = made.data_collator([dict(row) for row in rows])
        found["columns"] = {name: list(v.shape) if torch.is_tensor(v) else v for name, v in batch.items()}
        found["alone"] = alone(policy, batch, [document for row in rows for document in documents(row)])
        return made

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = {"packed": noting.train(packed)["losses"]}
    found["said"] = sorted({type(each.message).__name__ for each in caught})
    try:
        trainer(copy.deepcopy(policy), option, fa2patch.packed_trainer(trl.SFTTrainer))
    except fa2patch.Fa2PatchError as error:
        found["refused"] = error.message
    dataset = datasets.Dataset.from_list(found.pop("dataset"))
    plain = {"packing": False, "padding_free": False, "remove_unused_columns": False, "max_length": None}
    options = {"config": {**plain, "dataset_kwargs": {"skip_prepare_dataset": True}}, "data_collator": padded}
    policy.config._attn_implementation = "sdpa"
    losses["padded"] = noting.train(lambda generated: trainer(policy, option, train_dataset=dataset, **options))[
        "losses"
    ]
    print(json.dumps({"trl": trl.__version__, "losses": losses, **found}))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(*sys.argv[1:])
