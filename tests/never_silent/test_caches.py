"""Caches by whatever name this version gives them: a packed row with one is refused, other calls are as unpatched."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from small_models import DOCS, class_of, llama, logits_alone, of_family, patched, refusal, takes_any_name, told
from unpatched import ones_and_zeros, tokens

import fa2patch
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import takes_positions
from fa2patch.upstream import caches, find_documents

# A hybrid and a model without attention. The other ones are slow, because each takes seconds to build and run.
QUICK = ("jamba", "mamba2")

MORE = ("bamba", "falcon_h1", "zamba", "zamba2", "recurrent_gemma", "lfm2", "qwen3_next", "mamba")
HYBRIDS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]

LEFT = ["00111111", "11111111", "00001111"]


def name_of_the_cache(model):
    # The forward's signature tells the name: it is one that the model also returns.
    with torch.no_grad():
        returned = model(DOCS[0][None], use_cache=True)
    taken = inspect.signature(type(model).forward).parameters
    found = [name for name, value in returned.items() if name in taken and not isinstance(value, torch.Tensor)]
    if not found:
        pytest.skip("this version returns no cache here")
    return found[0]


def filled(model, name):
    with torch.no_grad():
        return model(DOCS[0][None], use_cache=True)[name]


def left_padded(model):
    mask = ones_and_zeros(LEFT)
    ids = torch.where(mask == 1, tokens(*mask.shape), 0)
    counted = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if takes_positions(model) else {}
    return {"input_ids": ids, "attention_mask": mask, **counted}


def with_a_mask_for_queries(model, name, ids, positions, sees, form):
    # ``generate()`` with a static cache makes such arguments, whose mask is a tensor for queries.
    mask = sees if form == "bool" else torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    empty = type(filled(model, name))()
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask[:, None], name: empty}


def generated(model, row, **cache):
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    return model.generate(**row, **settings, **cache)[0, -3:]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "hybrid", "sliding_window"])
def test_generating_from_a_packed_row_is_refused_with_every_cache(family, kind):
    # With a static cache, ``generate()`` itself makes masks: a tensor, or a dict with one for each kind of layer.
    model, docs = of_family(family), DOCS[:2]
    cache = {} if kind == "dynamic" else {"cache_implementation": kind}
    row = {
        "input_ids": torch.cat(docs)[None],
        "position_ids": torch.cat([torch.arange(len(document)) for document in docs])[None],
    }
    seen = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True
    )
    try:
        generated(model, row, **cache)
    except Exception as error:
        pytest.skip(f"the unpatched model cannot generate so: {str(error)[:100]}")
    hook.remove()
    if seen[0] is None or seen[0].tolist() != row["position_ids"].tolist():
        pytest.skip("generate() does not hand the position ids on in this version")
    fa2patch.apply(model)
    with refusal("(?s)documents one by one", fa2patch.errors.PackedWithCache):
        generated(model, row, **cache)


PACKED, LEFT_PADDED, ONE = [0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 5, 6], [*range(9)]
ANY = SimpleNamespace(ndim=4)

MASKS_OF_GENERATE = {
    "none": (PACKED, None, 0, True),
    "real tokens only": (PACKED, torch.ones(1, 9, dtype=torch.bool), 0, True),
    "real tokens, and room of the cache before them": (PACKED, torch.ones(1, 12), 0, True),
    "padding and one document": (LEFT_PADDED, ones_and_zeros(["001111111"]), 0, False),
    "fillers of 1": ([1, 1, *range(7)], ones_and_zeros(["001111111"]), 0, False),
    "padding before two documents": ([1, 1, 0, 1, 2, 3, 0, 1, 2], ones_and_zeros(["001111111"]), 0, True),
    "padding between documents of different rows": (
        [0, 1, 2, 3, 0, 0, 0, 0, 0],
        ones_and_zeros(["111100000"]),
        0,
        False,
    ),
    "one document": (ONE, torch.ones(1, 9), 0, False),
    "one document, counted from 0 where a model counts from 2": (ONE, torch.ones(1, 9), 2, False),
    "documents that are counted from 2": ([2, 3, 4, 5, 2, 3, 4, 5, 6], torch.ones(1, 9), 2, True),
    "a kind that is not known": (PACKED, ANY, 0, True),
    "a kind that is not known, of a padded row": ([1, 1, *range(7)], ANY, 0, False),
}


@pytest.mark.parametrize("what", MASKS_OF_GENERATE)
def test_documents_that_meet_are_known_by_each_kind_of_mask(what):
    # ``generate()`` with flash attention passes masks [batch, keys], also as a dict, and others with the rest.
    ids, mask, first, meet = MASKS_OF_GENERATE[what]
    assert find_documents._documents_meet(torch.tensor([ids]), mask, first) is meet


@pytest.mark.parametrize("family", ["llama", "roberta"])
def test_left_padded_rows_with_a_static_cache_are_generated_from(family):
    # RoBERTa's documents begin at position 2, and ``generate()`` counts from 0.
    model = of_family(family)
    mask = ones_and_zeros(LEFT)
    row = {"input_ids": torch.where(mask == 1, tokens(*mask.shape), 0), "attention_mask": mask}
    try:
        expected = generated(model, row, cache_implementation="static")
    except Exception as error:
        pytest.skip(f"the unpatched model cannot generate so: {str(error)[:100]}")
    fa2patch.apply(model)
    assert torch.equal(generated(model, row, cache_implementation="static"), expected)


@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_row_whose_documents_see_each_other_by_a_mask_for_queries_is_refused_with_a_cache(form):
    model = llama()
    name = name_of_the_cache(model)
    if isinstance(filled(model, name), tuple):
        pytest.skip("this version's cache is a tuple, which has no empty one")
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    ids, positions = tokens(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    document = torch.tensor([0] * 4 + [1] * 5)
    apart = causal & (document[:, None] == document)
    left = ones_and_zeros(["001111111"]).bool()
    unattended = (causal & left[:, None]) | ~left[..., None]  # upstream lets padding see all
    fillers = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6]])
    dense = [(positions, apart), (fillers, unattended), (torch.arange(9)[None], causal)]
    with torch.no_grad():
        calls = [with_a_mask_for_queries(model, name, ids, given, sees, form) for given, sees in dense]
        expected = [model(**call).logits for call in calls]
        fa2patch.apply(model)
        for (given, sees), logits in zip(dense, expected):
            assert torch.equal(model(**with_a_mask_for_queries(model, name, ids, given, sees, form)).logits, logits)
        with refusal("documents one by one", fa2patch.errors.PackedWithCache):
            model(**with_a_mask_for_queries(model, name, ids, positions, causal, form))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("way", ["position_ids", "all lengths", pytest.param("seq_idx", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "gpt2", *HYBRIDS])
def test_a_packed_row_with_a_cache_is_refused(family, way, training):
    model = of_family(family)
    name = name_of_the_cache(model)
    cache = filled(model, name)
    fa2patch.apply(model)
    with refusal(f"(?s){name}.*documents one by one", fa2patch.errors.PackedWithCache):
        model.train(training)(**told(way=way), **{name: cache})


@pytest.mark.parametrize("name", ["past_key_values", "cache", "memory_of_earlier_tokens"])
def test_a_cache_is_known_under_any_name(name):
    # A forward with ``**kwargs`` takes any name, and hands it on to layers that may know it.
    model = llama()
    cache = filled(model, name_of_the_cache(model))
    fa2patch.apply(model)
    if not takes_any_name(model):
        pytest.skip("this version's forward takes no other names")
    with pytest.raises(fa2patch.errors.PackedWithCache, match=name):
        model(**told(), **{name: cache})


class Bare:
    # A cache without methods, as Mamba's in 4.39 and xLSTM's.

    def __init__(self):
        self.states = {0: (torch.zeros(1, 4, 3), torch.zeros(1, 4, 5))}


class Updated:
    # A cache of remote code, which is no subclass of ``Cache``.

    def update(self, keys, values, layer):
        return keys, values

    def get_seq_length(self, layer=0):
        return 0


PAIR = (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))

WHAT_IT_IS = {
    "an object with states": (Bare(), True),
    "an object with the methods of a cache": (Updated(), True),
    "a tuple of tuples": ((PAIR, PAIR), True),
    "a tensor": (PAIR[0], False),
    "pictures of several sizes": ([torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 4, 4)], False),
    "outputs of an encoder": ((torch.zeros(1, 5, 8), (torch.zeros(1, 5, 8),)), False),
    "a mapping": ({"last_hidden_state": torch.zeros(1, 5, 8)}, False),
    "an empty tuple": ((), False),
    "a module": (torch.nn.Linear(2, 2), False),
    "a text": ("cache", False),
    "lists of numbers": ([[1, 2], [3]], False),
}


@pytest.mark.parametrize("what", WHAT_IT_IS)
def test_a_cache_is_known_by_what_it_is(what):
    value, expected = WHAT_IT_IS[what]
    assert caches.is_cache(value) is expected


@pytest.mark.parametrize("padded_batches", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma", *HYBRIDS])
def test_left_padded_rows_and_the_step_after_them(family, padded_batches):
    # Computed packed or not, the logits of the next token are those of the unpatched model.
    model, reference = of_family(family), of_family(family)
    name = name_of_the_cache(reference)
    batch = left_padded(model)

    @torch.no_grad()
    def two_steps(model):
        first = model(**batch, use_cache=True)
        mask = torch.cat([batch["attention_mask"], torch.ones(len(LEFT), 1, dtype=torch.long)], dim=1)
        counted = {"position_ids": mask.cumsum(-1)[:, -1:] - 1} if takes_positions(model) else {}
        second = model(tokens(len(LEFT), 1), attention_mask=mask, use_cache=True, **counted, **{name: first[name]})
        return first.logits[:, -1], second.logits[:, -1]

    try:
        expected = two_steps(reference)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        pytest.skip(f"the unpatched model cannot go on so: {error}")
    fa2patch.apply(model, padded_batches=padded_batches)
    for one, other in zip(two_steps(model), expected):
        if padded_batches:
            assert_close(one, other, "logits")
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("padded_batches", [False, True])
@pytest.mark.parametrize("use_cache", [None, True, "left out"])
def test_left_padded_rows_that_fill_a_cache_of_the_caller(use_cache, padded_batches):
    # The caller's empty cache must hold the padded rows afterwards, so that its next step is right.
    dynamic = class_of("DynamicCache")
    model, reference = llama(), llama()
    name = name_of_the_cache(reference)
    batch, more = left_padded(model), {} if use_cache == "left out" else {"use_cache": use_cache}

    def filling(model):
        cache = dynamic(config=model.config) if "config" in inspect.signature(dynamic).parameters else dynamic()
        with torch.no_grad():
            logits = model(**batch, **more, **{name: cache}).logits
        return logits, cache.get_seq_length()

    expected, length = filling(reference)
    fa2patch.apply(model, padded_batches=padded_batches)
    logits, held = filling(model)
    seen = batch["attention_mask"].bool()
    assert torch.equal(logits[seen], expected[seen])
    assert held == length


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 3}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_generate_as_unpatched(family, implementation, settings):
    reference, model = of_family(family, implementation), of_family(family, implementation)
    mask = ones_and_zeros(LEFT)
    given = {"input_ids": torch.where(mask == 1, tokens(*mask.shape), 0), "attention_mask": mask}
    wanted = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0, "do_sample": False, **settings}
    try:
        expected = reference.generate(**given, **wanted)
    except Exception as error:
        pytest.skip(f"the unpatched model cannot generate so: {error}")
    fa2patch.apply(model)
    assert torch.equal(model.generate(**given, **wanted), expected)


@pytest.mark.parametrize("family", ["xlstm", "rwkv", "mamba", "mamba2", "falcon_mamba"])
def test_models_without_attention_are_right_and_need_no_cache(family):
    # Their boundaries travel in the place of an argument that reaches each layer, whatever it is called.
    model, reference = of_family(family), of_family(family)
    try:
        expected = logits_alone(reference, use_cache=False)
    except Exception as error:
        pytest.skip(f"the unpatched model fails on a document: {error}")
    fa2patch.apply(model)
    with torch.no_grad():
        assert_close(model(**told()).logits[0], expected, "logits", 1e-4)


@pytest.mark.parametrize("family", ["llama", "minimax", "mamba", "rwkv", "xlstm"])
def test_a_call_that_will_look_for_the_cache_is_refused(family):
    # In models that make the cache themselves, ``generate`` takes a row whose cache is missing for one token alone.
    model = patched(of_family(family))
    batch = told()
    with torch.no_grad(), refusal("use_cache=True", fa2patch.errors.PackedWithCache):
        model(**batch, use_cache=True)
    model.train()(**batch, use_cache=True)


def test_a_config_that_asks_for_a_cache_does_not_count():
    # ``config.use_cache`` is True in nearly every model, and packed training leaves the cache out.
    model = patched(llama(use_cache=True).train())
    model(**told())
