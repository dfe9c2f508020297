"""Packed rows with pictures: each document is computed as the unpatched model computes it alone."""

import pickle

import multimodal_cases as cases
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from fa2patch import DataCollatorForMultimodalFlattening
from fa2patch.documents.find import find_boundaries
from fa2patch.documents.given_boundaries import from_cu_seqlens
from fa2patch.errors import BadPositionIds, BoundaryConflict, CollatorError, PackingNotIsolated
from fa2patch.upstream.axes import takes_text_axis

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
PRESENT = [family for family in cases.FAMILIES if cases.is_present(family)]
# GLM-4V's processor writes a film's frames as pictures between its own tokens.
WITH_FILMS = [family for family in PRESENT if family != "glm4v"]


def films_of(model):
    # 4.54's Qwen2-VL looks for a film's tokens among those of pictures.
    if model.config.model_type == "glm4v":
        return False
    try:
        cases.alone(model, cases.document(model, 1, ("film", 1, 4, 4), 1))
    except ValueError as error:
        assert "Video features and video tokens do not match" in str(error)
        return False
    return True


@pytest.fixture(params=PRESENT)
def family(request):
    return request.param


def documents(model):
    return [
        cases.document(model, 3, (1, 4, 8), 2, seed=1),
        cases.document(model, 5, seed=2),
        cases.document(model, 2, (1, 4, 4), 1, (1, 8, 4), 4, seed=3),
    ]


def packed(model, docs, **options):
    row = DataCollatorForMultimodalFlattening(model, **options)(docs)
    return row, row.pop("labels")


def without(row, *names, **changes):
    return {**{name: value for name, value in row.items() if name not in names}, **changes}


def rows_of(row):
    # The row is given with all the information about where documents start, and with less of it.
    bare = without(row, *LENGTHS)
    three = row["position_ids"][-3:]
    yield "as collated", row
    yield "ids without lengths", bare
    yield "time, height and width alone", {**bare, "position_ids": three}
    yield "time, height and width with lengths", {**row, "position_ids": three}
    text = torch.cat([torch.arange(n) for n in row["cu_seq_lens_q"].diff()])[None, None]
    yield "with the text's axis, also where the model takes three", {**bare, "position_ids": torch.cat([text, three])}


def assert_computed_as_alone(model, reference, docs):
    row, _ = packed(model, docs)
    with torch.no_grad(), fa2patch.apply(model):
        expected = torch.cat([cases.alone(reference, doc) for doc in docs])
        for what, given in rows_of(row):
            assert_close(model(**given).logits[0], expected, what)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_each_document_is_computed_as_alone(family, implementation):
    reference, model = cases.build(family), cases.build(family, implementation)
    docs = documents(reference)
    assert_computed_as_alone(model, reference, docs)


@pytest.mark.parametrize("family", WITH_FILMS)
@pytest.mark.parametrize("frames", [2, 5])
def test_films_too_and_where_text_goes_on_below_their_last_time(family, frames):
    reference, model = cases.build(family), cases.build(family)
    if not films_of(reference):
        pytest.skip("the unpatched model fails on any film in this version")
    film = cases.document(reference, 3, ("film", frames, 4, 4), 6, seed=1)
    docs = [film, cases.document(reference, 2, (1, 4, 4), ("film", 2, 4, 8), 2, seed=2), film]
    assert_computed_as_alone(model, reference, docs)


@pytest.mark.skipif("qwen2_5_vl" not in PRESENT, reason="came with 4.49")
def test_films_of_any_rate():
    reference, model = cases.build("qwen2_5_vl"), cases.build("qwen2_5_vl")
    docs = []
    for seconds in (0.1, 1.0, 4.0):
        doc = cases.document(reference, 3, ("film", 4, 4, 8), 6, seed=1)
        docs.append({**doc, "second_per_grid_ts": torch.tensor([seconds])})
    row, _ = packed(model, docs)
    assert "second_per_grid_ts" not in row and len(row["video_grid_thw"]) == 3
    assert_computed_as_alone(model, reference, docs)


def test_a_changed_document_moves_no_other(family):
    model = cases.build(family)
    docs = documents(model)
    row, _ = packed(model, docs)
    mixture = family == "qwen3_vl_moe"  # its experts get another number of tokens at a time, so rounding differs
    with torch.no_grad(), fa2patch.apply(model):
        for what, given in rows_of(row):
            before = model(**given).logits[0]
            first, _, third = before.split(np.diff(row["cu_seq_lens_q"]).tolist())
            pixels = given["pixel_values"].clone()
            pixels[: docs[0]["pixel_values"].shape[0]] += 1
            ids = given["input_ids"].clone()
            ids[0, :2] = torch.tensor([11, 12])
            for change in ({"pixel_values": pixels}, {"input_ids": ids}):
                after = model(**{**given, **change}).logits[0]
                moved = after.split(np.diff(row["cu_seq_lens_q"]).tolist())
                assert not torch.equal(moved[0], first), what
                if mixture:
                    assert_close(moved[2], third, what)
                else:
                    assert torch.equal(after[len(first) :], before[len(first) :]), what


def test_no_gradient_crosses_a_boundary(family):
    model = cases.build(family)
    docs = documents(model)
    row, _ = packed(model, docs)
    embedded = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: embedded.append(output.requires_grad_()) or output
    )
    with fa2patch.apply(model, prove=False):  # the hook only looks
        pixels = row["pixel_values"].clone().requires_grad_()
        logits = model(**{**row, "pixel_values": pixels}).logits[0]
    hook.remove()
    ends = row["cu_seq_lens_q"].tolist()
    patches = len(docs[0]["pixel_values"])
    of_last = torch.autograd.grad(logits[ends[2] :].square().sum(), (embedded[0], pixels), retain_graph=True)
    assert not of_last[0][0, : ends[2]].any() and of_last[0][0, ends[2] :].any()
    assert not of_last[1][:patches].any() and of_last[1][patches:].any()
    of_first = torch.autograd.grad(logits[: ends[1]].square().sum(), (embedded[0], pixels))
    assert not of_first[0][0, ends[1] :].any() and of_first[1][:patches].any() and not of_first[1][patches:].any()


def test_training_on_a_row_gives_the_gradients_of_its_documents(family):
    model, reference = cases.build(family), cases.build(family)
    docs = documents(reference)
    row, labels = packed(model, docs)
    model.train().gradient_checkpointing_enable()
    with fa2patch.apply(model):
        loss = model(**row, labels=labels).loss
        loss.backward()
    learned = (labels != -100).sum()
    expected = 0
    for doc, target in zip(docs, labels[0].split([doc["input_ids"].shape[1] for doc in docs])):
        logits = cases.alone(reference.train(), doc)[:-1]
        expected = expected + torch.nn.functional.cross_entropy(logits, target[1:], reduction="sum") / learned
    expected.backward()
    assert_close(loss.detach(), expected.detach(), "loss")
    gradients = dict(reference.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in gradients.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        if gradients[name].grad is not None:
            assert_close(parameter.grad, gradients[name].grad, name, 5e-5, at_least=0.01 * largest)


def test_rows_that_are_not_packed_are_computed_as_before(family):
    unpatched, model = cases.build(family), cases.build(family)
    parts = (3, (1, 4, 8), 2, *([("film", 5, 4, 4), 6] if films_of(model) else []))
    doc = cases.document(model, *parts)
    two = {name: torch.cat([value, value]) for name, value in doc.items()}
    with torch.no_grad(), fa2patch.apply(model):
        for given in (doc, two, without(doc, "attention_mask") if hasattr(model.model, "get_rope_index") else doc):
            try:
                expected = unpatched(**given).logits
            except AttributeError:  # 4.53 and 4.54 fail on a row without a mask
                continue
            assert torch.equal(model(**given).logits, expected)


def of_one_axis(row):
    # The row as collators make it that know of one axis only: with ids, with lengths, or with both.
    lengths = row["cu_seq_lens_q"].diff()
    ids = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    yield without(row, *LENGTHS, position_ids=ids)
    yield without(row, *LENGTHS, position_ids=ids[None])
    yield without(row, position_ids=ids)
    yield without(row, "position_ids")
    numbers = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)[None]
    yield without(row, *LENGTHS, "position_ids", attention_mask=numbers)
    yield without(row, *LENGTHS, attention_mask=numbers, position_ids=ids)


def test_pictures_with_ids_on_one_axis_or_none_are_counted_as_in_a_padded_batch(family):
    reference, model = cases.build(family), cases.build(family)
    docs = documents(model)
    if family in WITH_FILMS and films_of(cases.build(family)):
        docs.append(cases.document(model, 2, ("film", 2, 4, 4), 3, seed=5))
    row, _ = packed(model, docs)
    with torch.no_grad(), fa2patch.apply(model):
        expected = padded_logits(reference, docs)
        for given in of_one_axis(row):
            assert_close(model(**given).logits[0], expected, "ids on one axis")


def padded_logits(model, docs):
    # The unpatched model counts the positions of the padded batch.
    columns = [name for name in ("input_ids", "attention_mask", "mm_token_type_ids") if name in docs[0]]
    batch = {name: pad_sequence([doc[name][0] for doc in docs], batch_first=True) for name in columns}
    for name in {name for doc in docs for name in doc} - {*columns, "mm_token_type_ids"}:
        batch[name] = torch.cat([doc[name] for doc in docs if name in doc])
    logits = model(**batch, use_cache=False).logits
    return torch.cat([one[: doc["input_ids"].shape[1]] for one, doc in zip(logits, docs)])


def test_gradients_of_pictures_with_ids_on_one_axis(family):
    reference, model = cases.build(family).train(), cases.build(family).train()
    docs = documents(model)
    row, _ = packed(model, docs)
    flat = next(of_one_axis(row))
    weights = torch.randn(1, model.config.get_text_config().vocab_size, generator=torch.Generator().manual_seed(4))
    with fa2patch.apply(model):
        (model(**flat).logits[0] * weights).sum().backward()
    (padded_logits(reference, docs) * weights).sum().backward()
    expected = {name: weight.grad for name, weight in reference.named_parameters() if weight.grad is not None}
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert_same_gradients(found, expected, GRADIENT_TOLERANCE, 0.01)


@pytest.mark.parametrize("change", ["jump", "start", "inside a picture", "embeds", "no types"])
def test_pictures_whose_positions_cannot_be_counted_are_refused(family, change):
    model = cases.build(family)
    row, _ = packed(model, documents(model))
    ids = torch.cat([torch.arange(n) for n in row["cu_seq_lens_q"].diff().tolist()])[None]
    given, match = without(row, position_ids=ids), "get_rope_index does not count"
    if change == "jump":
        given["position_ids"], match = ids + 5 * (ids > 3), "do not count the tokens of each document from 0"
    elif change == "start":
        given["position_ids"], match = ids + 1, "do not count the tokens of each document from 0"
    elif change == "inside a picture":
        cut = given["cu_seq_lens_q"].clone()
        cut[1] = 7
        given = without(given, "position_ids", cu_seq_lens_q=cut, cu_seq_lens_k=cut, max_length_q=99, max_length_k=99)
    elif change == "embeds":
        given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
        match = "and there are none"
    elif "mm_token_type_ids" not in row:
        return
    else:
        given.pop("mm_token_type_ids")
    with torch.no_grad(), fa2patch.apply(model), pytest.raises(PackingNotIsolated, match=match):
        model(**given)


@pytest.mark.parametrize(
    "collator", [fa2patch.DataCollatorWithFlattening(), fa2patch.DataCollatorForCompletionOnlyLM([1])]
)
def test_a_collator_for_text_that_is_given_pictures_names_the_other(collator):
    example = {"input_ids": [1, 2, 3], "image_grid_thw": torch.tensor([[1, 4, 4]]), "pixel_values": torch.zeros(16, 8)}
    with pytest.raises(CollatorError, match="DataCollatorForMultimodalFlattening"):
        collator([example])
    with pytest.raises(CollatorError, match="DataCollatorForMultimodalFlattening"):
        collator([{**example, "image_grid_thw": [[1, 4, 4]], "pixel_values": [[0.0] * 8] * 16}] * 2)


def test_the_lengths_of_documents_do_not_reach_the_tower(family):
    model = cases.build(family)
    row, _ = packed(model, documents(model))
    handed = []
    tower = model.visual if hasattr(model, "visual") else model.model.visual
    tower.register_forward_pre_hook(lambda module, args, kwargs: handed.append(set(kwargs)), with_kwargs=True)
    with torch.no_grad(), fa2patch.apply(model):
        model(**row)
    assert handed and not handed[0] & set(LENGTHS)


def test_ids_that_may_be_a_start_or_not_are_refused():
    picture = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])[:, None]
    assert find_boundaries((1, 8), picture.device, position_ids=picture) is None
    for later in ([3, 3, 3], [9, 9, 9], [1, 1, 1], [1, 5, 5]):
        ids = picture.clone()
        ids[:, 0, 7] = torch.tensor(later)
        for look in (fa2patch.boundaries, lambda ids: find_boundaries((1, 8), ids.device, position_ids=ids)):
            with pytest.raises(BadPositionIds, match="a document's start, or not"):
                look(ids)
        seq_idx = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1]])
        assert find_boundaries((1, 8), ids.device, position_ids=ids, seq_idx=seq_idx).lengths == (7, 1)
        assert find_boundaries((1, 8), ids.device, position_ids=ids, only_certain=True) is None
        assert from_cu_seqlens(torch.tensor([0, 7, 8]), 7, (1, 8), position_ids=ids).lengths == (7, 1)
        if later == [9, 9, 9]:  # a jump upwards, which lengths may say is none of a document's start
            assert from_cu_seqlens(torch.tensor([0, 8]), 8, (1, 8), position_ids=ids).lengths == (8,)
            continue
        with pytest.raises(BoundaryConflict):
            from_cu_seqlens(torch.tensor([0, 8]), 8, (1, 8), position_ids=ids)


def test_the_row_holds_what_the_examples_hold_in_their_order():
    model = cases.build("qwen2_vl")
    docs = documents(model)
    row, labels = packed(model, docs, pad_to_multiple_of=16, pad_token_id=7, return_seq_idx=True)
    lengths = [doc["input_ids"].shape[1] for doc in docs]
    padding = -sum(lengths) % 16
    assert row["cu_seq_lens_q"].tolist() == np.cumsum([0, *lengths, padding]).tolist()
    assert row["input_ids"].shape == labels.shape == row["seq_idx"].shape == (1, sum(lengths) + padding)
    assert (row["input_ids"][0, sum(lengths) :] == 7).all() and (labels[0, sum(lengths) :] == -100).all()
    assert (labels[0, row["cu_seq_lens_q"][:-1].long()] == -100).all()
    assert (labels[row["input_ids"] == cases.PICTURE] == -100).all()
    assert len(row["position_ids"]) == (4 if takes_text_axis(cases.decoder(model)) else 3)
    assert torch.equal(row["pixel_values"], torch.cat([docs[0]["pixel_values"], docs[2]["pixel_values"]]))
    assert row["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4], [1, 8, 4]]
    assert fa2patch.boundaries(row["position_ids"]).lengths == (*lengths, padding)
    with torch.no_grad(), fa2patch.apply(model):
        expected = torch.cat([cases.alone(cases.build("qwen2_vl"), doc) for doc in docs])
        assert_close(model(**without(row, "seq_idx")).logits[0, : len(expected)], expected, "padded to a multiple")


def test_a_collator_is_made_of_a_config_or_a_wrapped_model_and_is_sent_to_workers(family):
    model = cases.build(family)
    docs = documents(model)
    expected = DataCollatorForMultimodalFlattening(model)(docs)
    wrapped = DataCollatorForMultimodalFlattening(torch.nn.ModuleDict({"module": model}))
    for collator in (wrapped, DataCollatorForMultimodalFlattening(model.config)):
        sent = pickle.dumps(collator)
        assert len(sent) < 50_000
        found = pickle.loads(sent)(docs)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def test_what_a_mask_hides_is_dropped_and_lists_are_as_good_as_tensors():
    model = cases.build("qwen2_vl")
    docs = documents(model)
    padded = []
    for doc in docs:
        sizes = {"input_ids": 7, "attention_mask": 0, "mm_token_type_ids": 0}
        new = {n: torch.nn.functional.pad(v, (2, 3), value=sizes[n]) if n in sizes else v for n, v in doc.items()}
        padded.append({n: v.tolist() if n in sizes or n.endswith("thw") else v.numpy() for n, v in new.items()})
    collator = DataCollatorForMultimodalFlattening(model)
    found = collator(padded)
    for name, value in collator(docs).items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("family", ["qwen2_vl"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_example_without_tokens_is_left_out_and_counted(family, place):
    model = cases.build(family)
    docs = documents(model)
    collator = DataCollatorForMultimodalFlattening(model)
    expected = collator(docs)
    assert collator.empty == 0
    columns = [name for name, value in docs[1].items() if value.shape == docs[1]["input_ids"].shape]
    found = collator([*docs[:place], {name: docs[1][name][:, :0] for name in columns}, *docs[place:]])
    assert collator.empty == 1 and found.parts == expected.parts and found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
    with pytest.raises(CollatorError, match="the only example of the batch came without tokens"):
        collator([{"input_ids": []}])
    with pytest.raises(CollatorError, match="placeholders"):
        collator([{**docs[0], **{name: docs[0][name][:, :0] for name in columns}}, docs[1]])


def _changed(doc, **changes):
    return {name: value for name, value in {**doc, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda doc: {"pixel_values": None}, "image_grid_thw without pixel_values"),
        (lambda doc: {"image_grid_thw": None}, "pixel_values without image_grid_thw"),
        (lambda doc: {"pixel_values": doc["pixel_values"][1:]}, "says 32 patches, pixel_values holds 31"),
        (lambda doc: {"image_grid_thw": torch.tensor([1, 4, 8])}, r"integers \[pictures, 3\]"),
        (lambda doc: {"image_grid_thw": doc["image_grid_thw"].float()}, r"integers \[pictures, 3\]"),
        (lambda doc: {"image_grid_thw": None, "pixel_values": None}, "expected 0 placeholders"),
        (lambda doc: {n: doc[n][:, :-5] for n in doc if doc[n].shape == doc["input_ids"].shape}, "truncated"),
        (lambda doc: {"position_ids": torch.zeros_like(doc["input_ids"])}, "made by the collator"),
        (lambda doc: {"pixel_values": object()}, "no array of numbers"),
        (lambda doc: {"labels": [1]}, "labels has length 1"),
    ],
)
def test_examples_that_cannot_be_put_into_a_row_are_refused(change, match):
    model = cases.build("qwen2_vl")
    doc = cases.document(model, 3, (1, 4, 8), 2)
    with pytest.raises(CollatorError, match=match):
        DataCollatorForMultimodalFlattening(model)([_changed(doc, **change(doc))])


def test_types_of_tokens_are_asked_for_where_the_model_counts_with_them():
    model = cases.build("qwen2_vl")
    doc = without(cases.document(model, 3, (1, 4, 8), 2), "mm_token_type_ids")
    collator = DataCollatorForMultimodalFlattening(model)
    if not cases.takes_types(model):
        assert "mm_token_type_ids" not in collator([doc])
        return
    with pytest.raises(CollatorError, match="mm_token_type_ids missing"):
        collator([doc])
    text = without(cases.document(model, 4), "mm_token_type_ids")
    assert not collator([text, cases.document(model, 3, (1, 4, 8), 2)])["mm_token_type_ids"][0, :4].any()


@pytest.mark.parametrize("model", [torch.nn.Linear(1, 1), object(), tiny_models.config_of("llama")])
def test_a_model_without_several_axes_has_another_collator(model):
    with pytest.raises(CollatorError, match="model: expected"):
        DataCollatorForMultimodalFlattening(model)
    with pytest.raises(CollatorError, match="DataCollatorWithFlattening is for it"):
        DataCollatorForMultimodalFlattening(tiny_models.build("llama"))


def test_of_several_models_in_a_module_none_is_taken_in_silence():
    holder = torch.nn.Module()
    holder.policy, holder.reward = tiny_models.build("llama"), tiny_models.build("qwen2")
    with pytest.raises(CollatorError, match=r"found 2 of them in this Module, policy \(LlamaForCausalLM\), reward"):
        DataCollatorForMultimodalFlattening(holder)
