"""A ``flash_attn`` package for machines without a GPU: the signatures of flash-attn 2.6, computed by the reference.

Transformers takes it for the real package, so models can be loaded with ``flash_attention_2`` and the code that
upstream would run on a GPU runs here. Install it before anything imports Transformers' modeling files.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

from fa2patch.kernels import Options
from fa2patch.kernels.reference import attend

_QUESTIONS = (
    "is_flash_attn_available", "is_flash_attn_2_available", "is_flash_attn_greater_or_equal_2_10",
    "is_flash_attn_greater_or_equal",
)  # fmt: skip

# some arguments of every varlen call, for tests that inspect them
CALLS: list[dict[str, Any]] = []


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    # q: [tokens, heads, dim]. Queries are the last of their keys, as in flash-attn.
    CALLS.append({"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "window_size": window_size})
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if ends_q[-1] != q.shape[0] or ends_k[-1] != k.shape[0]:
        raise RuntimeError(
            f"cu_seqlens end at {ends_q[-1]}/{ends_k[-1]} but there are {q.shape[0]}/{k.shape[0]} tokens"
        )
    pieces = []
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
        queries, missing = q[a:b], (d - c) - (b - a) if causal or window_size[0] >= 0 else 0  # cross attention has any
        padded = torch.cat([queries.new_zeros(missing, *queries.shape[1:]), queries])
        options = Options(
            scale=softmax_scale,
            causal=causal,
            window=window_size[0] + 1 if window_size[0] >= 0 else None,
            softcap=softcap or None,
            dropout=float(dropout_p),
            alibi_slopes=alibi_slopes,
        )
        pieces.append(attend(padded[None], k[None, c:d], v[None, c:d], options)[0].transpose(0, 1)[missing:])
    return torch.cat(pieces)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    # q: [batch, length, heads, dim]
    batch = q.shape[0]
    cu_q, cu_k = (torch.arange(0, (batch + 1) * x.shape[1], x.shape[1], dtype=torch.int32) for x in (q, k))
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out = flash_attn_varlen_func(
        *flat, cu_q, cu_k, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size, softcap
    )
    CALLS.pop()
    return out.view(*q.shape[:3], v.shape[-1])


def flash_attn_with_kvcache(*args, **kwargs):
    raise NotImplementedError("the stand-in has no paged cache")


def index_first_axis(x, indices):
    return x[indices]


def pad_input(hidden_states, indices, batch, seqlen):
    # hidden_states: [tokens, ...]. They are put at their places in [batch, seqlen, ...].
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def unpad_input(hidden_states, attention_mask, *unused):
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cu = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu, int(lengths.max())


def install() -> None:
    package = ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", loader=None)
    package.__version__ = "2.6.3"
    package.__path__ = []
    names = ("bert_padding", "flash_attn_interface", "layers", "layers.rotary")
    padding, interface, layers, rotary = (ModuleType(f"flash_attn.{name}") for name in names)
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(package, function.__name__, function)
    for function in (index_first_axis, pad_input, unpad_input):
        setattr(padding, function.__name__, function)
    interface.flash_attn_func, interface.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    rotary.apply_rotary_emb = None  # it is imported, but never called
    package.bert_padding, package.flash_attn_interface = padding, interface
    for module in (package, padding, interface, layers, rotary):
        sys.modules[module.__name__] = module
    for name in ("transformers.utils.import_utils", "transformers.utils"):
        utils = importlib.import_module(name)
        getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", {}).setdefault("flash_attn", ["flash-attn"])
        for name in _QUESTIONS:
            if hasattr(utils, name):
                setattr(utils, name, lambda *unused, **ignored: True)
