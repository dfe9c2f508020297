"""Attention layers that compute attention by themselves, and base models that compute each document by itself."""

import math
import sys
import types
from dataclasses import replace

import pytest
import torch
import transformers

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors
from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import Picks
from fa2patch.upstream.facts import Facts
from fa2patch.upstream.packed_mask import PackedMask
from fa2patch.upstream.seams import formula
from fa2patch.upstream.seams.scores import product

LENGTHS = (5, 9, 1, 3)


class Attention(torch.nn.Module):
    # BERT's layers up to Transformers 4.57 compute attention so.

    is_decoder = False

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(16, 16) for _ in range(3))
        self.dropout = torch.nn.Dropout(0.0)

    def heads(self, states):
        return states.view(*states.shape[:2], 2, 8).transpose(1, 2)

    def forward(self, hidden_states, attention_mask=None, head_mask=None):
        q, k, v = (self.heads(part(hidden_states)) for part in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = self.dropout(torch.nn.functional.softmax(scores, dim=-1))
        if head_mask is not None:
            weights = weights * head_mask
        return torch.matmul(weights, v).transpose(1, 2).flatten(2)


class CausalAttention(Attention):
    is_decoder = True


class TorchAttention(Attention):
    def forward(self, hidden_states, attention_mask=None, head_mask=None):
        q, k, v = (self.heads(part(hidden_states)) for part in (self.query, self.key, self.value))
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, dropout_p=0.0)
        return output.transpose(1, 2).flatten(2)


class FilledAttention(Attention):
    # DistilBERT's up to 4.56 is so: queries are scaled, and the mask is compared with 0.

    def forward(self, query, mask, head_mask=None):
        q, k, v = (self.heads(part(query)) for part in (self.query, self.key, self.value))
        scores = torch.matmul(q / math.sqrt(8), k.transpose(2, 3))
        hidden = (mask == 0).view((query.shape[0], 1, 1, query.shape[1])).expand_as(scores)
        scores = scores.masked_fill(hidden, torch.tensor(torch.finfo(scores.dtype).min))
        weights = self.dropout(torch.nn.functional.softmax(scores, dim=-1))
        return torch.matmul(weights, v).transpose(1, 2).flatten(2)


class CappedAttention(CausalAttention):
    # Gemma 2's up to 4.47 is so. The operator is that of Falcon's.

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (self.heads(part(hidden_states)) for part in (self.query, self.key, self.value))
        scores = torch.tanh(q @ k.transpose(2, 3) * 0.3 / 0.5) * 0.5
        return ((scores + attention_mask[:, :, :, : k.shape[-2]]).softmax(-1) @ v).transpose(1, 2).flatten(2)


class BatchedAttention(CausalAttention):
    # GPT-NeoX's up to 4.46 is so: heads are in the batch, and a triangle hides later tokens.

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(), persistent=False)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (self.heads(part(hidden_states)) for part in (self.query, self.key, self.value))
        batch, heads, length, _ = q.size()
        q, k = q.reshape(batch * heads, length, -1), k.reshape(batch * heads, length, -1)
        scores = torch.zeros(batch * heads, length, length, dtype=q.dtype)
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=1.0, alpha=0.4).view(batch, heads, length, length)
        least = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype).to(scores.device)
        scores = torch.where(self.bias[:, :, :length, :length], scores, least) + attention_mask
        return torch.matmul(torch.nn.functional.softmax(scores, dim=-1).to(v.dtype), v).transpose(1, 2).flatten(2)


class SharedKeysAttention(CausalAttention):
    # GPTBigCode's up to 4.53 is so: all heads share a key, and their queries follow each other along the row.

    def forward(self, hidden_states, attention_mask=None):
        batch, length = hidden_states.shape[:2]
        q = self.query(hidden_states).reshape(batch, length * 2, 8)
        k, v = self.key(hidden_states)[..., :8], self.value(hidden_states)[..., :8]
        scores = torch.baddbmm(
            torch.empty(1, 2 * length, length, dtype=q.dtype), q, k.transpose(1, 2), beta=0, alpha=0.4
        )
        scores = scores.view(batch, length, 2, length)
        if isinstance(attention_mask, torch.Tensor):  # queries, heads, keys
            attention_mask = attention_mask[None, :, None] == 0
        scores = torch.where(attention_mask, scores, torch.tensor(torch.finfo(scores.dtype).min))
        weights = self.dropout(torch.nn.functional.softmax(scores, dim=-1))
        return torch.bmm(weights.view(batch, length * 2, length), v).view(hidden_states.shape)


class BiasedAttention(Attention):
    def forward(self, hidden_states, attention_mask=None, position_bias=None):
        q, k, v = (self.heads(part(hidden_states)) for part in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) + position_bias
        return torch.matmul(torch.nn.functional.softmax(scores + attention_mask, dim=-1), v)


def packed(lengths=LENGTHS):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    boundaries = Boundaries(cu, max(lengths), None, tuple(lengths))
    return PackedMask(boundaries, Picks("reference"), (1, sum(lengths)), max(lengths))


WITHOUT_FLASH = [Attention, CausalAttention, TorchAttention, FilledAttention]
ALL = [*WITHOUT_FLASH, CappedAttention, BatchedAttention, SharedKeysAttention]


@pytest.mark.parametrize("cls", ALL)
def test_a_layer_s_own_forward_computes_each_document_alone(cls):
    torch.manual_seed(0)
    layer, states, mask = cls().double(), torch.randn(1, sum(LENGTHS), 16).double(), packed()
    assert formula.is_formula(cls.forward) and not (cls in WITHOUT_FLASH and formula.says_more(layer))
    found = formula.by_formula(cls.forward)(layer, states, mask)
    for piece, own in zip(states.split(LENGTHS, 1), found.split(LENGTHS, 1)):
        length = piece.shape[1]
        hidden = torch.full((length, length), -torch.inf).double().triu(1) if layer.is_decoder else None
        given = torch.ones(1, length) if cls is FilledAttention else hidden
        given = hidden[None, None] if cls in (CappedAttention, BatchedAttention) else given
        assert_close(own, cls.forward(layer, piece, given), "output", 1e-12)
    assert mask.calls == [layer]


@pytest.mark.parametrize("is_decoder", [True, False])
def test_a_decoder_s_layer_may_have_an_is_causal_that_nothing_reads(is_decoder):
    # BioGPT's and Pegasus X's up to 4.47 are so. A layer that is turned after `apply` is refused.
    layer, states, causal = CausalAttention(), torch.randn(1, sum(LENGTHS), 16), CausalAttention()
    causal.load_state_dict(layer.state_dict())
    layer.is_decoder, layer.is_causal = is_decoder, False
    mask = replace(packed(), facts=Facts(both_ways=False))
    forward = formula.by_formula(Attention.forward)
    if is_decoder:
        assert_close(forward(layer, states, mask), forward(causal, states, packed()), "output", 0.0)
    else:
        with pytest.raises(errors.PackingNotIsolated, match="has is_causal=False"):
            forward(layer, states, mask)


def test_code_that_makes_masks_hands_a_packed_one_on():
    mask = packed()
    inverted = 1.0 - mask[:, None, None, :].expand(1, 1, 18, 18).to(torch.float32)  # BART's kin (4.34)
    assert inverted.masked_fill(inverted.to(torch.bool), -1.0) is mask
    later = torch.full((1, 1, 18, 18), -torch.inf).triu(1)
    assert later + mask is mask  # LED (4.34 to 4.57)
    window = later.masked_fill(torch.ones(18, 18, dtype=torch.bool).tril(-4), -torch.inf)
    with pytest.raises(errors.PackingNotIsolated, match="hides other tokens than later ones"):
        window + mask
    for scores in (torch.zeros(1, 4, 18, 18), torch.zeros(4, 18, 18)):
        with pytest.raises(TypeError, match="PackedMask"):
            scores + mask


@pytest.mark.parametrize("cls", WITHOUT_FLASH)
def test_a_formula_stays_in_one_graph(cls):
    torch.manual_seed(0)
    layer, states, mask = cls(), torch.randn(1, sum(LENGTHS), 16), packed()
    forward = formula.by_formula(cls.forward)
    compiled = torch.compile(lambda states: forward(layer, states, mask), backend="eager", fullgraph=True)
    assert_close(compiled(states), forward(layer, states, packed()), "output", 1e-6)


def test_dense_calls_are_the_layer_s_own():
    layer, states = Attention(), torch.randn(2, 4, 16)
    mask = torch.zeros(2, 1, 1, 4)
    assert torch.equal(formula.by_formula(Attention.forward)(layer, states, mask), layer(states, mask))


def test_weights_are_dropped_in_training_only():
    layer, states = Attention(), torch.randn(1, sum(LENGTHS), 16)
    layer.dropout.p = 0.5
    forward = formula.by_formula(Attention.forward)
    assert not torch.equal(forward(layer, states, packed()), forward(layer, states, packed()))
    layer.eval()
    assert torch.equal(forward(layer, states, packed()), forward(layer, states, packed()))


def scores_of():
    return product(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 4, 3))


def scores_and_mask():
    return scores_of(), formula.FormulaMask.of(packed(), None, True, None)


def by_a_head_mask():
    formula.by_formula(Attention.forward)(Attention(), torch.randn(1, 18, 16), packed(), torch.ones(1, 2, 1, 1))


def by_a_bias():
    formula.by_formula(BiasedAttention.forward)(BiasedAttention(), torch.randn(1, 18, 16), packed(), torch.ones(1))


def a_softcap_of_masked_scores():
    scores, mask = scores_and_mask()
    torch.tanh(scores + mask)


UNSAYABLE = [
    ("multiplied by something other than a number", by_a_head_mask),
    ("softcap: expected a number", lambda: capped(lambda scores: scores) / torch.tensor([0.2, 0.3])),
    ("softcap: expected a number", lambda: capped(lambda scores: scores * 2.0) / torch.tensor([0.2, 0.3])),
    ("added to something other than the mask", by_a_bias),
    ("along something other than the keys", lambda: torch.nn.functional.softmax(scores_of(), dim=1)),
    ("handed to torch's where", lambda: torch.where(SEES, scores_of(), torch.ones(3, 3))),
    ("handed to torch's tanh", a_softcap_of_masked_scores),
]


@pytest.mark.parametrize(("message", "compute"), UNSAYABLE)
def test_what_packed_attention_cannot_say_is_an_error(message, compute):
    with pytest.raises(errors.PackingNotIsolated, match=message):
        compute()


LEAST = torch.tensor(torch.finfo(torch.float32).min)
SEES = torch.ones(3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "hide",
    [
        lambda scores, mask: torch.where(mask, scores, LEAST),
        lambda scores, mask: torch.where(mask, scores, -1e9),
        lambda scores, mask: torch.masked_fill(scores, mask, -10000.0),
        lambda scores, mask: scores.masked_fill(mask, float("-inf")),
        lambda scores, mask: torch.max(scores + mask, LEAST),
    ],
)
def test_scores_are_hidden_by_the_mask(hide):
    scores, mask = scores_and_mask()
    assert hide(scores, mask).mask is mask


@pytest.mark.parametrize(
    "change",
    [
        lambda scores, mask: torch.where(SEES, scores, LEAST),
        lambda scores, mask: torch.where(mask, LEAST, scores),
        lambda scores, mask: torch.where(mask, scores, torch.tensor(0.0)),
        lambda scores, mask: torch.where(mask, scores, 3.0),
        lambda scores, mask: torch.masked_fill(scores, SEES, -1e9),
        lambda scores, mask: torch.masked_fill(scores, mask, 0.0),
        lambda scores, mask: scores.masked_fill(mask, 0.0),
        lambda scores, mask: torch.max(scores, torch.tensor(0.0)),
        lambda scores, mask: torch.maximum(scores, torch.zeros(3, 3)),
    ],
    ids=range(9),
)
def test_scores_that_are_hidden_by_something_else_or_get_a_value_are_an_error(change):
    with pytest.raises(errors.PackingNotIsolated, match="computes its scores by itself"):
        change(*scores_and_mask())


def capped(of_scores):
    return of_scores(torch.tanh(scores_of() * 0.3))


def test_a_factor_after_the_softcap_is_one_of_the_cap_too():
    scores = capped(lambda scores: scores * 2.0 * 0.5)
    assert (scores.softcap, scores.scale) == (1.0, pytest.approx(0.3))
    scores = capped(lambda scores: scores * 2.0 / torch.tensor(2.0))
    assert (scores.softcap, scores.scale) == (1.0, pytest.approx(0.3))


def test_another_thread_never_sees_a_formula_without_its_stand_ins():
    # A formula's globals are refreshed in each call. They must not hold torch itself even for a moment.
    computed, seen = formula.with_scores(Attention.forward), set()
    own = computed.__closure__[[*computed.__code__.co_freevars].index("alike")].cell_contents.__globals__

    def look(frame, event, argument):
        seen.add(own.get("torch"))

    sys.setprofile(look)
    try:
        for _ in range(2):
            computed(Attention(), torch.randn(1, sum(LENGTHS), 16), formula.FormulaMask.of(packed(), None, True, None))
    finally:
        sys.setprofile(None)
    assert seen - {None} == {formula.torch_of_formulas}


class Flash:
    # What flash classes say of windows: all layers (Mistral), some by their number (Qwen2 of 4.37 and of 4.43).

    def of_all(self):
        return getattr(self.config, "sliding_window", None)

    def below(self):
        return self.config.use_sliding_window and self.config.sliding_window and self._flash_attention_forward()

    def _flash_attention_forward(self):
        return self.layer_idx >= self.config.max_window_layers

    def above(self):
        used = self.config.use_sliding_window and self.layer_idx >= self.config.max_window_layers
        return getattr(self.config, "sliding_window", None) if used else None

    def none(self):
        return getattr(self, "sliding_window", None), self.config.hidden_size


@pytest.mark.parametrize(
    "name, windows", {"of_all": [4, 4], "below": [4, None], "above": [None, 4], "none": [None, None]}.items()
)
def test_the_flash_class_says_which_layers_have_a_window(name, windows):
    held = {"forward": vars(Flash)[name]}
    if name == "below":
        held["_flash_attention_forward"] = Flash._flash_attention_forward
    said = formula.Windows.of(type("FlashAttention2", (), held))
    config = types.SimpleNamespace(sliding_window=4, use_sliding_window=True, max_window_layers=1)
    assert [said.of_layer(types.SimpleNamespace(config=config, layer_idx=index)) for index in (0, 1)] == windows
    assert said.of_layer(types.SimpleNamespace(sliding_window=6)) == 6, "a layer's own, as in Gemma 2"


def test_a_table_of_who_sees_whom_that_is_no_triangle_says_more_than_a_mask():
    layer = BatchedAttention()
    assert not formula.says_more(layer)
    layer.bias[0, 0, 5, 1] = False  # a window
    assert formula.says_more(layer)


def test_weights_that_a_layer_returns_are_none():
    class Returning(CausalAttention):
        def forward(self, hidden_states, attention_mask=None):
            q, k, v = (self.heads(part(hidden_states)) for part in (self.query, self.key, self.value))
            weights = torch.nn.functional.softmax(torch.matmul(q, k.transpose(2, 3)) + attention_mask, dim=-1)
            return torch.matmul(weights, v), None, weights

    output, *rest = formula.by_formula(Returning.forward)(Returning(), torch.randn(1, sum(LENGTHS), 16), packed())
    assert isinstance(output, torch.Tensor) and rest == [None, None]


def test_signs_of_more_than_a_mask_are_seen():
    assert formula.says_more(BiasedAttention())  # an argument of unknown meaning
    table, parameter = Attention(), Attention()
    table.distances = torch.nn.Embedding(4, 8)
    parameter.register_parameter("bias", torch.nn.Parameter(torch.zeros(2)))
    assert formula.says_more(table) and formula.says_more(parameter)
    mixing = Attention()
    mixing.inner = torch.nn.Sequential(torch.nn.Conv1d(16, 16, 3))
    assert formula.convolves(mixing) and not formula.convolves(table)


@pytest.mark.parametrize("family", ["mpnet:masked", "deberta:masked", "deberta-v2:masked"])
def test_position_biases_are_computed_document_by_document(family):
    docs, model = documents(*LENGTHS), tiny_models.build(family)
    with fa2patch.apply(model) as patch:
        assert {layer.seam for layer in patch.layers} == {"document"}
        output = model(**pack(docs), output_hidden_states=True)
        assert_close(output.logits[0], alone(tiny_models.build(family), docs), "logits")
        assert output.hidden_states[0].shape[:2] == (1, sum(LENGTHS))
        assert {layer.kernel for layer in patch.layers} == {"its own, document by document"}
        fa2patch.verify(model)


def test_deberta_with_a_convolution_keeps_documents_apart():
    docs, model = documents(*LENGTHS), tiny_models.build("deberta-v2:masked", conv_kernel_size=3, conv_act="gelu")
    expected = alone(model, docs)
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).logits[0], expected, "logits")
        fa2patch.verify(model)


def test_albert_s_pooler_is_applied_to_each_document():
    model = transformers.AlbertModel(tiny_models.config_of("albert:masked")).eval()
    docs = documents(*LENGTHS)
    expected = torch.cat([model(input_ids=doc[None]).pooler_output for doc in docs])
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).pooler_output, expected, "pooler_output")
