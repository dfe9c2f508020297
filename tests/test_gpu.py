"""Whole models with real kernels: one script for a lent GPU (``python -m pytest -m gpu``)."""

import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.points import alone, documents, loss_of, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FAMILIES = [family for family in tiny_models.FAMILIES if family != "dbrx"]
BIG_HEADS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def on_gpu(batch):
    return {name: ids.cuda() for name, ids in batch.items()}


@pytest.mark.parametrize("kernel", ["reference", "flash_attn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_as_near_to_float32_as_documents_alone(family, kernel):
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn")
    if not tiny_models.is_present(family):
        pytest.skip(f"{family} is not in this Transformers")
    changes = {**BIG_HEADS, **({"head_dim": 64} if family == "gemma" else {})}
    model = tiny_models.build(family, "sdpa", torch.bfloat16, **changes).cuda()
    docs = documents(50, 130, 1, 77)
    exact = alone(tiny_models.build(family, "eager" if family != "falcon" else "sdpa", **changes), docs)
    single = torch.cat([model(input_ids=doc[None].cuda()).logits[0] for doc in docs]).float().cpu()
    with fa2patch.apply(model, kernel=kernel):
        found = model(**on_gpu(pack(docs))).logits[0]
        changed = model(**on_gpu(pack([documents(50, seed=7)[0], *docs[1:]]))).logits[0]
        loss_of(found.cpu(), docs).backward()
    if family not in tiny_models.MIXTURES:
        assert torch.equal(found[50:], changed[50:])
    packed_error, alone_error = ((x - exact).abs().mean() / exact.abs().mean() for x in (found.float().cpu(), single))
    assert packed_error <= 2 * alone_error + 5e-3


def test_one_synchronisation_per_forward_and_none_with_lengths():
    pytest.importorskip("flash_attn")
    docs = documents(50, 130, 1, 77)
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": doc.tolist()} for doc in docs])
    batch = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    model = tiny_models.build("llama", "sdpa", torch.bfloat16, **BIG_HEADS).cuda()
    del batch["labels"]
    with fa2patch.apply(model, kernel="flash_attn"):
        model(**batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.model(**batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
