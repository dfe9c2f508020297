"""Mixers by document, in real models and in toys, and in one call where their kernels keep documents apart."""

import inspect

import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.points import alone, assert_close, documents, pack
from fa2patch import errors
from fa2patch.mixers import by_document, whole_row
from fa2patch.seams import packed_batch

LENGTHS = (5, 9, 1, 3, 7)
HYBRIDS = [name for name in ("qwen3_next", "mamba", "rwkv", "lfm2", "falcon_h1") if tiny_models.is_present(name)]


class Running(torch.nn.Module):
    """A toy mixer: the running sum of a projection. ``kernel``: what it makes of documents on its own."""

    kernel = "ignores"

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.calls = 0

    def forward(self, hidden_states, attention_mask=None, cache_params=None, **kwargs):
        self.calls += 1
        projected = hidden_states @ self.weight
        numbers = kwargs.get("seq_idx")
        if numbers is None or self.kernel == "ignores":
            return projected.cumsum(1)
        if self.kernel == "raises":
            raise ValueError("cannot keep packed sequences apart")
        total = projected.cumsum(1)
        starts = torch.nn.functional.pad(numbers.diff() != 0, (1, 0), value=True)[0]
        before = (total - projected)[:, starts][:, numbers[0].long()]
        leaks = 1e-3 if self.kernel == "leaks a little" else 0.0
        apart = torch.cat(
            [
                piece.cumsum(1)
                for piece in projected.split(numbers[0].unique_consecutive(return_counts=True)[1].tolist(), 1)
            ],
            1,
        )
        return apart + leaks * before


@pytest.fixture
def mask():
    batch = pack(documents(*LENGTHS))
    patch = fa2patch.apply(tiny_models.build("llama", "sdpa"))
    return packed_batch.packed_mask(batch, patch)


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(whole_row, "NEVER_ON", ())


@pytest.mark.parametrize("kernel", ["ignores", "raises", "leaks a little", "keeps apart"])
def test_a_mixers_own_kernel_is_used_only_where_it_was_seen_to_keep_documents_apart(kernel, mask, any_device):
    module, hidden = Running(), torch.randn(1, sum(LENGTHS), 8)
    module.kernel = kernel
    forward = by_document.by_document(Running.forward)
    expected = torch.cat([(piece @ module.weight).cumsum(1) for piece in hidden.split(LENGTHS, 1)], 1)
    for _ in range(2):
        module.calls = 0
        assert_close(forward(module, hidden, attention_mask=mask), expected, kernel)
    assert module.calls == (1 if kernel == "keeps apart" else len(LENGTHS))
    assert [*mask.picks.whole_rows.values()] == [kernel == "keeps apart"]


def test_on_a_cpu_nothing_is_tried(mask):
    module = Running()
    module.kernel = "keeps apart"
    by_document.by_document(Running.forward)(module, torch.randn(1, sum(LENGTHS), 8), attention_mask=mask)
    assert module.calls == len(LENGTHS) and not mask.picks.whole_rows


def test_a_cache_is_refused(mask):
    forward = by_document.by_document(Running.forward)
    with pytest.raises(errors.PackedWithCache, match="cache_params"):
        forward(Running(), torch.randn(1, sum(LENGTHS), 8), mask, object())


def test_what_is_not_for_each_token_is_refused_alone_and_dropped_behind_the_output(mask):
    def states(self, hidden_states, attention_mask=None):
        return hidden_states.sum(1)

    def with_states(self, hidden_states, attention_mask=None):
        return hidden_states, hidden_states.sum(1), hidden_states[0]

    hidden = torch.randn(1, sum(LENGTHS), 8)
    with pytest.raises(errors.PackingNotIsolated, match="not for each token"):
        by_document.by_document(states)(Running(), hidden, mask)
    output, state, experts = by_document.by_document(with_states)(Running(), hidden, mask)
    assert torch.equal(output, hidden) and state is None and torch.equal(experts, hidden[0])


@pytest.mark.parametrize("family", HYBRIDS)
def test_isolated_without_a_patch_not(family):
    model = tiny_models.build(family).train()  # in eval mode RWKV writes to its own states
    assert not fa2patch.verify(model, strict=False).ok
    with fa2patch.apply(model) as patch:
        assert fa2patch.verify(model).ok
        assert "mixer" in {layer.seam for layer in patch.layers}
    assert not fa2patch.verify(model, strict=False).ok


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_dearer_than_documents_alone(family):
    """The same calls of the mixers' own functions as for the documents one by one."""
    docs, model = documents(*LENGTHS), tiny_models.build(family)
    layers = None

    def rows_seen(run):
        seen = []
        hooks = [
            module.register_forward_pre_hook(lambda module, args: seen.append((id(module), args[0].shape[-2])))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and any(name.startswith(f"{path}.") for path in layers)
        ]
        run()
        for hook in hooks:
            hook.remove()
        return sorted(seen)

    with fa2patch.apply(model) as patch:
        prefix = next(
            name for name, module in model.named_modules() if module is fa2patch.seams.layers.models(model)[-1]
        )
        layers = [f"{prefix}.{layer.name}" for layer in patch.layers if layer.seam == "mixer"]
        packed = rows_seen(lambda: model(**pack(docs)))
    assert packed == rows_seen(lambda: alone(model, docs))


def test_a_kernel_that_takes_lengths_is_handed_the_row(any_device):
    """Qwen3-Next as with causal-conv1d and flash-linear-attention: real code around functions that know documents."""
    if not tiny_models.is_present("qwen3_next"):
        pytest.skip("this Transformers has no Qwen3-Next")
    model, docs = tiny_models.build("qwen3_next"), documents(*LENGTHS)
    expected = alone(model, docs)
    modeling = tiny_models.modeling("qwen3_next")
    conv, delta = inspect.unwrap(modeling.causal_conv1d_fn), inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    calls = []

    def knowing_conv(x, weight, bias=None, activation=None, seq_idx=None, **kwargs):
        calls.append(x.shape[-1])
        lengths = [x.shape[-1]] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([conv(piece, weight, bias, activation) for piece in x.split(lengths, -1)], -1)

    def knowing_delta(q, k, v, g, beta, cu_seqlens=None, **kwargs):
        lengths = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        kwargs = {name: kwargs[name] for name in inspect.signature(delta).parameters if name in kwargs}
        pieces = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)))
        outputs = [delta(q, k, v, g=g, beta=beta, **kwargs)[0] for q, k, v, g, beta in pieces]
        return torch.cat(outputs, 1), None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(modeling, "causal_conv1d_fn", knowing_conv)
        patched.setattr(modeling, "torch_chunk_gated_delta_rule", knowing_delta)
        with fa2patch.apply(model) as patch:
            model(**pack(docs))
            assert [*patch.picks.whole_rows.values()] == [True]
            calls.clear()
            assert_close(model(**pack(docs)).logits[0], expected, "in one call")
            assert calls == [sum(LENGTHS)]
            assert fa2patch.verify(model).ok
