"""Whole models with real kernels on a GPU: ``python -m pytest -m gpu``."""

import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import gpu
from compat_matrix.check.rows import documents
from fa2patch import kernels
from fa2patch.errors import KernelUnavailable, KernelWrong

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kernel", [kernel.name for kernel in kernels.ORDER])
@pytest.mark.parametrize("point", gpu.POINTS)
@pytest.mark.parametrize("family", tiny_models.SEEDS)
def test_point(family, point, kernel):
    able, reason = kernels.named(kernel).available()
    if not able:
        pytest.skip(reason)
    if not tiny_models.is_present(family):
        pytest.skip(f"{family} is not in this Transformers")
    model = tiny_models.build(family, "sdpa", torch.bfloat16, **gpu.big(family)).cuda()
    try:
        gpu.POINTS[point](family, model, kernel)
    except KernelWrong:
        raise
    except KernelUnavailable as error:
        pytest.skip(str(error))


def test_one_synchronisation_per_forward_and_none_with_lengths():
    docs = documents(50, 130, 1, 77)
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": doc.tolist()} for doc in docs])
    batch = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    model = tiny_models.build("llama", "sdpa", torch.bfloat16, **gpu.big("llama")).cuda()
    del batch["labels"]
    with fa2patch.apply(model) as patch:
        model(**batch)
        assert "reference" not in {layer.kernel for layer in patch.layers}
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.model(**batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
