"""The text of every error and warning ends in the address of its class's section in the documentation."""

import copy
import pickle

import pytest

from fa2patch import errors

OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
CLASSES = [kind for kind in OURS if not kind.__name__.startswith("_")]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_text_ends_in_the_address_of_its_section(kind):
    error = kind("kernel='x': expected y.")
    assert str(error) == f"kernel='x': expected y.\nSee {errors.PAGE}#{kind.__name__.lower()}"
    assert error.message == errors.message(error) == "kernel='x': expected y."
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(same) == str(error)


def test_a_class_of_somebody_else_has_the_section_of_ours():
    class Mine(errors.BadBatch):
        pass

    assert str(Mine("text")).endswith("#badbatch")


def test_an_error_of_somebody_else_is_quoted_as_it_is():
    assert errors.message(ValueError("text")) == "text"
