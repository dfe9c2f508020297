"""Models of the installed Transformers that need more than an ordinary seam."""

import pytest
import torch
import transformers

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.points import alone, assert_close, documents, pack
from fa2patch import errors


def present(name):
    return pytest.mark.skipif(not tiny_models.is_present(name), reason=f"no {name} in {transformers.__version__}")


@pytest.fixture
def docs():
    return documents(5, 9, 1, 7)


@present("gemma3")
def test_tokens_that_see_each_other_both_ways_are_an_error(docs):
    model = tiny_models.build("gemma3", "sdpa")
    expected, batch = alone(model, docs), pack(docs)
    types = torch.zeros_like(batch["input_ids"])
    with fa2patch.apply(model):
        assert_close(model(**batch, token_type_ids=types).logits[0], expected, "text only")
        types[0, 6:9] = 1
        with pytest.raises(errors.PackingNotIsolated, match="both directions"):
            model(**batch, token_type_ids=types)


@present("qwen2_vl")
def test_ids_of_an_image_change_nothing_in_a_row_of_one_document():
    model = tiny_models.build("qwen2_vl", "sdpa")
    ids = torch.tensor([[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]])[:, None]
    batch = {"input_ids": documents(8)[0][None], "position_ids": ids}
    before = model(**batch).logits
    with fa2patch.apply(model):
        assert torch.equal(model(**batch).logits, before)


@present("qwen2_vl")
@pytest.mark.parametrize("axes", [None, 3, 4])
def test_every_shape_of_ids_of_several_axes(docs, axes):
    model = tiny_models.build("qwen2_vl", "sdpa")
    expected, batch = alone(model, docs), pack(docs)
    if axes:
        batch["position_ids"] = batch["position_ids"].expand(axes, -1, -1)
    with fa2patch.apply(model):
        assert_close(model(**batch).logits[0], expected, f"{axes} axes")


@present("gemma3n_text")
def test_layers_that_share_keys_find_them(docs):
    model = tiny_models.build("gemma3n_text", "sdpa")
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).logits[0], alone(tiny_models.build("gemma3n_text", "eager"), docs), "logits")
