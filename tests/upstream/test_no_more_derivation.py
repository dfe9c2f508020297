"""A release that no longer finds documents in position ids, in favour of stated lengths: a patched model is right with
ids alone, because it finds them itself.
"""

import pytest
import torch
import transformers
from small_models import alone, assert_right, called, labelled, of_family, patched

from compat_matrix.follow import sources

PLACES = ("masking_utils", "modeling_flash_attention_utils")


@pytest.fixture
def derives_no_more(monkeypatch):
    """Functions of the library that find documents in position ids, as ``follow`` names them, are errors."""
    package = sources.Path(transformers.__file__).parent
    stopped = set()
    for place in PLACES:
        file = package / f"{place}.py"
        if not file.exists():
            continue
        home = __import__(f"transformers.{place}", fromlist=["*"])
        for name in sources._parsed(file.read_text(encoding="utf-8")).derives:

            def stop(*args, name=name, **kwargs):
                raise AssertionError(f"{name} was asked")

            if name != "_flash_attention_forward":  # it computes attention, too
                monkeypatch.setattr(home, name, stop)
                stopped.add(name)
    if not stopped:
        pytest.skip("this Transformers derives nothing from position ids")
    return stopped


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "phi", "gpt_neox", "mixtral", "jamba"])
def test_a_patched_model_asks_none_of_them(family, derives_no_more):
    expected = alone(of_family(family))
    assert_right(called(patched(of_family(family)), labelled()), expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_that_is_not_patched_asks(implementation, derives_no_more):
    model = of_family("llama", implementation)
    with pytest.raises(AssertionError, match="was asked"), torch.no_grad():
        model(**labelled(), use_cache=False)
