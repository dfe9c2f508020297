"""A model is found to be what it is, also where another one of its class carries a patch already."""

from __future__ import annotations

from typing import Any

import pytest

import fa2patch
from compat_matrix import tiny_models

OF_THE_OBJECT = {
    "model", "picks", "number", "structure", "sites", "attention", "rehooked", "unpacked", "vouched", "unproven",
}  # fmt: skip
"""What two patches of equal models do not share, or what batches change."""


def found_of(patch: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(patch).items() if name not in OF_THE_OBJECT and name[0] != "_"}


def applied(family: str) -> Any:
    """The patch, or what ``apply`` says where it refuses such a model."""
    try:
        return fa2patch.apply(tiny_models.build(family))
    except fa2patch.Fa2PatchError as error:
        return str(error)


@pytest.mark.parametrize("family", tiny_models.architectures())
def test_a_second_model_of_a_class_is_found_to_be_as_the_first(family: str) -> None:
    if not tiny_models.is_present(family):
        pytest.skip(f"this Transformers has no {family}")
    first, second = applied(family), applied(family)

    if isinstance(first, str):
        assert second == first
        return
    assert found_of(second) == found_of(first)
    assert [site.kind for site in second.sites] == [site.kind for site in first.sites]
    assert [(layer.name, layer.seam) for layer in second.attention] == [
        (layer.name, layer.seam) for layer in first.attention
    ]
    assert first.active and second.active
