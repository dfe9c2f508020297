"""For a CI of one's own. In ``conftest.py``: ``pytest_plugins = ["fa2patch.testing"]``; then, in a test:

def test_packing_is_isolated(assert_isolated):
    assert_isolated(my_model())
"""

from __future__ import annotations

from typing import Any, Callable

import pytest

from .proof.verify import Verification, verify


@pytest.fixture(name="assert_isolated")
def _assert_isolated() -> Callable[..., Verification]:
    """:func:`assert_isolated`, as a fixture."""
    return assert_isolated


def assert_isolated(model: Any, **options: Any) -> Verification:
    """Fail the test, naming the first module that leaks, unless ``fa2patch.verify(model, **options)`` is ok."""
    found = verify(model, **{**options, "strict": False})
    if not found.ok:
        pytest.fail(f"{type(model).__name__}: {found}", pytrace=False)
    return found
