"""Any layout: attention against one masked softmax in float64, and a patched model against its documents alone."""

import pytest
import torch
from fake_models import modeling_function, modeling_interface, modeling_method
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa2patch
from fa2patch.documents.find import find_boundaries
from fa2patch.documents.given_boundaries import from_cu_seqlens
from fa2patch.kernels import Options, packed_attention

CPU = torch.device("cpu")
DRAWN = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5}
MODELING = {"interface": modeling_interface, "function": modeling_function, "method": modeling_method}
TABLE = 64  # positions for which the fake models have embeddings


class Layout:
    """A batch that is built from known documents."""

    def __init__(self, rows):
        width = max(sum(gap + length for gap, length, _ in row) for row in rows)
        # [axes, batch, length]; the first axis holds the ids of text
        self.ids = torch.zeros(1, len(rows), width, dtype=torch.int64)
        # every token's document, counted from 1 through the batch; 0 is padding
        self.number = torch.zeros(len(rows), width, dtype=torch.int64)
        self.documents = []  # the row and the slice of each document
        for index, row in enumerate(rows):
            at, last, apart = 0, None, 0
            for gap, length, start in row:
                apart += gap + 1
                goes_on = last is not None and start in (last + 1, last + apart)
                behind_padding = last is not None and apart > 1  # there a document must start at 0
                start = 0 if goes_on or behind_padding else start
                span = slice(at + gap, at + gap + length)
                self.ids[0, index, span] = torch.arange(start, start + length)
                self.documents.append((index, span))
                self.number[index, span] = len(self.documents)
                at, last, apart = span.stop, start + length - 1, 0

    @property
    def shape(self):
        return tuple(self.number.shape)

    @property
    def mask(self):
        return (self.number > 0).long()

    @property
    def padded(self):
        return bool((self.number == 0).any())

    @property
    def packed(self):
        rows = [row for row, _ in self.documents]
        return len(rows) > len(set(rows))


@st.composite
def layouts(draw, longest=40, furthest=2**40):
    # 1 to 50 documents in 1 to 4 rows, with runs of padding before, between and after them, and filler ids.
    count = draw(st.one_of(st.integers(1, 50), st.integers(2, 12), st.just(50)))
    length = st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 8), st.integers(1, longest))
    gap = st.sampled_from([0, 0, 0, 0, 0, 1, 3]) if draw(st.booleans()) else st.just(0)
    start = st.one_of(st.just(0), st.integers(0, 12), st.integers(0, furthest))
    pieces = draw(st.lists(st.tuples(gap, length, start), min_size=count, max_size=count))
    ends = sorted(draw(st.lists(st.integers(0, count), max_size=3)))
    rows = [pieces[begin:end] for begin, end in zip([0, *ends], [*ends, count])]
    layout = Layout(rows)
    filler = torch.randint(0, 4, layout.shape, generator=torch.Generator().manual_seed(count))
    layout.ids[0] = torch.where(layout.number > 0, layout.ids[0], filler)
    return layout


@st.composite
def of_several_axes(draw, layout):
    # The same documents get mRoPE's ids: text, or pictures, whose tokens do not advance the time axis.
    layout, axes = draw(layout), draw(st.sampled_from([1, 1, 2, 3, 4]))
    text = layout.ids
    layout.ids = text.repeat(axes, 1, 1)
    if axes in (2, 4):
        layout.ids[1:] = torch.randint(0, 9, layout.ids[1:].shape, generator=torch.Generator().manual_seed(axes))
    if axes == 3 and draw(st.booleans()):
        for row, span in layout.documents:
            counted = torch.arange(span.stop - span.start)
            time = counted.clamp(max=draw(st.integers(0, len(counted) - 1)))
            layout.ids[:, row, span] = torch.stack([time, counted, counted])
    return layout


def found_boundaries(layout, source):
    ids = layout.ids if len(layout.ids) > 1 else layout.ids[0]
    if source == "ids alone":
        return fa2patch.boundaries(ids)
    if source == "lengths":
        ends = [layout.shape[1] * row + edge for row, span in layout.documents for edge in (span.start, span.stop)]
        edges = sorted({0, *ends, *(layout.shape[1] * row for row in range(layout.shape[0])), layout.number.numel()})
        cu = torch.tensor(edges, dtype=torch.int32)
        return from_cu_seqlens(cu, None, layout.shape, position_ids=ids, attention_mask=layout.mask)
    given = {
        "ids and mask": {"position_ids": ids, "attention_mask": layout.mask},
        "document numbers": {"attention_mask": layout.number},
        "seq_idx": {"seq_idx": layout.number, "attention_mask": layout.mask},
    }[source]
    return find_boundaries(layout.shape, CPU, **given)


def definition(q, k, v, number, options):
    # All scores are computed in float64, with minus infinity where a query must not attend. Padding sees itself.
    q, k, v = (states.double() for states in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (states.repeat_interleave(groups, dim=2) for states in (k, v))
    token = torch.arange(q.shape[1])
    distance = token[:, None] - token
    visible = (number[:, :, None] == number[:, None, :]) & (distance.abs() < (options.window or len(token)))
    visible &= distance >= 0 if options.causal else torch.ones_like(distance, dtype=torch.bool)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (options.scale or q.shape[3] ** -0.5)
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def of_tokens(output, layout):
    # A weighted sum, so that every token has a gradient of its own.
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (output.double() * weights * layout.mask[:, :, None, None]).sum()


def error(found, truth):
    found, truth = found.detach().double(), truth.detach().double()
    return float((found - truth).abs().max() / truth.abs().max().clamp(min=1))


CALLS = st.fixed_dictionaries({
    "dtype": st.sampled_from(list(TOLERANCES)),
    "key_heads": st.sampled_from([4, 2, 1]),
    "value_dim": st.sampled_from([8, 5]),
    "window": st.one_of(st.none(), st.integers(1, 12)),
    "scale": st.sampled_from([None, 0.9]),
    "causal": st.sampled_from([True, True, True, False]),
    "source": st.sampled_from(["ids alone", "ids and mask", "document numbers", "seq_idx", "lengths"]),
})  # fmt: skip


def attends_as_defined(layout, call, seen):
    source = "ids and mask" if layout.padded and call["source"] == "ids alone" else call["source"]
    boundaries = found_boundaries(layout, source)
    if boundaries is None:
        assert not layout.packed
        return
    assert layout.packed or source in ("ids alone", "lengths")
    generator = torch.Generator().manual_seed(len(layout.documents))
    sizes = ((4, 8), (call["key_heads"], 8), (call["key_heads"], call["value_dim"]))
    states = [torch.randn(*layout.shape, *size, generator=generator).to(call["dtype"]) for size in sizes]
    states = [(1.5 * one).requires_grad_() for one in states]
    options = Options(scale=call["scale"], causal=call["causal"], window=call["window"])
    found = packed_attention(*states, boundaries, options, "reference")
    truth = definition(*states, layout.number, options)
    assert found.dtype == call["dtype"] and found.shape == truth.shape
    real, tolerance = layout.mask.bool(), TOLERANCES[call["dtype"]]
    assert error(found[real], truth[real]) <= tolerance
    pairs = [torch.autograd.grad(of_tokens(output, layout), states) for output in (found, truth)]
    for gradient, expected in zip(*pairs):
        assert error(gradient, expected) <= tolerance
        assert not gradient[~real].any()
    seen.append(layout)


def on_every_kind(seen):
    assert {len(layout.ids) for layout in seen} == {1, 2, 3, 4}
    assert {layout.shape[0] for layout in seen} == {1, 2, 3, 4}
    assert {layout.padded for layout in seen} == {True, False}
    documents = [len(layout.documents) for layout in seen]
    assert min(documents) <= 2 and max(documents) == 50


@pytest.mark.parametrize(("examples", "least"), [(200, 150), pytest.param(12_000, 10_000, marks=pytest.mark.slow)])
def test_attention_over_any_layout_is_a_masked_softmax(examples, least):
    seen = []
    strategy = of_several_axes(layouts())
    check = given(strategy, CALLS)(lambda layout, call: attends_as_defined(layout, call, seen))
    settings(max_examples=examples, **DRAWN)(check)()
    on_every_kind(seen)
    assert len(seen) > least


# A patched model, end to end


def build(seam):
    modeling, name = MODELING[seam], f"Fake{seam.capitalize()}"
    own = {} if seam == "interface" else {"attn_impl": "sdpa"}
    model = getattr(modeling, f"{name}ForCausalLM")(getattr(modeling, f"{name}Config")(**own)).eval()
    model.config._attn_implementation = "sdpa"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


def alone(model, layout, tokens, counted):
    pieces = []
    for row, span in layout.documents:
        ids = layout.ids[0, row, span][None] if counted else None
        pieces.append(model(input_ids=tokens[row, span][None], position_ids=ids).logits[0])
    return torch.cat(pieces)


def gradients(model, logits):
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((logits * weights).sum() / logits.shape[0], list(model.parameters()))


def computes_as_alone(patched, plain, counted, layout, seen):
    tokens = torch.randint(0, 97, layout.shape, generator=torch.Generator().manual_seed(len(layout.documents)))
    batch = {"input_ids": tokens, "position_ids": layout.ids[0], "attention_mask": layout.mask}
    if not layout.packed:
        return
    output = patched(**batch).logits
    found = torch.cat([output[row, span] for row, span in layout.documents])
    expected = alone(plain, layout, tokens, counted)
    assert error(found, expected) <= 2e-5
    for gradient, truth in zip(gradients(patched, found), gradients(plain, expected)):
        assert error(gradient, truth) <= 1e-4
    seen.append(layout)


@pytest.mark.parametrize(("examples", "least"), [(25, 15), pytest.param(1_000, 800, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seam", MODELING)
def test_a_model_computes_the_documents_of_any_layout_as_alone(seam, examples, least):
    patched, plain, seen = build(seam), build(seam), []
    # The rotary table of such layers ends with the row, and rotary positions do not depend on the first id.
    counted = seam != "method"
    strategy = layouts(longest=16, furthest=TABLE - 16)
    with fa2patch.apply(patched):
        check = given(strategy)(lambda layout: computes_as_alone(patched, plain, counted, layout, seen))
        settings(max_examples=examples, **DRAWN)(check)()
    assert len(seen) > least
