"""A kernel, a trait and a row of the registry of one's own, as docs/extending.md and examples/extend have them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import fa2patch
from fa2patch.errors import KernelUnavailable, PackingNotIsolated
from fa2patch.kernels import Kernel, Options, register_kernel
from fa2patch.traits import Looked, Site, Step, Trait, documents_of, of_forward, register_trait


CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LENGTHS = (5, 1, 9, 3)


def model_of(cls: Any, config: Any = CONFIG) -> Any:
    """A random model in eval mode. Its weights are scaled up, so that a leak is not lost in rounding."""
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


def documents() -> list[torch.Tensor]:
    """Documents of random tokens, int64 ``[length]`` each."""
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(0, CONFIG.vocab_size, (length,), generator=drawn) for length in LENGTHS]


def packed(docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row of all documents, with ``position_ids`` that restart for each: int64 ``[1, tokens]``."""
    return {
        "input_ids": torch.cat(docs)[None],
        "position_ids": torch.cat([torch.arange(len(doc)) for doc in docs])[None],
    }


@torch.no_grad()
def alone(model: Any, docs: list[torch.Tensor]) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of each document by itself, end to end."""
    return torch.cat([model(input_ids=doc[None]).logits[0] for doc in docs])


@torch.no_grad()
def difference(model: Any, docs: list[torch.Tensor], expected: torch.Tensor) -> float:
    """The largest difference between a packed row's logits and the expected ones, as a share of the largest."""
    found = model(**packed(docs)).logits[0]
    return float((found - expected).abs().max() / expected.abs().max())


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


def with_a_kernel() -> None:
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


class StartVector(torch.nn.Module):
    """The feature: adds a learnt vector to the first token of every row."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(1, size))

    def forward(self, embedded: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """``[batch, length, size]`` -> the same."""
        return torch.cat([embedded[:, :1] + self.weight, embedded[:, 1:]], dim=1)


class StartModel(LlamaModel):
    """Llama's base model with a :class:`StartVector` behind its embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.start = StartVector(config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Any = None, position_ids: Any = None, inputs_embeds: Any = None, **rest: Any) -> Any:
        embedded = self.start(self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds, position_ids)
        return super().forward(inputs_embeds=embedded, position_ids=position_ids, **rest)


class StartForCausalLM(LlamaForCausalLM):
    """A causal LM around it, as remote code would define it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = StartModel(config)
        self.post_init()


def of_each_document(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for :meth:`StartVector.forward`: each document gets the vector."""

    @functools.wraps(original)
    def forward(self: Any, embedded: torch.Tensor, position_ids: Any) -> torch.Tensor:
        boundaries = documents_of(position_ids)
        if boundaries is None:  # a dense batch
            return original(self, embedded, position_ids)
        flat = embedded.flatten(0, 1)
        starts = boundaries.cu_seqlens[:-1].long()
        return flat.index_add(0, starts, self.weight.expand(len(starts), -1)).view_as(embedded)

    return forward


class StartVectors(Trait):
    """The trait: found by its module's class."""

    name = "start vectors"

    def finds(self, model: Looked) -> Any:
        """True for a model that holds a start vector. Where it is None, the rest is not called."""
        return True if any(isinstance(module, StartVector) for module in model.decoder.modules()) else None

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        """The vector's forward. A site's function must be one that pickle finds by its name."""
        return [of_forward(m, of_each_document) for m in model.decoder.modules() if isinstance(m, StartVector)]

    def before(self, step: Step, found: Any) -> None:
        """The documents ride on ``position_ids``. It is an error if the replacement does not take them."""
        step.send_documents()


def with_a_trait() -> None:
    model, docs = model_of(StartForCausalLM, CONFIG), documents()
    expected = alone(model, docs)
    with fa2patch.apply(model):
        try:
            model(**packed(docs))
        except PackingNotIsolated as error:
            print(f"without the trait: {error.message}")
    register_trait(StartVectors())
    with fa2patch.apply(model):
        print(f"with the trait: difference {difference(model, docs, expected):.1e}")


def refused(config: Any) -> str | None:
    """The reason why this config cannot be trained packed, or None."""
    return "its first tokens see all others" if getattr(config, "prefix_tokens", 0) else None


def adjusted(module: Any, options: Options) -> Options:
    """The options of an attention layer that are right. This one never uses a window beyond the longest position."""
    longest = module.config.max_position_embeddings
    return replace(options, window=None) if options.window is not None and options.window > longest else options


def with_a_row() -> None:
    fa2patch.register(fa2patch.Architecture("llama", refuse=refused, adjust=adjusted))
    model, docs = model_of(LlamaForCausalLM), documents()
    expected = alone(model, docs)
    with fa2patch.apply(model):
        print(f"difference {difference(model, docs, expected):.1e}")
    model.config.prefix_tokens = 3
    try:
        fa2patch.apply(model)
    except fa2patch.errors.UnsupportedModel as error:
        print(f"refused: {error}")
    finally:
        del model.config.prefix_tokens
        fa2patch.register(fa2patch.Architecture("llama"))


with_a_kernel()
with_a_trait()
with_a_row()
