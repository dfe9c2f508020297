"""The calls of ``flash_attn_varlen_func`` fit the signature of every published release, without these releases.

``varlen_signatures.json`` has the signatures by kernel, with the releases that have them: read from the tags of
flash-attention (flash_attn_interface.py, hopper/flash_attn_interface.py, flash_attn/cute/interface.py) and from aiter.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import compat_matrix.bench
from compat_matrix.check.kernel_cases import LENGTHS, documents, states
from fa2patch import kernels
from fa2patch.kernels import Options, varlen
from fa2patch.kernels.varlen import EntryPoint

SIGNATURES = json.loads((Path(compat_matrix.bench.__file__).parent / "varlen_signatures.json").read_text())
RELEASES = [(name, text, said) for name, of in SIGNATURES.items() for text, said in of.items()]
# FlashAttention 3 beside 2.7.4 wants two more arguments that have no default: its trial fails, with their names.
REQUIRED = "seqused_q, seqused_k, max_seqlen_q"

OPTIONS = {
    "window": ({"window": 4}, {"window_size": (3, 0)}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0, "logits_soft_cap": 2.0}),
    "sinks": ({"sinks": torch.zeros(4)}, {"learnable_sink": ..., "s_aux": ...}),
    "alibi": ({"alibi_slopes": torch.ones(4)}, {"alibi_slopes": ...}),
    "dropout": ({"dropout": 0.1}, {"dropout_p": 0.1}),
}


def build_of(text):
    # The arguments of the build's calls are returned by name.
    calls, made = [], {}
    exec(f"def flash_attn_varlen_func({text}):\n    return taken(dict(locals()))", made)

    def taken(given):
        calls.append(given)
        return given["q"].new_zeros(*given["q"].shape[:2], given["v"].shape[2])

    made["taken"] = taken
    return EntryPoint.of(SimpleNamespace(flash_attn_varlen_func=made["flash_attn_varlen_func"])), calls


@pytest.mark.parametrize(("name", "text", "said"), RELEASES, ids=[f"{name} {said}" for name, _, said in RELEASES])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_a_call_fits_the_signature_of_a_release(monkeypatch, name, text, said, causal):
    entry, calls = build_of(text)
    kernel = kernels.named(name)
    monkeypatch.setattr(varlen, "entry_points", {kernel.source: entry})
    monkeypatch.setattr(torch.version, "hip", "6.4" if name == "aiter" else None)
    asked = {feature: case for feature, case in OPTIONS.items() if feature in kernel.features()}
    if REQUIRED in text:
        with pytest.raises(TypeError, match="'seqused_q' and 'seqused_k'"):
            kernel(*states(), documents(LENGTHS), Options())
        return
    for given, wanted in [({}, {}), *asked.values()]:
        q, k, v = states()
        kernel(q, k, v, documents(LENGTHS), Options(scale=0.3, causal=causal, **given))
        call = calls.pop()
        assert call["causal"] is causal and call["softmax_scale"] == 0.3
        assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == max(LENGTHS)
        expected = {parameter: value for parameter, value in wanted.items() if parameter in call}
        assert bool(expected) is bool(wanted)
        if not causal and "window_size" in expected:
            expected["window_size"] = (3, 3)
        assert all(value is ... or call[parameter] == value for parameter, value in expected.items())
        assert all(call[parameter] is not None for parameter in expected)


def test_features_are_those_of_the_signature():
    found = {}
    for name, text, said in RELEASES:
        entry, _ = build_of(text)
        found[f"{name} {said}"] = {feature for feature in varlen.PARAMETERS if entry.name_of(feature)}
    assert found["flash_attn 2.1.0 to 2.2.5"] == {"dropout"}
    assert found["flash_attn 2.3.0 to 2.3.6"] == {"dropout", "window"}
    assert found["flash_attn 2.6.0 to 2.8.3.post1"] == {"dropout", "window", "softcap", "alibi", "deterministic"}
    assert all("sinks" in found[key] and "dropout" not in found[key] for key in found if key.startswith("flash_attn_4"))
