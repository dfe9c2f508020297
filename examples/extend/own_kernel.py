"""A kernel of your own: attention by one dense mask over the whole row, for evaluation only.

    python examples/extend/own_kernel.py

``apply(model, kernel=DenseMask())`` uses it for this model. ``register_kernel`` gives it a name for every model, and
with ``before=`` a place in what ``kernel="auto"`` tries. Before its first use fa2patch compares it with the reference.
"""

from __future__ import annotations

import torch
from rows import alone, difference, documents, model_of, packed
from transformers import LlamaForCausalLM

import fa2patch
from fa2patch.errors import KernelUnavailable
from fa2patch.kernels import Kernel, Options, register_kernel


class DenseMask(Kernel):
    """``scaled_dot_product_attention`` with a block-diagonal mask. Its memory grows with the square of the row."""

    name = "dense-mask"
    what = "scaled_dot_product_attention with a block-diagonal mask"
    needs = "nothing"
    DEVICES = DTYPES = MAX_HEAD_DIM = None
    MULTIPLE = 1
    BACKWARD = False  # training goes to another kernel, or is refused where this one was asked for

    def available(self) -> tuple[bool, str]:
        return True, ""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        boundaries: fa2patch.Boundaries,
        options: Options,
        scale: float,
    ) -> torch.Tensor:
        """q, k and v ``[tokens, heads, dim]`` -> ``[tokens, query heads, value dim]``."""
        tokens, groups = torch.arange(len(q), device=q.device), q.shape[1] // k.shape[1]
        document = torch.searchsorted(boundaries.cu_seqlens[1:], tokens, right=True)
        seen = document[:, None] == document
        if options.causal:
            seen = seen & (tokens[:, None] >= tokens)
        states = (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        query, key, value = (x.transpose(0, 1)[None] for x in states)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
        return attended[0].transpose(0, 1)


def main() -> None:
    model, docs = model_of(LlamaForCausalLM), documents()
    expected = alone(model, docs)
    with fa2patch.apply(model, kernel=DenseMask()) as patch:
        print(f"difference {difference(model, docs, expected):.1e}, computed by {patch.layers[0].kernel}")
        try:
            model(**packed(docs))
        except KernelUnavailable as error:
            print(f"with gradients: {error}")
    register_kernel(DenseMask(), before="reference")
    with fa2patch.apply(model, kernel="dense-mask") as patch:
        print(f"difference {difference(model, docs, expected):.1e}, computed by {patch.layers[0].kernel}")


if __name__ == "__main__":
    main()
