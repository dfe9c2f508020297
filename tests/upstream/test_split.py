"""Rows that an engine splits, with threads as ranks: each document is computed as alone, and no wait is without end.

What the engines themselves do is run with processes, in tests/distributed.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from thread_ranks import of_ranks

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from compat_matrix.check.compare import assert_close
from fa2patch.documents import needed_keys
from fa2patch.documents.parts import Order, Part, Pieces, consecutive, head_and_tail
from fa2patch.errors import PackingNotIsolated
from fa2patch.upstream.split import attention, collectives

CUT = ((10, 26, 7, 21),)  # no cut is a document's end, in two and in four parts
ROWS = ((10, 26, 7, 21), (3, 1, 60))
WHOLE = ((16, 10, 6, 12, 4, 16),)  # documents of whole pieces, for two parts with head and tail


def shuffled(length, parts):
    # pieces of four tokens in any order
    pieces = np.random.default_rng(0).permutation(length // 4)
    return Order((4 * pieces[:, None] + np.arange(4)).ravel(), consecutive(length, parts).sizes)


class Split:
    """A tiny model whose rows are split over threads, and what each document alone gives."""

    def __init__(
        self, family="llama", lengths=CUT, ranks=2, arranges=head_and_tail, heads=False, stated=False, **config
    ):
        attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
        self.model = tiny_models.build(family, attention, torch.float64, **config)
        tiny_models.scale_up(self.model)
        self.near = 1e-5 if family in ("gemma2", "deepseek_v3") else 1e-10  # norms or rope are in float32
        self.ranks, self.arranges, self.heads = ranks, arranges, heads
        self.docs = rows.documents(*(length for row in lengths for length in row))
        self.width = sum(lengths[0])
        self.order = (arranges or consecutive)(self.width, ranks)
        ids, counted = torch.cat(self.docs), torch.cat([torch.arange(len(doc)) for doc in self.docs])
        self.batch = {"input_ids": ids.view(-1, self.width), "position_ids": counted.view(-1, self.width)}
        cu = torch.tensor([0, *map(len, self.docs)]).cumsum(0).int()
        self.stated = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 64, "max_length_k": 64}
        self.stated = self.stated if stated else {}
        self.expected = rows.alone(self.model, self.docs)
        self.weight = torch.randn_like(self.expected)
        loss, parameters = (self.expected * self.weight).sum(), [*self.model.parameters()]
        self.gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)

    def own(self, rank, values):
        # values [rows, length, ...] of the whole rows
        at = self.order.tokens[self.order.starts[rank] : self.order.starts[rank + 1]]
        return values[:, torch.from_numpy(at)]

    def computed(self, batch=None, prove=None):
        """The logits of the whole rows, the sums of the ranks' gradients, and the meeting."""
        batch, models = batch or self.batch, [copy.deepcopy(self.model) for _ in range(self.ranks)]
        weight = self.weight.view(*self.batch["input_ids"].shape, -1)

        def work(rank):
            with fa2patch.apply(models[rank], prove=prove):
                call = {name: self.own(rank, value) for name, value in batch.items()}
                logits = models[rank](**call, **self.stated, use_cache=False).logits
                (logits * self.own(rank, weight)).sum().backward()
            return logits.detach()

        found, meeting = of_ranks(self.ranks, work, self.arranges, self.heads)
        whole = torch.cat(found, 1)[:, torch.from_numpy(self.order.places)].flatten(0, 1)
        every = zip(*(model.parameters() for model in models))
        gradients = [sum(torch.zeros_like(one) if one.grad is None else one.grad for one in ones) for ones in every]
        return whole, gradients, meeting

    def require_right(self):
        logits, gradients, meeting = self.computed()
        assert_close(logits, self.expected.detach(), "logits", self.near)
        for found, expected, (name, _) in zip(gradients, self.gradients, self.model.named_parameters()):
            assert_close(found, expected, name, 10 * self.near, at_least=1e-3)
        return meeting


MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},
    "gpt_neox": {},
    "deepseek_v3": {},
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("ranks, arranges", [(2, head_and_tail), (4, consecutive), (4, shuffled)])
def test_documents_that_are_cut_equal_documents_alone(family, ranks, arranges):
    Split(family, ranks=ranks, arranges=arranges, **MODELS[family]).require_right()


@pytest.mark.parametrize("lengths", [ROWS, ((64,),), ((1,) * 64,), ((2, 62), (63, 1))], ids=str)
@pytest.mark.parametrize("stated", [False, True], ids=["ids", "lengths"])
def test_rows(lengths, stated):
    Split(lengths=lengths, ranks=4, stated=stated).require_right()


@pytest.mark.parametrize("length", [63, 62, 61])
@pytest.mark.parametrize("stated", [False, True], ids=["ids", "lengths"])
def test_parts_of_different_lengths(length, stated):
    Split(lengths=((10, 26, 7, length - 43),), ranks=4, arranges=consecutive, stated=stated).require_right()


@pytest.mark.parametrize("family, lengths", [("llama", CUT), ("llama", ROWS), ("gpt_oss", CUT), ("bert:masked", CUT)])
def test_heads_are_exchanged_in_any_order_too(family, lengths):
    config = {"num_key_value_heads": 4} if family == "llama" else {}
    for arranges in (None, head_and_tail, shuffled):
        Split(family, lengths, arranges=arranges, heads=True, **config).require_right()


def test_keys_are_sent_where_heads_cannot_be_shared_out():
    # four query heads, and eight parts of consecutive tokens, as Ulysses makes them
    Split(ranks=8, arranges=None, heads=True).require_right()


def test_encoders_get_all_keys_of_their_documents():
    Split("bert:masked", ranks=4, arranges=shuffled).require_right()


def test_windows_that_look_both_ways_and_other_kinds_go_by_heads():
    meeting = Split("modernbert:masked", ranks=2).require_right()
    assert sum(meeting.sent)


def test_nothing_is_sent_for_documents_that_lie_whole_in_a_part():
    assert sum(Split(lengths=WHOLE, ranks=2, stated=True).require_right().sent) == 0


def test_a_window_prunes_what_is_sent():
    sent = [sum(Split("mistral", sliding_window=window).require_right().sent) for window in (None, 3)]
    assert sent[1] < sent[0] / 2


def test_only_lacking_keys_are_sent():
    # 5 tokens one way and 6 the other, and their gradients back: k and v in double precision
    split = Split(stated=True)
    config = split.model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_token = 2 * config.num_key_value_heads * dim * 8 * config.num_hidden_layers
    assert split.require_right().sent == [11 * of_token] * 2


def test_mixers_take_whole_documents_only():
    Split("lfm2", WHOLE).require_right()
    with pytest.raises(PackingNotIsolated, match="an engine splits rows over 2 processes.*lie whole in one process"):
        Split("lfm2", CUT).require_right()


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("lengths", [CUT, ((64,),)], ids=str)
def test_other_documents_do_not_move_one(family, lengths):
    split = Split(family, (*lengths, (32, 32)), **MODELS[family])
    before, *_ = split.computed()
    changed = {**split.batch, "input_ids": split.batch["input_ids"].clone()}
    own = len(split.docs[0])
    changed["input_ids"][0, :own] = (changed["input_ids"][0, :own] + 5) % 90 + 3
    after, *_ = split.computed(changed)
    assert torch.equal(after[own:], before[own:]) and not torch.equal(after[:own], before[:own])


class Loud(Split):
    """A split that some rank gets wrong."""

    def __init__(self, spoil, **more):
        super().__init__(**more)
        self.spoil = spoil

    def errors(self):
        """The error of every rank; a rank that waits without end is a failure."""
        models = [copy.deepcopy(self.model) for _ in range(self.ranks)]

        def work(rank):
            with fa2patch.apply(models[rank]):
                call = {name: self.own(rank, value) for name, value in self.batch.items()}
                self.spoil(rank, call)
                try:
                    models[rank](**call, **self.stated, use_cache=False)
                except fa2patch.Fa2PatchError as error:
                    return error.message
            return ""

        return of_ranks(self.ranks, work, self.arranges, self.heads)[0]


def without_ids(rank, call):
    if rank == 1:
        del call["position_ids"]


def with_a_mask(rank, call):
    if rank == 1:
        call["attention_mask"] = torch.ones_like(call["input_ids"])


def another_batch(rank, call):
    if rank == 1:
        call.update({name: torch.cat([value, value]) for name, value in call.items()})


def a_token_less(rank, call):
    if rank == 1:
        call.update({name: value[:, :-1] for name, value in call.items()})


@pytest.mark.parametrize(
    "spoil, said",
    [
        (without_ids, "Add position_ids before rows are split"),
        (with_a_mask, r"found \[1, 1\] rows with \[1, 2\] statements"),
        (another_batch, r"found \[1, 2\] rows"),
        (a_token_less, "expected parts of .* tokens"),
    ],
)
def test_a_rank_with_another_call_is_an_error_on_every_rank(spoil, said):
    arranges = consecutive if spoil is a_token_less else head_and_tail
    lengths = ((10, 26, 7, 20),) if spoil is a_token_less else CUT
    errors = Loud(spoil, lengths=lengths, arranges=arranges).errors()
    assert all(errors)
    for error in errors:
        with pytest.raises(PackingNotIsolated, match=said):
            raise PackingNotIsolated(error)


@pytest.mark.parametrize("stated", [False, True], ids=["ids", "lengths"])
def test_a_rank_without_tokens_is_an_error_on_every_rank(stated):
    errors = Loud(lambda rank, call: None, lengths=((3, 2),), ranks=4, arranges=consecutive, stated=stated).errors()
    assert all("none of 0" in error and "pad_to_multiple_of=8" in error for error in errors), errors


def test_lengths_of_a_part_are_an_error_on_every_rank():
    split = Loud(lambda rank, call: None, stated=True)
    cu = torch.tensor([0, 10, 32]).int()
    split.stated.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    assert all("cu_seq_lens_q are those of the whole rows" in error for error in split.errors())


# Faults, each of which the tests above must see


def _row_without_order(monkeypatch):
    monkeypatch.setattr(Order, "places", property(lambda self: np.arange(self.length)))


def _pieces(change):
    def plant(monkeypatch):
        of = Pieces.of.__func__
        monkeypatch.setattr(Pieces, "of", classmethod(lambda cls, *given: change(of(cls, *given))))

    return plant


def _changed(**arrays):
    def change(pieces):
        for name, made in arrays.items():
            setattr(pieces, name, made(pieces))
        return pieces

    return _pieces(change)


def _seen(change):
    def plant(monkeypatch):
        seen_by = needed_keys.seen_by
        monkeypatch.setattr(needed_keys, "seen_by", lambda pieces, *given: change(pieces, seen_by(pieces, *given)))

    return plant


def _exchange(change):
    def plant(monkeypatch):
        exchange = attention.exchange_of

        def changed(pieces, number, *given):
            found = exchange(pieces, number, *given)
            for name, value in change(found, number).items():
                object.__setattr__(found, name, value)
            return found

        monkeypatch.setattr(attention, "exchange_of", changed)

    return plant


def _sent(change):
    def plant(monkeypatch):
        sent = collectives._sent
        monkeypatch.setattr(collectives, "_sent", lambda states, *given: change(sent, states, given))

    return plant


def _gradient(change):
    def plant(monkeypatch):
        backward = collectives._Sent.backward
        monkeypatch.setattr(collectives._Sent, "backward", staticmethod(lambda ctx, grad: change(backward, ctx, grad)))

    return plant


def _own(monkeypatch):
    monkeypatch.setattr(Part, "own", lambda self, values, dim=-1: values.narrow(dim, 0, values.shape[dim] // self.of))


def _attend(change):
    def plant(monkeypatch):
        there = attention.KeyExchange.there
        monkeypatch.setattr(attention.KeyExchange, "there", lambda self, asked: change(there(self, asked)))

    return plant


def _one_less(lengths):
    longest = int(np.argmax(lengths))
    return tuple(length - (at == longest) for at, length in enumerate(lengths))


def _a_key_less(pieces, seen):
    return seen._replace(starts=np.minimum(seen.starts + 1, pieces.starts))


def _without_the_own_key(pieces, seen):
    return seen._replace(ends=np.maximum(seen.ends - 1, seen.starts + 1))


def _gradient_times(factor):
    return _gradient(lambda way, ctx, grad: (factor * way(ctx, grad)[0], None, None, None))


def _not_causal(asked):
    return asked._replace(options=dataclasses.replace(asked.options, causal=False))


def _a_window(monkeypatch):
    exchange = attention.exchange_of
    monkeypatch.setattr(attention, "exchange_of", lambda *given: exchange(*given[:-1], 3))


FAULTS = {
    "the order is not put back": _row_without_order,
    "a document begins one token later": _changed(first=lambda pieces: np.minimum(pieces.first + 1, pieces.starts)),
    "a piece begins one place later": _changed(places=lambda pieces: pieces.places + (pieces.parts == 1)),
    "every piece is a document": _changed(first=lambda pieces: pieces.starts),
    "all rows are one document": _changed(first=lambda pieces: 0 * pieces.first),
    "parts are exchanged": _changed(parts=lambda pieces: pieces.parts[::-1].copy()),
    "a key too few": _seen(_a_key_less),
    "later keys": _seen(lambda pieces, seen: seen._replace(ends=pieces.last)),
    "the own key is missing": _seen(_without_the_own_key),
    "the first key twice": _exchange(lambda found, _: {"keys": np.append(found.keys[0], found.keys[:-1])}),
    "keys in the opposite order": _exchange(lambda found, _: {"keys": found.keys[::-1].copy()}),
    "other tokens are sent": _exchange(lambda found, _: {"sends": np.maximum(found.sends - 1, 0)}),
    "a rank's queries are one less": _exchange(lambda found, _: {"lengths": _one_less(found.lengths)}),
    "a rank's keys are one less": _exchange(lambda found, _: {"key_lengths": _one_less(found.key_lengths)}),
    "the lengths of another rank": _exchange(lambda found, _: {"key_lengths": found.key_lengths[::-1]}),
    "nothing is sent": _exchange(lambda found, _: {"any_sent": False}),
    "one rank sends nothing": _exchange(lambda found, number: {"any_sent": number == 0}),
    "what is received is dropped": _sent(lambda sent, states, given: 0 * sent(states, *given)),
    "what is received is in another order": _sent(lambda sent, states, given: sent(states, *given).flip(0)),
    "the gradient of sent keys is dropped": _gradient_times(0),
    "the gradient of sent keys is doubled": _gradient_times(2),
    "the gradient of sent keys is another's": _gradient(lambda way, ctx, grad: way(ctx, grad.flip(0))),
    "values are keys": _attend(lambda asked: asked._replace(v=asked.k)),
    "queries see all keys": _attend(_not_causal),
    "a window that none asked for": _a_window,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, fault):
    split = Split(ranks=4, arranges=shuffled)
    FAULTS[fault](monkeypatch)
    monkeypatch.setattr("thread_ranks.LIMIT", 2)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        split.require_right()
