"""Documents of near length share a call of a mixer as a batch, where a trial has shown that this is right."""

from __future__ import annotations

import pytest
import torch
from tree_cases import tree_batch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from compat_matrix.check.rows import alone, documents, gradients, loss_of, pack
from fa2patch.documents import device
from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import grouping
from fa2patch.kernels.picks import BATCHES, DOCUMENTS
from fa2patch.upstream import packed_batch
from fa2patch.upstream.seams import mixer, mixer_calls
from fa2patch.upstream.splitting import Documents

ROWS = {
    "of one length": (6,) * 8,
    "near": (5, 9, 1, 3, 7),
    "of two lengths": (6, 2) * 4,
    "one long and many short": (150, *(2, 3, 1) * 7),
    "of one token": (1,) * 6,
    "far apart": (200, 90, 3),
}
HYBRIDS = [name for name in ("qwen3_next", "mamba", "rwkv", "lfm2", "bamba") if tiny_models.is_present(name)]


class Running(torch.nn.Module):
    """A toy mixer: the running sum of a projection.

    Attributes:
        shapes: the shapes of the hidden states of its calls.
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.bias = torch.nn.Parameter(torch.randn(8))
        self.shapes = []

    def forward(self, hidden_states, attention_mask=None):
        self.shapes.append(tuple(hidden_states.shape[:2]))
        return self.mix(hidden_states @ self.weight + self.bias)

    def mix(self, projected):
        return projected.cumsum(1)


class Changed(Running):
    def __init__(self, mix):
        super().__init__()
        self.mix = mix


class Dropping(Running):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)

    def mix(self, projected):
        return self.dropout(projected.cumsum(1))


class Counting(Running):
    """Keeps the mean of its inputs in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def mix(self, projected):
        self.mean.mul_(0.9).add_(projected.detach().mean((0, 1)))
        return projected.cumsum(1)


FAULTS = {
    "computes something else": lambda x: x.cumsum(1) - x.mean(1, keepdim=True),
    "it fails: ValueError: one document at a time": lambda x: one_document(x).cumsum(1),
    "sends gradients into what fills a batch up": lambda x: x.cumsum(1) / 9 + x / x.norm(dim=-1, keepdim=True),
    "changes a document when the others change": lambda x: x.cumsum(1) + 1e-5 * x.detach().roll(1, 0),
    "sends gradients from one document into another": lambda x: x.cumsum(1) + (x - x.detach()).roll(1, 0),
    "has other gradients": lambda x: x.cumsum(1) + (len(x) > 1) * (x - x.detach()),
}
"""Mixers that batches of near length cannot be given to. At zeros, the third one's derivative is not a number."""


def one_document(x):
    if len(x) > 1:
        raise ValueError("one document at a time")
    return x


def packed(lengths, **options):
    """The packed mask of a row and hidden states for it ``[1, tokens, 8]``."""
    patch = fa2patch.apply(tiny_models.build("llama", "sdpa"))
    return packed_batch.packed_mask(pack(documents(*lengths)), patch), torch.randn(1, sum(lengths), 8)


def right(module, hidden, lengths):
    pieces = hidden.split([length for length in lengths if length], 1)
    return torch.cat([Running.forward(module, piece) for piece in pieces], 1)


def computed(module, mask, hidden):
    """The mixer's output for a packed row, with the number of calls once its trials are made."""
    forward = mixer.by_document(type(module).forward)
    forward(module, hidden, attention_mask=mask)
    module.shapes.clear()
    return forward(module, hidden, attention_mask=mask)


def built(family):
    """A model in train mode with scaled up weights. In eval mode RWKV writes to its own states."""
    model = tiny_models.build(family).train()
    tiny_models.scale_up(model)
    return model


# What a batch holds


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
    batches = each.in_batches([[0, 1]], torch.device("cpu"))
    states = torch.randn(1, 5, 2, requires_grad=True)
    (batch,) = batches.split(states)
    assert batch.shape == (2, 3, 2) and not batch[1, 2].any()
    (batch * torch.tensor([[1.0, 1, 1], [1, 1, torch.nan]])[..., None]).nansum().backward()
    assert torch.equal(states.grad, torch.ones_like(states))


# Mixers


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_a_mixer_computes_batches_as_documents_one_by_one(lengths):
    mask, hidden = packed(lengths)
    module, calls = Running(), grouping.batches(tuple(lengths), mixer_calls.LARGEST)
    found, expected = (hidden.clone().requires_grad_() for _ in range(2))
    output = computed(module, mask, found)
    assert module.shapes == [(len(batch), lengths[batch[0]]) for batch in calls]
    assert mask.picks.of(module) == ((BATCHES if len(calls) < len(lengths) else DOCUMENTS), "")
    wanted = right(module, expected, lengths)
    assert_close(output, wanted, "output")
    found_gradients = torch.autograd.grad(output.square().sum(), [found, *module.parameters()])
    for pair in zip(found_gradients, torch.autograd.grad(wanted.square().sum(), [expected, *module.parameters()])):
        assert_close(*pair, "gradients")


@pytest.mark.parametrize(("why", "mix"), FAULTS.items(), ids=FAULTS)
def test_a_mixer_that_is_wrong_in_batches_gets_documents_one_by_one_and_why_is_said(why, mix):
    lengths = (5, 4, 7, 6)
    mask, hidden = packed(lengths)
    module = Changed(mix)
    module.bias.data.zero_()
    output = computed(module, mask, hidden)
    assert module.shapes == [(1, length) for length in lengths]
    made, reason = mask.picks.of(module)
    assert made is DOCUMENTS and why in reason and reason.startswith("tried on this machine with documents in padded ")
    assert torch.equal(output, torch.cat([Running.forward(module, piece) for piece in hidden.split(lengths, 1)], 1))


def test_a_mixer_that_looks_at_later_tokens_gets_only_documents_of_one_length_together():
    lengths = (6, 4, 6, 4, 6)
    mask, hidden = packed(lengths)
    module = Changed(lambda x: x.flip(1).cumsum(1))
    output = computed(module, mask, hidden)
    assert module.shapes == [(3, 6), (2, 4)]
    assert_close(output, right(module, hidden, lengths), "output")
    made, reason = mask.picks.of(module)
    assert made is BATCHES and "with documents in padded batches, it computes something else" in reason


def test_what_a_row_of_one_length_has_shown_says_nothing_of_padding():
    """A mixer that looks at later tokens passes its first row, where nothing is padded."""
    module, forward = Changed(lambda x: x.flip(1).cumsum(1)), mixer.by_document(Changed.forward)
    mask, hidden = packed((6, 6, 6))
    forward(module, hidden, attention_mask=mask)
    assert mask.picks.of(module) == (BATCHES, "")
    other = packed_batch.packed_mask(pack(documents(5, 7, 6)), fa2patch.apply(tiny_models.build("llama", "sdpa")))
    other.picks = mask.picks
    assert_close(forward(module, hidden, attention_mask=other), right(module, hidden, (5, 7, 6)), "output")
    assert mask.picks.of(module).kernel is DOCUMENTS


CHUNK = 8
AHEAD = {
    "beyond a chunk": lambda x: x.cumsum(1) - x.mean(1, keepdim=True) * (torch.arange(x.shape[1]) >= CHUNK)[:, None],
    "inside a chunk, beyond the first": lambda x: torch.cat(
        [x.cumsum(1)[:, :CHUNK], *(part.flip(1).cumsum(1) for part in x[:, CHUNK:].split(CHUNK, 1))], 1
    ),
    "a little": lambda x: x.cumsum(1) + 1e-5 * x.flip(1).cumsum(1),
}
"""Mixers that look at later tokens. Documents of whole chunks do not show it of the second one."""


@pytest.mark.parametrize("mix", AHEAD.values(), ids=AHEAD)
def test_a_mixer_that_looks_ahead_is_found_whatever_the_lengths_of_its_first_row(mix):
    module = Changed(mix)
    mask, hidden = packed((3 * CHUNK, 2 * CHUNK, 2 * CHUNK, CHUNK))
    computed(module, mask, hidden)
    made, reason = mask.picks.of(module)
    assert made is BATCHES and "with documents in padded batches, it " in reason
    assert {count for count, _ in module.shapes} == {1, 2}


@pytest.mark.parametrize("others", [(), (CHUNK, CHUNK - 1)])
def test_a_mixer_in_which_only_the_last_token_of_a_document_sees_padding_is_found(others):
    """As Zamba 2 in 5.4 and 5.9: less than a trial's tolerance, and the first part of the document is one chunk."""

    def mix(x):
        behind = x[:, CHUNK:]
        return x.cumsum(1) + torch.cat([0 * x[:, :CHUNK], 1e-5 * (behind + 1).flip(1).cumsum(1).flip(1)], 1)

    lengths = (CHUNK + 2, CHUNK + 1, *others)
    mask, hidden = packed(lengths)
    module = Changed(mix)
    output = computed(module, mask, hidden)
    assert "with documents in padded batches, it " in mask.picks.of(module).why
    assert torch.equal(output, right(module, hidden, lengths))


LONGER = {
    "a document of several chunks in a longer call": (
        lambda x: x.cumsum(1) - x.mean(1, keepdim=True) * (torch.arange(x.shape[1]) >= CHUNK)[:, None],
        (5, 3, 7),
        (12, 9, 10),
    ),
    "a document of one chunk in a call of several": (
        lambda x: x.cumsum(1) - x.mean(1, keepdim=True) * (x.shape[1] > CHUNK),
        (5, 3, 7),
        (12, 3, 5),
    ),
    "documents of one length": (
        lambda x: x.cumsum(1) + x.roll(1, 0) * (x.shape[1] > CHUNK),
        (6, 6, 6),
        (9, 9, 9),
    ),
}
"""Mixers in chunks that are wrong only beyond a chunk, as Mamba 2 in 4.45 and Nemotron-H in 5.3 are."""


@pytest.mark.parametrize(("mix", "short", "longer"), LONGER.values(), ids=LONGER)
def test_what_short_documents_have_shown_says_nothing_of_longer_ones(mix, short, longer):
    module, forward = Changed(mix), mixer.by_document(Changed.forward)
    mask, hidden = packed(short)
    assert_close(forward(module, hidden, attention_mask=mask), right(module, hidden, short), "output")
    assert mask.picks.of(module) == (BATCHES, "")
    other, hidden = packed(longer)
    other.picks = mask.picks
    output = forward(module, hidden, attention_mask=other)
    assert_close(output, right(module, hidden, longer), "output")
    assert mask.picks.of(module).kernel is DOCUMENTS


def test_a_trial_is_repeated_only_for_longer_documents_and_until_they_are_long_enough():
    module, forward, picks = Running(), mixer.by_document(Running.forward), packed((2, 1))[0].picks
    tried_then_known = (
        ((5, 3, 7), (4, 3, 7), (5, 2, 6)),
        ((5, 3, 8), (3, 2, 1)),
        ((8, 6, 7),),
        ((1500, 1490), (3000, 2990)),
    )
    for first, *known in tried_then_known:
        for lengths in (first, *known):
            mask, hidden = packed(lengths)
            mask.picks = picks
            module.shapes.clear()
            forward(module, hidden, attention_mask=mask)
            assert (len(module.shapes) > 1) == (lengths is first), lengths


def test_dropout_is_off_in_a_trial_and_on_behind_it():
    mask, hidden = packed((5, 4, 5))
    module = Dropping()
    output = computed(module, mask, hidden)
    assert mask.picks.of(module) == (BATCHES, "") and module.dropout.training
    assert (output == 0).any() and not torch.equal(output, computed(module, mask, hidden))


def test_a_mixer_that_draws_by_itself_gets_documents_one_by_one():
    mask, hidden = packed((5, 4, 5))
    module = Changed(lambda x: torch.nn.functional.dropout(x.cumsum(1), 0.5))
    computed(module, mask, hidden)
    assert module.shapes == [(1, 5), (1, 4), (1, 5)] and mask.picks.of(module).kernel is DOCUMENTS


def test_a_mixer_that_keeps_statistics_gets_documents_one_by_one_and_a_trial_leaves_them_alone():
    lengths = (5, 4, 5)
    mask, hidden = packed(lengths)
    module, other = Counting(), Counting()
    other.load_state_dict(module.state_dict())
    mixer.by_document(Counting.forward)(module, hidden, attention_mask=mask)
    right(other, hidden, lengths)
    assert torch.equal(module.mean, other.mean)
    assert "writes to its buffers" in mask.picks.of(module).why


def test_hooks_on_parameters_do_not_see_a_trial():
    mask, hidden = packed((5, 4, 5))
    module, seen = Running(), []
    module.weight.register_hook(seen.append)
    module.bias.register_post_accumulate_grad_hook(seen.append)
    computed(module, mask, hidden)
    assert mask.picks.of(module).kernel is BATCHES and not seen
    assert module.weight.grad is None and module.bias.grad is None


def test_deepspeed_s_zero_3_makes_no_trial():
    """Its hooks would take a trial's backward for the training's."""
    mask, hidden = packed((5, 4, 5))
    module = Running()
    module.weight.ds_id = 0
    computed(module, mask, hidden)
    assert module.shapes == [(1, 5), (1, 4), (1, 5)] and mask.picks.of(module) == (DOCUMENTS, "")


def test_a_checkpoint_computes_the_same_batches_again():
    lengths = (5, 9, 1, 3, 60, 150)
    mask, hidden = packed(lengths)
    module, forward = Running(), mixer.by_document(Running.forward)
    forward(module, hidden, attention_mask=mask)
    module.shapes.clear()
    states = hidden.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(
        lambda x: forward(module, x, attention_mask=mask), states, use_reentrant=False
    ).square().sum().backward()
    half = len(module.shapes) // 2
    assert module.shapes[:half] == module.shapes[half:] and 0 < half < len(lengths)


# Reads from the device


@pytest.mark.parametrize("takes", ["a whole row", "batches"])
def test_nothing_is_read_where_a_whole_row_is_taken_and_lengths_once_for_batches(takes, monkeypatch):
    class WithLengths(Running):
        def forward(self, hidden_states, attention_mask=None, seq_idx=None):
            self.shapes.append(tuple(hidden_states.shape[:2]))
            projected = hidden_states @ self.weight
            if seq_idx is None or takes == "batches":
                return projected.cumsum(1)
            pieces = projected.split(torch.bincount(seq_idx[0]).tolist(), 1)
            return torch.cat([piece.cumsum(1) for piece in pieces], 1)

    monkeypatch.setattr(mixer_calls, "NO_KERNELS", ())
    mask, hidden = packed((5, 4, 5))
    layers, forward = [WithLengths(), WithLengths()], mixer.by_document(WithLengths.forward)
    reads = []
    read = device.read
    for at in range(2):
        if at:
            monkeypatch.setattr(device, "read", lambda tensor: reads.append(1) or read(tensor))
        mask.boundaries = Boundaries(mask.boundaries.cu_seqlens, 5)  # as the collator's lengths give them
        for layer in layers:
            layer.shapes.clear()
            forward(layer, hidden, attention_mask=mask)
    assert layers[1].shapes == [(1, 14) if takes == "a whole row" else (3, 5)]
    assert len(reads) == (0 if takes == "a whole row" else 1)


def test_what_a_whole_row_is_handed_is_made_once_for_all_layers(monkeypatch):
    boundaries = Boundaries(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    monkeypatch.setattr(mixer_calls, "NO_KERNELS", ())
    first, second = (
        next(mixer_calls.Mixing(None, None, (), {}, boundaries, (1, 5), False).ways(("seq_idx",))) for _ in range(2)
    )
    assert first.more["seq_idx"] is second.more["seq_idx"] and first.more["seq_idx"].tolist() == [[0, 0, 1, 1, 1]]


# Models


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("lengths", [(6,) * 8, (5, 9, 1, 3, 7), (70, 2, 3, 2, 66)], ids=str)
def test_a_hybrid_equals_its_documents_alone_with_their_gradients(family, lengths):
    model, docs = built(family), documents(*lengths)
    expected = alone(model, docs)
    loss_of(expected, docs).backward()
    right_gradients = gradients(model)
    with fa2patch.apply(model) as patch:
        found = model(**pack(docs)).logits[0]
        assert {layer.kernel for layer in patch.layers if layer.seam == "mixer"} == {BATCHES.name}
        loss_of(found, docs).backward()
    assert_close(found, expected, "logits")
    assert_same_gradients(gradients(model), right_gradients, GRADIENT_TOLERANCE, 0.01)


@pytest.mark.parametrize("family", HYBRIDS)
def test_documents_of_a_batch_are_isolated_by_perturbation_and_by_gradient(family):
    model, lengths = built(family), (6, 4, 6, 5)
    docs, others = documents(*lengths), documents(*lengths, seed=1)
    with fa2patch.apply(model):
        model(**pack(docs))
        for at, span in enumerate(torch.arange(sum(lengths)).split(lengths)):
            among = [*others[:at], docs[at], *others[at + 1 :]]
            assert torch.equal(model(**pack(among)).logits[0, span], model(**pack(docs)).logits[0, span])
            embedded = model.get_input_embeddings()(pack(docs)["input_ids"]).detach().requires_grad_()
            call = {"inputs_embeds": embedded, "position_ids": pack(docs)["position_ids"]}
            (gradient,) = torch.autograd.grad(model(**call).logits[0, span].square().sum(), embedded)
            outside = torch.ones(sum(lengths), dtype=torch.bool).index_fill(0, span, False)
            assert not gradient[0, outside].any() and gradient[0, span].any(-1).all()


@pytest.mark.parametrize("family", HYBRIDS)
def test_paths_of_a_tree_share_calls(family):
    """What they share is computed on each of them, and taken from the first."""
    lengths, parents = [5, 3, 4, 3, 6, 3], [-1, 0, 0, 0, -1, 4]
    model, batch = built(family), tree_batch(lengths, parents)
    paths = [[*range(5), *range(start, stop)] for start, stop in ((5, 8), (8, 12), (12, 15))] + [[*range(15, 24)]]
    expected = [model(input_ids=batch["input_ids"][:, path], use_cache=False).logits[0] for path in paths]
    with fa2patch.apply(model) as patch:
        found = model(**batch).logits[0]
        assert {layer.kernel for layer in patch.layers if layer.seam == "mixer"} == {BATCHES.name}
    for path, logits in zip(paths, expected):
        assert_close(found[path], logits, "a path")
