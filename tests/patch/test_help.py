"""``help(fa2patch.apply)`` names every kernel, in the order of the registry, and shows an example."""

import inspect
import pydoc
import re

import fa2patch
from fa2patch import errors, kernels


def test_it_names_the_kernels_in_the_order_of_auto():
    documented = re.findall(r'``"(\w+)"``', inspect.getdoc(fa2patch.apply).partition("kernel: what")[2])
    assert documented[: 1 + len(kernels.ORDER)] == ["auto", *(kernel.name for kernel in kernels.ORDER)]
    assert set(kernels.NAMES) <= set(documented)


def test_it_shows_an_example_and_every_error():
    shown = pydoc.plain(pydoc.render_doc(fa2patch.apply))
    assert "fa2patch.apply(model)" in shown and "DataCollatorWithFlattening" in shown
    raised = re.findall(r"\b[A-Z]\w+", inspect.getdoc(fa2patch.apply).partition("Raises:")[2])
    known = [name for name in raised if hasattr(errors, name)]
    assert {"NotAModel", "UnsupportedModel", "LayerNotPatchable", "UnknownKernel", "BadArgument"} <= set(known)
