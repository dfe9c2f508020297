"""The matrix's point ``windows`` tries every kind of window, and fails if packed rows have another window."""

import dataclasses
import sys
from dataclasses import replace

import pytest
import transformers

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import window_kinds
from compat_matrix.check.cell import Cell, NotApplicable
from compat_matrix.check.points import POINTS, windows
from fa2patch import Boundaries
from fa2patch.upstream import packed_mask

architectures = sys.modules["fa2patch.upstream.architectures"]


def red(family):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        POINTS["windows"](Cell(family, "eager"))
    assert not isinstance(caught.value, NotApplicable)


def test_a_window_one_token_wider_is_red(monkeypatch):
    attend = packed_mask.PackedMask.attend

    def wider(self, module, q, k, v, options):
        window = options.window and options.window + 1
        wide = replace(self, window=self.window and self.window + 1)
        return attend(wide, module, q, k, v, replace(options, window=window))

    monkeypatch.setattr(packed_mask.PackedMask, "attend", wider)
    red("qwen2")


KINDS = {
    "sliding_window": "qwen2",
    "window_size": "gpt_neo",
    "attention_window_size": "recurrent_gemma",
    "attention_chunk_size": "llama4_text",
    "local_attention": "modernbert:masked",
}


@pytest.mark.parametrize(
    "name", [*[*KINDS][:2], *(pytest.param(name, marks=pytest.mark.slow) for name in [*KINDS][2:])]
)
def test_a_window_of_any_kind_that_packed_rows_lose_is_red(monkeypatch, name):
    try:
        tiny_models.model_class(KINDS[name])
    except (KeyError, AttributeError, RuntimeError):
        pytest.skip(f"no {KINDS[name]} in {transformers.__version__}")
    attend = packed_mask.PackedMask.attend
    assert name in [kind.name for kind in window_kinds.of(KINDS[name])]

    def lost(self, module, q, k, v, options):
        without = dataclasses.replace(self, window=None, architecture=None)
        without.calls = self.calls
        return attend(without, module, q, k, v, dataclasses.replace(options, window=None))

    POINTS["windows"](Cell(KINDS[name], "eager"))
    monkeypatch.setattr(packed_mask.PackedMask, "attend", lost)
    monkeypatch.setattr(Boundaries, "chunked", lambda self, size, tokens: self)
    red(KINDS[name])


def test_every_kind_of_window_is_tried_here():
    assert KINDS.keys() == window_kinds.KINDS.keys()


def test_a_row_without_the_window_that_upstream_s_flash_class_forgets_is_red(monkeypatch):
    monkeypatch.setitem(architectures._rows, "gpt_neo", fa2patch.Architecture("gpt_neo"))
    red("gpt_neo")


def test_a_window_in_one_layer_too_many_is_red(monkeypatch):
    attend = packed_mask.PackedMask.attend

    def everywhere(self, module, q, k, v, options):
        return attend(self, module, q, k, v, dataclasses.replace(options, window=module.config.sliding_window))

    monkeypatch.setattr(packed_mask.PackedMask, "attend", everywhere)
    red("qwen2")


def test_a_window_that_nobody_knows_how_to_turn_on_is_red(monkeypatch):
    monkeypatch.setattr(window_kinds, "ways", lambda architecture: {"every layer": window_kinds.Way({})})
    with pytest.raises(AssertionError, match="does not know how this config turns it on"):
        POINTS["windows"](Cell("qwen2", "eager"))


def test_a_config_with_a_window_that_nobody_has_looked_at_is_red(monkeypatch):
    config = tiny_models.config_of("llama")
    config.local_window_len = 4
    monkeypatch.setattr(tiny_models, "config_of", lambda architecture, **changes: config)
    assert window_kinds.of("llama") == []  # a config keeps any attribute, so having it proves nothing
    monkeypatch.setattr(window_kinds, "_is_in", lambda name, module: True)
    with pytest.raises(window_kinds.UnknownWindow, match="local_window_len"):
        POINTS["windows"](Cell("llama", "eager"))


def test_a_window_in_every_layer_where_the_config_wants_one_is_red(monkeypatch):
    monkeypatch.setattr(window_kinds, "ways", lambda architecture: {"one": window_kinds.Way({}, layers=1)})
    with pytest.raises(AssertionError, match="expected it in"):
        POINTS["windows"](Cell("mistral", "eager"))


def test_a_model_without_a_window_has_none():
    assert window_kinds.of("llama") == []
    with pytest.raises(NotApplicable, match="no sliding window"):
        POINTS["windows"](Cell("llama", "eager"))


def test_a_block_s_reach_is_what_its_attention_sees():
    model = tiny_models.build("mistral", sliding_window=4)
    expected = windows.defined(window_kinds.KINDS["sliding_window"], 4)
    assert [int(row.sum()) for row in expected] == [1, 2, 3, *[4] * 9]
    assert all((seen == expected).all() for seen in windows.reach_packed(model).values())
    assert windows.reach_packed(model).keys() == {"model.layers.0", "model.layers.1"}


def test_chunks_and_windows_hide_what_they_say():
    chunk, both = window_kinds.KINDS["attention_chunk_size"], window_kinds.KINDS["local_attention"]
    assert [int(row.sum()) for row in windows.defined(chunk, 5)] == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert [int(row.sum()) for row in windows.defined(both, 4)] == [3, 4, *[5] * 8, 4, 3]
    assert (chunk.hides(12, 11), chunk.hides(12, 12), both.hides(12, 20, encoder=True)) == (True, False, True)
