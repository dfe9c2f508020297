"""Kernels that compute something else, or fail, and the ways in which layers ask for something else."""

import torch
from definition_cases import asks

from fa2patch import kernels
from fa2patch.kernels.reference import Reference


class Scripted(Reference):
    """The reference, with boundaries and options changed by ``wrong``."""

    name = "scripted"

    def __init__(self, wrong=lambda *given: given):
        self.wrong = wrong

    def attend(self, q, k, v, boundaries, options, scale):
        return super().attend(q, k, v, *self.wrong(boundaries, options), scale)


OTHERS = {
    "device": "cuda", "dtype": torch.float16, "heads": 8, "key_heads": 2, "head_dim": 128, "value_dim": 32,
    "causal": False, "gradients": False, **{feature: (feature,) for feature in kernels.FEATURES},
}  # fmt: skip


def asks_other(what):
    return asks()._replace(**{"features" if what in kernels.FEATURES else what: OTHERS[what]})
