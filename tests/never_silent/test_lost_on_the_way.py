"""Boundaries reach the layers even if arguments are copied or position ids are made anew in between."""

import pytest
import torch
import transformers
from small_models import (
    DOCS,
    WAYS,
    Result,
    alone,
    called,
    class_of,
    config_of,
    labels_of,
    llama,
    logits_alone,
    of_family,
    patched,
    right_or_refused,
    small,
    told,
)

import fa2patch
from compat_matrix import tiny_models, tiny_overrides


def copies_its_inputs(module):
    # Offloading and many hooks clone all inputs, so that attributes of the tensors are lost.

    def copied(value):
        return value.clone() if isinstance(value, torch.Tensor) else value

    def hook(module, args, kwargs):
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def copying(model, copied=True):
    patched(model)
    if copied:
        copies_its_inputs(model.base_model)
    return model


def batches():
    # The rows tell in each of the ways where documents start, also with ids that run through the row.
    for way in WAYS:
        yield way, told(way=way)
    running = {"position_ids": torch.arange(sum(map(len, DOCS)))[None]}
    yield "ids that run on, all lengths", {**told(way="all lengths"), **running}
    yield "ids that run on, lengths of keys", {**told(way="lengths of keys"), **running}
    yield "ids that run on, seq_idx", {**told(way="seq_idx"), **running}


BATCHES = dict(batches())
RUNNING_ON = [name for name in BATCHES if name.startswith("ids that run on")]


@pytest.mark.parametrize("copied", [False, True], ids=["as they are", "copied"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_base_model_s_inputs(family, name, copied):
    # Rope depends only on distances, so ids that run through the row change nothing.
    batch = {**BATCHES[name], "labels": labels_of(DOCS, 7)}
    found = right_or_refused(lambda: called(copying(of_family(family), copied), batch), alone(of_family(family)))
    assert copied or found == "right", "refused without a reason"


@pytest.mark.parametrize("name", RUNNING_ON)
def test_another_first_document_moves_no_other(name):
    # If a copy loses the boundaries, this shows a leak even where values happen to be close.
    model = copying(llama())
    other = {**BATCHES[name], "input_ids": BATCHES[name]["input_ids"].clone()}
    other["input_ids"][0, 0] += 1
    with torch.no_grad():
        try:
            before, after = (model(**batch).logits[0, len(DOCS[0]) :] for batch in (BATCHES[name], other))
        except fa2patch.Fa2PatchError:
            return
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", BATCHES)
def test_rope_that_depends_on_the_longest_document(name):
    # Phi-3's factors depend on a document's length, also for short and long documents in one row.
    config_of("phi3")
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
    for name_of in ("longrope", "su"):
        config = with_longrope(name_of, factors)
        if config is not None:
            break
    else:
        pytest.skip(f"Phi-3 of Transformers {transformers.__version__} takes no such scaling")
    cls, batch = class_of("Phi3ForCausalLM"), {**BATCHES[name], "labels": labels_of(DOCS, 7)}
    expected = alone(small(cls, config), ids=BATCHES[name].get("position_ids"))
    right_or_refused(lambda: called(copying(small(cls, config)), batch), expected)


def with_longrope(kind, factors):
    # Documents of over 6 tokens are scaled differently. The result is None if this version spells it otherwise.
    limit = {"max_position_embeddings": 128, "original_max_position_embeddings": 6}
    for given in (
        {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **factors, "original_max_position_embeddings": 6}},
        {"rope_scaling": {"type": kind, **factors}},
    ):
        if next(iter(given)) not in tiny_models.parameters(tiny_models.config_class("phi3")):
            continue
        try:
            config = tiny_models.config_of("phi3", **given, **limit)
            model = small(tiny_models.model_class("phi3"), config)
            short, long = (model(input_ids=DOCS[2][None, :end]).logits[0, :3] for end in (3, 9))
        except Exception:  # each version checks its config differently
            continue
        if (short - long).abs().max() > 1e-3:
            return config
    return None


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_scaled_by_a_document_s_masked_tokens(way):
    # ESM's embeddings need the documents before any layer does.
    docs = [doc.clone() for doc in DOCS]
    docs[2][:4] = tiny_overrides.MASK_TOKEN
    try:
        expected = Result(logits_alone(of_family("esm:masked"), docs))
    except AttributeError as error:
        pytest.skip(f"the unpatched model fails: {error}")
    batch = told(docs, way)
    right_or_refused(lambda: Result(copying(of_family("esm:masked"))(**batch).logits[0].detach()), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "GPT2ForSequenceClassification"])
def test_one_vector_for_each_document(name, way):
    cls, config = class_of(name), config_of("gpt2" if "GPT2" in name else "llama", num_labels=3)
    expected = Result(logits_alone(small(cls, config)))
    right_or_refused(lambda: Result(copying(small(cls, config))(**told(way=way)).logits.detach()), expected)


@pytest.mark.parametrize(
    ("cls", "tensor", "other"),
    [
        (transformers.LlamaForCausalLM, "position_ids", "input ids"),
        (transformers.LlamaForSequenceClassification, "input ids", "position_ids"),
    ],
)
def test_the_tensor_that_lost_its_documents_is_named(cls, tensor, other):
    model = copying(llama(cls, num_labels=3))
    running = {"position_ids": torch.arange(sum(map(len, DOCS)))[None]}
    with pytest.raises(fa2patch.Fa2PatchError, match=f"with the {tensor}, but they did not arrive") as caught:
        model(**{**told(way="seq_idx"), **running})
    assert other not in str(caught.value)


# Pictures


IMAGE = 90
PICTURE_MODELS = {
    "LlavaForConditionalGeneration": {"vision_feature_layer": -1},
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-1, -2]},
    "LlavaNextForConditionalGeneration": {"vision_feature_layer": -1, "image_grid_pinpoints": [[28, 28]]},
}


def with_pictures(name, merged):
    cls = class_of(name)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14
    )
    more = {"image_token_index": IMAGE, "pad_token_id": 0, **PICTURE_MODELS[name]}
    if not merged and "image_seq_length" in tiny_models.parameters(cls.config_class):
        more["image_seq_length"] = 1  # 4.45 and 4.46 merge if a picture has fewer placeholder tokens
    return small(cls, cls.config_class(text_config=config_of("llama"), vision_config=vision, **more))


def pictures(name):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, 3, 28, 28, generator=generator)
    if name.startswith("LlavaNext"):
        return {"pixel_values": pixels[None].repeat(1, 2, 1, 1, 1), "image_sizes": torch.tensor([[28, 28]])}
    return {"pixel_values": pixels}


def documents_with_a_picture(tokens_of_it):
    words = [doc.clamp(max=80) for doc in DOCS]
    return [torch.cat([words[0], torch.full((tokens_of_it,), IMAGE), words[2]]), words[3], words[2]]


@pytest.mark.parametrize("way", ["position_ids", "all lengths", "seq_idx"])
@pytest.mark.parametrize("merged", [True, False], ids=["merged by the model", "as many tokens as patches"])
@pytest.mark.parametrize("name", PICTURE_MODELS)
def test_a_row_with_a_picture(name, merged, way):
    # Up to 4.46 a picture has one placeholder token, and merging the picture makes new ids of the row.
    model, given = with_pictures(name, merged), pictures(name)
    for tokens in [1] if merged else range(4, 12):
        docs = documents_with_a_picture(tokens)
        try:
            with torch.no_grad():
                expected = [logits_with(model, doc, given if IMAGE in doc else {}) for doc in docs]
            break
        except (ValueError, RuntimeError, IndexError, AttributeError, TypeError):
            continue
    else:
        pytest.skip(f"the unpatched {name} takes no such row in Transformers {transformers.__version__}")

    def run():
        model, row = patched(with_pictures(name, merged)), told(docs, way)
        row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
        with torch.no_grad():
            return Result(model(**row, **given).logits[0])

    right_or_refused(run, Result(torch.cat(expected)))


def logits_with(model, doc, given):
    # Text alone goes to the inner language model if that has a head, because 4.46 merges even without a picture.
    row = {"input_ids": doc[None], "attention_mask": torch.ones(1, len(doc), dtype=torch.long), "use_cache": False}
    if not given:
        inside = getattr(model, "language_model", None)
        return (inside if hasattr(inside, "lm_head") else model)(**row).logits[0]
    logits = model(**row, **given).logits[0]
    assert len(logits) > len(doc) or int((doc == IMAGE).sum()) > 1, "the picture was not taken"
    return logits
