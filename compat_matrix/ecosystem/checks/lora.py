"""PEFT adapters: added to a patched model, and a patch on a model with adapters."""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
from typing import Any

import fa2patch

from ..collators import packed, packed_in_two_rows, padded
from ..training import Stage, furthest, largest_relative_difference, tiny_llama, weights

BOUND = 1e-3
SAME = 1e-4


def lora(stage: Stage, steps: int = 20) -> dict[str, Any]:
    """LoRA, packed against padded."""
    return _compared(stage, steps, {})


def dora(stage: Stage, steps: int = 20) -> dict[str, Any]:
    """DoRA, packed against padded."""
    import peft

    if "use_dora" not in inspect.signature(peft.LoraConfig).parameters:
        return {"skipped": f"PEFT {peft.__version__} has no DoRA"}
    return _compared(stage, steps, {"use_dora": True})


def qlora(stage: Stage, steps: int = 10) -> dict[str, Any]:
    """Adapters on a model in four bits (bitsandbytes' NF4, which has a CPU build), with gradient checkpointing."""
    if not importlib.util.find_spec("bitsandbytes"):
        return {"skipped": "no bitsandbytes in this stack"}
    import peft
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    folder = tempfile.mkdtemp(dir=stage.folder.name)
    tiny_llama().save_pretrained(folder)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def made() -> Any:
        model = LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map={"": "cpu"})
        return _with_adapters(peft.prepare_model_for_kbit_training(model), {})

    reference = stage.run(made(), padded, patched=False, steps=steps)
    run = stage.run(made(), packed, patched=True, steps=steps)
    alone = stage.run(made(), packed_in_two_rows, patched=False, steps=steps)
    quantized = sum(isinstance(module, Linear4bit) for module in run["model"].modules())
    difference = largest_relative_difference(run["losses"], reference["losses"])
    leaks = largest_relative_difference(alone["losses"], reference["losses"])
    return {
        "ok": quantized == 14 and difference < BOUND < leaks,
        "steps": steps,
        "layers_in_four_bits": quantized,
        "largest_relative_difference": difference,
        "alone_by": leaks,
    }


def _compared(stage: Stage, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Compare packed with padded: patched before and after adding adapters, with checkpointing, and after merging."""
    reference = stage.run(_with_adapters(tiny_llama(), options), padded, patched=False, steps=steps)
    moved = furthest(weights(reference["model"]), weights(_with_adapters(tiny_llama(), options)))
    found: dict[str, Any] = {"steps": steps, "adapters_moved_by": moved}
    found["ok"] = moved > 100 * SAME
    for name, before, checkpointed in (("before", True, False), ("after", False, False), ("checkpointed", False, True)):
        base = tiny_llama()
        if before:
            fa2patch.apply(base)
        model = _with_adapters(base, options)
        if checkpointed:
            model.enable_input_require_grads()
        run = stage.run(model, packed, patched=not before, steps=steps, gradient_checkpointing=checkpointed)
        difference = largest_relative_difference(run["losses"], reference["losses"])
        off = furthest(weights(model), weights(reference["model"]))
        found[name] = {"largest_relative_difference": difference, "weights_off_by": off}
        found["ok"] = found["ok"] and difference < BOUND and off < SAME
    fa2patch.verify(model, batch=run["batch"], max_documents=2)
    merged = model.merge_and_unload()
    found["merged_is_isolated"] = fa2patch.verify(merged, batch=run["batch"], max_documents=2, strict=False).ok
    found["ok"] = found["ok"] and found["merged_is_isolated"]
    return found


def _with_adapters(model: Any, options: dict[str, Any]) -> Any:
    import peft
    import torch

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)
