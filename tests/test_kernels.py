"""Every kernel against one softmax over the whole row with an additive mask, outputs and gradients."""

import functools
import itertools
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compat_matrix import stand_in
from fa2patch import kernels
from fa2patch.attention import Options, packed_attention
from fa2patch.boundaries import Boundaries
from fa2patch.errors import Fa2PatchError, KernelUnavailable, PackingNotIsolated, UnknownKernel
from fa2patch.kernels import flash_attn as flash_attn_file
from fa2patch.kernels.flash_attn import FlashAttn
from fa2patch.kernels.reference import Reference

LENGTHS = (1, 5, 3, 8)
HEADS, DIM = 4, 8
WINDOWS = {"no window": None, "window 1": 1, "smaller": 4, "equal": 8, "larger": 20}


def documents(lengths, device="cpu"):
    ends = [0, *itertools.accumulate(lengths)]
    return Boundaries(torch.tensor(ends, dtype=torch.int32, device=device), max(lengths))


def states(lengths=LENGTHS, dtype=torch.float64, groups=1, dim=DIM, value_dim=DIM, device="cpu", heads=HEADS):
    """q, k, v of one row, large enough that a weight on a wrong key shows."""
    sizes = ((heads, dim), (heads // groups, dim), (heads // groups, value_dim))
    return [
        (1.5 * torch.randn(sum(lengths), *size, dtype=torch.float64)).to(device, dtype).requires_grad_()
        for size in sizes
    ]


def brute_force(q, k, v, lengths, options):
    """The definition: every score of the row, ``-inf`` added where a query must not look."""
    tokens, heads, dim = q.shape
    key_head = torch.arange(heads, device=q.device) // (heads // k.shape[1])
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    token = torch.arange(tokens, device=q.device)
    distance = token[:, None] - token[None, :]
    allowed = document[:, None] == document[None, :]
    if options.causal:
        allowed = allowed & (distance >= 0)
    if options.window is not None:
        allowed = allowed & (distance < options.window) & (-distance < options.window)
    scores = torch.einsum("ihd,jhd->hij", q, k[:, key_head]) * (dim**-0.5 if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes[:, None, None] * distance.abs()
    scores = scores + torch.zeros(tokens, tokens, dtype=q.dtype, device=q.device).masked_fill(~allowed, float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(options.sinks[:, None, None] - top)
    return torch.einsum("hij,jhd->ihd", weights / total, v[:, key_head])


def with_gradients(attend, inputs):
    """The output, and the gradient of a fixed random sum of it with respect to every input."""
    output = attend()
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, inputs, direction.to(output.device, output.dtype))]


def largest_errors(found, truth):
    return [(a.double() - b.double()).abs().max().item() for a, b in zip(found, truth)]


def doubled(tensor):
    return None if tensor is None else tensor.detach().double().requires_grad_()


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
    slopes = torch.tensor([0.5, 0.1, 1.0, 0.0], dtype=max_precision(dtype)).requires_grad_() if case["alibi"] else None
    sinks = torch.tensor([0.5, -1.0, 2.0, 4.0], dtype=dtype).requires_grad_() if case["sinks"] else None
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


def max_precision(dtype):
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("special", [{}, {"softcap": 3.0}], ids=["scaled_dot_product_attention", "plain formula"])
def test_the_scale_is_used(special):
    q, k, v = states()
    options = Options(scale=0.9, **special)
    found = with_gradients(lambda: Reference()(q, k, v, documents(LENGTHS), options), [q, k, v])
    truth = with_gradients(lambda: brute_force(q, k, v, LENGTHS, options), [q, k, v])
    assert max(largest_errors(found, truth)) < 1e-12


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

SPECIALS = {
    "plain": {},
    "both ways": {"causal": False},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 1.0, 0.0])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 4.0])},
}


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
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


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
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


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
def test_a_packed_document_equals_itself_alone(special):
    q, k, v = states(dtype=torch.float32)
    packed = Reference()(q, k, v, documents(LENGTHS), Options(**special)).split(LENGTHS)
    for output, *document in zip(packed, *(tensor.split(LENGTHS) for tensor in (q, k, v))):
        assert torch.equal(output, Reference()(*document, documents((len(output),)), Options(**special)))


# Dropout


@pytest.mark.parametrize("special", [{}, {"window": 3}], ids=["scaled_dot_product_attention", "plain formula"])
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


@pytest.mark.parametrize("special", [{}, {"window": 3}], ids=["scaled_dot_product_attention", "plain formula"])
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


# Cost


class Scores(TorchDispatchMode):
    """Counts attention scores, query times key, and keeps the size of the largest tensor that was made."""

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


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
@pytest.mark.parametrize(
    "lengths",
    [(1, 20, 30, 13), (16,) * 12, (192,), (1,) * 192],
    ids=["mixed", "12 of 16", "one of 192", "192 of 1"],
)
def test_scores_computed_are_the_sum_of_squared_lengths(special, lengths):
    q, k, v = (tensor.detach() for tensor in states(lengths, dtype=torch.float32, dim=2, value_dim=3))
    boundaries = documents(lengths)
    with Scores() as scores:
        Reference()(q, k, v, boundaries, Options(**special))
    assert scores.computed == HEADS * sum(length**2 for length in lengths)
    assert scores.largest <= HEADS * max((max(lengths) + 1) ** 2, 3 * sum(lengths))


def test_a_backward_makes_nothing_of_the_row_squared():
    lengths = (16,) * 12
    q, k, v = states(lengths, dtype=torch.float32, dim=2, value_dim=3)
    with Scores() as scores:
        for special in SPECIALS.values():
            Reference()(q, k, v, documents(lengths), Options(**special)).sum().backward()
    assert scores.largest <= HEADS * 3 * sum(lengths)


# packed_attention


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
def test_packed_attention_flattens_rows_and_gives_them_back(special):
    lengths = (3, 5, 1, 7)
    q, k, v = (tensor.detach() for tensor in states(lengths, groups=2, value_dim=6))
    rows = [tensor.view(2, 8, *tensor.shape[1:]) for tensor in (q, k, v)]
    output = packed_attention(*rows, documents(lengths), Options(**special))
    assert output.shape == (2, 8, HEADS, 6)
    assert output.is_contiguous()
    assert output.dtype == q.dtype
    assert torch.equal(output.flatten(0, 1), Reference()(q, k, v, documents(lengths), Options(**special)))


@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
@pytest.mark.parametrize("lengths", [(8, 8), (16,), (4, 4, 8)], ids=str)
def test_packed_attention_is_contiguous_also_for_transposed_states(special, lengths):
    rows = [torch.randn(1, HEADS, 16, DIM).transpose(1, 2) for _ in range(3)]
    assert not rows[0].is_contiguous()
    output = packed_attention(*rows, documents(lengths), Options(**special))
    assert output.is_contiguous()
    same = packed_attention(*(tensor.contiguous() for tensor in rows), documents(lengths), Options(**special))
    torch.testing.assert_close(output, same)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("special", SPECIALS.values(), ids=SPECIALS)
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
    assert "Pass no key/value cache with a packed batch." in message
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


# Which kernel


def on(device="cuda", dtype=torch.bfloat16, dim=64):
    """What a kernel may look at before it says whether it can compute this."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(6, HEADS, dim))


def test_auto_takes_the_reference_on_a_cpu():
    q = torch.zeros(3, HEADS, DIM)
    assert kernels.choose("auto", q, q, Options()).name == "reference"
    assert kernels.choose("reference", q, q, Options()).name == "reference"


def test_the_last_kernel_takes_everything():
    last = kernels.ORDER[-1]
    everything = Options(window=1, softcap=1.0, dropout=0.5, sinks=torch.zeros(4), alibi_slopes=torch.zeros(4))
    assert last.available() == (True, "")
    assert last.supports(on(dtype=torch.float64, dim=7), on(dim=9), everything) == (True, "")


def test_names_are_auto_and_one_for_each_kernel():
    assert kernels.NAMES[0] == "auto"
    assert len(set(kernels.NAMES)) == len(kernels.NAMES) == len(kernels.ORDER) + 1
    assert {"flash_attn", "reference"} < set(kernels.NAMES)


@pytest.mark.parametrize("name", ["nonsense", "", "FLASH_ATTN", None])
def test_an_unknown_kernel_is_named_beside_the_known_ones(name):
    q = torch.zeros(3, HEADS, DIM)
    for ask in (kernels.check_name, lambda name: kernels.choose(name, q, q, Options())):
        with pytest.raises(UnknownKernel) as error:
            ask(name)
        assert str(error.value).startswith(f"kernel={name!r}: expected one of 'auto', ")
        assert all(repr(known) in str(error.value) for known in kernels.NAMES)
        assert isinstance(error.value, LookupError)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_names_that_run_everywhere_pass(name):
    kernels.check_name(name)


def test_a_kernel_that_is_not_installed_is_unavailable(absent):
    assert FlashAttn().available() == (False, "the package flash_attn is not installed")
    with pytest.raises(KernelUnavailable) as error:
        kernels.check_name("flash_attn")
    assert str(error.value) == (
        "kernel='flash_attn' cannot run here: the package flash_attn is not installed. Use kernel='auto'."
    )
    with pytest.raises(KernelUnavailable, match="kernel='flash_attn' cannot run here: the package flash_attn is not"):
        FlashAttn()(*states(), documents(LENGTHS), Options())
    assert kernels.choose("auto", on(), on(), Options()).name != "flash_attn"


def test_a_named_kernel_that_cannot_compute_a_layer_says_why():
    q = torch.zeros(3, HEADS, DIM)
    with pytest.raises(KernelUnavailable) as error:
        kernels.choose("flash_attn", q, q, Options())
    assert str(error.value) == (
        "kernel='flash_attn' cannot compute this layer: flash_attn needs a CUDA device, found cpu. Use kernel='auto'."
    )


def test_auto_takes_flash_attn_where_it_can(flash_attn):
    kernels.check_name("flash_attn")
    assert kernels.choose("auto", on(), on(), Options(window=4)).name == "flash_attn"
    assert kernels.choose("flash_attn", on(), on(), Options(window=4)).name == "flash_attn"
    assert kernels.choose("auto", on(dtype=torch.float32), on(), Options()).name != "flash_attn"


# FlashAttn, with a stand-in for the package


@pytest.fixture
def install(monkeypatch):
    """Puts a ``flash_attn`` in place whose varlen function is given; None means not installed."""

    def put(function, **attributes):
        module = None
        if function is not None:
            module = ModuleType("flash_attn")
            module.__spec__ = ModuleSpec("flash_attn", loader=None)
            module.flash_attn_varlen_func = function
            vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        flash_attn_file._varlen.cache_clear()
        return module

    yield put
    flash_attn_file._varlen.cache_clear()


@pytest.fixture
def absent(install):
    install(None)


@pytest.fixture
def flash_attn(install):
    """The stand-in is installed; the arguments of its calls."""
    calls = []

    @functools.wraps(stand_in.flash_attn_varlen_func)
    def flash_attn_varlen_func(q, k, v, **kwargs):
        calls.append({"q": q, "k": k, "v": v, **kwargs})
        return stand_in.flash_attn_varlen_func(q, k, v, **kwargs)

    install(flash_attn_varlen_func)
    yield calls
    stand_in.CALLS.clear()


@pytest.mark.parametrize("groups", [1, 4], ids=["MHA", "MQA"])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_flash_attn_equals_the_definition(flash_attn, causal, window, softcap, scale, groups):
    q, k, v = states(groups=groups)
    options = Options(causal=causal, window=window, softcap=softcap, scale=scale)
    found = with_gradients(lambda: FlashAttn()(q, k, v, documents(LENGTHS), options), [q, k, v])
    truth = with_gradients(lambda: brute_force(q, k, v, LENGTHS, options), [q, k, v])
    assert max(largest_errors(found, truth)) < 1e-11


def test_flash_attn_is_handed_the_boundaries_as_they_are(flash_attn):
    q, k, v = states()
    boundaries = replace(documents(LENGTHS), max_seqlen=11)
    FlashAttn()(q, k, v, boundaries, Options())
    (call,) = flash_attn
    assert call["q"] is q
    assert call["k"] is k
    assert call["v"] is v
    assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is boundaries.cu_seqlens
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 11
    assert type(call["max_seqlen_q"]) is type(call["max_seqlen_k"]) is int
    assert boundaries._lengths is None, "the lengths were read from the device"


@pytest.mark.parametrize(
    ("options", "handed"),
    [
        (Options(), {"dropout_p": 0.0, "softmax_scale": None, "causal": True}),
        (Options(scale=0.3), {"softmax_scale": 0.3}),
        (Options(dropout=0.1), {"dropout_p": 0.1}),
        (Options(causal=False), {"causal": False}),
        (Options(window=1), {"window_size": (0, 0)}),
        (Options(window=4), {"window_size": (3, 0)}),
        (Options(window=4, causal=False), {"window_size": (3, 3)}),
        (Options(softcap=30.0), {"softcap": 30.0}),
    ],
    ids=str,
)
def test_flash_attn_is_handed_the_options(flash_attn, options, handed):
    FlashAttn()(*states(), documents(LENGTHS), options)
    (call,) = flash_attn
    assert {name: call[name] for name in handed} == handed


def test_flash_attn_is_handed_nothing_that_was_not_asked_for(flash_attn):
    FlashAttn()(*states(), documents(LENGTHS), Options())
    (call,) = flash_attn
    assert not {"window_size", "softcap", "alibi_slopes"} & set(call)


def test_flash_attn_is_handed_alibi_slopes_in_float32(flash_attn):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.bfloat16)
    FlashAttn()(*states(), documents(LENGTHS), Options(alibi_slopes=slopes))
    (call,) = flash_attn
    assert call["alibi_slopes"].dtype == torch.float32
    assert torch.equal(call["alibi_slopes"], slopes.float())


@pytest.mark.parametrize("deterministic", [True, False])
def test_flash_attn_is_deterministic_where_torch_is_asked_to_be(flash_attn, deterministic):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        FlashAttn()(*states(), documents(LENGTHS), Options())
    finally:
        torch.use_deterministic_algorithms(before)
    assert flash_attn[0]["deterministic"] is deterministic


def flash_attn_2_1(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                   causal=False, return_attn_probs=False):  # fmt: skip
    return stand_in.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal
    )


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (Options(window=4), "window"),
        (Options(softcap=1.0), "softcap"),
        (Options(alibi_slopes=torch.zeros(HEADS)), "alibi_slopes"),
        (Options(window=4, softcap=1.0, alibi_slopes=torch.zeros(HEADS)), "window, softcap, alibi_slopes"),
    ],
    ids=["window", "softcap", "alibi", "all"],
)
def test_what_an_older_flash_attn_lacks_is_refused(install, options, missing):
    install(flash_attn_2_1)
    assert FlashAttn().supports(on(), on(), options) == (False, f"this flash_attn has no {missing}")
    with pytest.raises(KernelUnavailable, match=f"this flash_attn has no {missing}. Use kernel='auto'."):
        kernels.choose("flash_attn", on(), on(), options)
    assert kernels.choose("auto", on(), on(), options).name != "flash_attn"


def test_an_older_flash_attn_computes_what_it_has(install):
    install(flash_attn_2_1)
    assert FlashAttn().supports(on(), on(), Options()) == (True, "")
    q, k, v = states()
    output = FlashAttn()(q, k, v, documents(LENGTHS), Options())
    assert largest_errors([output], [brute_force(q, k, v, LENGTHS, Options())])[0] < 1e-12


@pytest.mark.parametrize(
    ("q", "v", "options", "reason"),
    [
        (on("cpu"), on("cpu"), Options(), "flash_attn needs a CUDA device, found cpu"),
        (on(), on(), Options(sinks=torch.zeros(HEADS)), "flash_attn 2 has no attention sinks"),
        (on(dtype=torch.float32), on(), Options(), "flash_attn needs float16 or bfloat16, found torch.float32"),
        (on(dtype=torch.float64), on(), Options(), "flash_attn needs float16 or bfloat16, found torch.float64"),
        (on(dim=264), on(dim=264), Options(), "a multiple of 8 up to 256; found 264 and 264"),
        (on(dim=60), on(dim=60), Options(), "a multiple of 8 up to 256; found 60 and 60"),
        (
            on(dim=192),
            on(dim=128),
            Options(),
            "needs one head dimension for q, k and v, a multiple of 8 up to 256; found",
        ),
    ],
    ids=["CPU", "sinks", "float32", "float64", "too large", "not a multiple of 8", "another value head dim"],
)
def test_what_flash_attn_does_not_support_has_a_reason(flash_attn, q, v, options, reason):
    able, found = FlashAttn().supports(q, v, options)
    assert not able
    assert reason in found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 64, 96, 256])
def test_flash_attn_supports_half_precision_on_a_gpu(flash_attn, dim, dtype):
    q = on(dtype=dtype, dim=dim)
    everything = Options(window=4, softcap=1.0, dropout=0.1, alibi_slopes=torch.zeros(HEADS))
    assert FlashAttn().available() == (True, "")
    assert FlashAttn().supports(q, q, everything) == (True, "")


def test_a_package_that_does_not_import_is_not_available(install):
    del install(flash_attn_2_1).flash_attn_varlen_func
    able, reason = FlashAttn().available()
    assert not able
    assert reason.startswith("the package flash_attn does not import (AttributeError: ")


def test_a_stub_without_a_spec_is_not_available(install):
    install(flash_attn_2_1, __spec__=None)
    able, _ = FlashAttn().available()
    assert isinstance(able, bool)


# On a GPU


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    flash_attn_file._varlen.cache_clear()
    able, reason = FlashAttn().available()
    if "not installed" in reason:
        pytest.skip(reason)
    assert able, reason
    return "cuda"


GPU_LENGTHS = (1, 200, 77, 130)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("groups", [1, 4], ids=["MHA", "MQA"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 37, 200, 1000])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_flash_attn_equals_the_reference_on_a_gpu(cuda, causal, window, softcap, groups, dim, dtype):
    """As flash-attn's own tests: off by no more than twice what the plain formula is off by in the same dtype.

    The truth is the reference in float32. The reference in half precision is no yardstick: it computes windows and
    softcap in float32 inside, so that it rounds less than a flash kernel, which rounds its weights.
    """
    options = Options(causal=causal, window=window, softcap=softcap)
    half = states(GPU_LENGTHS, dtype=dtype, groups=groups, dim=dim, value_dim=dim, device=cuda)
    able, reason = FlashAttn().supports(half[0], half[2], options)
    if not able:
        pytest.skip(reason)
    whole = [tensor.detach().float().requires_grad_() for tensor in half]
    boundaries = documents(GPU_LENGTHS, cuda)
    truth = with_gradients(lambda: Reference()(*whole, boundaries, options), whole)
    rounded = largest_errors(with_gradients(lambda: brute_force(*half, GPU_LENGTHS, options), half), truth)
    found = with_gradients(lambda: FlashAttn()(*half, boundaries, options), half)
    assert found[0].dtype == dtype
    for name, error, allowed in zip(("output", "dq", "dk", "dv"), largest_errors(found, truth), rounded):
        assert error <= 2 * allowed + 1e-3, f"{name} is off by {error}, the plain formula in {dtype} by {allowed}"


@pytest.mark.gpu
@pytest.mark.parametrize("special", [{}, {"window": 37}, {"softcap": 5.0}], ids=str)
def test_flash_attn_isolates_documents_on_a_gpu(cuda, special):
    q, k, v = states(GPU_LENGTHS, dtype=torch.bfloat16, dim=64, value_dim=64, device=cuda)
    boundaries, options = documents(GPU_LENGTHS, cuda), Options(**special)
    before = FlashAttn()(q, k, v, boundaries, options).split(GPU_LENGTHS)
    gradients = torch.autograd.grad(before[2].float().square().sum(), [q, k, v])
    for gradient in gradients:
        assert [bool(piece.any()) for piece in gradient.split(GPU_LENGTHS)] == [False, False, True, False]
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.split(GPU_LENGTHS)[1].add_(1)
    after = FlashAttn()(q, k, v, boundaries, options).split(GPU_LENGTHS)
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, False, True, True]


@pytest.mark.gpu
def test_auto_takes_flash_attn_on_a_gpu_without_a_synchronisation(cuda):
    rows = [
        tensor.detach()[None] for tensor in states(GPU_LENGTHS, dtype=torch.bfloat16, dim=64, value_dim=64, device=cuda)
    ]
    boundaries = documents(GPU_LENGTHS, cuda)
    packed_attention(*rows, boundaries, Options())
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = packed_attention(*rows, boundaries, Options())
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert output.is_contiguous()
    assert torch.equal(output, packed_attention(*rows, boundaries, Options(), kernel="flash_attn"))
    assert boundaries._lengths is None
