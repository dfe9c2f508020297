"""Compare a call's result with a patched model to the same call's with the unpatched model."""

from __future__ import annotations

import functools

import torch

import fa2patch
from compat_matrix import tiny_configs, tiny_models

ARCHITECTURES = ["llama", "mistral", "qwen2", "gemma", "gpt2", "gpt_neox", "phi", "falcon", "mixtral", "opt", "mamba2"]
PRESENT = [name for name in ARCHITECTURES if tiny_models.is_present(name)]


@functools.cache
def models(architecture):
    # The assistant has the same architecture with other weights.
    cls = tiny_models.model_class(architecture)
    implementation = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    model, assistant = (tiny_models.build(architecture, implementation) for _ in range(2))
    tiny_models.scale_up(assistant, seed=1)
    if hasattr(assistant, "generation_config"):  # otherwise the number of drafted tokens depends on the previous call
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return model, assistant


def tokens(rows, length):
    return torch.randint(3, tiny_configs.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


def ones_and_zeros(rows):
    # Rows are written as "110111".
    return torch.tensor([[int(one) for one in row] for row in rows])


def require_as_unpatched(architecture, call):
    # The tensors must be the same, bit for bit, with both models patched and with both unpatched. If the unpatched call
    # fails, the patched one has to fail with the same type of error.
    # ``call`` takes the model and the assistant and returns a dictionary of tensors.
    model, assistant = models(architecture)
    expected = _outcome(call, model, assistant)
    with fa2patch.apply(model), fa2patch.apply(assistant):
        found = _outcome(call, model, assistant)
    if isinstance(expected, Exception):
        assert type(found) is type(expected), f"unpatched: {expected!r}; patched: {found!r}"
        return
    if isinstance(found, Exception):
        raise AssertionError(f"patched: {found!r}; unpatched: no error") from found
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=f"other {name}")


def _outcome(call, *arguments):
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            return call(*arguments)
    except Exception as error:
        return error
