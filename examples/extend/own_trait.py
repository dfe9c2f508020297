"""A trait of your own: a model that adds a vector to the first token of every row, which must be every document's.

    python examples/extend/own_trait.py

No token sees another document through such a vector. The numbers are wrong all the same: in a packed row only the first
document gets its vector. fa2patch does not know the module, so it computes a document alone as well, and raises an
error. A trait says how the feature is found, what is replaced for it, and that the documents must ride to it on
``position_ids``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Callable

import torch
from rows import CONFIG, alone, difference, documents, model_of, packed
from transformers import LlamaForCausalLM, LlamaModel

import fa2patch
from fa2patch.errors import PackingNotIsolated
from fa2patch.traits import ModelLayers, Site, Step, Trait, documents_of, of_forward, register_trait


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

    def finds(self, model: ModelLayers) -> Any:
        """True for a model that holds a start vector. Where it is None, the rest is not called."""
        return True if any(isinstance(module, StartVector) for module in model.decoder.modules()) else None

    def replaces(self, model: ModelLayers, found: Any) -> Iterable[Site]:
        """The vector's forward. A site's function must be one that pickle finds by its name."""
        return [of_forward(m, of_each_document) for m in model.decoder.modules() if isinstance(m, StartVector)]

    def before(self, step: Step, found: Any) -> None:
        """The documents ride on ``position_ids``. It is an error if the replacement does not take them."""
        step.send_documents()


def main() -> None:
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


if __name__ == "__main__":
    main()
