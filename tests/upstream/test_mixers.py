"""Mixers, of real models or toys, run document by document; in batches of near length, or the whole row, where a trial
has passed.
"""

from __future__ import annotations

import functools
import inspect

import packed_rows
import pytest
import torch
from packed_rows import assert_equals_alone, assert_nothing_crosses
from torch.utils._python_dispatch import TorchDispatchMode
from tree_cases import tree_batch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import GRADIENT_TOLERANCE, assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import comparison, errors
from fa2patch.documents import tensors
from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import grouping
from fa2patch.kernels.picks import BATCHES, DOCUMENTS, WHOLE_ROW
from fa2patch.upstream.find_documents import packed_mask_of
from fa2patch.upstream.find_layers import ModelLayers
from fa2patch.upstream.find_models import models
from fa2patch.upstream.seams import mixer, mixer_calls, mixer_trial
from fa2patch.upstream.splitting import Documents

LENGTHS = (5, 9, 1, 3, 7)
ROWS = {
    "of one length": (6,) * 8,
    "near": LENGTHS,
    "of two lengths": (6, 2) * 4,
    "one long and many short": (150, *(2, 3, 1) * 7),
    "of one token": (1,) * 6,
    "far apart": (200, 90, 3),
}
HYBRIDS = [name for name in ("qwen3_next", "mamba", "rwkv", "lfm2", "falcon_h1") if tiny_models.is_present(name)]
CHUNK = 8


class Running(torch.nn.Module):
    """A toy mixer: the running sum of a projection."""

    def __init__(self, mix=lambda projected: projected.cumsum(1), kernel=None):
        # ``mix`` computes the output from the projection of several documents. If ``seq_idx`` is given, ``kernel``
        # computes it from the documents' own sums and from the sum before each document; None ignores ``seq_idx``.
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.mix, self.kernel, self.shapes = mix, kernel, []

    def forward(self, hidden_states, attention_mask=None, cache_params=None, **kwargs):
        self.shapes.append(tuple(hidden_states.shape[:2]))
        projected = hidden_states @ self.weight
        numbers = kwargs.get("seq_idx")
        if numbers is None or self.kernel is None:
            return self.mix(projected)
        _, number, counts = numbers[0].unique_consecutive(return_inverse=True, return_counts=True)
        self.numbers, self.lengths = numbers, counts.tolist()
        apart = torch.cat([piece.cumsum(1) for piece in projected.split(self.lengths, 1)], 1)
        starts = torch.nn.functional.pad(numbers.diff() != 0, (1, 0), value=True)[0]
        before = (projected.cumsum(1) - projected)[:, starts][:, number]
        return self.kernel(apart, before)


class Dropping(Running):
    def __init__(self):
        super().__init__(lambda projected: self.dropout(projected.cumsum(1)))
        self.dropout = torch.nn.Dropout(0.5)


class Counting(Running):
    # It keeps the mean of its inputs in a buffer, which it changes or replaces.

    def __init__(self, replaces=False):
        super().__init__(self.counted)
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(8))

    def counted(self, projected):
        mean = projected.detach().mean((0, 1))
        if self.replaces:
            self.mean = 0.9 * self.mean + mean
        else:
            self.mean.mul_(0.9).add_(mean)
        return projected.cumsum(1)


def keeps_apart(apart, before):
    return apart


def raises(apart, before):
    raise ValueError("cannot keep packed sequences apart\nand more of that")


def runs_out_of_memory(apart, before):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def one_document(x):
    if len(x) > 1:
        raise ValueError("one document at a time")
    return x


KERNEL_FAULTS = [
    (None, "computes something else"),
    (raises, "it fails: ValueError: cannot keep packed sequences apart"),
    (lambda apart, before: apart * 1.01, "computes something else"),
    (lambda apart, before: apart + 3e-4 * before, "sends gradients from one document into another"),
    (lambda apart, before: apart + 1e-5 * before.detach(), "changes a document when the others change"),
    (lambda apart, before: apart + (before - before.detach()), "sends gradients from one document into another"),
    (lambda apart, before: apart * 1.01 - (apart * 0.01).detach(), "has other gradients"),
]


def wrong_if_short(module, apart, before):
    first, *others = apart.split(module.lengths, 1)
    return torch.cat([first, *(piece * (1 + 0.1 * (piece.shape[1] < 3)) for piece in others)], 1)


def leaks_over_a_short_one(module, apart, before):
    # A convolution over four tokens does so if it only looks whether the last one is of the same document.
    pieces = list(apart.split(module.lengths, 1))
    for at in range(2, len(pieces)):
        if pieces[at - 1].shape[1] < 4:
            pieces[at] = pieces[at] + 1e-5 * pieces[at - 2][:, -1:].detach()
    return torch.cat(pieces, 1)


def wrong_if_one_is_empty(module, apart, before):
    return apart * (1 + 0.1 * (max(module.numbers.diff().tolist()[0]) > 1))


# A row shows these kernels as wrong by the lengths of its documents.
ROW_FAULTS = {
    wrong_if_short: "computes something else",
    leaks_over_a_short_one: "changes a document when the others change",
    wrong_if_one_is_empty: "computes something else",
}

# Batches of near length cannot be given to these mixers. At zeros, the third one's derivative is not a number. The last
# but one goes by its call's length alone, and the last is wrong only where the longest document has no padding beside.
BATCH_FAULTS = [
    (lambda x: x.cumsum(1) - x.mean(1, keepdim=True), "computes something else"),
    (lambda x: one_document(x).cumsum(1), "it fails: ValueError: one document at a time"),
    (lambda x: x.cumsum(1) / 9 + x / x.norm(dim=-1, keepdim=True), "sends gradients into what fills a batch up"),
    (lambda x: x.cumsum(1) + 1e-5 * x.detach().roll(1, 0), "changes a document when the others change"),
    (lambda x: x.cumsum(1) + (x - x.detach()).roll(1, 0), "sends gradients from one document into another"),
    (lambda x: x.cumsum(1) + (len(x) > 1) * (x - x.detach()), "has other gradients"),
    (lambda x: x.cumsum(1) + 1e-5 * before(x.detach()), "changes a document when the others change"),
    (lambda x: x.cumsum(1) + 1e-5 * behind(x.detach()), "changes a document when the others change"),
    (lambda x: x.cumsum(1) + before(x - x.detach()), "sends gradients from one document into another"),
    (lambda x: x.cumsum(1) + behind(x - x.detach()), "sends gradients from one document into another"),
    (lambda x: x.cumsum(1) + 1e-5 * x.detach().mean(0), "changes a document when the others change"),
    (lambda x: x.cumsum(1) * (1 + 0.01 * x.shape[1]), "computes something else"),
    (lambda x: x.cumsum(1) * (1 + 0.1 * (len(x) > 1) * (torch.arange(x.shape[1]) == 6)[:, None]), "computes something"),
]


def before(x):
    # What the document before each one in a batch has; nothing for the first.
    return torch.cat([0 * x[:1], x[:-1]])


def behind(x):
    return torch.cat([x[1:], 0 * x[:1]])


def far(x):
    return (torch.arange(x.shape[1]) >= CHUNK)[:, None]


def following(x):
    return torch.nn.functional.pad(x[:, 1:], (0, 0, 0, 1))


def at_ends_of_chunks(x):
    # What the next token has, for the last tokens of chunks; nothing for others.
    return following(x) * (torch.arange(x.shape[1]) % CHUNK == CHUNK - 1)[:, None]


# These mixers look at later tokens. Documents of whole chunks do not show it of the second one.
AHEAD = {
    "beyond a chunk": lambda x: x.cumsum(1) - x.mean(1, keepdim=True) * far(x),
    "inside a chunk, beyond the first": lambda x: torch.cat(
        [x.cumsum(1)[:, :CHUNK], *(part.flip(1).cumsum(1) for part in x[:, CHUNK:].split(CHUNK, 1))], 1
    ),
    "a little": lambda x: x.cumsum(1) + 1e-5 * x.flip(1).cumsum(1),
    "at the end of a chunk": lambda x: x.cumsum(1) + 1e-5 * at_ends_of_chunks(x),
    "in the backward": lambda x: x.cumsum(1) + at_ends_of_chunks(x - x.detach()),
}

# These mixers pass a first row and fail on another, as Mamba 2 in 4.45 and Nemotron-H in 5.3 do beyond a chunk.
LONGER = {
    "a document of several chunks in a longer call": (AHEAD["beyond a chunk"], (5, 3, 7), (12, 9, 10)),
    "a document of one chunk in a call of several": (
        lambda x: x.cumsum(1) - x.mean(1, keepdim=True) * (x.shape[1] > CHUNK),
        (5, 3, 7),
        (12, 3, 5),
    ),
    "documents of one length": (lambda x: x.cumsum(1) + x.roll(1, 0) * (x.shape[1] > CHUNK), (6, 6, 6), (9, 9, 9)),
    "what a row of one length shows says nothing of padding": (lambda x: x.flip(1).cumsum(1), (6, 6, 6), (5, 7, 6)),
}


@pytest.fixture
def any_device(monkeypatch):
    monkeypatch.setattr(mixer_calls, "NO_KERNELS", ())


@pytest.fixture
def mask():
    return packed(LENGTHS)[0]


@pytest.fixture
def hidden():
    return torch.randn(1, sum(LENGTHS), 8)


forward = mixer.by_document(Running.forward)


def packed(lengths, picks=None):
    # The hidden states are [1, tokens, 8].
    mask = packed_mask_of(pack(documents(*lengths)), fa2patch.apply(tiny_models.build("llama", "sdpa")))
    mask.picks = mask.picks if picks is None else picks
    return mask, torch.randn(1, sum(lengths), 8)


def right(module, hidden, lengths=LENGTHS):
    # What the documents one by one give, without lengths.
    return torch.cat([Running.forward(module, piece) for piece in hidden.split(list(lengths), 1)], 1)


def computed(module, mask, hidden):
    # The shapes are those of the calls once the module's trials are made.
    forward(module, hidden, attention_mask=mask)
    module.shapes.clear()
    return forward(module, hidden, attention_mask=mask)


def in_a_row(module, lengths, exactly=False):
    # The packed row's output must be right. Returned is what was picked and why.
    mask, hidden = packed(lengths)
    output = computed(module, mask, hidden)
    shapes = list(module.shapes)
    expected = right(module, hidden, lengths)
    assert_close(output, expected, "output")
    assert torch.equal(output, expected) or not exactly
    module.shapes[:] = shapes
    return mask.picks.of(module)


def built(family):
    # The weights are scaled up. The model is in train mode, because in eval mode RWKV writes to its own states.
    model = tiny_models.build(family).train()
    tiny_models.scale_up(model)
    return model


# The whole row


def test_a_mixers_own_kernel_is_used_where_it_was_seen_to_keep_documents_apart(mask, hidden, any_device):
    module = Running(kernel=keeps_apart)
    assert_close(computed(module, mask, hidden), right(module, hidden), "in one call")
    assert module.shapes[:1] == [(1, sum(LENGTHS))] and mask.picks.of(module) == (WHOLE_ROW, "")


@pytest.mark.parametrize(
    ("kernel", "why"), KERNEL_FAULTS, ids=[f"{i} {why}" for i, (_, why) in enumerate(KERNEL_FAULTS)]
)
def test_a_mixers_own_kernel_that_is_wrong_or_leaks_is_not_used_and_why_is_said(kernel, why, mask, hidden, any_device):
    module = Running(kernel=kernel)
    output = computed(module, mask, hidden)
    assert len(module.shapes) == 1
    assert_close(output, right(module, hidden), "in another way")
    made, reason = mask.picks.of(module)
    assert made is BATCHES and reason.startswith("tried on this machine with a whole row, it ") and why in reason
    assert "\n" not in reason


@pytest.mark.parametrize(("kernel", "why"), ROW_FAULTS.items(), ids=[fault.__name__ for fault in ROW_FAULTS])
def test_a_mixers_own_kernel_is_tried_with_short_and_empty_documents_between_long_ones(kernel, why, mask, any_device):
    lengths = (5, 9, 1, 0, 3, 7)
    module, hidden = Running(), torch.randn(1, sum(lengths), 8)
    module.kernel = functools.partial(kernel, module)
    mask.boundaries = Boundaries(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    assert_close(computed(module, mask, hidden), right(module, hidden, lengths), "in another way")
    made, reason = mask.picks.of(module)
    assert made is BATCHES and reason.startswith("tried on this machine with a whole row, it ") and why in reason


def test_a_mixer_that_looks_at_later_tokens_gets_a_row_that_its_own_kernel_keeps_apart(mask, hidden, any_device):
    module = Running(lambda x: x.cumsum(1) + x.mean(1, keepdim=True))

    def kernel(apart, before):
        own = (torch.diff(piece, dim=1, prepend=0 * piece[:, :1]) for piece in apart.split(module.lengths, 1))
        return torch.cat([module.mix(piece) for piece in own], 1)

    module.kernel = kernel
    assert_close(computed(module, mask, hidden), right(module, hidden), "in one call")
    assert module.shapes[:1] == [(1, sum(LENGTHS))] and mask.picks.of(module) == (WHOLE_ROW, "")


def test_a_mixer_without_memory_for_its_trial_says_so_and_is_tried_again(mask, hidden, any_device):
    module = Running(kernel=runs_out_of_memory)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        forward(module, hidden, attention_mask=mask)
    assert mask.picks.of(module) is None
    module.kernel = keeps_apart
    forward(module, hidden, attention_mask=mask)
    assert mask.picks.of(module) == (WHOLE_ROW, "")


def test_what_was_seen_of_one_mixer_says_nothing_of_another_of_its_class(mask, any_device):
    # Parameters matter: a convolution over one token keeps documents apart, and one over four does not.
    hidden = torch.randn(1, sum(LENGTHS), 8)
    good, bad = Running(kernel=keeps_apart), Running()
    for module in (good, bad, good):
        output = forward(module, hidden, attention_mask=mask)
        assert_close(output, right(module, hidden), "each as it must be")
    assert mask.picks.of(good).kernel is WHOLE_ROW and mask.picks.of(bad).kernel is BATCHES


@pytest.mark.parametrize("other", ["dtype", "training", "autocast", "dtype under autocast"])
def test_what_was_seen_of_one_kind_of_call_says_nothing_of_another(other, mask, any_device):
    module, hidden, rows = Running(kernel=keeps_apart), torch.randn(1, sum(LENGTHS), 8), []
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
        output = forward(module, hidden, attention_mask=mask)
        assert_close(output, right(module, hidden), other)
    assert mask.picks.of(module).kernel is not WHOLE_ROW


@pytest.mark.parametrize("around", ["inference mode", "a checkpoint", "an older checkpoint"])
def test_a_trial_leaves_no_trace_in_the_forward_around_it(around, mask, any_device):
    module = Running(kernel=lambda apart, before: apart + 0 * torch.rand(()))
    hidden = torch.randn(1, sum(LENGTHS), 8, requires_grad=True)

    def run(states):
        return forward(module, states, attention_mask=mask) * torch.rand(())

    run(hidden)  # makes the trial, so that it takes no part in the expected result
    torch.manual_seed(3)
    plain = run(hidden)
    plain.square().sum().backward()
    expected, hidden.grad = hidden.grad, None
    mask.picks._tried.clear()
    torch.manual_seed(3)
    if around == "inference mode":
        with torch.inference_mode():
            found = run(hidden)
    else:
        found = torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=around == "an older checkpoint")
        found.square().sum().backward()
        assert torch.equal(hidden.grad, expected)
    assert torch.equal(found, plain) and mask.picks.of(module) == (WHOLE_ROW, "")


def test_on_a_cpu_no_whole_row_is_tried(mask):
    module = Running(kernel=keeps_apart)
    forward(module, torch.randn(1, sum(LENGTHS), 8), attention_mask=mask)
    assert mask.picks.of(module) == (BATCHES, "")


@pytest.mark.parametrize("takes", [WHOLE_ROW, BATCHES])
def test_nothing_is_read_where_a_whole_row_is_taken_and_lengths_once_for_batches(takes, monkeypatch, any_device):
    mask, hidden = packed((5, 4, 5))
    layers = [Running(kernel=keeps_apart if takes is WHOLE_ROW else None) for _ in range(2)]
    reads, read = [], tensors.read
    for at in range(2):
        if at:
            monkeypatch.setattr(tensors, "read", lambda tensor: reads.append(1) or read(tensor))
        mask.boundaries = Boundaries(mask.boundaries.cu_seqlens, 5)  # as the collator's lengths give them
        for layer in layers:
            layer.shapes.clear()
            forward(layer, hidden, attention_mask=mask)
    assert layers[1].shapes == [(1, 14) if takes is WHOLE_ROW else (3, 5)]
    assert len(reads) == (0 if takes is WHOLE_ROW else 1)


def test_what_a_whole_row_is_handed_is_made_once_for_all_layers(any_device):
    boundaries = Boundaries(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    mixing = mixer_calls.Mixing(None, None, (), {}, boundaries, (1, 5), False)
    first, second = (next(mixing.ways(("seq_idx",))).more for _ in range(2))
    assert first["seq_idx"] is second["seq_idx"] and first["seq_idx"].tolist() == [[0, 0, 1, 1, 1]]


@pytest.mark.parametrize("lengths", [LENGTHS, (300,) * 8, (4, 0, 3), (1, 1), (0, 6), (2000, 5, 2000)], ids=str)
def test_a_row_for_a_trial_is_as_long_as_the_one_that_it_is_for_and_has_its_longest_document_inside(lengths):
    excerpts = mixer_trial._excerpts_of_row(lengths)
    assert sum(length for length, _ in excerpts) >= min(sum(lengths), mixer_calls.LONG_ENOUGH)
    assert sum(length for length, _ in excerpts) <= 4 * mixer_calls.LONG_ENOUGH
    assert any(kept for _, kept in excerpts[1:-1]) and not excerpts[0].kept and (0 in lengths) == ((0, 0) in excerpts)


# Batches


@pytest.mark.parametrize("lengths", [*ROWS.values(), (4, 0, 3, 0), (0, 6)], ids=[*ROWS, "empty ones", "an empty first"])
def test_documents_come_back_from_batches_as_they_were(lengths):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    each = Documents(Boundaries(cu, max(lengths)), (1, sum(lengths)))
    batches = each.in_batches(grouping.batches(tuple(each.lengths), mixer_calls.LARGEST), cu.device)
    for value in (torch.randn(1, sum(lengths), 3), torch.arange(sum(lengths))[None]):
        portions = batches.split(value)
        assert [portion.shape[:2] for portion in portions] == batches.calls.shapes
        assert sum(portion.shape[:2].numel() for portion in portions) == batches.calls.size
        assert torch.equal(batches.join(portions), value)
        assert torch.equal(batches.join([portion.flatten(0, 1) for portion in portions]), value[0])
        kept = torch.cat([portion[portion != 0] for portion in portions]).sort().values
        assert torch.equal(kept, value[value != 0].sort().values)  # zeros fill them up


def test_what_fills_a_batch_up_is_zero_and_sends_nothing_back():
    each = Documents(Boundaries(torch.tensor([0, 3, 5], dtype=torch.int32), 3), (1, 5))
    states = torch.randn(1, 5, 2, requires_grad=True)
    (batch,) = each.in_batches([[0, 1]], torch.device("cpu")).split(states)
    assert batch.shape == (2, 3, 2) and not batch[1, 2].any()
    (batch * torch.tensor([[1.0, 1, 1], [1, 1, torch.nan]])[..., None]).nansum().backward()
    assert torch.equal(states.grad, torch.ones_like(states))


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_a_mixer_computes_batches_as_documents_one_by_one(lengths):
    mask, hidden = packed(lengths)
    module, calls = Running(), grouping.batches(lengths, mixer_calls.LARGEST)
    found, expected = (hidden.clone().requires_grad_() for _ in range(2))
    output = computed(module, mask, found)
    assert module.shapes == [(len(batch), lengths[batch[0]]) for batch in calls]
    assert mask.picks.of(module) == ((BATCHES if len(calls) < len(lengths) else DOCUMENTS), "")
    wanted = right(module, expected, lengths)
    assert_close(output, wanted, "output")
    found_gradients = torch.autograd.grad(output.square().sum(), [found, module.weight])
    for pair in zip(found_gradients, torch.autograd.grad(wanted.square().sum(), [expected, module.weight])):
        assert_close(*pair, "gradients")


@pytest.mark.parametrize(("mix", "why"), BATCH_FAULTS, ids=[why for _, why in BATCH_FAULTS])
def test_a_mixer_that_is_wrong_in_batches_gets_documents_one_by_one_and_why_is_said(mix, why):
    module = Running(mix)
    made, reason = in_a_row(module, (5, 4, 7, 6), exactly=True)
    assert module.shapes == [(1, 5), (1, 4), (1, 7), (1, 6)]
    assert made is DOCUMENTS and why in reason and reason.startswith("tried on this machine with documents in padded ")


def test_a_mixer_that_looks_at_later_tokens_gets_only_documents_of_one_length_together():
    module = Running(lambda x: x.flip(1).cumsum(1))
    made, reason = in_a_row(module, (6, 4, 6, 4, 6))
    assert module.shapes == [(3, 6), (2, 4)]
    assert made is BATCHES and "with documents in padded batches, it computes something else" in reason


@pytest.mark.parametrize("mix", AHEAD.values(), ids=AHEAD)
@pytest.mark.parametrize("more", [0, 1, 2, 3])
def test_a_mixer_that_looks_ahead_is_found_whatever_the_lengths_of_its_first_row(mix, more):
    module = Running(mix)
    made, reason = in_a_row(module, (3 * CHUNK + more, 2 * CHUNK + more, 2 * CHUNK + more, CHUNK + more))
    assert made is BATCHES and "with documents in padded batches, it " in reason
    assert {count for count, _ in module.shapes} == {1, 2}


@pytest.mark.parametrize("others", [(), (CHUNK, CHUNK - 1)])
def test_a_mixer_in_which_only_the_last_token_of_a_document_sees_padding_is_found(others):
    # As in Zamba 2 of 5.4 and 5.9: it is less than a trial's tolerance, and the first part of the document is one
    # chunk.

    def mix(x):
        behind = x[:, CHUNK:]
        return x.cumsum(1) + torch.cat([0 * x[:, :CHUNK], 1e-5 * (behind + 1).flip(1).cumsum(1).flip(1)], 1)

    made, reason = in_a_row(Running(mix), (CHUNK + 2, CHUNK + 1, *others), exactly=True)
    assert "with documents in padded batches, it " in reason


def test_what_fills_a_batch_up_is_changed_in_a_trial():
    # One token sees the next, which is padding of the second document.

    def mix(x):
        return x.cumsum(1) + 1e-5 * following(x.detach()) * (torch.arange(x.shape[1]) == 6)[:, None]

    made, reason = in_a_row(Running(mix), (12, 7, 3), exactly=True)
    assert made is DOCUMENTS and "padded batches, it changes a document when the others change" in reason


@pytest.mark.parametrize("fault", ["of long documents that share a call", "of padded ones"])
def test_a_trial_makes_calls_of_all_lengths_that_its_verdict_holds_up_to(fault):
    # The first documents of this row are a batch without padding, and the others one with padding.

    def mix(x):
        last = (torch.arange(x.shape[1]) >= 140)[:, None]
        wrong = 0.1 * last * (len(x) > 1) if fault == "of long documents that share a call" else 1e-5 * (x.shape[1] < 9)
        return x.cumsum(1) + wrong * x.flip(1)

    made, reason = in_a_row(Running(mix), (150, 150, 7, 5), exactly=True)
    assert "with documents in padded batches, it " in reason


def test_what_is_for_each_token_only_alone_is_a_difference():
    def forward(self, hidden_states, attention_mask=None):
        return hidden_states, hidden_states if len(hidden_states) == 1 else hidden_states.sum()

    mask, hidden = packed((5, 4, 5))
    module = Running()
    output, other = mixer.by_document(forward)(module, hidden, mask)
    assert torch.equal(other, hidden) and mask.picks.of(module).kernel is DOCUMENTS


@pytest.mark.parametrize(("mix", "first", "other"), LONGER.values(), ids=LONGER)
def test_what_one_row_has_shown_says_nothing_of_longer_documents_or_padding(mix, first, other):
    module, (mask, hidden) = Running(mix), packed(first)
    assert_close(forward(module, hidden, attention_mask=mask), right(module, hidden, first), "output")
    assert mask.picks.of(module) == (BATCHES, "")
    other_mask, hidden = packed(other, mask.picks)
    assert_close(forward(module, hidden, attention_mask=other_mask), right(module, hidden, other), "output")
    assert mask.picks.of(module).kernel is DOCUMENTS


def test_a_trial_is_repeated_only_for_longer_documents_and_until_they_are_long_enough():
    module, picks = Running(), packed((2, 1))[0].picks
    tried_then_known = (
        ((5, 3, 7), (4, 3, 7), (5, 2, 6)),
        ((5, 3, 8), (3, 2, 1)),
        ((8, 6, 7),),
        ((1500, 1490), (3000, 2990)),
    )
    for first, *known in tried_then_known:
        for lengths in (first, *known):
            mask, hidden = packed(lengths, picks)
            module.shapes.clear()
            forward(module, hidden, attention_mask=mask)
            assert (len(module.shapes) > 1) == (lengths is first), lengths


def test_a_trial_calls_a_mixer_four_times_and_not_with_more_tokens_however_many_documents_there_are():
    lengths = (20, *(5, 9, 1, 3, 7, 11) * 10)
    module, (mask, hidden) = Running(), packed(lengths)
    forward(module, hidden, attention_mask=mask)
    shortest = min(lengths[at] for at in grouping.batches(lengths, mixer_calls.LARGEST)[0])
    assert module.shapes[:4] == [(4, 20), (1, 20), (1, shortest), (4, 20)]
    assert len(module.shapes) - 4 == len(grouping.batches(lengths, mixer_calls.LARGEST))


def test_a_trial_of_very_long_documents_takes_first_parts_that_are_long_enough():
    module, (mask, hidden) = Running(), packed((3000, 2990))
    forward(module, hidden, attention_mask=mask)
    assert module.shapes == [(4, 1034), (1, 1034), (1, 1024), (4, 1034), (2, 3000)]


def test_dropout_is_off_in_a_trial_and_on_behind_it():
    mask, hidden = packed((5, 4, 5))
    module = Dropping()
    output = computed(module, mask, hidden)
    assert mask.picks.of(module) == (BATCHES, "") and module.dropout.training
    assert (output == 0).any() and not torch.equal(output, computed(module, mask, hidden))


@pytest.mark.parametrize("reason", ["it draws by itself", "deepspeed's zero-3"])
def test_documents_one_by_one_where_a_trial_fails_or_cannot_be_made(reason):
    # The hooks of DeepSpeed's ZeRO-3 would take a trial's backward for the training's.
    mask, hidden = packed((5, 4, 5))
    draws = reason == "it draws by itself"
    module = Running(lambda x: torch.nn.functional.dropout(x.cumsum(1), 0.5)) if draws else Running()
    if not draws:
        module.weight.ds_id = 0
    computed(module, mask, hidden)
    assert module.shapes == [(1, 5), (1, 4), (1, 5)]
    assert mask.picks.of(module).kernel is DOCUMENTS and (draws or mask.picks.of(module).why == "")


@pytest.mark.parametrize("replaces", [False, True])
def test_a_mixer_that_keeps_statistics_gets_documents_one_by_one_and_a_trial_leaves_them_alone(replaces):
    lengths = (5, 4, 5)
    mask, hidden = packed(lengths)
    module, other = Counting(replaces), Counting(replaces)
    other.load_state_dict(module.state_dict())
    forward(module, hidden, attention_mask=mask)
    right(other, hidden, lengths)
    assert torch.equal(module.mean, other.mean)
    assert "writes to its buffers" in mask.picks.of(module).why


def test_hooks_on_parameters_do_not_see_a_trial():
    mask, hidden = packed((5, 4, 5))
    module, seen = Running(), []
    module.weight.register_hook(seen.append)
    module.weight.register_post_accumulate_grad_hook(seen.append)
    computed(module, mask, hidden)
    assert mask.picks.of(module).kernel is BATCHES and not seen and module.weight.grad is None


def test_a_checkpoint_computes_the_same_batches_again():
    lengths = (5, 9, 1, 3, 60, 150)
    mask, hidden = packed(lengths)
    module = Running()
    forward(module, hidden, attention_mask=mask)
    module.shapes.clear()
    torch.utils.checkpoint.checkpoint(
        lambda x: forward(module, x, attention_mask=mask), hidden.requires_grad_(), use_reentrant=False
    ).square().sum().backward()
    half = len(module.shapes) // 2
    assert module.shapes[:half] == module.shapes[half:] and 0 < half < len(lengths)


# Arguments and outputs


@pytest.mark.parametrize("length", [sum(LENGTHS) - 1, sum(LENGTHS) + 1])
def test_what_is_not_of_the_rows_tokens_is_the_same_for_each_document(length, mask):
    seen = []

    def forward(self, hidden_states, attention_mask=None, table=None):
        seen.append(table)
        return hidden_states

    table = torch.randn(1, length)
    mixer.by_document(forward)(Running(), torch.randn(1, sum(LENGTHS), 8), mask, table=table)
    assert len(seen) > 1 and all(found is table for found in seen)


def test_a_cache_is_refused(mask):
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


# Models


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


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("lengths", [(6,) * 8, (5, 9, 1, 3, 7), (70, 2, 3, 2, 66)], ids=str)
def test_a_hybrid_equals_its_documents_alone_with_their_gradients(family, lengths):
    model, docs = built(family), documents(*lengths)
    with fa2patch.apply(model) as patch:
        assert_equals_alone(model, built(family), docs, GRADIENT_TOLERANCE, 0.01)
        assert {layer.kernel for layer in patch.layers if layer.seam == "mixer"} == {BATCHES.name}


@pytest.mark.parametrize("family", HYBRIDS)
def test_documents_of_a_batch_are_isolated_by_perturbation_and_by_gradient(family):
    model, docs = built(family), documents(6, 4, 6, 5)
    with fa2patch.apply(model):
        model(**pack(docs))  # makes the trials
        assert_nothing_crosses(model, docs)


@pytest.mark.parametrize("family", HYBRIDS)
def test_paths_of_a_tree_share_calls(family):
    # What the paths share is computed on each of them, and taken from the first.
    lengths, parents = [5, 3, 4, 3, 6, 3], [-1, 0, 0, 0, -1, 4]
    model, batch = built(family), tree_batch(lengths, parents)
    paths = [[*range(5), *range(start, stop)] for start, stop in ((5, 8), (8, 12), (12, 15))] + [[*range(15, 24)]]
    expected = [model(input_ids=batch["input_ids"][:, path], use_cache=False).logits[0] for path in paths]
    with fa2patch.apply(model) as patch:
        found = model(**batch).logits[0]
        assert {layer.kernel for layer in patch.layers if layer.seam == "mixer"} == {BATCHES.name}
    for path, logits in zip(paths, expected):
        assert_close(found[path], logits, "a path")


@pytest.mark.parametrize("family", HYBRIDS)
def test_isolated_without_a_patch_not(family):
    model = tiny_models.build(family).train()  # in eval mode RWKV writes to its own states
    assert not fa2patch.verify(model, strict=False).ok
    with fa2patch.apply(model) as patch:
        assert fa2patch.verify(model).ok
        assert "mixer" in {layer.seam for layer in patch.layers}
    assert not fa2patch.verify(model, strict=False).ok


class Work(TorchDispatchMode):
    # Counts the operators that run in a block, and the numbers that they return.

    def __init__(self):
        super().__init__()
        self.operators = self.numbers = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        self.operators += 1
        self.numbers += sum(each.numel() for each in comparison.tensors(output))
        return output


@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("lengths", [(5, 9, 3), tuple(5 + 5 * at % 33 for at in range(14))], ids=["few", "many"])
def test_a_first_batch_costs_three_batches_more_than_a_later_one(family, lengths):
    # Forward and backward of the whole model are counted in operators, which take the time on a tiny one, and in
    # numbers.
    model, work = packed_rows.built(family).train(), []
    with fa2patch.apply(model, prove=False):  # a proof costs a batch of its own
        for _ in range(2):
            with Work() as counted:
                model(**pack(documents(*lengths)), use_cache=False).logits.square().mean().backward()
            work.append(counted)
    first, later = work
    assert first.operators - later.operators <= 3 * later.operators
    assert first.numbers - later.numbers <= 3 * later.numbers


@pytest.mark.parametrize("family", HYBRIDS)
def test_no_dearer_than_documents_alone(family):
    # The mixers' linear layers are called less often than for the documents one by one, on few tokens of padding.
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
    # Qwen3-Next's real code, with functions that take boundaries like causal-conv1d and flash-linear-attention.
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
    # LFM2 of 5.10 hands its convolutions no mask if rows are one token long, as in decoding.
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
    layers = ModelLayers(tiny_models.build("kimi_linear", "sdpa"))
    assert layers.carrying and not {*layers.carrying} & {layer.name for layer in layers.attention}
