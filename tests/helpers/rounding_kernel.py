"""A right kernel that rounds as flash attention does on a GPU: what a trial must still believe."""

import torch

from fa2patch.kernels.reference import Reference


class _Flash(torch.autograd.Function):
    # FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2) for one head, with weights and dS in half precision.

    @staticmethod
    def forward(ctx, q, k, v, mask, scale, tf32):
        half, (q_, k_, v_) = q.dtype, (_tf32(x.float(), tf32) for x in (q, k, v))
        logits = (q_ @ k_.T * scale).masked_fill(~mask, float("-inf"))
        top = logits.amax(1, keepdim=True)
        weights = (logits - top).exp()
        total = weights.sum(1, keepdim=True)
        output = (_tf32(weights.to(half).float(), tf32) @ v_ / total).to(half)
        ctx.save_for_backward(q, k, v, output, weights / total)
        ctx.scale, ctx.tf32 = scale, tf32
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, weights = ctx.saved_tensors
        q_, k_, v_, grad_ = (_tf32(x.float(), ctx.tf32) for x in (q, k, v, grad))
        drawn = (grad.float() * output.float()).sum(1, keepdim=True)
        of_logits = _tf32((weights * (grad_ @ v_.T - drawn)).to(q.dtype).float(), ctx.tf32)
        of_values = _tf32(weights.to(q.dtype).float(), ctx.tf32).T @ grad_
        found = of_logits @ k_ * ctx.scale, of_logits.T @ q_ * ctx.scale, of_values
        return *(x.to(q.dtype) for x in found), None, None, None


def _tf32(x, wanted):
    # TF32 keeps ten bits.
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) if wanted else x


class Rounding(Reference):
    # Plain and causal attention, two-way or with a window, head by head. ``tf32`` rounds float32 as TF32 does.

    name = "rounding"

    def __init__(self, tf32=True):
        self.tf32 = tf32

    def attend(self, q, k, v, boundaries, options, scale):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))  # the gradients of a group are added in half precision
        tf32, heads = self.tf32 and q.dtype == torch.float32, []
        ends = boundaries.cu_seqlens.tolist()
        for head in range(q.shape[1]):
            rows = []
            for a, b in zip(ends, ends[1:]):
                token = torch.arange(b - a)
                far = token[:, None] - token
                mask = far >= 0 if options.causal else torch.ones_like(far, dtype=torch.bool)
                if options.window is not None:
                    mask = mask & (far.abs() < options.window)
                rows.append(_Flash.apply(q[a:b, head], k[a:b, head], v[a:b, head], mask, scale, tf32))
            heads.append(torch.cat(rows))
        return torch.stack(heads, 1)
