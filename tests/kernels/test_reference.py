"""The reference and its operator compared with attention's definition, its cost, and ``packed_attention``."""

import itertools

import pytest
import torch
from definition_cases import errors_of, operator, sinks_of, slopes_of
from torch.utils._python_dispatch import TorchDispatchMode

from compat_matrix.check.kernel_cases import (
    DIM,
    HEADS,
    LENGTHS,
    WINDOWS,
    brute_force,
    documents,
    doubled,
    largest_errors,
    states,
    with_gradients,
)
from fa2patch._torch import HAS_OPERATORS
from fa2patch.documents.boundaries import Boundaries
from fa2patch.errors import Fa2PatchError, PackingNotIsolated, UnknownKernel
from fa2patch.kernels import Options, packed_attention
from fa2patch.kernels.reference import Reference

SPECIALS = {
    "plain": {},
    "both ways": {"causal": False},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 1.0, 0.0])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 4.0])},
}
of_each_special = pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
of_both_formulas = pytest.mark.parametrize(
    "special", [{}, {"window": 3}], ids=["scaled_dot_product_attention", "plain formula"]
)
has_operator = pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")

# The reference against the definition

CASES = {
    ", ".join(name for name, _ in case): dict(
        zip(("causal", "window", "softcap", "alibi", "sinks"), [v for _, v in case])
    )
    for case in itertools.product(
        [("causal", True), ("both ways", False)],
        WINDOWS.items(),
        [("no softcap", None), ("softcap", 2.0)],
        [("no alibi", False), ("alibi", True)],
        [("no sinks", False), ("sinks", True)],
    )
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("value_dim", [DIM, 6], ids=["one head dim", "another value head dim"])
@pytest.mark.parametrize("groups", [1, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_equals_the_definition(case, groups, value_dim, dtype):
    q, k, v = states(dtype=dtype, groups=groups, value_dim=value_dim)
    slopes = slopes_of(case["alibi"], torch.promote_types(dtype, torch.float32))
    sinks = sinks_of(case["sinks"], dtype)
    plain = {name: case[name] for name in ("causal", "window", "softcap")}
    options = Options(**plain, alibi_slopes=slopes, sinks=sinks)
    given = [tensor for tensor in (q, k, v, slopes, sinks) if tensor is not None]
    found = with_gradients(lambda: Reference()(q, k, v, documents(LENGTHS), options), given)

    q, k, v, slopes, sinks = (doubled(tensor) for tensor in (q, k, v, slopes, sinks))
    options = Options(**plain, alibi_slopes=slopes, sinks=sinks)
    given = [tensor for tensor in (q, k, v, slopes, sinks) if tensor is not None]
    truth = with_gradients(lambda: brute_force(q, k, v, LENGTHS, options), given)

    assert found[0].dtype == dtype
    assert found[0].shape == truth[0].shape == (sum(LENGTHS), HEADS, value_dim)
    for error, tensor in zip(largest_errors(found, truth), truth):
        assert error <= TOLERANCES[dtype] * max(1.0, tensor.abs().max().item())


@pytest.mark.parametrize("special", [{}, {"softcap": 3.0}], ids=["scaled_dot_product_attention", "plain formula"])
def test_the_scale_is_used(special):
    assert errors_of(Reference(), Options(scale=0.9, **special)) < 1e-12


@pytest.mark.parametrize("special", [{}, {"softcap": 3.0}, {"window": 2}, {"window": 1}], ids=str)
def test_documents_without_tokens_change_nothing(special):
    q, k, v = states((3, 4))
    options = Options(**special)
    alone = Reference()(q, k, v, documents((3, 4)), options)
    assert torch.equal(Reference()(q, k, v, documents((0, 3, 0, 0, 4, 0)), options), alone)


def test_no_documents_give_no_tokens():
    q, k, v = states((0,), value_dim=6)
    for boundaries in (documents((0,)), Boundaries(torch.zeros(1, dtype=torch.int32), 0)):
        assert Reference()(q, k, v, boundaries, Options()).shape == (0, HEADS, 6)


# Documents are isolated


@of_each_special
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_document_leaves_the_others_bit_identical(special, changed):
    q, k, v = states(dtype=torch.float32)
    before = Reference()(q, k, v, documents(LENGTHS), Options(**special)).split(LENGTHS)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.split(LENGTHS)[changed].add_(torch.randn(()) + 1)
    after = Reference()(q, k, v, documents(LENGTHS), Options(**special)).split(LENGTHS)
    for document in range(len(LENGTHS)):
        assert torch.equal(before[document], after[document]) == (document != changed)


@of_each_special
@pytest.mark.parametrize("source", range(len(LENGTHS)))
def test_no_gradient_crosses_a_boundary(special, source):
    q, k, v = states(dtype=torch.float32)
    output = Reference()(q, k, v, documents(LENGTHS), Options(**special)).split(LENGTHS)[source]
    gradients = torch.autograd.grad(output.square().sum(), [q, k, v])
    for document, pieces in enumerate(zip(*(gradient.split(LENGTHS) for gradient in gradients))):
        if document != source:
            assert not any(piece.any() for piece in pieces)
        else:
            assert pieces[2].any()
            assert LENGTHS[document] == 1 or all(piece.any() for piece in pieces)


@of_each_special
@pytest.mark.parametrize("lengths", [LENGTHS, (5,) * 7], ids=["mixed", "equal"])
def test_a_packed_document_equals_itself_alone(special, lengths):
    q, k, v = states(lengths)
    packed = Reference()(q, k, v, documents(lengths), Options(**special)).split(lengths)
    for output, *document in zip(packed, *(tensor.split(lengths) for tensor in (q, k, v))):
        alone = Reference()(*document, documents((len(output),)), Options(**special))
        if lengths == LENGTHS:  # a matrix that has more rows is multiplied in another order
            torch.testing.assert_close(output, alone, rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(output, alone)


# Dropout


@of_both_formulas
def test_dropout_follows_the_seed(special):
    q, k, v = states(dtype=torch.float32)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(Reference()(q, k, v, documents(LENGTHS), Options(dropout=0.5, **special)))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    whole = Reference()(q, k, v, documents(LENGTHS), Options(**special))
    assert not torch.equal(outputs[0], whole)


@of_both_formulas
def test_dropout_keeps_the_expectation(special):
    heads = 20_000
    lengths = (1, 4)
    one = [torch.randn(sum(lengths), 1, 4).expand(-1, heads, -1) for _ in range(3)]
    dropped = Reference()(*one, documents(lengths), Options(dropout=0.25, **special))
    whole = Reference()(*(tensor[:, :1] for tensor in one), documents(lengths), Options(**special))
    error = dropped.mean(1) - whole[:, 0]
    assert (error.abs() < 6 * dropped.std(1) / heads**0.5 + 1e-6).all()
    assert (dropped.std(1) > 0.01).all()
    assert 0.2 < (dropped[0] == 0).all(-1).float().mean() < 0.3


# The operator


@has_operator
@pytest.mark.parametrize("groups", [1, 2], ids=["MHA", "GQA"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("alibi", [False, True], ids=["no alibi", "alibi"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_the_operator_equals_the_reference(causal, window, softcap, alibi, sinks, groups):
    q, k, v = states(groups=groups, value_dim=6)
    options = Options(
        causal=causal, window=window, softcap=softcap, alibi_slopes=slopes_of(alibi), sinks=sinks_of(sinks)
    )
    given = [x for x in (q, k, v, options.sinks, options.alibi_slopes) if x is not None]
    found = with_gradients(lambda: operator(q, k, v, documents(LENGTHS), options), given)
    truth = with_gradients(lambda: Reference()(q, k, v, documents(LENGTHS), options), given)
    assert max(largest_errors(found, truth)) < 1e-12


@has_operator
def test_heads_without_a_group_and_half_precision():
    q, k, v = states(dtype=torch.bfloat16, groups=HEADS)
    found = with_gradients(lambda: operator(q, k, v, documents(LENGTHS), Options()), [q, k, v])
    truth = with_gradients(lambda: Reference()(q, k, v, documents(LENGTHS), Options()), [q, k, v])
    assert [x.dtype for x in found] == [torch.bfloat16] * 4
    for error, tensor in zip(largest_errors(found, truth), truth):
        assert error <= 6e-2 * max(1.0, tensor.abs().max().item())


@has_operator
@pytest.mark.parametrize("special", [{}, {"window": 3, "softcap": 2.0}], ids=str)
def test_the_backward_drops_what_the_forward_dropped(special):
    # The derivative along a direction equals a finite difference with the same seed.
    q, k, v = states()
    options = Options(scale=0.3, dropout=0.4, **special)

    def output(*given):
        torch.manual_seed(5)
        return operator(*given, documents(LENGTHS), options)

    moves = [torch.randn_like(x) for x in (q, k, v)]
    by_autograd = torch.autograd.grad(output(q, k, v).square().sum(), [q, k, v])
    slope = sum((a * b).sum() for a, b in zip(by_autograd, moves))
    step = 1e-6
    ahead, behind = (output(*(x + s * m for x, m in zip((q, k, v), moves))).square().sum() for s in (step, -step))
    assert abs((ahead - behind) / (2 * step) - slope) < 1e-4 * abs(slope)
    assert not torch.equal(output(q, k, v), operator(q, k, v, documents(LENGTHS), Options(scale=0.3, **special)))


@has_operator
def test_every_layer_drops_other_weights():
    # 120 calls are as many as a large model has layers. No seed is drawn twice.
    q, k, v = (x.detach() for x in states())
    drawn = [operator(q, k, v, documents(LENGTHS), Options(scale=0.3, dropout=0.4)) for _ in range(120)]
    assert len({tuple(output.flatten().tolist()) for output in drawn}) == len(drawn)


@has_operator
@pytest.mark.parametrize("spans", [None, [(2, 4)]], ids=["no spans", "spans"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_torch_accepts_the_operator(sinks, spans):
    made, states_of = documents((1, 3), spans=spans), states((1, 3), groups=2, value_dim=6)
    bias = torch.randn(states_of[0].shape[1], 3, 3).requires_grad_() if sinks else None
    tensors = (made.cu_seqlens, None, None, made.until, sinks_of(sinks), slopes_of(sinks), bias, None)
    torch.library.opcheck(torch.ops.fa2patch.reference.default, (*states_of, *tensors, 0.3, True, 2, 2.0, 0.0))


@has_operator
@pytest.mark.parametrize("lengths", [(6,), (1,), (3, 3), (1, 3, 2), (0, 6)], ids=str)
@of_each_special
def test_the_operators_results_lie_in_memory_as_a_graph_expects(special, lengths):
    # A graph is made from fake results, and reshapes the real ones in place.
    for value_dim in (DIM, 6):
        q, k, v = states(lengths, value_dim=value_dim)
        q, k, v = (x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v))
        output = operator(q, k, v, documents(lengths), Options(scale=0.3, **special))
        assert output.is_contiguous()
        assert all(x.is_contiguous() for x in torch.autograd.grad(output.sum(), [q, k, v]))


# Cost


class Scores(TorchDispatchMode):
    # Scores are pairs of query and key.

    def __init__(self):
        super().__init__()
        self.computed = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, (tuple, list)) else made
        if isinstance(first, torch.Tensor):
            self.largest = max(self.largest, first.numel())
        name = str(func)
        if "scaled_dot_product" in name and "backward" not in name:
            query, key = args[:2]
            self.computed += query.shape[:-1].numel() * key.shape[-2]
        elif "bmm" in name and first.shape[-1] == first.shape[-2]:
            self.computed += first.numel()
        return made


@of_each_special
@pytest.mark.parametrize(
    "lengths",
    [(1, 60, 130, 33), (16,) * 12, (192,), (1,) * 192],
    ids=["mixed", "12 of 16", "one of 192", "192 of 1"],
)
def test_scores_computed_are_the_sum_of_squared_lengths(special, lengths):
    q, k, v = (tensor.detach() for tensor in states(lengths, dtype=torch.float32, dim=256, value_dim=3))
    boundaries = documents(lengths)
    with Scores() as scores:
        Reference()(q, k, v, boundaries, Options(**special))
    one_token_has_scores = not special.keys().isdisjoint({"softcap", "alibi_slopes", "sinks"})
    computed = [length for length in lengths if length > 1 or one_token_has_scores]
    assert scores.computed == HEADS * sum(length**2 for length in computed)
    assert scores.largest <= HEADS * max(sum((length + 1) * length for length in lengths), 256 * sum(lengths))


def test_a_backward_makes_nothing_of_the_row_squared():
    lengths = (16,) * 12
    q, k, v = states(lengths, dtype=torch.float32, dim=2, value_dim=3)
    with Scores() as scores:
        for special in SPECIALS.values():
            Reference()(q, k, v, documents(lengths), Options(**special)).sum().backward()
    assert scores.largest <= HEADS * sum((length + 1) * length for length in lengths) < HEADS * sum(lengths) ** 2 / 8


# packed_attention


@of_each_special
def test_packed_attention_flattens_rows_and_gives_them_back(special):
    lengths = (3, 5, 1, 7)
    q, k, v = (tensor.detach() for tensor in states(lengths, groups=2, value_dim=6))
    rows = [tensor.view(2, 8, *tensor.shape[1:]) for tensor in (q, k, v)]
    output = packed_attention(*rows, documents(lengths), Options(**special))
    assert output.shape == (2, 8, HEADS, 6)
    assert output.is_contiguous()
    assert output.dtype == q.dtype
    assert torch.equal(output.flatten(0, 1), Reference()(q, k, v, documents(lengths), Options(**special)))


@of_each_special
@pytest.mark.parametrize("lengths", [(8, 8), (16,), (4, 4, 8)], ids=str)
def test_packed_attention_is_contiguous_also_for_transposed_states(special, lengths):
    rows = [torch.randn(1, HEADS, 16, DIM).transpose(1, 2) for _ in range(3)]
    assert not rows[0].is_contiguous()
    output = packed_attention(*rows, documents(lengths), Options(**special))
    assert output.is_contiguous()
    same = packed_attention(*(tensor.contiguous() for tensor in rows), documents(lengths), Options(**special))
    torch.testing.assert_close(output, same)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@of_each_special
def test_packed_attention_keeps_the_dtype(special, dtype):
    if dtype == torch.float16 and not half_on_cpu():
        pytest.skip("this torch has no float16 attention on a CPU")
    rows = [tensor.detach()[None] for tensor in states(dtype=dtype)]
    assert packed_attention(*rows, documents(LENGTHS), Options(**special)).dtype == dtype


def half_on_cpu():
    query = torch.zeros(1, 1, 2, 8, dtype=torch.float16)
    try:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("tokens_q", "tokens_k", "tokens_v"), [((1, 1), (1, 6), (1, 6)), ((1, 6), (1, 6), (1, 5)), ((2, 3), (1, 6), (1, 6))]
)
def test_queries_and_keys_of_different_tokens_are_refused(tokens_q, tokens_k, tokens_v):
    q, k, v = (torch.zeros(*tokens, HEADS, DIM) for tokens in (tokens_q, tokens_k, tokens_v))
    with pytest.raises(PackingNotIsolated) as error:
        packed_attention(q, k, v, documents((6,)), Options())
    message = str(error.value)
    assert f"found {list(tokens_q)} queries and {list(tokens_k)} keys [batch, length]" in message
    assert "If the call has a key/value cache, leave it out." in message and "makes keys of other tokens" in message
    assert isinstance(error.value, Fa2PatchError)


def test_packed_attention_uses_the_named_kernel(monkeypatch):
    used = []
    monkeypatch.setattr(Reference, "__call__", lambda self, q, k, v, *rest: used.append(rest) or v)
    rows = [tensor.detach()[None] for tensor in states()]
    boundaries, options = documents(LENGTHS), Options()
    packed_attention(*rows, boundaries, options, kernel="reference")
    assert used == [(boundaries, options)]
    with pytest.raises(UnknownKernel):
        packed_attention(*rows, boundaries, options, kernel="nonsense")
