"""A model is recognised the same way if another model of its class is already patched."""

from __future__ import annotations

from typing import Any

import pytest

import fa2patch
from compat_matrix import tiny_models


def applied(family: str) -> Any:
    # The result is the message if ``apply`` refuses the model.
    try:
        return fa2patch.apply(tiny_models.build(family))
    except fa2patch.Fa2PatchError as error:
        return str(error)


FAMILIES = tiny_models.architectures()


@pytest.mark.parametrize(
    "family",
    [*FAMILIES[::4], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each not in FAMILIES[::4])],
)
def test_a_second_model_of_a_class_is_found_to_be_as_the_first(family: str) -> None:
    if not tiny_models.is_present(family):
        pytest.skip(f"this Transformers has no {family}")
    first, second = applied(family), applied(family)

    if isinstance(first, str):
        assert second == first
        return
    assert second.plan == first.plan
    assert first.active and second.active
