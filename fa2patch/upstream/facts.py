"""What is known of a model, and the attributes that are replaced for it: picklable, without modules or tensors."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, NamedTuple

from ..binding import bind
from ..documents.names import LENGTHS
from .architectures import Architecture
from .inspecting import defining
from .rope import LengthScaled


@dataclass
class Facts:
    """What is known of a model since ``apply`` looked at it. A forward goes by it."""

    architecture: Architecture = Architecture("")
    padded: bool = False  # whether padded batches are computed packed
    both_ways: bool = True  # whether a layer lets tokens see later tokens, as in an encoder
    contradiction: str = ""  # how the masks and the layers differ in that; empty if they agree
    # The masks may be told of tokens that see each other (PaliGemma in 5.x). In such a call they say outright who sees
    # whom, and in any other call a contradiction is an error.
    told_of_types: bool = False
    first_position: int = 0  # of a document's first token if a batch has no position ids
    # The model embeds a token's place in the row if a batch has no position ids. In a row that is padded left, that is
    # not the token's place in its document.
    by_column: bool = False
    row_positions: bool = False  # whether embeddings look positions up along the row (DistilBERT up to 4.57)
    counting: tuple[str, ...] = ()  # modules of the decoder that count positions along the row (BART's kin)
    rope: LengthScaled | None = None  # a rope scaling that depends on the sequence length
    rope_by_document: bool = False  # whether the decoder's rotary modules must get the documents (longrope)
    row_head: str = ""  # how the head computes one result per row, as a text for an error
    has_mixers: bool = False  # whether layers other than attention carry state along the row
    # Gemma 3n's later layers read the keys and values of earlier layers from a cache, also in packed batches.
    keeps_cache: bool = False
    carrier: str = "attention_mask"  # the forward argument that the packed mask replaces
    stops_ids: bool = False  # whether the decoder takes no position_ids (Mamba, RWKV, OPT up to 4.45)
    # whether the outermost model makes masks for the models inside it (Gemma 3 up to 4.52)
    makes_masks: bool = False
    crosses: bool = False  # whether layers attend to an encoder's states, if the decoder is given some
    shifts_in_its_loss: bool = False  # whether the loss of an encoder-decoder shifts labels once more
    stacks: tuple[str, ...] = ()  # the names of an encoder-decoder's encoder and decoder, which have their own patches
    by_document: bool = False  # whether the decoder is called for each document
    # whether flash attention alone has the window of the config, and eager code has none
    windows_of_flash: bool = False


class Role(NamedTuple):
    """The role of a model among the models that a call goes through."""

    outermost: bool  # no other model is around it
    innermost: bool  # it is the base model, which loops over the layers
    predicts_the_next: bool = False  # a label is predicted by the token before it
    pools: bool = False  # its head pools the last token of each row; packed batches are pooled for each document
    # the collator lengths that its `forward`, or one that runs through super(), does not accept
    rejected: tuple[str, ...] = LENGTHS


@dataclass(frozen=True)
class Site:
    """An attribute to replace, and the function that makes the replacement.

    A site pickles its owner by name, so that a patch can be bound again in another process.

    Attributes:
        owner: the class or module itself. A name would not do, because remote code that is loaded again defines another
            class of the same name.
        attribute: the attribute's name.
        make: a function that takes the original value and returns the replacement. It must be picklable.
    """

    owner: type | ModuleType
    attribute: str
    make: Callable[[Any], Any]

    @property
    def module(self) -> ModuleType:
        """The owner itself if it is a module, else the module that defines it."""
        if isinstance(self.owner, ModuleType):
            return self.owner
        return importlib.import_module(self.owner.__module__)

    def bind(self, user: object) -> None:
        """Replace the attribute on behalf of ``user``, for example a ``Patch``."""
        bind(self.owner, self.attribute, self.make, user)

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.owner, ModuleType):
            return _site_of_module, (self.owner.__name__, self.attribute, self.make)
        return Site, (self.owner, self.attribute, self.make)


def _site_of_module(module: str, attribute: str, make: Callable[[Any], Any]) -> Site:
    return Site(importlib.import_module(module), attribute, make)


def of_forward(module: object, make: Callable[[Any], Any]) -> Site:
    """Return the site of a module's ``forward``, on the class that defines it.

    Args:
        module: The module.
        make: Makes the replacement from the forward that it replaces.
    """
    return Site(defining(type(module), "forward"), "forward", make)
