"""What the callbacks of Trainer and Lightning patch, and their errors; tests/integrations trains with them."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import FNetConfig, FNetForMaskedLM, Trainer, TrainingArguments, ViTConfig, ViTModel

import fa2patch
from compat_matrix import tiny_models
from fa2patch.callbacks import lightning as module_of_lightning
from fa2patch.errors import BadArgument, Fa2PatchError, LayerNotPatchable, NotAModel, PackingNotIsolated, UnknownKernel


def trainer_of(folder: Any, **given: Any) -> Any:
    args = TrainingArguments(str(folder), report_to=[], use_cpu=True)
    return Trainer(args=args, train_dataset=[{"input_ids": [1, 2]}], **given)


def vision_model() -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4, "patch_size": 2}
    return ViTModel(ViTConfig(**sizes))


# --- Trainer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["model", "model_init"])
def test_the_model_of_a_trainer_is_patched_in_its_constructor(tmp_path: Any, given: str) -> None:
    model = tiny_models.build("llama", "sdpa")
    callback = fa2patch.TrainerCallback(kernel="reference")
    trainer = trainer_of(tmp_path, callbacks=[callback], **{given: model if given == "model" else lambda: model})
    assert callback.patch is fa2patch.status(trainer.model) is not None
    assert callback.patch.kernel == "reference"


def test_the_class_is_a_callback_too(tmp_path: Any) -> None:
    model = tiny_models.build("llama", "sdpa")
    trainer_of(tmp_path, model=model, callbacks=[fa2patch.TrainerCallback])
    assert fa2patch.status(model) is not None


def test_each_training_patches_the_model_that_it_has(tmp_path: Any) -> None:
    # ``train`` calls ``model_init`` again, and trains no step here.
    made = []

    def make() -> Any:
        made.append(tiny_models.build("llama", "sdpa"))
        return made[-1]

    callback = fa2patch.TrainerCallback()
    trainer = trainer_of(tmp_path, model_init=make, callbacks=[callback])
    trainer.args.max_steps, trainer.args.num_train_epochs = -1, 0
    trainer.train()
    first, second = made
    assert callback.patch is fa2patch.status(second) and callback.patch.model is second
    assert fa2patch.status(first) is not None


def test_apply_raises_its_errors_in_the_trainers_constructor(tmp_path: Any) -> None:
    with pytest.raises(UnknownKernel, match="bogus"):
        trainer_of(
            tmp_path, model=tiny_models.build("llama", "sdpa"), callbacks=[fa2patch.TrainerCallback(kernel="bogus")]
        )
    with pytest.raises(NotAModel, match="expected a Transformers model"):
        trainer_of(tmp_path, model=torch.nn.Linear(2, 2), callbacks=[fa2patch.TrainerCallback()])


def test_a_batch_that_was_evaluated_unpatched_is_an_error() -> None:
    model = tiny_models.build("llama", "sdpa")
    with pytest.raises(PackingNotIsolated, match="was added later.*callbacks=.*to the Trainer, or call fa2patch.apply"):
        fa2patch.TrainerCallback().on_prediction_step(None, None, None, model=model)
    fa2patch.apply(model)
    fa2patch.TrainerCallback().on_prediction_step(None, None, None, model=model)


# --- Lightning -------------------------------------------------------------------------------------------------------


class Parent:
    # It stands in the place of Lightning's ``Callback``, which is not installed here. The slow tests use the real one.
    pass


@pytest.fixture
def lightning(monkeypatch: Any) -> Any:
    """The callback's class as it is where Lightning is installed."""
    monkeypatch.setattr(module_of_lightning, "_BASES", (Parent,))
    return module_of_lightning.LightningCallback


def module_with(**models: Any) -> torch.nn.Module:
    return torch.nn.ModuleDict(models)


def test_the_callback_says_that_lightning_is_missing() -> None:
    code = (
        "import sys; sys.modules.update({'lightning': None, 'pytorch_lightning': None})\n"
        "import fa2patch\n"
        "try: fa2patch.LightningCallback()\n"
        "except fa2patch.Fa2PatchError as e: sys.exit('pip install lightning' not in str(e))\n"
        "sys.exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_model_in_a_module_is_patched_once(lightning: Any) -> None:
    one, other = tiny_models.build("llama", "sdpa"), tiny_models.build("llama", "sdpa")
    module = module_with(policy=one, wrapped=module_with(teacher=other))
    callback = lightning()
    callback.setup(None, module, "fit")
    assert list(callback.patches) == ["policy", "wrapped.teacher"]
    assert callback.patches == {"policy": fa2patch.status(one), "wrapped.teacher": fa2patch.status(other)}
    before = copy.copy(callback.patches)
    callback.on_fit_start(None, module)
    assert callback.patches == before


@pytest.mark.parametrize("event", ["on_fit_start", "on_validation_start", "on_test_start", "on_predict_start"])
def test_a_model_that_is_made_after_setup_is_patched_before_the_first_batch(lightning: Any, event: str) -> None:
    module, callback = module_with(), lightning()
    callback.setup(None, module, "fit")
    module.llm = tiny_models.build("llama", "sdpa")
    getattr(callback, event)(None, module)
    assert fa2patch.status(module.llm) is not None


def test_a_module_without_a_model_is_an_error_before_the_first_batch(lightning: Any) -> None:
    module, callback = module_with(head=torch.nn.Linear(2, 2)), lightning()
    callback.setup(None, module, "fit")
    with pytest.raises(NotAModel, match="expected a Transformers model in this ModuleDict, found none"):
        callback.on_fit_start(None, module)


def test_models_are_chosen_by_name(lightning: Any) -> None:
    module = module_with(llm=tiny_models.build("llama", "sdpa"), tower=vision_model())
    with pytest.raises(Fa2PatchError, match=r"tower of this ModuleDict: .*LightningCallback\(models=\[...\]\)"):
        lightning().setup(None, module, "fit")
    callback = lightning(["llm"])
    callback.setup(None, module, "fit")
    callback.on_fit_start(None, module)
    assert list(callback.patches) == ["llm"] and fa2patch.status(module["tower"]) is None
    with pytest.raises(BadArgument, match="found 'llm', 'tower', and none of the name 'lm'"):
        lightning(["lm"]).on_fit_start(None, module)


def test_an_error_about_a_model_keeps_its_class(lightning: Any) -> None:
    model = FNetForMaskedLM(FNetConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9))
    with pytest.raises(LayerNotPatchable, match="fnet of this ModuleDict: .*looked in every layer"):
        lightning().setup(None, module_with(fnet=model), "fit")
