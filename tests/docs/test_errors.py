"""docs/errors.md has a section for every error class, and the text of an error ends in the address of its section."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import pkgutil
import re

import pytest
from snippets import ROOT

import fa2patch
from fa2patch import errors

PAGE = ROOT / "docs" / "errors.md"
HEADINGS = re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.M)
LIMITS = ("Limits",)  # sections that are about no class


def classes() -> list[type[BaseException]]:
    # The commands need click, which some environments lack.
    for module in pkgutil.walk_packages(fa2patch.__path__, "fa2patch."):
        if "startup" not in module.name and not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError, SystemExit):
                importlib.import_module(module.name)
    found, new = set(), [errors._Documented]
    while new:
        found.update(new := [child for parent in new for child in parent.__subclasses__()])
    return sorted((cls for cls in found if cls.__module__.startswith("fa2patch.")), key=lambda cls: cls.__name__)


CLASSES = classes()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_text_of_an_error_ends_in_the_address_of_its_section(cls: type[BaseException]) -> None:
    assert cls.__module__ == "fa2patch.errors", f"{cls.__name__} is not where users look for errors"
    assert HEADINGS.count(cls.__name__) == 1, f"{PAGE.name} has no section ## {cls.__name__}, or several"
    error = cls("what to do.")
    assert str(error) == f"what to do.\nSee {errors.PAGE}#{cls.__name__.lower()}"
    assert error.message == errors.message(error) == "what to do."
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(same) == str(error)


def test_a_class_of_somebody_else_has_the_section_of_ours() -> None:
    class Mine(errors.BadBatch):
        pass

    assert str(Mine("text")).endswith("#badbatch")


def test_an_error_of_somebody_else_is_quoted_as_it_is() -> None:
    assert errors.message(ValueError("text")) == "text"


def test_no_section_is_about_a_class_that_is_gone() -> None:
    assert set(HEADINGS) == {*LIMITS, *(cls.__name__ for cls in CLASSES)}


def test_sphinx_gives_the_sections_these_anchors() -> None:
    docutils = pytest.importorskip("myst_parser.parsers.docutils_", reason="needs the packages that build the site")
    from docutils.core import publish_string

    options = {"myst_suppress_warnings": ["myst"], "report_level": 5, "myst_heading_anchors": 3}
    page = publish_string(
        PAGE.read_text(encoding="utf-8"), parser=docutils.Parser(), writer="html5", settings_overrides=options
    ).decode()
    missing = [name for name in HEADINGS if f'id="{name.lower()}"' not in page]
    assert not missing
