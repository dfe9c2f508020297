"""A pytest fixture for the tests of other projects.

Put ``pytest_plugins = ["fa2patch.testing"]`` in ``conftest.py``. A test that takes the argument ``assert_isolated`` can
then call ``assert_isolated(my_model())``.
"""

from __future__ import annotations

from typing import Any, Callable

import pytest

from .proof.result import Verification
from .proof.verify import verify


@pytest.fixture(name="assert_isolated")
def _assert_isolated() -> Callable[..., Verification]:
    return assert_isolated


def assert_isolated(model: Any, **options: Any) -> Verification:
    """Run ``fa2patch.verify(model, **options)`` and fail the test if it is not ok.

    The failure message names the first module that leaks.

    Args:
        model: as for :func:`fa2patch.verify`.
        options: further arguments of :func:`fa2patch.verify`; ``strict`` is ignored.

    Returns:
        The verification, which is ok.
    """
    found = verify(model, **{**options, "strict": False})
    if not found.ok:
        pytest.fail(f"{type(model).__name__}: {found}", pytrace=False)
    return found
