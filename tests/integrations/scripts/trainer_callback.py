"""A Trainer that is given ``fa2patch.TrainerCallback``, and no patched model: ``trainer_callback.py``.

Prints a JSON object: the losses of padded training without fa2patch, and of trainings of packed rows. In ``padded
batches``, rows are padded and computed packed. ``evaluated`` is the loss of an evaluation without training, ``first``
the numbers of tokens in the first layer, and ``late`` the error of a callback that was added too late for an
evaluation.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import transformers
from model_init import arguments, documents, make_model, packed, padded

HOME = tempfile.mkdtemp()


def trainer_of(collate: Any, **given: Any) -> Any:
    rows = documents(16)
    args = arguments(HOME, **given.pop("args", {}))
    return transformers.Trainer(args=args, train_dataset=rows, eval_dataset=rows[:6], data_collator=collate, **given)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def model() -> Any:
    transformers.set_seed(3)
    return make_model()


def main() -> None:
    found: dict[str, Any] = {
        "padded": losses(trainer_of(padded, model_init=make_model)),
        "leaking": losses(trainer_of(packed, model_init=make_model)),
        "padded evaluated": trainer_of(padded, model=model()).evaluate()["eval_loss"],
    }
    import fa2patch
    from fa2patch.errors import PackingNotIsolated

    callback = fa2patch.TrainerCallback()
    trainer = trainer_of(packed, model_init=make_model, callbacks=[callback])
    found["model_init"] = [losses(trainer), losses(trainer)]
    found["patch"] = callback.patch is fa2patch.status(trainer.model)
    found["a model"] = losses(trainer_of(packed, model=model(), callbacks=[fa2patch.TrainerCallback]))
    trainer = trainer_of(packed, model=model())
    trainer.add_callback(fa2patch.TrainerCallback())
    try:
        trainer.evaluate()
    except PackingNotIsolated as error:
        found["late"] = error.message
    found["added"] = losses(trainer)
    found["evaluated"] = trainer_of(packed, model=model(), callbacks=[fa2patch.TrainerCallback()]).evaluate()[
        "eval_loss"
    ]
    tokens: list[int] = []
    made = model()
    first = made.model.layers[0]

    def count(layer: Any, args: Any, kwargs: Any) -> None:
        if layer is first:  # a proof runs a replica
            tokens.append((args[0] if args else kwargs["hidden_states"])[..., 0].numel())

    first.register_forward_pre_hook(count, with_kwargs=True)
    made.config.use_cache = False
    found["padded batches"] = losses(
        trainer_of(padded, model=made, callbacks=[fa2patch.TrainerCallback(padded_batches=True)])
    )
    found["first"] = tokens
    found["documents"] = [len(document["input_ids"]) for document in documents(16)]
    bf16 = {"args": {"bf16": True}}  # at the end: accelerate keeps the precision for all later Trainers
    for name, collate, callbacks in (
        ("padded bf16", padded, []), ("leaking bf16", packed, []), ("bf16", packed, [fa2patch.TrainerCallback()]),
    ):  # fmt: skip
        found[name] = losses(trainer_of(collate, model_init=make_model, callbacks=callbacks, **bf16))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
