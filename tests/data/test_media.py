"""Packed rows with pictures or sound of any model, joined by the table of keys, which docs/pictures.md shows."""

import functools
import pickle
from pathlib import Path

import pytest
import torch

import fa2patch
from compat_matrix import tiny_media, tiny_models
from compat_matrix.check.cell import Cell
from compat_matrix.check.points import media
from fa2patch import DataCollatorForMultimodalFlattening
from fa2patch.documents.names import JOINS, KEYS
from fa2patch.errors import BadBatch, CollatorError, PackingNotIsolated
from fa2patch.upstream.find_layers import ModelLayers

PRESENT = [name for name in tiny_media.FAMILIES if tiny_models.is_present(name) and tiny_media.is_expanded(name)]
NAMES = [
    "packed_row",
    "nothing_crosses",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("inertness", "refusals")),
]


def needs(family):
    return pytest.mark.skipif(family not in PRESENT, reason=f"this Transformers has no {family}")


@functools.cache
def failure_alone(family):
    return media.failure_alone(Cell(family, "sdpa"))


@pytest.fixture(params=PRESENT)
def cell(request):
    failure = failure_alone(request.param)
    if failure:
        pytest.skip(failure)  # Llama 4 in 5.0, 5.1 and 5.24: compat_matrix/xfail.toml
    return Cell(request.param, "sdpa")


@pytest.mark.parametrize("name", NAMES)
def test_each_document_sees_its_own_pictures_only(cell, name):
    media.POINTS[name](cell)


def test_verify_takes_the_row_that_the_collator_returned(cell):
    model = cell.model()
    row = DataCollatorForMultimodalFlattening(model)(media.documents(cell))
    with fa2patch.apply(model):
        assert fa2patch.verify(model, batch=pickle.loads(pickle.dumps(row))).ok
        with pytest.raises(BadBatch, match="the very object that fa2patch.DataCollatorForMultimodalFlattening"):
            fa2patch.verify(model, batch=dict(row))


def test_the_tower_is_not_patched_and_gets_no_lengths(cell):
    model = cell.model()
    patch = fa2patch.apply(model)
    towers = ("vision", "visual", "audio", "image", "perceiver", "connector", "projector")
    assert patch.layers and not [layer.name for layer in patch.layers if any(word in layer.name for word in towers)]


@needs("phi4_multimodal:sound")
def test_convolutions_of_an_encoder_inside_the_decoder_are_not_on_the_tokens_way():
    model = tiny_models.build("phi4_multimodal:sound", "sdpa")
    layers = ModelLayers(model)
    assert layers.carrying == {}
    assert {layer.name for layer in layers.attention} == {"layers.0.self_attn", "layers.1.self_attn"}
    with fa2patch.apply(model):
        assert fa2patch.verify(model).ok


@needs("phi4_multimodal:sound")
def test_a_convolution_among_the_decoders_own_layers_is_still_refused():
    model = tiny_models.build("phi4_multimodal:sound", "sdpa")
    model.model.layers[0].mlp.convolution = torch.nn.Conv1d(2, 2, 3)
    with pytest.raises(fa2patch.errors.UnsupportedModel, match="a convolution over 3 tokens"):
        fa2patch.apply(model)


@needs("phi4_multimodal:sound")
def test_examples_that_a_model_computes_otherwise_beside_others_are_refused():
    picture, sound = "phi4_multimodal:picture", "phi4_multimodal:sound"
    model = tiny_models.build(picture, "sdpa")
    collate = DataCollatorForMultimodalFlattening(model)
    seen, heard = tiny_media.document(picture, 3, "it"), tiny_media.document(sound, 3, "it")
    with pytest.raises(CollatorError, match="example 1: audio_input_features without image_pixel_values"):
        collate([seen, heard])
    longer = {**heard, "audio_input_features": torch.zeros(1, 32, 80)}
    with pytest.raises(CollatorError, match="audio_input_features: examples hold entries of shapes"):
        collate([heard, longer])
    part = {**seen, "image_attention_mask": seen["image_attention_mask"].clone()}
    part["image_attention_mask"][..., -1] = 0
    with pytest.raises(CollatorError, match="example 0: its image_attention_mask is 1 everywhere"):
        collate([seen, part])
    collate([part, part])


@needs("phi4_multimodal:sound")
def test_a_mask_that_a_processor_leaves_out_is_made_of_ones():
    sound = "phi4_multimodal:sound"
    heard = tiny_media.document(sound, 3, "it")
    masked = {**heard, "audio_attention_mask": torch.ones(1, 24, dtype=torch.bool)}
    row = DataCollatorForMultimodalFlattening(tiny_models.build(sound, "sdpa"))([heard, masked])
    assert row["audio_attention_mask"].tolist() == [[True] * 24] * 2


@needs("pixtral:picture")
def test_what_is_filled_in_for_pictures_of_other_sizes_changes_nothing():
    family = "pixtral:picture"
    if "image_sizes" not in tiny_media.arguments(family):
        pytest.skip("this version takes no image_sizes")
    model = tiny_models.build(family, "sdpa")
    docs = [tiny_media.document(family, 2, "it", 2, seed=n, first=n) for n in range(3)]
    row = DataCollatorForMultimodalFlattening(model)(docs)
    assert row["pixel_values"].shape == (3, 3, 56, 56) and row["image_sizes"].tolist() == [[28, 28], [28, 56], [56, 28]]
    expected = torch.cat([media.alone(model, doc) for doc in docs])
    with fa2patch.apply(model):
        torch.testing.assert_close(model(**row, use_cache=False).logits[0], expected, rtol=1e-4, atol=1e-4)


@needs("llava_onevision:picture")
def test_the_number_of_each_examples_pictures_is_for_each_example():
    family = "llava_onevision:picture"
    if "batch_num_images" not in tiny_media.arguments(family):
        pytest.skip("this version takes no batch_num_images")
    model = tiny_models.build(family, "sdpa")
    one = {**tiny_media.document(family, 2, "it", 2), "batch_num_images": torch.tensor([1])}
    ids = torch.tensor([[5, *[tiny_media.PICTURE] * 5, 6, *[tiny_media.PICTURE] * 5, 7]])
    two = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 1, 3, 28, 28),
        "image_sizes": torch.tensor([[28, 28], [28, 28]]), "batch_num_images": torch.tensor([2]),
    }  # fmt: skip
    row = DataCollatorForMultimodalFlattening(model)([one, two])
    assert row["batch_num_images"].tolist() == [1, 2]
    expected = torch.cat([media.alone(model, doc) for doc in (one, two)])
    with fa2patch.apply(model):
        torch.testing.assert_close(model(**row, use_cache=False).logits[0], expected, rtol=1e-4, atol=1e-4)


@needs("gemma3:picture")
def test_pictures_that_meet_at_a_boundary_see_themselves_only():
    model = tiny_models.build("gemma3:picture", "sdpa")
    docs = [tiny_media.document("gemma3:picture", 3, "it"), tiny_media.document("gemma3:picture", "it", 2, seed=1)]
    docs[1] = {name: value if name == "pixel_values" else value[:, 1:] for name, value in docs[1].items()}
    row = DataCollatorForMultimodalFlattening(model)(docs)
    assert row["token_type_ids"][0].tolist() == [0, 0, 0, 0, *[1] * 8, 0, 0]
    expected = [media.alone(model, doc) for doc in docs]
    causal = media.alone(model, {**docs[0], "token_type_ids": torch.zeros_like(docs[0]["token_type_ids"])})
    assert not torch.allclose(causal, expected[0], atol=1e-3), "pictures see themselves in both directions"
    with fa2patch.apply(model):
        found = model(**row, use_cache=False).logits[0]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


@needs("gemma3:picture")
def test_a_picture_longer_than_the_sliding_window_is_refused():
    model = tiny_models.build("gemma3:picture", "sdpa", sliding_window=3)
    row = DataCollatorForMultimodalFlattening(model)([tiny_media.document("gemma3:picture", 3, "it", 2)] * 2)
    with fa2patch.apply(model), pytest.raises(PackingNotIsolated, match="window"):
        model(**row, use_cache=False)


@needs("paligemma:picture")
def test_examples_without_types_of_tokens_are_refused_beside_others_or_in_the_forward():
    model = tiny_models.build("paligemma:picture", "sdpa")
    docs = [tiny_media.document("paligemma:picture", 3, "it", 2, seed=seed) for seed in range(2)]
    bare = [{name: value for name, value in doc.items() if name != "token_type_ids"} for doc in docs]
    collate = DataCollatorForMultimodalFlattening(model)
    with pytest.raises(CollatorError, match="token_type_ids"):
        collate([docs[0], bare[1]])
    with fa2patch.apply(model), pytest.raises(PackingNotIsolated, match="token_type_ids"):
        model(**collate(bare), use_cache=False)


@needs("llava:picture")
def test_keys_that_the_table_lacks_are_asked_for():
    family = "llava:picture"
    model = tiny_models.build(family, "sdpa")
    doc = {**tiny_media.document(family, 3, "it", 2), "crops": torch.zeros(1, 4, 2)}
    with pytest.raises(CollatorError, match=r"example 0: crops has shape \[1, 4, 2\].*keys=\{'crops': 'each'\}"):
        DataCollatorForMultimodalFlattening(model)([doc])
    for join, shape in {"each": (2, 4, 2), "in row": (1, 8, 2), "same": (1, 4, 2), "drop": None}.items():
        row = DataCollatorForMultimodalFlattening(model, keys={"crops": join})([doc, doc])
        assert (tuple(row["crops"].shape) if "crops" in row else None) == shape, join
    for wrong, match in (({"crops": "other"}, "expected one of patches, each"), ("crops", "keys: expected a mapping")):
        with pytest.raises(CollatorError, match=match):
            DataCollatorForMultimodalFlattening(model, keys=wrong)


@needs("llava:picture")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pixel_values": torch.zeros(2, 3, 28, 28)}, "example 0: 4 placeholders of pictures .* for 2 of them"),
        ({"pixel_values": torch.zeros(1, 3, 14, 14)}, "pixel_values: examples hold entries of shapes"),
        ({"pixel_values": torch.zeros(1, 3, 28, 28), "image_sizes": torch.ones(1, 2).long()}, "image_sizes"),
        ({"pixel_values": "x"}, "no array of numbers"),
    ],
)
def test_pictures_that_do_not_belong_together_are_refused(change, match):
    family = "llava:picture"
    doc = tiny_media.document(family, 3, "it", 2)
    with pytest.raises(CollatorError, match=match):
        DataCollatorForMultimodalFlattening(tiny_models.build(family, "sdpa"))([{**doc, **change}, doc])


PAGE = Path(__file__).parents[2] / "docs" / "pictures.md"
BEGIN, END = "<!-- keys:begin -->\n", "<!-- keys:end -->"


def table():
    rows = ["| key | if the example has | of | shape and meaning | joined |", "| --- | --- | --- | --- | --- |"]
    for key in KEYS:
        beside = f"`{key.beside}`" if key.beside else ""
        rows.append(f"| `{key.name}` | {beside} | {key.of} | {key.meaning} | {key.join} |")
    rows += ["", "| joined | how |", "| --- | --- |", *(f"| {name} | {how} |" for name, how in JOINS.items())]
    return "\n".join(rows) + "\n"


def test_the_page_has_the_table_of_the_code():
    # If this fails after a change of the table, write what it expects between the page's two marks.
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == table()


def test_every_row_of_the_table_can_be_met():
    seen = set()
    for key in KEYS:
        assert key.join in JOINS and key.of in ("picture", "film", "sound") and key.meaning
        assert (key.name, key.beside) not in seen and (key.name, "") not in seen, key.name
        seen.add((key.name, key.beside))
