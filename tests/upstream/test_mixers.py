"""Mixers run document by document, or in one call if their kernel keeps documents apart. Models are real or toys.

Documents that share a call as a batch have tests of their own (``test_documents_in_batches.py``).
"""

import inspect

import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors
from fa2patch.kernels.picks import BATCHES, DOCUMENTS, WHOLE_ROW
from fa2patch.upstream import packed_batch
from fa2patch.upstream.find_layers import attention_layers
from fa2patch.upstream.find_mixers import mixers
from fa2patch.upstream.find_models import models
from fa2patch.upstream.seams import mixer, mixer_calls

LENGTHS = (5, 9, 1, 3, 7)
HYBRIDS = [name for name in ("qwen3_next", "mamba", "rwkv", "lfm2", "falcon_h1") if tiny_models.is_present(name)]


class Running(torch.nn.Module):
    """A toy mixer: the running sum of a projection.

    Attributes:
        kernel: Computes the output if ``seq_idx`` is given, from the documents' own sums and from the sum before each
            document. None ignores ``seq_idx``.
    """

    kernel = None

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.calls = 0

    def forward(self, hidden_states, attention_mask=None, cache_params=None, **kwargs):
        self.calls += 1
        projected = hidden_states @ self.weight
        numbers = kwargs.get("seq_idx")
        if numbers is None or self.kernel is None:
            return projected.cumsum(1)
        lengths = numbers[0].unique_consecutive(return_counts=True)[1].tolist()
        apart = torch.cat([piece.cumsum(1) for piece in projected.split(lengths, 1)], 1)
        starts = torch.nn.functional.pad(numbers.diff() != 0, (1, 0), value=True)[0]
        before = (projected.cumsum(1) - projected)[:, starts][:, numbers[0].long()]
        return self.kernel(apart, before)


def keeps_apart(apart, before):
    return apart


def raises(apart, before):
    raise ValueError("cannot keep packed sequences apart\nand more of that")


def runs_out_of_memory(apart, before):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


FAULTS = {
    None: "computes something else",
    raises: "it fails: ValueError: cannot keep packed sequences apart",
    lambda apart, before: apart * 1.01: "computes something else",
    lambda apart, before: apart + 1e-3 * before: "sends gradients from one document into another",
    lambda apart, before: apart + 1e-5 * before.detach(): "changes a document when the others change",
    lambda apart, before: apart + (before - before.detach()): "sends gradients from one document into another",
    lambda apart, before: apart * 1.01 - (apart * 0.01).detach(): "has other gradients",
}


@pytest.fixture
def mask():
    batch = pack(documents(*LENGTHS))
    patch = fa2patch.apply(tiny_models.build("llama", "sdpa"))
    return packed_batch.packed_mask(batch, patch)


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(mixer_calls, "NO_KERNELS", ())


def row():
    return torch.randn(1, sum(LENGTHS), 8)


def right(module, hidden):
    return torch.cat([(piece @ module.weight).cumsum(1) for piece in hidden.split(LENGTHS, 1)], 1)


def in_one_call(mask, module):
    """Return whether the mixer's last row was reported as computed in one call, and the reason if it was not."""
    computed = mask.picks.of(module)
    return {WHOLE_ROW: True, BATCHES: False, DOCUMENTS: False}[computed.kernel], computed.why


def made_with(kernel):
    module = Running()
    module.kernel = kernel
    return module


def test_a_mixers_own_kernel_is_used_where_it_was_seen_to_keep_documents_apart(mask, any_device):
    module, hidden = made_with(keeps_apart), row()
    forward = mixer.by_document(Running.forward)
    for _ in range(2):
        module.calls = 0
        assert_close(forward(module, hidden, attention_mask=mask), right(module, hidden), "in one call")
    assert module.calls == 1
    assert in_one_call(mask, module) == (True, "")


@pytest.mark.parametrize(("kernel", "why"), FAULTS.items(), ids=[f"{i} {why}" for i, why in enumerate(FAULTS.values())])
def test_a_mixers_own_kernel_that_is_wrong_or_leaks_is_not_used_and_why_is_said(kernel, why, mask, any_device):
    module, hidden = made_with(kernel), row()
    forward = mixer.by_document(Running.forward)
    for _ in range(2):
        module.calls = 0
        assert_close(forward(module, hidden, attention_mask=mask), right(module, hidden), "in another way")
    assert module.calls == 1 and mask.picks.of(module).kernel is BATCHES
    able, reason = in_one_call(mask, module)
    assert not able and reason.startswith("tried on this machine with a whole row, it ") and why in reason
    assert "\n" not in reason


def test_a_mixer_without_memory_for_its_trial_says_so_and_is_tried_again(mask, any_device):
    module, hidden = made_with(runs_out_of_memory), row()
    forward = mixer.by_document(Running.forward)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        forward(module, hidden, attention_mask=mask)
    assert mask.picks.of(module) is None
    module.kernel = keeps_apart
    forward(module, hidden, attention_mask=mask)
    assert in_one_call(mask, module) == (True, "")


def test_what_was_seen_of_one_mixer_says_nothing_of_another_of_its_class(mask, any_device):
    """Parameters matter: a convolution over one token keeps documents apart, and one over four does not."""
    forward, hidden = mixer.by_document(Running.forward), row()
    good, bad = made_with(keeps_apart), made_with(None)
    for module in (good, bad, good):
        assert_close(forward(module, hidden, attention_mask=mask), right(module, hidden), "each as it must be")
    assert in_one_call(mask, good)[0] and not in_one_call(mask, bad)[0]


@pytest.mark.parametrize("other", ["dtype", "training", "autocast", "dtype under autocast"])
def test_what_was_seen_of_one_kind_of_call_says_nothing_of_another(other, mask, any_device):
    module, hidden, rows = made_with(keeps_apart), row(), []
    forward = mixer.by_document(Running.forward)
    with torch.autocast("cpu", torch.bfloat16, enabled=other == "dtype under autocast"):
        forward(module, hidden, attention_mask=mask)
        module.kernel = lambda apart, before: rows.append(1) or apart + before
        forward(module, hidden, attention_mask=mask)
    assert rows == [1], "of this kind it is known"
    if other == "training":
        module.eval()
    elif other == "dtype":
        module, hidden = module.double(), hidden.double()
    elif other == "dtype under autocast":
        hidden = hidden.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in other):
        assert_close(forward(module, hidden, attention_mask=mask), right(module, hidden), other)
    assert not in_one_call(mask, module)[0]


@pytest.mark.parametrize("around", ["inference mode", "a checkpoint", "an older checkpoint"])
def test_a_trial_leaves_no_trace_in_the_forward_around_it(around, mask, any_device):
    def drops(apart, before):
        return apart + 0 * torch.rand(())

    module, hidden = made_with(drops), row().requires_grad_()
    running = mixer.by_document(Running.forward)

    def forward(states):
        return running(module, states, attention_mask=mask) * torch.rand(())

    forward(hidden)  # makes the trial, so that it takes no part in the expected result
    torch.manual_seed(3)
    plain = forward(hidden)
    plain.square().sum().backward()
    expected, hidden.grad = hidden.grad, None
    mask.picks._tried.clear()
    torch.manual_seed(3)
    if around == "inference mode":
        with torch.inference_mode():
            found = forward(hidden)
    else:
        found = torch.utils.checkpoint.checkpoint(forward, hidden, use_reentrant=around == "an older checkpoint")
        found.square().sum().backward()
        assert torch.equal(hidden.grad, expected)
    assert torch.equal(found, plain)
    assert in_one_call(mask, module) == (True, "")


@pytest.mark.parametrize("device", ["of kernels that could", "of none"])
def test_the_layers_of_a_patch_say_in_what_portions_their_mixers_were_computed(device, request):
    family = next((name for name in ("mamba", "rwkv") if tiny_models.is_present(name)), None)
    if family is None:
        pytest.skip("this Transformers has no model without attention")
    if device == "of kernels that could":
        request.getfixturevalue("any_device")
    with fa2patch.apply(tiny_models.build(family).train()) as patch:
        assert {(layer.kernel, layer.why) for layer in patch.layers} == {(None, "")}
        patch.model(**pack(documents(*LENGTHS)))
        for layer in fa2patch.status(patch.model).layers:
            assert layer.kernel == "its own, documents in batches"
            tried = layer.why.startswith("tried on this machine with a whole row, it ")
            assert tried if takes_boundaries(layer) and device != "of none" else layer.why == ""


def takes_boundaries(layer):
    parameters = inspect.signature(inspect.unwrap(layer.owner.forward)).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name in ("seq_idx", "cu_seq_lens_q") for p in parameters)


@pytest.mark.parametrize("length", [sum(LENGTHS) - 1, sum(LENGTHS) + 1])
def test_what_is_not_of_the_rows_tokens_is_the_same_for_each_document(length, mask):
    seen = []

    def forward(self, hidden_states, attention_mask=None, table=None):
        seen.append(table)
        return hidden_states

    table = torch.randn(1, length)
    mixer.by_document(forward)(Running(), row(), mask, table=table)
    assert len(seen) > len(LENGTHS) and all(found is table for found in seen)


def test_on_a_cpu_no_whole_row_is_tried(mask):
    module = made_with(keeps_apart)
    mixer.by_document(Running.forward)(module, row(), attention_mask=mask)
    assert mask.picks.of(module).kernel is BATCHES and in_one_call(mask, module) == (False, "")


def test_a_cache_is_refused(mask):
    forward = mixer.by_document(Running.forward)
    with pytest.raises(errors.PackedWithCache, match="cache_params"):
        forward(Running(), torch.randn(1, sum(LENGTHS), 8), mask, object())


def test_what_is_not_for_each_token_is_refused_alone_and_dropped_behind_the_output(mask):
    def states(self, hidden_states, attention_mask=None):
        return hidden_states.sum(1)

    def with_states(self, hidden_states, attention_mask=None):
        return hidden_states, hidden_states.sum(1), hidden_states[0]

    hidden = torch.randn(1, sum(LENGTHS), 8)
    with pytest.raises(errors.PackingNotIsolated, match="not for each token"):
        mixer.by_document(states)(Running(), hidden, mask)
    output, state, experts = mixer.by_document(with_states)(Running(), hidden, mask)
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
    """The mixers' linear layers are called less often than for the documents one by one, on few tokens of padding."""
    docs, model = documents(*LENGTHS), tiny_models.build(family)
    layers = None

    def tokens_seen(run):
        seen = []
        hooks = [
            module.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and any(name.startswith(f"{path}.") for path in layers)
        ]
        run()
        for hook in hooks:
            hook.remove()
        return seen

    with fa2patch.apply(model, prove=False) as patch:  # hooks only look
        prefix = next(name for name, module in model.named_modules() if module is models(model)[-1])
        layers = [f"{prefix}.{layer.name}" for layer in patch.layers if layer.seam == "mixer"]
        model(**pack(docs))  # makes the trials
        packed = tokens_seen(lambda: model(**pack(docs)))
    one_by_one = tokens_seen(lambda: alone(model, docs))
    calls, padding = len(one_by_one) // len(docs), len(docs) * max(LENGTHS) - sum(LENGTHS)
    assert len(packed) == calls
    assert sum(packed) == sum(one_by_one) + calls * padding


def test_a_kernel_that_takes_lengths_is_handed_the_row(any_device):
    """Qwen3-Next's real code, with functions that take boundaries like causal-conv1d and flash-linear-attention."""
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
        with fa2patch.apply(model, prove=False) as patch:  # a proof would call them, too
            model(**pack(docs))
            assert {layer.kernel for layer in patch.layers if layer.seam == "mixer"} == {"its own, the whole row"}
            calls.clear()
            assert_close(model(**pack(docs)).logits[0], expected, "in one call")
            assert calls == [sum(LENGTHS)]
            assert fa2patch.verify(model).ok


@pytest.mark.skipif("lfm2" not in HYBRIDS, reason="this Transformers has no LFM2")
def test_rows_of_one_token_need_no_boundaries_in_mixers():
    """LFM2 of 5.10 hands its convolutions no mask if rows are one token long, as in decoding."""
    model = tiny_models.build("lfm2", "eager")

    def without_a_mask(layer, args, kwargs):
        return args, {**kwargs, "attention_mask": None}

    docs = documents(1, 1, 1)
    expected = alone(model, docs)
    tokens, starts = torch.cat(docs)[:, None], torch.arange(4, dtype=torch.int32)
    batch = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 1, "max_length_k": 1}
    fa2patch.apply(model)
    layers = [layer for layer in models(model)[-1].layers if hasattr(layer, "conv")]
    assert layers
    handles = [layer.register_forward_pre_hook(without_a_mask, with_kwargs=True) for layer in layers]
    assert_close(model(input_ids=tokens, **batch).logits.flatten(0, 1), expected, "logits")
    with pytest.raises(errors.PackingNotIsolated, match="given the boundaries"):
        model(**pack(documents(2, 3)))
    for handle in handles:
        handle.remove()
    model(**pack(documents(2, 3)))


def test_attention_whose_class_sounds_like_a_mixer_is_none():
    if not tiny_models.is_present("kimi_linear"):
        pytest.skip("this Transformers has no Kimi Linear")
    decoder = models(tiny_models.build("kimi_linear", "sdpa"))[-1]
    attention = list(attention_layers(decoder))
    carrying = mixers(decoder, attention)
    assert carrying == mixers(decoder)
    assert carrying and not {*carrying} & {layer.name for layer in attention}
