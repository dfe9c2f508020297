"""Parameters are read once from each function, and again where they may have changed."""

import gc
import inspect
import weakref

from fa2patch.upstream import inspecting


def named(function):
    return [parameter.name for parameter in inspecting.parameters(function)]


def test_a_list_that_is_changed_does_not_change_the_next_one():
    def forward(self, input_ids):
        pass

    inspecting.parameters(forward).clear()
    assert named(forward) == ["self", "input_ids"]


def test_a_signature_that_is_shown_later_is_seen():
    def forward(self, input_ids):
        pass

    assert named(forward) == ["self", "input_ids"]
    shown = inspecting.parameters(lambda self, **kwargs: None)
    inspecting.show_parameters(forward, shown)
    assert named(forward) == ["self", "kwargs"]
    forward.__signature__ = inspect.signature(lambda mask: None)
    assert named(forward) == ["mask"]


def test_a_bound_method_has_no_self():
    class Model:
        def forward(self, input_ids):
            pass

    assert named(Model.forward) == ["self", "input_ids"]
    assert named(Model().forward) == ["input_ids"]


def test_a_function_is_not_kept_alive():
    def forward(self):
        pass

    inspecting.parameters(forward)
    gone = weakref.ref(forward)
    del forward
    gc.collect()
    assert gone() is None
