"""A point that float32 misses narrowly must hold in float64."""

import pytest
import torch

from compat_matrix.check.cell import AloneFails, Cell, unless_alone_raises
from compat_matrix.check.compare import TOLERANCE, TooFar
from compat_matrix.check.found import ROUNDING, held


def off_by(in_float32, in_float64=0.0):
    """A point whose results are so many tolerances away from what is expected."""

    def point(cell):
        tried.append(cell.dtype)
        off = in_float32 if cell.dtype == torch.float32 else in_float64
        if not off <= 1:
            raise TooFar("logits", off * TOLERANCE, TOLERANCE)

    tried = []
    point.tried = tried
    return point


def test_a_narrow_miss_that_holds_in_float64_is_told():
    point = off_by(2)
    assert held(point, Cell("llama", "sdpa")) == "logits: off by 2.0e-05 of the scale, allowed 1e-05"
    assert point.tried == [torch.float32, torch.float64]
    assert held(off_by(1), Cell("llama", "sdpa")) == ""


@pytest.mark.parametrize("off", [(2, 1.5), (2, float("nan")), (2 * ROUNDING, 0), (float("nan"), 0)], ids=str)
def test_what_is_wrong_in_float64_or_far_off_fails(off):
    with pytest.raises(TooFar) as caught:
        held(off_by(*off), Cell("llama", "sdpa"))
    assert caught.value.error == pytest.approx(off[0] * TOLERANCE, nan_ok=True)


def test_a_family_in_float64_is_not_tried_again_nor_is_another_error():
    point = off_by(0, 2)
    with pytest.raises(TooFar):
        held(point, Cell("jamba", "sdpa"))
    assert point.tried == [torch.float64]

    def fails(cell):
        raise RuntimeError(str(cell.dtype))

    with pytest.raises(RuntimeError, match="float32"):
        held(fails, Cell("llama", "sdpa"))


def raises(error):
    def function():
        raise error

    return function


def test_an_error_that_the_unpatched_model_raises_too_is_told_apart():
    alone, told = raises(ValueError("no types")), "in training: ValueError: no types"
    with pytest.raises(AloneFails, match=told), unless_alone_raises(alone):
        raise ValueError("no types")


@pytest.mark.parametrize("alone", [lambda: None, raises(KeyError("no types")), raises(ValueError("no ids"))])
def test_an_error_that_only_the_patched_model_raises_fails(alone):
    with pytest.raises(ValueError, match="no types"), unless_alone_raises(alone):
        raise ValueError("no types")
