"""PEFT's adapters: added to a patched model, a patch on a model with adapters, and adapters on a model in four bits."""

import inspect

import pytest
import torch
from stage import (
    compared,
    furthest,
    packed,
    packed_in_two_rows,
    padded,
    tiny_llama,
    weights,
)  # fmt: skip

import fa2patch

pytestmark = pytest.mark.slow
BOUND = 1e-3
SAME = 1e-4


def adapted(model, **options):
    import peft

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_adapters(stage, finding, name, steps=20):
    # The model is patched before and after the adapters are added, with checkpointing, and after merging.
    import peft

    if name == "dora" and "use_dora" not in inspect.signature(peft.LoraConfig).parameters:
        pytest.skip(f"PEFT {peft.__version__} has no DoRA")
    options = {"use_dora": True} if name == "dora" else {}
    reference = stage.run(adapted(tiny_llama(), **options), padded, patched=False, steps=steps)
    moved = furthest(weights(reference["model"]), weights(adapted(tiny_llama(), **options)))
    finding.update(steps=steps, adapters_moved_by=moved)
    assert moved > 100 * SAME
    for order in ("before", "after", "checkpointed"):
        model = tiny_llama()
        if order == "before":
            fa2patch.apply(model)
        model = adapted(model, **options)
        if order == "checkpointed":
            model.enable_input_require_grads()
        checkpointed = order == "checkpointed"
        run = stage.run(model, packed, patched=order != "before", steps=steps, gradient_checkpointing=checkpointed)
        finding[order] = compared(run, reference)
        assert finding[order]["largest_relative_difference"] < BOUND and finding[order]["weights_off_by"] < SAME
    fa2patch.verify(model, batch=run["batch"], max_documents=2)
    fa2patch.verify(model.merge_and_unload(), batch=run["batch"], max_documents=2)


def test_qlora(stage, finding, tmp_path, steps=10):
    # bitsandbytes' NF4 has a CPU build. Gradient checkpointing is on.
    pytest.importorskip("bitsandbytes", reason="no bitsandbytes in this stack")
    import peft
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    tiny_llama().save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def made():
        model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=four_bits, device_map={"": "cpu"})
        return adapted(peft.prepare_model_for_kbit_training(model))

    reference = stage.run(made(), padded, patched=False, steps=steps)
    run = stage.run(made(), packed, patched=True, steps=steps)
    alone = stage.run(made(), packed_in_two_rows, patched=False, steps=steps)
    finding.update(steps=steps, **compared(run, reference), alone=compared(alone, reference))
    finding["layers_in_four_bits"] = sum(isinstance(module, Linear4bit) for module in run["model"].modules())
    leaks = finding["alone"]["largest_relative_difference"]
    assert finding["layers_in_four_bits"] == 14 and finding["largest_relative_difference"] < BOUND < leaks
