"""The matrix's points hold here and now, and turn red when something that matters is broken."""

import sys

import numpy as np
import pytest

from compat_matrix import environments
from compat_matrix.__main__ import failures
from compat_matrix.points import POINTS, Cell, NotApplicable
from fa2patch import Boundaries
from fa2patch.seams import packed_mask

CELLS = [("llama", "sdpa"), ("qwen2", "eager"), ("falcon", "sdpa")]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(("family", "implementation"), CELLS)
def test_point(family, implementation, point):
    try:
        POINTS[point](Cell(family, implementation))
    except NotApplicable as reason:
        assert str(reason) in ("no sliding window",)


def red(*points, family="llama"):
    for point in points:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            POINTS[point](Cell(family, "sdpa"))
        assert not isinstance(caught.value, NotApplicable)


def test_a_boundary_only_where_ids_are_zero_is_red(monkeypatch):
    module = sys.modules["fa2patch.boundaries"]
    monkeypatch.setattr(module, "_changes", lambda ids, real, previous, step: real & (ids == 0))
    red("every_layout")


def test_a_boundary_only_where_ids_fall_is_red(monkeypatch):
    module = sys.modules["fa2patch.boundaries"]

    def falling(ids, real, previous, step):
        left = np.take_along_axis(ids, np.maximum(previous, 0), axis=1)
        return real & ((previous < 0) | (ids < left))

    monkeypatch.setattr(module, "_changes", falling)
    red("packed_row", "every_layout")


def test_one_document_for_the_whole_row_is_red(monkeypatch):
    attend = packed_mask.PackedMask.attend

    def leaking(self, module, q, k, v, options):
        tokens = q.shape[0] * q.shape[1]
        self.boundaries = Boundaries(self.boundaries.cu_seqlens[[0, -1]], tokens, None, (tokens,))
        return attend(self, module, q, k, v, options)

    monkeypatch.setattr(packed_mask.PackedMask, "attend", leaking)
    red("packed_row", "packed_rows", "padding", "lengths", "nothing_crosses", "checkpointing", "half_precision")


def test_a_window_one_token_wider_is_red(monkeypatch):
    attend = packed_mask.PackedMask.attend

    def wider(self, module, q, k, v, options):
        window = options.window and options.window + 1
        return attend(self, module, q, k, v, type(options)(**{**vars(options), "window": window}))

    monkeypatch.setattr(packed_mask.PackedMask, "attend", wider)
    red("windows", family="qwen2")


def test_every_version_has_a_block_and_a_release_without_one_the_defaults():
    blocks = environments.versions()
    minors = {tuple(map(int, block.transformers.split(".")[:2])) for block in blocks.values()}
    assert {(4, minor) for minor in range(34, 58)} <= minors
    assert blocks["4.36.2-py3.9-torch2.1"].python == "3.9"
    assert environments.version("5.99.0").requirements[:2] == ["torch==2.13.0", "transformers==5.99.0"]


def test_failures_are_told_apart_from_what_does_not_apply():
    cells = {"llama": {"sdpa": {"a": "ok", "b": "n/a: no window", "c": "FAIL: off"}}, "granite": "absent"}
    assert failures({"without": {"cells": cells}}) == ["llama sdpa c: FAIL: off"]
    assert failures({"error": "uv failed"}) == ["uv failed"]


def test_boundaries_derived_in_every_layer_are_red(monkeypatch):
    attend = packed_mask.PackedMask.attend

    def deriving(self, module, q, k, v, options):
        sys.modules["fa2patch.boundaries"]._host(self.boundaries.cu_seqlens)
        return attend(self, module, q, k, v, options)

    monkeypatch.setattr(packed_mask.PackedMask, "attend", deriving)
    red("host_reads")


def test_a_mask_of_the_rows_length_squared_is_red(monkeypatch):
    attend = packed_mask.PackedMask.attend

    def masking(self, module, q, k, v, options):
        q.new_zeros(q.shape[1], q.shape[1])
        return attend(self, module, q, k, v, options)

    monkeypatch.setattr(packed_mask.PackedMask, "attend", masking)
    red("no_dense_mask")
