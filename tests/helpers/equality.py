"""What it means in a test that two computations are equal: on any processor they differ by rounding alone.

A bound in float32 is one that some processor held: another one adds up in another order, and a model amplifies that ten
or a hundred times. So models compute in float64 where they can. What is left is what Transformers computes in float32
(norms, rotary embeddings): at most 1e-6 of the outputs and 7e-6 of the gradients in all architectures. Where they
cannot, results are compared with what rounding is on this machine, in this model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fa2patch.proof.runs import roundings

# The largest difference in float64, relative to the largest value.
SAME = 1e-5

Numbers = Mapping[str, torch.Tensor]


def assert_equal(found: Numbers, expected: Numbers, moved: Numbers | None = None) -> None:
    # Numbers are in float64, unless ``moved`` is given: the expected numbers, computed again inside
    # :class:`fa2patch.proof.runs.Rounded`.
    assert found.keys() == expected.keys()
    scale = max(float(value.detach().abs().max()) for value in expected.values())
    if moved is None:
        dtypes = {value.dtype for value in (*found.values(), *expected.values())}
        assert dtypes == {torch.float64}, f"float32 rounds otherwise on another processor: found {dtypes}"
        bound = SAME * scale
    else:
        dtype = next(iter(found.values())).dtype
        bound = (
            2 * roundings(dtype) * max(float((moved[name] - expected[name]).detach().abs().max()) for name in expected)
        )
    for name, right in expected.items():
        off = float((found[name] - right).detach().abs().max())
        assert off <= bound, f"{name}: off by {off / scale:.1e} of the largest, allowed {bound / scale:.1e}"
