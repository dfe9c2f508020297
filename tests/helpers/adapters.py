"""PEFT around a model, before ``apply`` and after it."""

import pytest
import torch

import fa2patch

ORDERS = ("apply first", "peft first", "peft first, apply to the model inside")
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def with_lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).eval()


def in_order(order, model, wrap):
    """Wrap a model and patch it in one of the ``ORDERS``; with another order, only wrap it."""
    if order == "apply first":
        fa2patch.apply(model)
    torch.manual_seed(3)
    wrapped = wrap(model).eval()
    if order.startswith("peft first"):
        fa2patch.apply(wrapped if order == "peft first" else model)
    return wrapped
