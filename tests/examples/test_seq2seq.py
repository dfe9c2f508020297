"""The example of encoder-decoders: padded and packed training have the same losses, and packed one fewer tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for needed in ("accelerate", "rich"):
    pytest.importorskip(needed)


@pytest.mark.parametrize("model", ["t5", "bart"])
def test_both_ways_have_the_same_losses(model, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "seq2seq", raising=False)
    import seq2seq

    found = seq2seq.main(["--model", model, "--steps", "4"])
    assert found["packed"]["losses"] == pytest.approx(found["padded"]["losses"], rel=1e-5)
    assert len(found["packed"]["losses"]) == 4 and 2 * found["packed"]["tokens"] < found["padded"]["tokens"]
    assert "tokens of both stacks" in capsys.readouterr().out
