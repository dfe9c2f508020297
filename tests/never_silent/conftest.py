import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_of_other_tests(request):
    """A forgotten model that is collected during a test removes its bindings while a model is traced or compared."""
    if "compiled" in request.node.nodeid or "trace" in request.node.nodeid:
        gc.collect()
