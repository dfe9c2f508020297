"""The packed mask, which carries boundaries to the layers in the place of ``attention_mask``.

That is the one argument that every layer of every version gets, also when gradient checkpointing computes a layer
again. So nothing is remembered by storage or by thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .._torch import autocast_dtype, compiling, eager
from .._types import Args, Call, Function
from ..documents.boundaries import Boundaries
from ..documents.tensors import require
from ..errors import BadParents, PackingNotIsolated
from ..kernels import Options, Picks, asked_by, packed_attention
from ..kernels.options import KEYWORDS, scaled
from ..kernels.protocol import require_within
from .facts import Facts
from .inspecting import uses_flash
from .prepared import LOOKED_AT, MOST, PLAIN, Prepared, compute_dtype

if TYPE_CHECKING:
    from .split.row_part import RowPart

MASK = "attention_mask"  # the forward argument that every version passes to every attention layer

# Torch's own, whatever stands under their names later: Transformers' symbolic_trace leaves torch.tril replaced if it
# fails, and what is called behind such a name is torch's own
_OF_MASKS = (
    torch.ones_like,  # Gemma 2, Gemma 3 and Cohere 2 (4.43 to 4.52) make a window
    torch.tril,  # the same
    torch.Tensor.mul,  # GPTBigCode (4.36 to 4.52) multiplies its causal mask by the mask
    torch.Tensor.__rsub__,  # remote code subtracts a tensor from the mask
)
_ADD = torch.Tensor.add  # LED (4.34 to 4.57) adds its causal mask [batch, 1, queries, keys] to the mask; never scores
_WHERE = torch.where  # the four models above; on logits it is called by an attention layer that was not patched


@dataclass(eq=False)
class PackedMask:
    """Carries the boundaries of a packed batch to the layers. It is not a tensor, so that unpatched attention fails."""

    boundaries: Boundaries  # with `part`, those of the whole rows
    picks: Picks
    shape: tuple[int, int]  # (batch, length), like a 2-D mask: models read it to reshape the mask or to slice keys
    positions: int  # largest position id + 1, the length that a table of rotary embeddings needs
    # Models that derive positions from the mask need the ids (OPT up to 4.45).
    position_ids: torch.Tensor | None = field(default=None, repr=False)
    facts: Facts = field(default_factory=Facts, repr=False)
    # The window, in tokens, of the mask that the model made for these layers. None leaves it to the layer, 0 is none.
    window: int | None = None
    # A model around the text side made a mask for every query. Functions of the text side that make masks then hand it
    # on without a window (PaliGemma 2 in 4.53 to 4.57).
    outright: bool = False
    # [batch, length], 0 for padding, from the batch's 2-D attention mask or its `real_tokens`; None without
    real: torch.Tensor | None = field(default=None, repr=False)
    # The part of every row that this process holds. `shape` and `position_ids` are then those of the part.
    part: RowPart | None = None
    cross: PackedMask | None = None  # that of cross attention, if the decoder does not hand it on
    keys_of: int | None = None  # the length of the sources' row, in the mask of cross attention
    # the attention layer being computed, which only the formula seam sets
    layer: torch.nn.Module | None = field(default=None, repr=False)
    # the layers that were given the boundaries, in order; None for an unknown layer or in a compiled graph
    calls: list[torch.nn.Module | None] = field(default_factory=list, repr=False)

    def attend(
        self,
        module: torch.nn.Module | None,
        q: torch.Tensor,  # [batch, length, query heads, head dim]
        k: torch.Tensor,  # [batch, length, key heads, head dim]
        v: torch.Tensor,  # [batch, length, key heads, value head dim]
        options: Options,  # the mask's window and the registry's quirks override it
        kind: Hashable = None,  # the call's `kind_of`, under which what is found is kept for later calls
        casts: bool = False,  # whether the layer's own function casts float32 states, as Transformers' flash path does
    ) -> torch.Tensor:
        """Compute packed attention for a layer: ``[batch, length, query heads, value head dim]``."""
        captured = compiling()  # asked here, as dynamo may trace this function alone
        if captured and self.part is not None and not self.part.stays_in_a_graph(q.shape[2], k.shape[2]):
            return _attend_outside_the_graph(self, module, q, k, v, options, kind, casts)
        self.calls.append(None if captured else module)
        documents, facts = self.boundaries, self.facts
        if documents.sources is not None:
            options = replace(options, causal=False)
        # what is_causal says of a layer with its own formula is in the options: BioGPT's is False, and nothing reads it
        elif (
            getattr(module, "is_causal", True) is False
            and not facts.both_ways
            and (self.layer is None or not options.causal)
        ):
            raise PackingNotIsolated(
                f"{type(module).__name__} has is_causal=False, and had it not when the model was patched: labels and "
                "masks were planned for a causal model. Call fa2patch.apply(model) again."
            )
        quirks = facts.architecture
        if quirks.adjust is not None:
            options = quirks.adjust(module, options)
        if quirks.queries is not None:
            positions = documents.positions_of(self.rows)  # counted from 0 along each document
            q = quirks.queries(module, q, positions if self.part is None else self.part.own(positions))
        if self.window is not None or facts.windows_of_flash:
            options = replace(options, window=self.window_of(module, options.window))
        if isinstance(options.scale, torch.Tensor):
            q, options = scaled(q, options)
        if options.bias is not None and documents.sources is None and options.bias.shape[-1] != self.longest:
            raise PackingNotIsolated(
                f"{type(module).__name__} adds a bias of {list(options.bias.shape)} to its scores: expected one of the "
                f"longest document, {self.longest} tokens. It was made elsewhere, and what it says of "
                "documents is not known. Train this model padded, and please report it."
            )
        dtype, weight = compute_dtype(module, q, k, v, casts)
        if not (q.dtype is k.dtype is v.dtype is dtype):
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if documents.parents is not None or documents.until is not None:
            options = self._as_documents_ask(module, options)
        split = None
        if self.part is not None:
            from .split.attention import exchanged  # few processes have a part

            split, (q, k, v, documents, options) = exchanged(self.part, q, k, v, documents, options)
        kinds = documents.parents is not None, documents.until is not None, documents.sources is not None
        if captured:
            kernel = self.picks.captured(q, k, v, options, kinds)
        else:
            kernel = self.picks(module, asked_by(q, k, v, options, *kinds), q.device)
        output = packed_attention(q, k, v, documents, options, kernel)
        if kind is not None and weight is not None:
            prepared = self.picks.prepared
            if len(prepared) >= MOST:
                prepared.clear()
            prepared[kind] = Prepared(self.picks.last[id(module)], kernel, options, dtype, weight)
        return output if split is None else split.back(output)

    def window_of(self, layer: torch.nn.Module | None, said: int | None) -> int | None:
        # `said` is the window that the layer hands to its function.
        if self.window is not None:  # eager attention has its window in the mask only
            return self.window or None
        if said is None or not self.facts.windows_of_flash:
            return said
        return said if uses_flash(getattr(layer, "config", None)) else None

    def _as_documents_ask(self, module: torch.nn.Module | None, options: Options) -> Options:
        documents = self.boundaries
        if documents.until is not None:
            options = replace(options, causal=True)  # the mask says who sees later tokens; PaliGemma's layers say: all
            if options.window is not None:
                require_within(options.window, documents)
        if documents.parents is not None and not options.causal:
            raise BadParents(
                f"segment_parents came to a {type(module).__name__} whose tokens see later tokens too (is_causal is "
                "False): a prompt would see what continues it. Give every sequence as a document of its own."
            )
        return options

    def kind_of(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Call, casts: bool = False
    ) -> Hashable:
        """The kind of a layer's call, under which ``Prepared`` is kept; None if the call must be looked at."""
        # query, key and value are [batch, heads, length, head dim].
        documents, quirks, get, dtype = self.boundaries, self.facts.architecture, asked.get, query.dtype
        if layer is None or self.part is not None or documents.until is not None or query.is_meta:
            return None
        if quirks.adjust is not None or quirks.queries is not None or self.facts.windows_of_flash:
            return None
        options = (*map(get, KEYWORDS),)
        if not PLAIN.issuperset(map(type, options)):
            return None
        for name in asked:
            if name not in LOOKED_AT and isinstance(asked[name], torch.Tensor):
                return None
        (rows, heads, length, dim), of_key, of_value = query.shape, key.shape, value.shape
        own = documents.sources is None
        if of_key[:3:2] != of_value[:3:2] or (own and not (rows == of_key[0] and length == of_key[2])):
            return None
        return (
            id(layer), own, getattr(layer, "is_causal", None), self.window, documents.parents is None, heads, of_key[1],
            of_value[1], dim, of_value[3], dtype, key.dtype, value.dtype, query.device,
            autocast_dtype(query) if dtype is torch.float32 else None,
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
            torch._C._get_deterministic_algorithms(), casts, *options,
        )  # fmt: skip

    def attend_again(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, known: Prepared
    ) -> torch.Tensor:
        """Compute a call of a kind that :meth:`attend` has looked at, and return the same."""
        # query, key and value are [batch, heads, length, dim], unlike those of `attend`.
        self.calls.append(layer)
        self.picks.last[id(layer)] = known.of
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        batch, _, length, _ = query.shape
        if not (q.dtype is k.dtype is v.dtype is known.dtype):
            q, k, v = q.to(known.dtype), k.to(known.dtype), v.to(known.dtype)
        output = known.kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), self.boundaries, known.options)
        return output.view(batch, length, *output.shape[1:])

    def require_whole_rows(self, what: str) -> None:
        # `what` is a part of the model that needs whole documents.
        if self.part is not None:
            raise PackingNotIsolated(
                f"{self.part.engine} splits rows over {self.part.of} processes, and the model has {what}, "
                "which needs whole documents. Train this model without it."
            )

    @property
    def rows(self) -> tuple[int, int]:
        # (batch, length) of the whole rows, which `boundaries` describe
        return self.shape if self.part is None else self.part.rows(self.shape)

    @property
    def longest(self) -> int:
        # the tokens of the longest document, or an upper bound; with a tree, of the longest path
        return self.boundaries.keys(self.rows[0] * self.rows[1]).max_seqlen

    def given(self, module: torch.nn.Module | None) -> None:
        # What is recorded here is checked after the forward.
        self.calls.append(None if compiling() else module)

    # What it does to look like a tensor ``[batch, length]`` to Transformers' code, on its way from a model's forward to
    # the attention layers. The versions are those whose models ask for it; others may ask for it too. Whatever is not
    # here raises an error, so that an attention layer that is not patched fails.

    def to(self, *args: Any, **kwargs: Any) -> PackedMask:
        # Models cast the mask: Falcon (4.34), GPT-2, GPT-J and GPT-NeoX (4.36 to 4.48), GPTBigCode (4.36 to 4.52),
        # Gemma 3 and Qwen2-VL (4.52), and `get_extended_attention_mask` (every version). The dtype is ignored.
        # Accelerate moves the inputs of each layer.
        device = self.boundaries.cu_seqlens[:0].to(*args, **kwargs).device
        if device == self.device:
            return self
        return replace(self, boundaries=self.boundaries.to(device))

    @property
    def device(self) -> torch.device:
        # The models that use `to` ask for it.
        return self.boundaries.cu_seqlens.device

    @property
    def dtype(self) -> torch.dtype:
        # Gemma 2 and Gemma 3 (4.52) look up its smallest number, which hides a token.
        return torch.get_default_dtype()

    # Its shape

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        # No model of a release asks for it; remote code may.
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        # Gemma 2 (4.48) and `get_extended_attention_mask` (every version) ask.
        return len(self.shape)

    ndim = property(dim)  # GPT-2 (4.52 on)

    # What turns a 2-D mask into a 4-D one: reshape it, cast it, map it to 0 and -inf

    def _as_it_is(self, *args: Any, **kwargs: Any) -> PackedMask:
        return self

    view = _as_it_is  # GPT-J and GPT-NeoX (4.36 to 4.43), GPTBigCode (4.36 to 4.52), GPT-2 (4.36 on)
    unsqueeze = transpose = _as_it_is  # GPTBigCode (4.36 to 4.52)
    expand = _as_it_is  # BART's kin (4.34), in cross attention
    __rsub__ = __mul__ = _as_it_is  # GPT-2, GPT-J, GPT-NeoX (4.36 to 4.48), get_extended_attention_mask (every version)
    __rmul__ = _as_it_is  # the same product in another order: remote code

    def masked_fill(self, where: object, value: float) -> PackedMask:
        # BART's kin (4.34), in cross attention, and Falcon (4.34) fill a mask where it itself says so.
        if not isinstance(where, PackedMask):
            raise TypeError("a PackedMask was filled where something else than a PackedMask says so")
        return self

    def __getattr__(self, name: str) -> Any:
        # GPTBigCode casts the mask by `bool()` (4.36 to 4.52). Methods of these names would hide the types `bool` and
        # `float` in the class.
        if name in ("bool", "long", "float"):
            return self._as_it_is
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls: type[PackedMask], function: Function, types: object, args: Args = (), kwargs: object = None
    ) -> PackedMask:
        # Models add a causal mask or a window to a mask with the functions that are allowed here. Any other function,
        # such as one that an unpatched attention layer calls on its mask, raises TypeError.
        of_masks = function in _OF_MASKS or (function is _WHERE and not any(_is_logits(value) for value in args))
        if of_masks or (function is _ADD and all(_hides_later(value) for value in args)):
            for value in args:
                if isinstance(value, cls):
                    return value
        raise TypeError(
            f"torch's {getattr(function, '__name__', function)} was called on a PackedMask: an attention layer was not "
            "patched by fa2patch. Call fa2patch.revert(model), then fa2patch.apply(model) again; if it stays, please "
            "report it."
        )

    # Its values

    def __contains__(self, value: object) -> bool:
        # Most flash models of 4.34 to 4.42, and GPTBigCode to 4.52, keep a mask only if it has a 0.
        return value == 0

    def __eq__(self, other: object) -> Any:
        # Moonshine's flash models up to 4.57 keep a mask only if (mask == 0.0).any(). Others fill tensors where a mask
        # is equal to a number, which a packed one must not answer.
        return _Any(other == 0) if isinstance(other, float) else self is other

    __hash__ = object.__hash__

    __iter__ = None  # else Python would iterate through __getitem__, without end

    def __bool__(self) -> bool:
        # xLSTM (4.55 on, `if cache_params:`) then writes no states back.
        return False

    def __getitem__(self, index: object) -> Any:
        # 4.34's flash Mistral tells the padding side by mask[:, -1]. GPT-2, GPT-J and GPT-NeoX (4.36 to 4.48) and
        # `get_extended_attention_mask` (every version) index for a 4-D mask, Gemma 2, Gemma 3 and Cohere 2 (4.48 to
        # 4.52) and GPT-Neo (4.46 on) for keys, and xLSTM (4.55 on) for a layer's state.
        if index == (slice(None), -1):
            return torch.ones(self.shape[0], dtype=torch.int64)
        return self

    @property
    def rnn_state(self) -> PackedMask:
        # xLSTM (4.55 on) hands it to each layer as `cache_params.rnn_state[layer]`.
        return self


@eager
def _attend_outside_the_graph(mask: PackedMask, *given: Any) -> torch.Tensor:
    return mask.attend(*given)


def mask_among(values: Iterable[Any]) -> PackedMask | None:
    for value in values:
        if isinstance(value, PackedMask):
            return value
    return None


class _Any:
    """Whether a value of a mask is equal to a number: nothing else can be asked of the comparison."""

    def __init__(self, held: bool) -> None:
        self._held = held

    def any(self) -> torch.Tensor:
        return torch.tensor(self._held)


def _hides_later(value: object) -> bool:
    # A mask [batch, 1, queries, keys] that hides other tokens than later ones would lose what it hides.
    if not isinstance(value, torch.Tensor):
        return True
    if value.dim() != 4 or value.shape[1] != 1 or value.shape[2] != value.shape[3]:
        return False
    require(
        ((value == 0) | torch.ones_like(value, dtype=torch.bool).triu(1)).all(),
        PackingNotIsolated,
        "a mask was added to a packed one, and it hides other tokens than later ones, which would be lost. Train this "
        "model padded, and please report it.",
    )
    return True


def _is_logits(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 2 and value.dtype != torch.bool
