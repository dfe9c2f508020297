"""Whole models with real kernels: one script for a lent GPU (``python -m pytest -m gpu``)."""

import pytest
import torch

import fa2patch
from compat_matrix import gpu, tiny_models
from compat_matrix.points import documents

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kernel", ["reference", "flash_attn"])
@pytest.mark.parametrize("point", gpu.POINTS)
@pytest.mark.parametrize("family", tiny_models.SEEDS)
def test_point(family, point, kernel):
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn")
    if not tiny_models.is_present(family):
        pytest.skip(f"{family} is not in this Transformers")
    model = tiny_models.build(family, "sdpa", torch.bfloat16, **gpu.big(family)).cuda()
    gpu.POINTS[point](family, model, kernel)


def test_one_synchronisation_per_forward_and_none_with_lengths():
    pytest.importorskip("flash_attn")
    docs = documents(50, 130, 1, 77)
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": doc.tolist()} for doc in docs])
    batch = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    model = tiny_models.build("llama", "sdpa", torch.bfloat16, **gpu.big("llama")).cuda()
    del batch["labels"]
    with fa2patch.apply(model, kernel="flash_attn"):
        model(**batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.model(**batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
