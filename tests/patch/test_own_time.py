"""What the patch itself takes of the host, counted in calls of Python: the same on every machine.

If a count has grown for a reason, raise its limit and say why in the commit. ``python -m compat_matrix.bench.own_time``
prints the counts, and ``compat_matrix.check.reads.calls`` says which functions are called.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fa2patch
from compat_matrix.bench import own_time
from compat_matrix.check.reads import calls


def test_a_forward_takes_few_calls_beyond_the_kernel():
    with torch.no_grad():
        few, many, larger = (own_time.forwards(layers, more) for layers, more in ((2, 0), (6, 0), (2, 2000)))
        found = own_time.calls_of_forwards(few, many, larger)
    limits = {"a layer": 2, "a forward beyond its layers": 60, "2,000 more modules": 0}
    for what, limit in limits.items():
        ids, lengths = (found[f"{what}, {way}: calls"] for way in own_time.WAYS)
        assert ids <= limit, found
        assert lengths <= limit + 20 * (what == "a forward beyond its layers"), found


def test_apply_looks_at_each_module_once():
    # Twice as many layers must take less than twice as many calls.
    counts = []
    for layers in (40, 80):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))
        counts.append(sum(calls(lambda one=model: fa2patch.apply(one)).values()))
    assert counts[1] <= 20_000
    assert counts[1] < 2 * counts[0]


def test_a_first_capture_traces_little_more_than_upstreams():
    # 1.42 before queries and keys could be of different rows, and scores have a bias
    assert own_time.steps_of_capture(True) <= 1.45 * own_time.steps_of_capture(False)
