"""Transformers alone, with its default cache and without one: ``doctor`` and ``verify`` say the same, and why."""

import pytest
import torch
import transformers

from compat_matrix import tiny_models
from fa2patch.cli import diagnosis
from fa2patch.cli.diagnosis import is_isolated, verify_unpatched
from fa2patch.proof.inputs import example

NEWEST = tuple(int(number) for number in transformers.__version__.split(".")[:2]) >= (5, 0)
new = pytest.mark.skipif(not NEWEST, reason="earlier versions leak both ways as sdpa")


def of(model, **more):
    return verify_unpatched(model, {**example(torch.device("cpu"), model), **more})


@new
def test_it_is_isolated_without_a_cache_only_and_the_cause_is_named():
    found = of(tiny_models.build("llama", "sdpa"))
    assert not is_isolated(found.by_default) and is_isolated(found.without_cache)
    assert "Loaded as sdpa" in found.why and "use_cache=False" in found.why and "config.use_cache" in found.why


def test_a_batch_that_says_so_is_taken_one_way():
    for use_cache in (True, False):
        found = of(tiny_models.build("llama", "sdpa"), use_cache=use_cache)
        assert found.without_cache is None and not found.why
        assert is_isolated(found.by_default) == (NEWEST and not use_cache)


def test_a_model_that_makes_no_cache_is_taken_one_way():
    model = tiny_models.build("llama", "sdpa")
    model.config.use_cache = False
    assert of(model).without_cache is None


def test_an_error_is_text():
    model = tiny_models.build("llama", "sdpa")
    found = verify_unpatched(model, {"input_ids": torch.zeros(1, 8, dtype=torch.int64)})
    assert found.by_default.startswith("BadBatch") and not found.why


def test_doctor_says_what_verify_says():
    model = diagnosis.tiny_llama()
    found, examined = of(model), diagnosis.diagnose()
    assert (examined["alone"]["state"] == "isolated") == is_isolated(found.by_default)
    assert (examined["alone_without_cache"]["state"] == "isolated") == is_isolated(found.without_cache)
    assert examined["why"] == found.why and examined["patched"]["state"] == "isolated"
