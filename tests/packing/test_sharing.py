"""``share``: every sequence is a path of the row, what they begin with is there once, and each is read as if alone."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa2patch
from compat_matrix import tiny_models
from fa2patch.errors import BadBatch
from fa2patch.packing import PackingError, Shared, share

DRAWN = settings(deadline=None, derandomize=True, database=None, max_examples=100)
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)
SYSTEM, FIRST, SECOND = [5, 6, 7, 8, 9], [20, 21, 22], [30, 31]
# A system prompt, two prompts below it, and completions below each. One sequence is alone.
NESTED = [
    [*SYSTEM, *FIRST, 40, 41],
    [*SYSTEM, *SECOND, 50],
    [*SYSTEM, *FIRST, 42],
    [60, 61, 62],
    [*SYSTEM, *FIRST, 40, 41, 43],
    [*SYSTEM, *SECOND, 51, 52, 53, 54],
]
PROMPTS = [8, 7, 8, 0, 8, 7]


@st.composite
def arguments(draw: Any) -> tuple[list[list[int]], list[int] | None]:
    sequences = draw(SEQUENCES)
    limits = [draw(st.integers(0, len(sequence))) for sequence in sequences]
    return sequences, draw(st.sampled_from([None, limits]))


def segments(row: Shared) -> list[tuple[int, int, int]]:
    # (start, stop, parent) of each segment.
    ends = row.batch["cu_seq_lens_q"].tolist()
    return list(zip(ends, ends[1:], row.batch["segment_parents"].tolist()))


def boundaries(row: Shared) -> fa2patch.Boundaries:
    return fa2patch.Boundaries(
        row.batch["cu_seq_lens_q"], row.batch["max_length_q"], parents=row.batch["segment_parents"]
    )


def from_the_definition(sequences: list[list[int]], limits: list[int]) -> tuple[int, int]:
    # The tokens of the tree with all common prefixes, and the number of these prefixes. Each distinct prefix is one
    # token. Where k branches part, the last token that they share is there k times.
    branches: dict[tuple[int, ...], set[Any]] = defaultdict(set)
    for number, (sequence, limit) in enumerate(zip(sequences, limits)):
        for end in range(1, limit + 1):
            branches[tuple(sequence[:end])].add(("own", number) if end == limit else sequence[end])
    parting = {prefix: len(found) for prefix, found in branches.items() if len(found) > 1}
    own = sum(len(sequence) - limit for sequence, limit in zip(sequences, limits))
    tokens = own + len(branches) + sum(parting.values()) - len(parting)
    return tokens, sum(len(prefix) > 1 for prefix in parting)


@DRAWN
@given(drawn=arguments(), least=st.integers(1, 20))
def test_every_sequence_is_a_path_and_every_segment_continues_its_parent(drawn: Any, least: int) -> None:
    sequences, prompts = drawn
    row = share(sequences, prompts=prompts, least=least)
    ids, positions = row.batch["input_ids"][0], row.batch["position_ids"][0]
    assert [ids[places].tolist() for places in row.indices] == sequences
    assert [positions[places].tolist() for places in row.indices] == [list(range(len(each))) for each in sequences]
    assert torch.cat(row.indices).unique().tolist() == list(range(row.tokens)), "no token is nobody's"
    tree = boundaries(row).tree
    assert tree is not None
    assert [tree.along(torch.arange(row.tokens), leaf).tolist() for leaf in tree.leaves] == [
        places.tolist() for places in row.indices
    ], "the documents are the sequences, in their order"
    assert torch.equal(tree.positions, positions)
    assert row.batch["max_length_q"] == row.batch["max_length_k"] == max(tree.lengths)
    assert all(-1 <= parent < number for number, (_, _, parent) in enumerate(segments(row)))
    assert row.lengths == tuple(map(len, sequences)) and row.tokens_before == sum(map(len, sequences))


@DRAWN
@given(drawn=arguments())
def test_everything_in_common_is_there_once(drawn: Any) -> None:
    sequences, prompts = drawn
    limits = [len(sequence) for sequence in sequences] if prompts is None else prompts
    row = share(sequences, prompts=prompts, least=1)
    tokens, prefixes = from_the_definition(sequences, limits)
    assert row.tokens == tokens
    assert len(row.batch["segment_parents"]) == len(sequences) + prefixes


@DRAWN
@given(sequences=SEQUENCES)
def test_no_two_segments_could_have_been_merged(sequences: list[list[int]]) -> None:
    # Those that continue the same segment begin with one token in common, their own copy of the last shared one.
    row = share(sequences, least=1)
    ids, beginnings = row.batch["input_ids"][0].tolist(), defaultdict(list)
    for start, stop, parent in segments(row):
        beginnings[parent].append(ids[start : min(start + 2, stop)])
    for parent, found in beginnings.items():
        pairs = [tuple(each) for each in found if len(each) == 2]
        assert len(pairs) == len(set(pairs))
        assert parent < 0 or (len(found) > 1 and len({each[0] for each in found}) == 1)


@DRAWN
@given(drawn=arguments(), least=st.integers(2, 20))
def test_a_prefix_is_shared_only_where_it_saves_enough(drawn: Any, least: int) -> None:
    sequences, prompts = drawn
    row, everything = share(sequences, prompts=prompts, least=least), share(sequences, prompts=prompts, least=1)
    found = segments(row)
    branches = [parent for _, _, parent in found]
    for number, (start, stop, _) in enumerate(found):
        count = branches.count(number)
        assert not count or (count - 1) * (stop - start) >= least
    left_out = len(everything.batch["segment_parents"]) - len(found)
    assert 0 <= row.tokens - everything.tokens <= left_out * (least - 1)


@DRAWN
@given(drawn=arguments())
def test_labels(drawn: Any) -> None:
    sequences, prompts = drawn
    row = share(sequences, prompts=prompts, least=1)
    found = [row.labels[0, places].tolist() for places in row.indices]
    if prompts is not None:
        wanted = [
            [-100 if at < max(limit, 1) else token for at, token in enumerate(sequence)]
            for sequence, limit in zip(sequences, prompts)
        ]
        assert found == wanted
    first = row.batch["cu_seq_lens_q"][:-1].long()
    assert (row.labels[0, first] == -100).all()
    rest = row.labels[0] != -100
    assert torch.equal(row.labels[0][rest], row.batch["input_ids"][0][rest])
    assert prompts is not None or int(rest.sum()) == row.tokens - len(first)


@DRAWN
@given(sequences=SEQUENCES, seed=st.integers(0, 9))
def test_any_order_gives_the_same_tree_and_the_same_arguments_the_same_row(sequences: Any, seed: int) -> None:
    row, again = share(sequences, least=3), share([np.array(each) for each in sequences], least=3)
    assert all(np.array_equal(row.batch[key], again.batch[key]) for key in row.batch)
    order = np.random.default_rng(seed).permutation(len(sequences))
    other = share([torch.tensor(sequences[at]) for at in order], least=3)
    assert other.tokens == row.tokens
    assert [places.tolist() for places in map(other.batch["input_ids"][0].__getitem__, other.indices)] == [
        sequences[at] for at in order
    ]


def test_nested_prefixes() -> None:
    row = share(NESTED, least=1)
    texts = [row.batch["input_ids"][0, start:stop].tolist() for start, stop, _ in segments(row)]
    assert list(zip(texts, row.batch["segment_parents"].tolist())) == [
        (SYSTEM[:-1], -1),
        ([9, *FIRST[:-1]], 0),
        ([22, 40], 1),
        ([41], 2),
        ([9, 30], 0),
        ([31, 50], 4),
        ([22, 42], 1),
        ([60, 61, 62], -1),
        ([41, 43], 2),
        ([31, 51, 52, 53, 54], 4),
    ]
    assert "6 sequences of 52 tokens in 26 tokens, 10 segments" in repr(row)
    within = share(NESTED, prompts=PROMPTS, least=1)
    assert [22, 40, 41] in [within.batch["input_ids"][0, a:b].tolist() for a, b, _ in segments(within)]
    assert share(NESTED, least=100).batch["segment_parents"].tolist() == [-1] * 6
    assert share(NESTED).batch["segment_parents"].tolist() == [-1, 0, 0, 0, -1, 0, 0], "4 tokens, 5 times"


def test_thousands_of_sequences_in_random_order() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 1000, (200, 300))
    sequences = [np.concatenate([prompts[at % 200], rng.integers(0, 1000, 50)]) for at in rng.permutation(4000)]
    row = share(sequences)
    assert row.tokens == 200 * 299 + 4000 * 51
    assert len(row.batch["segment_parents"]) == 4200
    assert all(np.array_equal(row.batch["input_ids"][0, at], each) for at, each in zip(row.indices, sequences))


@pytest.mark.parametrize("family", ["llama", "gpt2", "jamba"])
def test_logps_and_gradients_are_those_of_each_sequence_alone(family: str) -> None:
    model = tiny_models.build(family, "sdpa")
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(len(sequence) - 1, generator=generator) for sequence in NESTED]
    expected = []
    for sequence in NESTED:
        ids = torch.tensor([sequence])
        logps = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].log_softmax(-1)
        expected.append(logps.gather(1, ids[0, 1:, None])[:, 0])
    torch.stack([(one * other).sum() for one, other in zip(expected, weights)]).sum().backward()

    fa2patch.apply(model)
    row = share(NESTED, least=1)
    assert row.tokens == 26
    found = row.logps(model(**row.batch).logits)
    torch.stack([(one * other).sum() for one, other in zip(found, weights)]).sum().backward()
    for one, other in zip(found, expected):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert min(float(other.abs().max()) for other in expected) > 1, "nothing is read from uniform logits"
    scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for (name, one), other in zip(model.named_parameters(), reference.parameters()):
        if other.grad is not None:
            assert (one.grad - other.grad).abs().max() <= 1e-5 * scale, name


def test_the_models_own_loss_counts_each_completion_once() -> None:
    model = tiny_models.build("llama", "sdpa")
    fa2patch.apply(model)
    row = share(NESTED, prompts=PROMPTS, least=1)
    labels = [[-100] * prompt + sequence[prompt:] for sequence, prompt in zip(NESTED, PROMPTS)]
    examples = [{"input_ids": ids, "labels": own} for ids, own in zip(NESTED, labels)]
    without = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(examples)
    assert row.tokens < without["input_ids"].shape[1] == row.tokens_before
    assert torch.allclose(model(**row.batch, labels=row.labels).loss, model(**without).loss, rtol=1e-5)
    with pytest.raises(BadBatch, match="first token of a segment with a parent"):
        model(**row.batch, labels=row.batch["input_ids"])


def test_what_a_model_made_is_split_into_sequences() -> None:
    row = share(NESTED, least=1).to("cpu")
    values = torch.randn(1, row.tokens, 3)
    found = row.split(values)
    assert [len(each) for each in found] == list(row.lengths)
    assert torch.equal(found[2], values[0, row.indices[2]])
    assert torch.equal(torch.cat(row.split(values[0])), torch.cat(found))
    logits = torch.randn(1, row.tokens, 70, dtype=torch.bfloat16)
    assert {each.dtype for each in row.logps(logits)} == {torch.float32}
    assert {each.dtype for each in row.logps(logits.double())} == {torch.float64}
    assert [len(each) for each in share([[1], [1, 2]], least=1).logps(torch.zeros(1, 3, 4))] == [0, 1]
    for wrong in (values[:, :-1], values[0, :-1], values.squeeze(0)[None, None]):
        with pytest.raises(PackingError, match=r"expected one value for each token of the row, \[1, 26, ...\]"):
            row.split(wrong)
    with pytest.raises(PackingError, match=r"logps: expected logits \[1, 26, vocabulary\], found \[1, 26\]"):
        row.logps(torch.zeros(1, 26))


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([], {}, "at least one sequence of token ids, found none"),
        (5, {}, "of token ids, found 5"),
        ("text", {}, "of token ids, found 'text'"),
        ([[1], []], {}, "sequence 1: no tokens"),
        ([[1.5]], {}, "sequence 0: expected token ids, integers"),
        ([[True]], {}, "sequence 0: expected token ids, integers"),
        ([[[1, 2]]], {}, r"list of int64 \[1, 2\]"),
        ([[1, [2]]], {}, "sequence 0: expected token ids"),
        (["text"], {}, "sequence 0: expected token ids"),
        ([1, 2], {}, "sequence 0: expected token ids"),
        (torch.arange(4), {}, "sequence 0: expected token ids"),
        (torch.tensor(4), {}, r"of token ids, found tensor\(4\)"),
        ([torch.ones(3, device="meta", dtype=torch.long)], {}, "sequence 0: expected token ids"),
        ([[1, 2]], {"prompts": 2}, "prompts: expected one integer for each sequence, found 2"),
        ([[1, 2]], {"prompts": [1.0]}, "prompts: expected one integer"),
        ([[1, 2]], {"prompts": [1, 1]}, "one number for each of 1 sequences, found 2"),
        ([[1, 2]], {"prompts": [3]}, "sequence 0 has 2 tokens, so its prompt has 0 to 2, found 3"),
        ([[1, 2]], {"prompts": [-1]}, "found -1"),
        ([[1, 2]], {"least": 0}, r"a positive number of tokens \(1 shares every prefix\), found 0"),
        ([[1, 2]], {"least": None}, "least: expected a positive number of tokens .*found None"),
    ],
)
def test_errors(sequences: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        share(sequences, **options)


def test_prompts_and_sequences_may_be_tensors() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
    row = share(ids, prompts=torch.tensor([3, 3]), least=1)
    assert row.batch["input_ids"].tolist() == [[1, 2, 3, 4, 3, 5]]
