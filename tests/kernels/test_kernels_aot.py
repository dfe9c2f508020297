"""FlexAttention's kernels compile for cards that are not here. It needs Triton, which torch for CPUs does not bring."""

import json

import pytest
import torch

from compat_matrix.check import kernels_aot
from fa2patch.kernels import flex


def test_the_tensors_of_a_mask_become_arguments():
    family = kernels_aot.FAMILIES["Gemma 2 9B"]
    mask = kernels_aot._mask_of(family, 64)
    lifted, held = kernels_aot._lifted(mask)
    zero = torch.zeros((), dtype=torch.int32)
    places = [torch.tensor(at) for at in (0, 15, 16, 63)]
    for query in places:
        for key in places:
            assert torch.equal(lifted(zero, zero, query, key, *held), mask(zero, zero, query, key))
    other = [torch.zeros_like(x) if x.dtype == torch.int64 else x for x in held]
    assert lifted(zero, zero, places[3], places[0], *other) and not mask(zero, zero, places[3], places[0])


def test_what_is_compiled_is_what_the_kernel_asks_for():
    softcap = kernels_aot._score_of(kernels_aot.FAMILIES["Gemma 2 9B"], 64)
    alibi = kernels_aot._score_of(kernels_aot.FAMILIES["MPT 7B"], 64)
    plain = kernels_aot._score_of(kernels_aot.FAMILIES["Phi-2"], 64)
    number, at = torch.tensor(60.0), torch.tensor(20)
    assert softcap(number, at, at, at, at) == 50 * torch.tanh(number / 50)
    assert alibi(number, at, at, at, at - 3) == 57 and plain(number, at, at, at, at) is number
    assert softcap.__code__ is alibi.__code__ and softcap.__globals__ is vars(flex)


def test_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(kernels_aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        kernels_aot.main([])
    assert "the package triton is not installed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("target", kernels_aot.TARGETS)
def test_a_layer_compiles_forward_and_backward_for_every_target(target, capsys):
    pytest.importorskip("triton")
    assert kernels_aot.main(["--families", "Qwen2.5 7B", "--targets", target]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["kernel"].partition(",")[0] for line in lines} == {"forward", "backward"}
    assert all(line["bytes"] and line["fits"] for line in lines)
