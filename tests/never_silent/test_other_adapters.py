"""PEFT methods other than virtual tokens that affect a whole row: packed rows are right or refused."""

import pytest
import torch
from adapters import LORA, ORDERS, in_order

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors

peft = pytest.importorskip("peft")
DOCS = documents(5, 9, 3)


def adapted(config, order, **more):
    def wrap(model):
        wrapped = peft.get_peft_model(model, config, **more)
        for weight in wrapped.parameters():
            if weight.requires_grad and not weight.any():  # zeros would have no effect
                torch.nn.init.normal_(weight, std=0.3)
        return wrapped

    return in_order(order, tiny_models.build("llama", "sdpa"), wrap)


def takes(config, name):
    return hasattr(peft, config) and name in getattr(peft, config).__dataclass_fields__


@pytest.mark.parametrize("order", ORDERS)
def test_mixed_adapters_are_right(order):
    config = peft.LoraConfig(**LORA)
    try:
        model = adapted(config, order, mixed=True)
    except errors.NotAModel as error:  # PEFT 0.7's does not expose the model inside
        assert order == "peft first" and "Hand over the model object itself" in str(error)
        return
    model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["k_proj"], init_weights=False))
    model.set_adapter(["default", "other"])
    found = model(**pack(DOCS)).logits[0]
    fa2patch.revert(model.base_model.model)
    assert_close(found, alone(model, DOCS), "logits of mixed adapters")


@pytest.mark.parametrize("order", ORDERS)
def test_adaption_prompts_are_right_or_refused(order):
    # Adaption prompts replace attention layers, which is detected even after ``apply``.
    config = peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM")
    try:
        expected = alone(adapted(config, ""), DOCS)
    except Exception as error:
        pytest.skip(f"PEFT {peft.__version__} cannot compute it here: {type(error).__name__}: {error}")
    model = adapted(config, order)
    found = model(**pack(DOCS)).logits[0]
    assert_close(found, expected, "logits with adaption prompts")


@pytest.mark.skipif(not takes("LoraConfig", "alora_invocation_tokens"), reason="this PEFT has no activated LoRA")
@pytest.mark.parametrize("order", ORDERS)
def test_an_activated_lora_is_refused(order):
    # It starts at the last invocation in the row, so a document's own one is ignored if another follows.
    config = peft.LoraConfig(**LORA, alora_invocation_tokens=[7, 8])
    docs = documents(5, 9, 3)
    for doc in docs:
        doc[0:2] = torch.tensor([7, 8])
    model = adapted(config, order)
    with pytest.raises(errors.PackingNotIsolated, match="activated LoRA"):
        model(**pack(docs))
    padded = {"input_ids": docs[0][None], "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    torch.testing.assert_close(model(**padded).logits, adapted(config, "")(**padded).logits, rtol=0, atol=0)
    with model.disable_adapter():
        expected = alone(tiny_models.build("llama", "eager"), docs)
        assert_close(model(**pack(docs)).logits[0], expected, "logits without it")


@pytest.mark.skipif(not hasattr(peft, "ShadowConfig"), reason="this PEFT has no shadow models")
@pytest.mark.parametrize("order", ORDERS)
def test_a_model_that_runs_beside_the_patched_one_is_refused(order):
    config = peft.ShadowConfig(r=2, shadow_num_hidden_layers=1, init_weights=False, task_type="CAUSAL_LM")
    model = adapted(config, order)
    with pytest.raises(errors.PackingNotIsolated, match="a model of its own"):
        model(**pack(DOCS), use_cache=False)
    padded = {"input_ids": DOCS[0][None], "attention_mask": torch.ones(1, 5, dtype=torch.long), "use_cache": False}
    torch.testing.assert_close(model(**padded).logits, adapted(config, "")(**padded).logits, rtol=0, atol=0)


@pytest.mark.parametrize("order", [ORDERS[0], *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS[1:])])
def test_lora_compiles_to_one_graph(order):
    torch._dynamo.reset()
    batch = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": doc.tolist()} for doc in DOCS]
    )
    batch = {**batch, "use_cache": False}
    model = adapted(peft.LoraConfig(**LORA), order)
    if {layer.seam for layer in fa2patch.status(model).layers} != {"interface"}:
        pytest.skip("compiled in one graph on the interface seam only")
    expected = model(**batch).logits
    found = torch.compile(model, backend="eager", fullgraph=True)(**batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
