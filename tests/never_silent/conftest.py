import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_of_other_tests(request):
    """A forgotten model that is collected during a test removes its bindings while a model is traced or compared."""
    if any(word in request.node.nodeid for word in ("compiled", "trace", "on_the_class")):
        gc.collect()
