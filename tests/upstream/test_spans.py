"""Gemma 3 and PaliGemma: the tokens of a picture, or of a prefix, see each other in both directions in a packed row."""

from types import SimpleNamespace

import pytest
import span_cases as cases
import torch
import transformers

import fa2patch
from compat_matrix.check.compare import assert_close
from fa2patch import errors
from fa2patch.documents import tensors
from fa2patch.documents.boundaries import Boundaries
from fa2patch.upstream import masks
from fa2patch.upstream.facts import Facts
from fa2patch.upstream.masks import Blocks
from fa2patch.upstream.packed_mask import PackedMask
from fa2patch.upstream.split.row_part import RowPart

FAMILIES = [
    pytest.param(family, marks=pytest.mark.skipif(not cases.is_present(family), reason=transformers.__version__))
    for family in cases.FAMILIES
]
only_gemma3 = pytest.mark.skipif(not cases.is_present("gemma3"), reason=transformers.__version__)
only_paligemma = pytest.mark.skipif(not cases.is_present("paligemma"), reason=transformers.__version__)
# The tolerance of a gradient is relative to the largest of its parameter, or to a ten-thousandth of the largest of all.
TOLERANCE = 2e-4


def assert_same(found, expected):
    assert_close(found[0], expected[0], "outputs")
    assert found[1].keys() == expected[1].keys()
    largest = max(truth.abs().max() for truth in expected[1].values())
    for name, truth in expected[1].items():
        error = (found[1][name] - truth).abs().max() / truth.abs().max().clamp(min=1e-4 * largest)
        assert error < TOLERANCE, name


def documents_alone(model, docs, **call):
    return cases.with_gradients(model, [cases.alone(model, doc, **call) for doc in docs])


def assert_row(model, row, expected):
    assert_same(cases.with_gradients(model, [model(**row, use_cache=False).logits[0]]), expected)


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_document_of_a_packed_row_equals_itself_alone(family, labels):
    # Up to 4.57, PaliGemma's suffix is causal only with labels.
    model, docs = cases.build(family), cases.documents(family)
    without = {} if labels else {"labels": None}
    expected = documents_alone(model, docs, **without)
    with fa2patch.apply(model):
        row = {**cases.packed(docs), **without}
        assert_row(model, row, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_several_rows(family):
    model, docs = cases.build(family), cases.documents(family)
    rows = [cases.packed(docs[:2]), cases.packed(docs[2:])]
    expected = documents_alone(model, docs)
    length = max(row["input_ids"].shape[1] for row in rows) + 3
    sizes = [row["input_ids"].shape[1] for row in rows]
    fill = {"input_ids": 0, "token_type_ids": 0, "labels": -100, "position_ids": 0, "attention_mask": 0}
    for row in rows:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    batch = {
        name: torch.cat(
            [torch.nn.functional.pad(row[name], (0, length - row[name].shape[1]), value=value) for row in rows]
        )
        for name, value in fill.items()
    }
    batch["pixel_values"] = torch.cat([row["pixel_values"] for row in rows])
    with fa2patch.apply(model):
        logits = model(**batch, use_cache=False).logits
        assert_same(cases.with_gradients(model, [row[:size] for row, size in zip(logits, sizes)]), expected)
        cu = [0]
        for number, part in enumerate((docs[:2], docs[2:])):
            ends = torch.tensor([doc["input_ids"].shape[1] for doc in part]).cumsum(0).tolist()
            cu += [number * length + end for end in ends[:-1]] + [(number + 1) * length]
        del batch["position_ids"]  # padding is then in the last document of each row
        stated = {"cu_seq_lens_q": torch.tensor(cu, dtype=torch.int32), "max_length_q": length}
        logits = model(**batch, **stated, use_cache=False).logits
        assert_same(cases.with_gradients(model, [row[:size] for row, size in zip(logits, sizes)]), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_documents_change_no_bit_and_get_no_gradient(family):
    model, docs = cases.build(family), cases.documents(family)
    with fa2patch.apply(model):
        row = cases.packed(docs)
        before = model(**row, use_cache=False).logits[0].detach()
        start = docs[0]["input_ids"].shape[1]
        stop = start + docs[1]["input_ids"].shape[1]
        row["pixel_values"] = row["pixel_values"].requires_grad_()
        pictures = [len(doc.get("pixel_values", ())) for doc in docs]
        output = model(**row, use_cache=False).logits[0]
        output[start:stop].square().sum().backward()
        inside = slice(pictures[0], pictures[0] + pictures[1])
        grad = row["pixel_values"].grad
        assert (grad.flatten(1).abs().amax(1) > 0).tolist() == [
            i in range(inside.start, inside.stop) for i in range(len(grad))
        ]
        other = row["pixel_values"].detach().clone()
        other[inside] += 1
        changed = (model(**{**row, "pixel_values": other}, use_cache=False).logits[0] != before).any(1)
        assert changed[start:stop].any() and not changed[:start].any() and not changed[stop:].any()


@only_gemma3
def test_the_first_token_of_a_picture_sees_the_last_one_and_text_does_not():
    model = cases.build("gemma3")
    with fa2patch.apply(model):
        docs = [cases.document("gemma3", 3, seed=1), cases.document("gemma3", 2, "picture", 2, seed=2)]
        row = {name: value for name, value in cases.packed(docs).items() if name not in ("pixel_values", "labels")}
        embeds = model.get_input_embeddings()(row.pop("input_ids")).detach().requires_grad_()
        output = model(inputs_embeds=embeds, **row, use_cache=False).logits[0]
        seen = [torch.autograd.grad(output[at].sum(), embeds, retain_graph=True)[0][0].any(1) for at in (5, 4, 9)]
    assert seen[0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 7, 8]
    assert seen[1].nonzero()[:, 0].tolist() == [3, 4]
    assert not seen[2][:3].any() and not seen[2][10:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_longer_than_the_window(family):
    if family == "paligemma":
        pytest.skip("it has no window")
    model = cases.build(family, sliding_window=7)
    docs = [cases.document(family, "picture", 3, 20, seed=1), cases.document(family, "picture", 1, 18, seed=2)]
    expected = documents_alone(model, docs)
    with fa2patch.apply(model):
        assert_row(model, cases.packed(docs), expected)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4Config"), reason=transformers.__version__)
def test_gemma_4_sees_pictures_both_ways_in_the_layers_in_which_its_version_does():
    # Pictures are tokens of types 1 and 2. In 5.23 only sliding layers let them see each other, in 5.10 all layers do.
    model = cases.gemma4()
    kinds = [[0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0], [0, 0, 0]]
    docs = [
        {"input_ids": torch.arange(9, 9 + len(one))[None], "mm_token_type_ids": torch.tensor([one])} for one in kinds
    ]
    expected = documents_alone(model, docs)
    row = {name: torch.cat([doc[name] for doc in docs], 1) for name in docs[0]}
    row["position_ids"] = torch.cat([torch.arange(len(one)) for one in kinds])[None]
    with fa2patch.apply(model):
        assert_row(model, row, expected)


@only_gemma3
def test_a_picture_longer_than_the_window_is_refused():
    model = cases.build("gemma3", sliding_window=3)
    with fa2patch.apply(model), pytest.raises(errors.PackingNotIsolated, match="sliding window of 3 tokens"):
        model(**cases.packed(cases.documents("gemma3")), use_cache=False)


@only_paligemma
def test_a_prefix_behind_the_suffix_is_refused_or_right():
    # In 5.0 the tokens behind the suffix are a block of their own, which is a span.
    model, docs = cases.build("paligemma"), cases.documents("paligemma")
    docs[1]["token_type_ids"][0, -1] = 0
    expected = torch.cat([cases.alone(model, doc) for doc in docs])
    with fa2patch.apply(model):
        try:
            found = model(**cases.packed(docs), use_cache=False).logits[0]
        except errors.PackingNotIsolated as error:
            assert "two pieces of one document" in str(error) or "does not begin the document" in str(error)
        else:
            assert_close(found, expected, "a block of one token")


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_with_pictures_are_refused(family):
    model, docs = cases.build(family), cases.documents(family)
    lengths = [doc["input_ids"].shape[1] for doc in docs]
    row = cases.packed(docs)
    del row["position_ids"], row["labels"]
    tree = {
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
        "segment_parents": torch.tensor([-1, 0, 0, 0]),
    }
    tree["segment_parents"] = tree["segment_parents"][: len(lengths)].int()
    message = "shared prompts|later tokens"
    with fa2patch.apply(model), pytest.raises((errors.PackingNotIsolated, errors.BadParents), match=message):
        model(**row, **tree, use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_knows_the_spans(family):
    docs = [{**doc} for doc in cases.documents(family)]
    row = {name: value for name, value in cases.packed(docs).items() if name != "pixel_values"}
    row["input_ids"] = torch.where(row["input_ids"] == cases.PICTURE, 9, row["input_ids"])
    row["labels"] = row["input_ids"].masked_fill(row["labels"] == -100, -100)
    model = cases.build(family).eval()
    fa2patch.apply(model)
    assert fa2patch.verify(model, batch=row).ok


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_are_read_at_most_once(family, monkeypatch):
    model, row = cases.build(family), cases.packed(cases.documents(family))
    reads = []
    read = tensors.read
    with fa2patch.apply(model):
        model(**row, use_cache=False)
        monkeypatch.setattr(tensors, "read", lambda tensor: reads.append(tensor) or read(tensor))
        monkeypatch.setattr(tensors, "require", lambda *given: None)
        model(**row, use_cache=False)
    spans = [tensor for tensor in reads if tensor.numel() > row["input_ids"].numel() + 1]
    assert len(spans) <= 1  # none for the reference on a CPU, if no layer has a window


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_model_computes_spans(family):
    model, docs = cases.build(family), cases.documents(family)
    row = {name: value for name, value in cases.packed(docs).items() if name not in ("pixel_values", "labels")}
    row["input_ids"] = torch.where(row["input_ids"] == cases.PICTURE, 9, row["input_ids"])
    fa2patch.apply(model)
    expected = model(**row, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(compiled(**row, use_cache=False).logits, expected, "compiled")


def test_rows_that_are_split_over_processes_are_refused_if_they_have_spans():
    documents = Boundaries(torch.tensor([0, 3, 8], dtype=torch.int32), 5)
    mask = PackedMask(documents, None, (1, 4), 5, part=RowPart(0, 2, None, "group", "sequence parallelism (sp_size)"))
    assert masks.with_spans(mask, Blocks(torch.full((1, 4), -1), None)) is mask
    with pytest.raises(errors.PackingNotIsolated, match="sequence parallelism .* see each other in both directions"):
        masks.with_spans(mask, Blocks(torch.zeros(1, 4, dtype=torch.long), None))


def create_causal_mask(config, attention_mask, or_mask_function=None):
    raise AssertionError("it is not called")


def test_a_function_that_says_something_unknown_is_refused():
    made, mask = masks.let_through(create_causal_mask), mask_of(3, 5)
    assert made(None, mask) is mask
    with pytest.raises(errors.PackingNotIsolated, match="create_causal_mask was called with or_mask_function"):
        made(None, mask, or_mask_function=lambda *given: True)


@pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
def test_types_of_pictures_that_a_function_does_not_hand_on_are_refused(name):
    # Gemma 4's types had a name that was not known: 5.5 to 5.8 computed its pictures as text, in silence.

    def create_masks(config, attention_mask, **types):
        raise AssertionError("it is not called")

    made, mask = masks.let_through(create_masks), mask_of(3, 5)
    assert made(None, mask, **{name: torch.zeros(1, 8, dtype=torch.long)}) is mask
    with pytest.raises(errors.PackingNotIsolated, match=f"create_masks was called with {name}"):
        made(None, mask, **{name: torch.ones(1, 8, dtype=torch.long)})


@pytest.mark.parametrize("held", ["image_group_ids", "group_ids", "block_sequence_ids"])
def test_the_blocks_of_a_closure_are_known_by_each_name_that_it_gave_them(held):
    numbers = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1]])
    scope = {}
    exec(f"def overlay({held}):\n    return lambda q, k: {held}[q] == {held}[k]", scope)

    found = masks.let_through(create_causal_mask)(None, mask_of(3, 5), or_mask_function=scope["overlay"](numbers))
    assert found.boundaries.until.tolist() == [0, 2, 2, 3, 4, 7, 7, 7]


def test_pictures_that_see_each_other_by_their_distance_are_one_to_a_document():
    # Gemma 3's closure in 4.53 holds the types and a distance. Two pictures of a document see each other, too.

    def overlay(token_type_ids, tokens_per_image):
        return lambda q, k: token_type_ids[q] == token_type_ids[k] and abs(q - k) <= tokens_per_image

    made, mask = masks.let_through(create_causal_mask), mask_of(3, 5)
    found = made(None, mask, or_mask_function=overlay(torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1]]), 3))
    assert found.boundaries.until.tolist() == [0, 2, 2, 3, 4, 7, 7, 7]
    with pytest.raises(errors.PackingNotIsolated):
        made(None, mask_of(3, 5), or_mask_function=overlay(torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]]), 3))


def test_a_function_that_has_its_masks_made_by_others_is_called():
    # Gemma 4's in 5.5 to 5.8 is one: its masks of sliding layers hold the pictures, those of full layers do not.
    numbers, mask = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1]]), mask_of(3, 5)

    scope = {"create_causal_mask": masks.let_through(create_causal_mask), "__name__": "modeling_gemma4"}
    exec(MAPPING, scope)
    full, sliding = masks.let_through(scope["create_causal_mask_mapping"])(None, mask, numbers)
    assert full is mask and sliding.boundaries.until.tolist() == [0, 2, 2, 3, 4, 7, 7, 7]


MAPPING = """
def create_causal_mask_mapping(config, attention_mask, mm_token_type_ids):
    group_ids = mm_token_type_ids
    more = {"or_mask_function": lambda q, k: group_ids[q] == group_ids[k]}
    return create_causal_mask(config, attention_mask), create_causal_mask(config, attention_mask, **more)
"""


def mask_of(*lengths):
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    of_a_decoder = Facts(both_ways=False)
    return PackedMask(Boundaries(ends, max(lengths)), None, (1, sum(lengths)), max(lengths), facts=of_a_decoder)


def test_a_model_that_makes_its_prefix_mask_while_it_merges_pictures_is_refused():
    # PaliGemma in 4.41 to 4.44 does so.

    class Old:
        def _merge_input_ids_with_image_features(self, image_features, token_type_ids):
            raise AssertionError("it is not called")

    class Llava:
        def _merge_input_ids_with_image_features(self, image_features):
            raise AssertionError("it is not called")

    masks.look(SimpleNamespace(model=Llava(), entered=(Llava(),), mask_makers={}), Facts())
    with pytest.raises(errors.UnsupportedModel, match="Old makes the mask of its prefix .* Upgrade Transformers"):
        masks.look(SimpleNamespace(model=Llava(), entered=(Llava(), Old())), Facts())
