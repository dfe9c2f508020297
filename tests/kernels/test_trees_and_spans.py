"""Trees of segments, and spans (a picture's tokens): every kernel that takes them equals the definition with a mask."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import stand_in_aten
import torch
from definition_cases import SPECIAL, error_of_flex, errors_of, kernel_or_operator, options_of
from tree_cases import a_tree

from compat_matrix.check import stand_in
from compat_matrix.check.kernel_cases import DIM, brute_force, documents, largest_errors, states, with_gradients
from fa2patch import kernels
from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.trees import Level, Tree
from fa2patch.errors import KernelUnavailable, KernelWrong, PackingNotIsolated
from fa2patch.kernels import Options, cascade
from fa2patch.kernels.cascade import levels_of
from fa2patch.kernels.protocol import require_within
from fa2patch.kernels.reference import Reference
from fa2patch.kernels.varlen import EntryPoint, FlashAttn

PROMPTS = (6, 3, 5, 1), (-1, 0, 0, 0)
TURNS = (4, 3, 5, 2, 7), (-1, 0, 1, 2, 1)
TREES = {
    "a prompt": PROMPTS,
    "turns": TURNS,
    "several prompts": ((2, 5, 3, 4, 1, 6), (-1, -1, 1, 0, 1, 0)),
    "no parents": ((3, 4), (-1, -1)),
}
LENGTHS = (6, 1, 9, 4)
SPANS = {
    "inside": ((2, 5),),
    "side by side": ((7, 10), (10, 14)),
    "at both ends": ((0, 2), (13, 16)),
    "across a boundary": ((13, 16), (16, 18)),
    "a whole document": ((16, 20), (6, 7)),
    "none": (),
}
LAYOUTS = {name: (lengths, {"parents": parents}) for name, (lengths, parents) in TREES.items()}
LAYOUTS.update({f"spans {name}": (LENGTHS, {"spans": spans}) for name, spans in SPANS.items()})
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def aten_on_a_cpu():
    with stand_in_aten.installed():
        yield


class OnStandIn(FlashAttn):
    # On a CPU and in every precision.

    DEVICES = DTYPES = None

    def found(self):
        return EntryPoint.of(stand_in)


def kernel_named(name):
    return OnStandIn() if name == "flash_attn" else kernels.named(name)


@pytest.mark.parametrize("value_dim", [DIM, 6], ids=["one head dim", "another value head dim"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["reference", "operator", "flash_attn", "torch_varlen", "efficient"])
def test_a_kernel_equals_the_definition(name, layout, special, sinks, value_dim):
    (lengths, more), options = layout, options_of(special, sinks)
    attend = kernel_or_operator(name, options, kernel_named, trees="parents" in more, spans="spans" in more)
    if attend is None:  # softcap, alibi and sinks
        assert name != "reference" and (special or sinks)
        return
    assert errors_of(attend, options, lengths, value_dim=value_dim, **more) < 1e-12


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_flex_attention_equals_the_definition(layout, special):
    lengths, more = layout
    assert error_of_flex(options_of(special, sinks=False), lengths, **more) < 1e-6


def check_random_tree(seed):
    drawn = random.Random(seed)
    lengths, parents = a_tree(drawn)
    name = drawn.choice(["plain", "window", "softcap"])
    special = {"window": {"window": drawn.randint(1, 9)}, "softcap": {"softcap": 2.0}}.get(name, {})
    options = options_of(special, sinks=drawn.random() < 0.5)
    for kernel in ("reference", "torch_varlen"):
        if name != "softcap" or kernel == "reference":
            assert errors_of(kernel_named(kernel), options, lengths, parents=parents) < 1e-11


def check_random_spans(seed):
    drawn = random.Random(seed)
    lengths = [drawn.randint(1, 12) for _ in range(drawn.randint(1, 5))]
    spans, at = [], 0
    for length in lengths:
        cuts = sorted({at, at + length, *(drawn.randint(at, at + length) for _ in range(drawn.randint(0, 4)))})
        spans += [span for span in zip(cuts, cuts[1:]) if drawn.random() < 0.5]
        at += length
    longest = max((stop - start for start, stop in spans), default=1)
    special = {"window": drawn.randint(longest, longest + 4)} if drawn.random() < 0.5 else {}
    options = options_of(special, sinks=False)
    for name in ("reference", "flash_attn", "torch_varlen"):
        assert errors_of(kernel_named(name), options, lengths, spans=spans) < 1e-11, name


@pytest.mark.parametrize("check", [check_random_tree, check_random_spans], ids=["trees", "spans"])
@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 2000))])
def test_random_ones(check, seed):
    check(seed)


# Trees


def test_a_branch_does_not_move_by_a_bit_when_its_sibling_changes():
    lengths, parents = PROMPTS
    q, k, v = (x.detach().float() for x in states(lengths))
    boundaries = documents(lengths, parents=parents)
    sibling = slice(6, 9)
    for options in (Options(), Options(window=3), Options(softcap=2.0)):
        before = Reference()(q, k, v, boundaries, options)
        others = [x.clone() for x in (q, k, v)]
        for other in others:
            other[sibling] += 1
        after = Reference()(*others, boundaries, options)
        changed = (before != after).flatten(1).any(1)
        assert changed[sibling].all() and changed.sum() == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_precision_is_merged_in_float32(dtype):
    lengths, parents = TURNS
    q, k, v = states(lengths, groups=2)
    truth = with_gradients(lambda: brute_force(q, k, v, lengths, Options(), parents), [q, k, v])
    given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    found = with_gradients(lambda: Reference()(*given, documents(lengths, parents=parents), Options()), given)
    assert [x.dtype for x in found] == [dtype] * 4
    for error, tensor in zip(largest_errors(found, truth), truth):
        assert error <= (1e-5 if dtype == torch.float32 else 6e-2) * tensor.abs().max().item()


def test_the_cascade_copies_no_keys(monkeypatch):
    # The keys of a prompt are read once for all branches: one call for each segment, and one for each parent.
    calls = []
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def counted(query, key, value, *rest, **more):
        calls.append((query.shape[2], key.shape[2], key.untyped_storage().data_ptr()))
        return operator(query, key, value, *rest, **more)

    fake = SimpleNamespace(aten=SimpleNamespace(**{cascade._CPU_FLASH: SimpleNamespace(default=counted)}))
    monkeypatch.setattr(cascade, "torch", SimpleNamespace(**{**vars(torch), "ops": fake}))
    lengths, parents = PROMPTS
    q, k, v = (x.detach() for x in states(lengths))
    Reference()(q, k, v, documents(lengths, parents=parents), Options())
    assert [call[:2] for call in calls] == [(6, 6), (3, 3), (5, 5), (1, 1), (9, 6)]
    assert {call[2] for call in calls} == {k.untyped_storage().data_ptr()}


def test_a_kernel_that_does_not_know_trees_is_not_used():
    class Old(kernels.Kernel):
        name = "old"
        DEVICES = DTYPES = None

        def available(self):
            return True, ""

    asked = kernels.asked_by(*states(), Options(), trees=True)
    assert Old().supports(asked) == (False, "it has no trees")
    with pytest.raises(KernelUnavailable, match="it has no trees"):
        kernels.pick(Old(), asked, CPU)


def test_the_trial_finds_a_kernel_that_aligns_queries_with_the_first_keys():
    # FlashAttention 2.0 did so. A mask without parents does not show it.

    class TopLeft(Reference):
        name = "top left"
        GATHERS = True

        def attend(self, q, k, v, boundaries, options, scale):
            keys = boundaries.keys(len(q))
            cut = [k[start:][:length] for start, length in zip(keys.cu_seqlens.tolist(), boundaries.lengths)]
            values = [v[start:][:length] for start, length in zip(keys.cu_seqlens.tolist(), boundaries.lengths)]
            plain = Boundaries(boundaries.cu_seqlens, boundaries.max_seqlen)
            return super().attend(q, torch.cat(cut), torch.cat(values), plain, options, scale)

    q, k, v = (x.detach().float() for x in states())
    assert kernels.pick(TopLeft(), kernels.asked_by(q, k, v, Options()), CPU).why == ""
    with pytest.raises(KernelUnavailable, match="its outputs are off by"):
        kernels.pick(TopLeft(), kernels.asked_by(q, k, v, Options(), trees=True), CPU)


@pytest.mark.parametrize("seed", range(30))
def test_what_a_tree_says_of_its_paths(seed):
    lengths, parents = a_tree(random.Random(seed))
    tree = Tree(lengths, parents, CPU)
    tokens = torch.arange(sum(lengths))
    walked = [tree.along(tokens, segment) for segment in range(len(lengths))]
    assert torch.equal(torch.cat(walked), tree.keys[0])
    assert tree.keys[1].diff().tolist() == [len(path) for path in walked] and tree.keys[2] == max(map(len, walked))
    for segment, path in enumerate(walked):
        assert tree.positions[path].tolist() == list(range(len(path)))
        assert tree.continues[segment].nonzero().flatten().tolist() == sorted(tree.path(segment))
    seen = [set() for _ in tokens]
    levels = levels_of(documents(lengths, parents=parents))
    assert levels[0] == Level(slice(None), levels[0].cu_seqlens, max(lengths), tuple(lengths))
    for level in levels[1:]:
        of_level = torch.arange(sum(lengths))[level.tokens]
        assert len(set(of_level.tolist())) == len(of_level)
        for segment, queries in enumerate(of_level.split(list(level.counts))):
            for token in queries.tolist():
                seen[token].add(segment)
    of_token = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    assert seen == [set(tree.path(segment)[:-1]) for segment in of_token]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("size", [1, 3, 4])
def test_chunks_of_a_tree_are_chunks_of_its_paths(seed, size):
    # A token sees the tokens of its path in its chunk, as chunked attention of the path alone does.
    lengths, parents = a_tree(random.Random(seed))
    whole = documents(lengths, parents=parents)
    chunked = whole.chunked(size, sum(lengths))
    assert chunked.max_seqlen == size and sum(chunked.lengths) == sum(lengths)
    of_piece = [piece for piece, length in enumerate(chunked.lengths) for _ in range(length)]
    of_token = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    positions = whole.tree.positions
    tokens = torch.arange(sum(lengths))
    for token in tokens.tolist():
        path = whole.tree.along(tokens, of_token[token])
        expected = [other for other in path.tolist() if positions[other] // size == positions[token] // size]
        expected = [other for other in expected if positions[other] <= positions[token]]
        seen = chunked.tree.along(tokens, of_piece[token]).tolist()
        assert seen[: seen.index(token) + 1] == expected


@pytest.mark.parametrize(("groups", "expected"), [(1, True), (2, False)])
def test_torch_before_2_13_gets_no_fewer_heads_of_keys(monkeypatch, groups, expected):
    # torch 2.4 writes past the gradients of the keys if they have fewer heads.
    monkeypatch.setattr(cascade, "CPU_FLASH_GROUPED", False)
    lengths, parents = PROMPTS
    called = []
    forward = cascade.CpuFlash.forward
    monkeypatch.setattr(cascade.CpuFlash, "forward", lambda *given: called.append(1) or forward(*given))
    assert errors_of(Reference(), Options(scale=0.5), lengths, groups=groups, parents=parents) < 1e-12
    assert bool(called) is expected


# Spans


def test_a_kernel_that_computes_no_span_is_not_used():
    class Forgets(Reference):
        # It claims spans and does not look at them.

        name = "forgets"
        MASKS = False

        def attend(self, q, k, v, boundaries, options, scale):
            if not options.causal:  # the second call
                return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
            return super().attend(q, k, v, replace(boundaries, until=None, made={}), options, scale)

    q, k, v = states()
    assert kernels.pick(Forgets(), kernels.asked_by(q, k, v, Options()), CPU).why == ""
    with pytest.raises(KernelWrong, match="outputs are off"):
        kernels.pick(Forgets(), kernels.asked_by(q, k, v, Options(), spans=True), CPU)


def test_a_span_longer_than_the_window_is_refused():
    boundaries = documents(LENGTHS, spans=SPANS["inside"])
    require_within(3, boundaries)
    with pytest.raises(PackingNotIsolated, match="longer than the sliding window of 2 tokens"):
        require_within(2, boundaries)


def test_nothing_crosses_a_boundary_between_two_spans():
    spans = SPANS["across a boundary"]
    q, k, v = states(LENGTHS)
    for name in ("reference", "flash_attn", "torch_varlen"):
        output = kernel_named(name)(q, k, v, documents(LENGTHS, spans=spans), Options())
        for x in torch.autograd.grad(output[7:16].sum(), (q, k, v)):
            assert not x[:7].any() and not x[16:].any() and x[7:16].abs().sum() > 0
