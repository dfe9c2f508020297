"""Invalid input: the result is right, or an error of fa2patch says what was expected and what was found."""

import functools

import numpy as np
import pytest
import torch
import transformers
from two_layers import tiny_llama

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors
from fa2patch.upstream import forward as patched_forward

LENGTHS = (4, 5, 1)
DOCS = documents(*LENGTHS)
BATCH = pack(DOCS)
IDS, POSITIONS = BATCH["input_ids"], BATCH["position_ids"]
NUMBERS = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
CU = torch.tensor([0, 4, 9, 10], dtype=torch.int32)
INT64, NAN = torch.iinfo(torch.int64), float("nan")
FOUND = "expected .*found "

OTHERS_KIND = {
    "a list": (lambda t: t.tolist(), "found list"),
    "an array": (lambda t: t.numpy(), "found ndarray"),
    "text": (lambda t: "0, 1", "found str"),
    "a number": (lambda t: 3, "found int"),
    "floats": (lambda t: t.float(), "found torch.float32"),
    "not numbers": (lambda t: t * NAN, "found torch.float32"),
    "complex": (lambda t: t.cfloat(), "found torch.complex64"),
    "sparse": (lambda t: t.to_sparse(), "found .*torch.sparse_coo"),
    "on meta": (lambda t: t.to("meta"), "found one on the meta device"),
    "empty": (lambda t: t[..., :0], r"found .*\[.*0\]"),
}
OTHERS_SHAPE = {
    "no dimension": (lambda t: t.flatten()[0], r"found \[\]"),
    "too short": (lambda t: t[..., :3], r"found \[1, 3\]"),
    "too many rows": (lambda t: t.repeat(2, 1), r"found \[2, 10\]"),
    "no rows": (lambda t: t[:0], r"found \[0, 10\]"),
    "a column": (lambda t: t.T, r"found \[10, 1\]"),
    "four dimensions": (lambda t: t[None, None], r"found \[1, 1, 1, 10\]"),
}


def named(value):
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def cases(table):
    return pytest.mark.parametrize(("rubbish", "found"), table.values(), ids=table)


@pytest.fixture(scope="module")
def models():
    # Both models have the same weights.
    patched = tiny_llama()
    with fa2patch.apply(patched):
        yield patched, tiny_llama()


@functools.lru_cache(maxsize=1)
def expected():
    with torch.no_grad():
        return alone(tiny_llama(), DOCS)


@pytest.fixture(autouse=True)
def nothing_is_left_inside():
    yield
    assert patched_forward.thread.inside == []


def refused(call, match, error=errors.Fa2PatchError):
    with pytest.raises(error, match=f"(?s){match}") as caught:
        call()
    assert isinstance(caught.value, errors.Fa2PatchError)


def still_right(model):
    with torch.no_grad():
        assert_close(model(**BATCH).logits[0], expected(), "logits of the next batch")


# boundaries


@cases({
    **{name: row for name, row in OTHERS_KIND.items() if name != "an array"},
    "nothing": (lambda t: None, "found NoneType"),
    "booleans": (lambda t: t.bool(), "found torch.bool"),
    "nested": (lambda t: torch.nested.nested_tensor([t[0], t[0, :3]]), "found a nested tensor"),
})  # fmt: skip
def test_boundaries(rubbish, found):
    refused(lambda: fa2patch.boundaries(rubbish(POSITIONS)), f"position_ids: expected .*{found}", errors.BadPositionIds)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([INT64.max, INT64.min], (1, 1)),
        ([INT64.max - 1, INT64.max, INT64.min, INT64.min + 1, 0], (2, 2, 1)),
        ([-2, -1, 0, 1, -7], (4, 1)),
    ],
)
def test_ids_at_the_ends_of_int64_and_negative_ones(ids, lengths):
    assert fa2patch.boundaries(torch.tensor(ids)).lengths == lengths


# Objects that are not a model, a row or a kernel


@pytest.mark.parametrize("function", [fa2patch.apply, fa2patch.revert, fa2patch.status, fa2patch.verify])
@pytest.mark.parametrize(
    ("rubbish", "found"),
    [
        (None, "NoneType"),
        (3, "int"),
        ("meta-llama/Llama-2-7b", "str"),
        (IDS, "Tensor"),
        ({}, "dict"),
        (transformers.LlamaConfig(), "LlamaConfig"),
        (transformers.LlamaForCausalLM, "type"),
        (torch.nn.Linear(2, 2), "Linear"),
        (torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)}), "ModuleDict"),
    ],
)
def test_what_is_no_model(function, rubbish, found):
    refused(lambda: function(rubbish), f"expected a Transformers model.*found {found}", errors.NotAModel)


@pytest.mark.parametrize("kernel", [3, "", [], "flash", IDS], ids=named)
def test_what_is_no_kernel(kernel):
    refused(lambda: fa2patch.apply(tiny_llama(), kernel=kernel), "kernel=.*expected one of", errors.UnknownKernel)


@pytest.mark.parametrize("name", [3, "", [], ["llama"], {}, "lama", fa2patch.Architecture("llama"), IDS], ids=named)
def test_what_is_no_architectures_name(name):
    model = tiny_llama()
    refused(lambda: fa2patch.apply(model, architecture=name), "no architecture .*in the registry, which has")
    assert fa2patch.status(model) is None


@pytest.mark.parametrize("row", [None, 3, "llama", fa2patch.Architecture, {}], ids=named)
def test_what_is_no_row_of_the_registry(row):
    before = fa2patch.architectures()
    refused(
        lambda: fa2patch.register(row), f"register: expected an Architecture, found {type(row).__name__}", TypeError
    )
    assert fa2patch.architectures() == before


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model_type": None}, "model_type: expected .*found None"),
        ({"model_type": ["llama"]}, "model_type: expected .*found"),
        ({"model_type": "x", "refuse": "because"}, "refuse: expected a function or None, found 'because'"),
        ({"model_type": "x", "adjust": 3}, "adjust: expected a function or None, found 3"),
        ({"model_type": "x", "queries": IDS}, "queries: expected a function or None, found tensor"),
    ],
)
def test_a_row_of_rubbish(arguments, match):
    refused(lambda: fa2patch.Architecture(**arguments), match, TypeError)


# The collator

EXAMPLES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]


@pytest.mark.parametrize(
    ("examples", "match"),
    [
        (None, "expected a list of examples, found NoneType"),
        (3, "expected a list of examples, found int"),
        (object(), "expected a list of examples, found object"),
        ("ab", "example 0: expected a mapping, found str"),
        ([None], "example 0: expected a mapping, found NoneType"),
        (IDS, "example 0: expected a mapping, found Tensor"),
        (iter([]), "expected at least one example, found"),
        ([{"input_ids": torch.zeros(3, dtype=torch.long, device="meta")}], "must be .*found a tensor on the meta"),
        ([{"input_ids": torch.ones(3).to_sparse()}], "must be .*found a tensor of layout torch.sparse_coo"),
        ([{"input_ids": [True, False]}], "input_ids must be integers, found booleans"),
        ([{"input_ids": [NAN]}], "input_ids must be integers, found floats"),
        ([{"input_ids": [2**63]}], "input_ids must fit into int64, found 9223372036854775808"),
        ([{"input_ids": [2**70]}], "input_ids holds no plain numbers"),
        ([{"input_ids": [1j]}], "input_ids holds no plain numbers"),
        ([{"input_ids": [1], "weights": np.array([2**63], dtype=np.uint64)}], "weights must fit into int64"),
        ([{"input_ids": [1], "position_ids": [NAN]}], "position_ids must be integers, found floats"),
        ([{"input_ids": [1, 2], "attention_mask": [1, NAN]}], "attention_mask holds other numbers"),
        ([{"input_ids": [1], 3: [1]}, {"input_ids": [1], "a": [1]}], "3 is in only some examples"),
        ([{3: [1], None: [2]}], "input_ids missing, found 3, None"),
    ],
)
def test_examples(examples, match):
    refused(lambda: fa2patch.DataCollatorWithFlattening()(examples), match, errors.CollatorError)


@pytest.mark.parametrize("value", ["8", 1.5, NAN, 2**70, [1, 2], IDS], ids=named)
@pytest.mark.parametrize("option", ["separator_id", "position_ids_start", "pad_token_id", "pad_to_multiple_of"])
def test_options_of_the_collator(option, value):
    call = {"pad_to_multiple_of": 8, option: value}
    refused(lambda: fa2patch.DataCollatorWithFlattening(**call), f"{option}: {FOUND}", errors.CollatorError)


@pytest.mark.parametrize(("option", "value"), [("separator_id", "x"), ("separator_id", 1.5), ("return_tensors", [])])
def test_options_of_one_call_of_the_collator(option, value):
    collate = fa2patch.DataCollatorWithFlattening()
    refused(lambda: collate(EXAMPLES, **{option: value}), f"{option}: {FOUND}", errors.CollatorError)


def test_ids_that_go_on_only_because_int64_ends_are_two_documents():
    example = {"input_ids": [1, 2], "position_ids": [INT64.max, INT64.min]}
    batch = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)([example, example])
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 2, 3, 4]


# A patched model's forward


@cases({**OTHERS_KIND, **OTHERS_SHAPE, "booleans": (lambda t: t.bool(), "found torch.bool")})
def test_position_ids(models, rubbish, found):
    patched, _ = models
    refused(lambda: patched(**{**BATCH, "position_ids": rubbish(POSITIONS)}), f"position_ids: expected .*{found}")
    still_right(patched)


@pytest.mark.parametrize("given", ["position_ids", "no position_ids", "a mask of ones", "labels"])
@cases({
    **OTHERS_KIND,
    "booleans": (lambda t: t.bool(), r"found torch.bool \[4\]"),
    "one": (lambda t: t[:1], r"found torch.int32 \[1\]"),
    "of another batch": (lambda t: t[:3], r"found \[0, 4, 9\] ending in 9"),
    "negative": (lambda t: torch.tensor([0, -4, 10]), r"found \[0, -4, 10\]"),
    "falling": (lambda t: torch.tensor([0, 9, 4, 10]), r"found \[0, 9, 4, 10\]"),
    "beyond int32": (lambda t: torch.tensor([0, 4, 9, 2**32 + 10]), "found .* ending in 4294967306"),
    "the end of int64": (lambda t: torch.tensor([0, 4, 9, INT64.max]), "found .* ending in 9223372036854775807"),
})  # fmt: skip
def test_cu_seq_lens(models, rubbish, found, given):
    patched, _ = models
    lengths = {"cu_seq_lens_q": rubbish(CU), "cu_seq_lens_k": rubbish(CU), "max_length_q": 5, "max_length_k": 5}
    more = {"a mask of ones": {"attention_mask": torch.ones_like(IDS)}, "labels": {"labels": IDS}}.get(given, {})
    call = {**BATCH, **lengths, **more}
    if given == "no position_ids":
        del call["position_ids"]
    refused(lambda: patched(**call), f"cu_seq_lens.*{found}", errors.BadCuSeqlens)
    still_right(patched)


@pytest.mark.parametrize(
    "longest",
    ["5", 5.0, NAN, 2**70, [5], -1, 0, torch.tensor(NAN), torch.tensor([]), torch.tensor(5, device="meta")],
    ids=named,
)
def test_max_length(models, longest):
    patched, _ = models
    lengths = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": longest, "max_length_k": longest}
    match = "max_length: expected .*found |max_length is (-1|0), but cu_seq_lens hold a longer document"
    refused(lambda: patched(**BATCH, **lengths), match, errors.BadCuSeqlens)


@pytest.mark.parametrize("lengths", [{"cu_seq_lens_k": CU}, {"cu_seq_lens_k": CU, "max_length_k": 5}])
def test_lengths_of_keys_only_are_not_ignored(models, lengths):
    patched, _ = models
    assert_close(patched(input_ids=IDS, **lengths).logits[0], expected(), "logits")


@cases({
    **{name: row for name, row in OTHERS_KIND.items() if name != "empty"},
    **{name: row for name, row in OTHERS_SHAPE.items() if name not in ("no rows", "a column")},
    "fractions": (lambda t: t / 3, "found torch.float32"),
})  # fmt: skip
@pytest.mark.parametrize("given", [{}, {"position_ids": POSITIONS}], ids=["alone", "with position_ids"])
def test_seq_idx(models, rubbish, found, given):
    patched, _ = models
    refused(lambda: patched(input_ids=IDS, seq_idx=rubbish(NUMBERS), **given), f"seq_idx: expected .*{found}")
    still_right(patched)


@cases({
    "a list": (lambda t: t.tolist(), "attention_mask list: expected none"),
    "an array": (lambda t: t.numpy(), "attention_mask ndarray: expected none"),
    "text": (lambda t: "x", "attention_mask str: expected none"),
    "a number": (lambda t: 1, "attention_mask int: expected none"),
    "a dictionary": (lambda t: {"full": t}, "attention_mask dict: expected none"),
    "sparse": (lambda t: t.to_sparse(), "attention_mask.*expected "),
    "on meta": (lambda t: t.to("meta"), "expected .*found one on the meta device"),
    "complex": (lambda t: t.cfloat(), "expected .*found torch.complex64"),
    "no dimension": (lambda t: t[0, 0], r"attention_mask \[\]: expected none"),
    "one dimension": (lambda t: t[0], r"attention_mask \[10\]: expected none"),
    "too short": (lambda t: t[:, :4], r"attention_mask \[1, 4\]: expected none"),
    "too long": (lambda t: torch.cat([t, t], dim=1), r"\[1, 20\].*expected"),
    "too many rows": (lambda t: t.repeat(2, 1), r"attention_mask \[2, 10\]: expected none"),
    "not numbers": (lambda t: t * NAN, "expected zeros .*found something else at row 0, token 0"),
    "fractions": (lambda t: t / 2, "expected zeros .*found something else at row 0, token 0"),
    "negative": (lambda t: -t, "expected zeros .*found something else at row 0, token 0"),
    "to be added": (lambda t: torch.where(t == 2, -torch.inf, 0.0), "found something else at row 0, token 4"),
    "to be added, finite": (lambda t: (t == 2) * torch.finfo().min, "found something else at row 0, token 4"),
})  # fmt: skip
def test_attention_mask(models, rubbish, found):
    patched, _ = models
    refused(lambda: patched(**BATCH, attention_mask=rubbish(NUMBERS)), found)
    still_right(patched)


def test_document_numbers_of_any_size_and_dtype(models):
    patched, _ = models
    for numbers in (NUMBERS * 2**61, NUMBERS.float(), NUMBERS.to(torch.uint8), NUMBERS.double() * 2**20):
        found = patched(input_ids=IDS, attention_mask=numbers).logits[0]
        assert_close(found, expected(), f"logits with numbers of {numbers.dtype}")


def test_a_mask_of_rubbish_with_a_dense_row_is_the_models_own_affair(models):
    mask = torch.where(NUMBERS == 2, -torch.inf, 0.0)
    given = {"input_ids": IDS, "attention_mask": mask, "position_ids": torch.arange(10)[None]}
    patched, plain = models
    assert torch.equal(patched(**given).logits, plain(**given).logits)


def outcome(model, call):
    # Returns the error's class, and whether it was raised in a file of fa2patch.
    with pytest.raises(Exception) as caught:
        model(**call)
    return type(caught.value), "fa2patch" in str(caught.traceback[-1].path.parent)


@cases({
    "input_ids beyond the vocabulary": ({"input_ids": IDS + 1000}, None),
    "input_ids at the end of int64": ({"input_ids": IDS + (INT64.max - 200)}, None),
    "input_ids below zero": ({"input_ids": -IDS}, None),
    "input_ids of floats": ({"input_ids": IDS.float()}, None),
    "input_ids as a list": ({"input_ids": IDS.tolist()}, "input_ids: expected .*found list"),
    "input_ids as text": ({"input_ids": "a b"}, "input_ids: expected .*found str"),
    "input_ids of one dimension": ({"input_ids": IDS[0]}, r"input_ids: expected .*found .*\[10\]"),
    "input_ids of none": ({"input_ids": IDS[0, 0]}, r"input_ids: expected .*found .*\[\]"),
    "input_ids of three": ({"input_ids": IDS[None]}, r"expected .*found \[1, 10\]"),
    "input_ids on meta": ({"input_ids": IDS.to("meta")}, "expected .*meta"),
    "no tokens": ({"input_ids": IDS[:, :0]}, r"expected \[1, 0\] .*found \[1, 10\]"),
    "neither input_ids nor inputs_embeds": ({"input_ids": None}, None),
    "both input_ids and inputs_embeds": ({"inputs_embeds": torch.ones(1, 10, 32)}, None),
    "inputs_embeds as a list": ({"input_ids": None, "inputs_embeds": [[1.0]]}, "inputs_embeds: expected .*found list"),
    "inputs_embeds without rows": ({"input_ids": None, "inputs_embeds": torch.ones(10, 32)}, r"found \[1, 10\]"),
    "inputs_embeds too narrow": ({"input_ids": None, "inputs_embeds": torch.ones(1, 10, 8)}, None),
    "labels of floats": ({"labels": IDS.float()}, None),
    "labels beyond the vocabulary": ({"labels": IDS + 1000}, None),
    "labels as a list": ({"labels": IDS.tolist()}, "labels: expected .*found list"),
    "labels as text": ({"labels": "x"}, "labels: expected .*found str"),
    "labels too short": ({"labels": IDS[:, :5]}, r"labels: expected .*found .*\[1, 5\]"),
    "labels without tokens": ({"labels": IDS[:, :0]}, r"labels: expected .*found .*\[1, 0\]"),
    "labels of too many rows": ({"labels": IDS.repeat(2, 1)}, r"labels: expected .*found .*\[2, 10\]"),
    "a cache of text": ({"past_key_values": "x"}, "a packed batch came with past_key_values"),
})  # fmt: skip
def test_other_inputs_of_a_packed_batch(models, rubbish, found):
    # fa2patch does not check token ids and dtypes. They fail in the model with the same error as without it.
    patched, plain = models
    call = {name: value for name, value in {**BATCH, **rubbish}.items() if value is not None}
    if found is None:
        error, ours = outcome(patched, call)
        assert not ours and error is outcome(plain, call)[0]
    else:
        refused(lambda: patched(**call), found)
    still_right(patched)


def test_labels_of_one_dimension_do_not_cross_documents(models):
    patched, _ = models
    assert torch.equal(patched(**BATCH, labels=IDS[0]).loss, patched(**BATCH, labels=IDS).loss)


@pytest.mark.parametrize("offset", [INT64.max - 10, INT64.min, -(10**6), 2**40])
def test_ids_of_any_size(models, offset):
    patched, plain = models
    ids = POSITIONS + offset
    found = patched(input_ids=IDS, position_ids=ids).logits[0]
    truth = [plain(input_ids=doc[None], position_ids=own) for doc, own in zip(DOCS, ids.split(LENGTHS, dim=1))]
    assert_close(found, torch.cat([output.logits[0] for output in truth]), "logits")


def test_ids_that_go_on_only_because_int64_ends_keep_documents_apart(models):
    patched, _ = models
    ids = torch.tensor([[INT64.max - 1, INT64.max, INT64.min, INT64.min + 1]])
    before = patched(input_ids=IDS[:, :4], position_ids=ids).logits[0, 2:]
    after = patched(input_ids=IDS[:, [5, 6, 2, 3]], position_ids=ids).logits[0, 2:]
    assert torch.equal(before, after)


@pytest.mark.parametrize("rubbish", [NAN, float("inf"), 1e38])
def test_a_document_that_is_not_finite_keeps_that_to_itself(models, rubbish):
    patched, _ = models
    embeddings = patched.model.embed_tokens(IDS).detach()
    before = patched(inputs_embeds=embeddings, position_ids=POSITIONS).logits[0].split(LENGTHS)
    embeddings[0, 4:9] = rubbish
    embeddings.requires_grad_()
    found = patched(inputs_embeds=embeddings, position_ids=POSITIONS).logits[0].split(LENGTHS)
    assert torch.equal(found[0], before[0]) and torch.equal(found[2], before[2])
    assert not torch.equal(found[1], before[1])
    (found[0].square().sum() + found[2].square().sum()).backward()
    of_others = torch.cat([embeddings.grad[0, :4], embeddings.grad[0, 9:]])
    assert of_others.isfinite().all() and of_others.any()


def test_a_model_on_meta_says_so(models):
    model = tiny_llama().to("meta")
    with fa2patch.apply(model):
        refused(lambda: model(**{name: ids.to("meta") for name, ids in BATCH.items()}), "expected .*meta device")
        refused(lambda: fa2patch.verify(model), "meta device")


# verify


NOT_COMPUTED = "cannot compute|expected .*found "


@cases({
    "text": ("abc", "expected .*found str"),
    "a number": (3, "expected .*found int"),
    "a list": ([1], "expected .*found list"),
    "nothing": ({}, "input_ids.*expected .*found NoneType"),
    "names that are none": ({**BATCH, 3: 3}, NOT_COMPUTED),
    "input_ids as a list": ({**BATCH, "input_ids": IDS.tolist()}, "input_ids.*expected .*found list"),
    "input_ids of floats": ({**BATCH, "input_ids": IDS.float()}, "input_ids.*expected .*found torch.float32"),
    "input_ids of one dimension": ({**BATCH, "input_ids": IDS[0]}, r"input_ids.*expected .*found torch.int64 \[10\]"),
    "no rows": ({**BATCH, "input_ids": IDS[:0]}, r"input_ids.*expected .*found torch.int64 \[0, 10\]"),
    "input_ids on meta": ({**BATCH, "input_ids": IDS.to("meta")}, "input_ids.*expected .*meta"),
    "sparse input_ids": ({**BATCH, "input_ids": IDS.to_sparse()}, "input_ids.*expected .*sparse"),
    "input_ids beyond the vocabulary": ({**BATCH, "input_ids": IDS + 1000}, NOT_COMPUTED),
    "input_ids below zero": ({**BATCH, "input_ids": -IDS}, NOT_COMPUTED),
    "position_ids as a list": ({**BATCH, "position_ids": POSITIONS.tolist()}, "position_ids: expected .*found list"),
    "position_ids on meta": ({**BATCH, "position_ids": POSITIONS.to("meta")}, "position_ids.*expected .*meta"),
    "position_ids too short": ({**BATCH, "position_ids": POSITIONS[:, :3]}, r"position_ids.*expected .*found \[1, 3\]"),
    "no position_ids": ({"input_ids": IDS}, "Expected position_ids that restart"),
    "seq_idx as a list": ({"input_ids": IDS, "seq_idx": NUMBERS.tolist()}, "seq_idx: expected .*found list"),
    "seq_idx of fractions": ({"input_ids": IDS, "seq_idx": NUMBERS / 3}, "seq_idx: expected .*found torch.float32"),
    "lengths as a list": ({"input_ids": IDS, "cu_seq_lens_q": CU.tolist()}, "cu_seq_lens: expected .*found list"),
    "lengths too short": ({"input_ids": IDS, "cu_seq_lens_q": CU[:3]}, r"found \[0, 4, 9\]"),
    "one document and an empty one": ({"input_ids": IDS, "cu_seq_lens_q": CU[[0, 0, 3]]}, "several documents"),
    "a mask too short": ({**BATCH, "attention_mask": torch.ones(1, 3)}, r"attention_mask.*expected .*found \[1, 3\]"),
    "a mask of no numbers": ({**BATCH, "attention_mask": NUMBERS * NAN}, "attention_mask: expected .*found"),
    "labels as a list": ({**BATCH, "labels": IDS.tolist()}, "labels.*expected .*found list"),
    "labels of one dimension": ({**BATCH, "labels": IDS[0]}, r"labels.*expected .*found .*\[10\]"),
    "labels of floats": ({**BATCH, "labels": IDS.float()}, NOT_COMPUTED),
    "labels beyond the vocabulary": ({**BATCH, "labels": IDS + 1000}, NOT_COMPUTED),
})  # fmt: skip
def test_a_batch_to_verify(models, rubbish, found):
    patched, _ = models
    refused(lambda: fa2patch.verify(patched, batch=rubbish), found)
    assert fa2patch.verify(patched).ok


@pytest.mark.parametrize("most", [0, -1, 1.5, "2", NAN, [1], False], ids=named)
def test_a_number_of_documents_to_verify(models, most):
    refused(lambda: fa2patch.verify(models[0], max_documents=most), f"max_documents: {FOUND}", errors.BadBatch)


@pytest.mark.parametrize(("weight", "match"), [(NAN, "not finite"), (float("inf"), "not finite"), (0.0, "all zero")])
def test_weights_of_rubbish_are_not_called_isolated(weight, match):
    model = tiny_llama()
    torch.nn.init.constant_(model.lm_head.weight, weight)
    with fa2patch.apply(model):
        refused(lambda: fa2patch.verify(model), f"outputs are {match}", errors.PackingNotIsolated)


def test_a_model_without_tokens_is_not_verified():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    refused(lambda: fa2patch.verify(transformers.ViTModel(config)), "expected .*found ViTModel")


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError])
def test_a_model_that_does_not_tell_its_embeddings_is_not_verified(error, monkeypatch):
    def get_input_embeddings():
        raise error

    model = tiny_llama()
    monkeypatch.setattr(model, "get_input_embeddings", get_input_embeddings, raising=False)
    refused(lambda: fa2patch.verify(model), "get_input_embeddings|expected .*found LlamaForCausalLM")


def test_one_row_of_ids_without_a_batch_is_computed_as_without_fa2patch():
    model = tiny_models.build("gpt2", "eager")
    try:
        dense = model(IDS[0]).logits
    except Exception as error:  # 5.x does not take such a row
        with fa2patch.apply(model), pytest.raises(type(error)):
            model(IDS[0])
    else:
        with fa2patch.apply(model):
            assert torch.equal(model(IDS[0]).logits, dense)
