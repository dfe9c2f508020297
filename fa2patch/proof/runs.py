"""Runs of a model that leave it as it was, with a leaf as its input embeddings, and how much they may differ."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import eagerly, is_no_verdict
from .._types import Args, Call, Model
from ..comparison import random_sum, tensors
from ..documents.names import LENGTHS, TOKENS, stated
from ..documents.trees import Tree
from ..errors import PackingNotIsolated
from ..upstream.calls import passed
from ..upstream.find_models import embedding_in_use
from . import locate
from .inputs import RowSlice
from .split_rows import WholeRows
from .state import State

_ROUNDING, _ROUNDING_IN_HALF = {torch.float64: 1e-12, torch.float32: 1e-5}, 1e-2
_NEAR, _NEAR_IN_HALF = {torch.float64: 1e-9, torch.float32: 1e-4}, 5e-2

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs")


def rounding(dtype: torch.dtype) -> float:
    # The number of tokens in a grouped expert matmul may change a result so much, relative to the largest value.
    return _ROUNDING.get(dtype, _ROUNDING_IN_HALF)


def near(dtype: torch.dtype) -> float:
    # The largest distance between a document packed and alone, relative to the largest output.
    return _NEAR.get(dtype, _NEAR_IN_HALF)


def roundings(dtype: torch.dtype) -> float:
    # How many times as far as by Rounded two right results may be apart in the mean. Measured on random
    # weights, in five dtypes, documents packed and alone were 2.4 times as far apart at most. In half precision it was
    # half of that, because kernels add up in float32, so that few numbers round otherwise.
    return 4.0 if torch.finfo(dtype).bits > 16 else 1.0


def eps(dtype: torch.dtype) -> float:
    # What computes in float64 counts as float32, in which layers compute norms and rotary embeddings.
    return torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps


class _WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects whole numbers that operators make of other numbers, if there are as many as tokens, or more."""

    supports_higher_order_operators = True  # so that torch hands flex attention to a mode, too

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = tokens
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if any(tensor.is_floating_point() for tensor in tensors((args, kwargs))):
            whole = (tensor for tensor in tensors(output) if tensor.dtype in (torch.int64, torch.int32))
            self.made += [tensor.detach().clone() for tensor in whole if tensor.numel() >= self.tokens]
        return output


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every number of a matrix product, a convolution or attention is another one by its rounding."""

    # Another processor, kernel or number of tokens may round so. How far a result moves is therefore how far two right
    # results may be apart on this machine, in the dtype that each product is computed in and through all layers.
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function.overloadpacket in _products():
            values = output[0] if isinstance(output, tuple) else output
            size = eps(values.dtype) + _of_sums(args)
            # up and down, because a norm would undo one direction; by the value, as a part of a DTensor has no place
            values.mul_(1 + size * torch.cos(1e4 * values.float()).sign())
        return output


def _of_sums(args: Args) -> float:
    # Errors of a sum of n numbers grow as sqrt(n) (Higham and Mary 2019, doi:10.1137/18M1226312), and kernels add up in
    # float32. In float32, rows of a product alone and among others were 1.5, 2.6, 5.6 and 7.6 roundings apart, for n of
    # 64, 512, 4,096 and 8,192. The second factor comes last, and n is its last dimension but one.
    factors = [tensor for tensor in tensors(args) if tensor.dim() > 1]
    return torch.finfo(torch.float32).eps * math.sqrt(factors[-1].shape[-2]) / 8 if factors else 0.0


@functools.cache
def _products() -> Collection[Any]:
    # Torch's own table of operators that do matrix products.
    from torch.utils import flop_counter  # a proof needs it, and most processes make none

    names = ("flop_registry", "flop_mapping")  # the second in torch 2.1
    found: Collection[Any] = next(getattr(flop_counter, name) for name in names if hasattr(flop_counter, name))
    return found


def picks(runs: Iterable[Callable[[], object]], tokens: int) -> bool:
    # Whether a model picks something for each token by its value, as a router picks experts. Then other tokens decide
    # how many share a token's matmul, which rounds by that number. It shows in whole numbers that are others in another
    # run, with other tokens.
    made = []
    try:
        for run in runs:
            mode = _WholeNumbers(tokens)
            with torch.no_grad(), eagerly(), mode:
                run()
            made.append(mode.made)
    except Exception as error:  # a model whose runs cannot be watched gets the stricter bound
        if is_no_verdict(error):
            raise
        return False
    first, *others = made
    return any(len(one) != len(first) or not all(map(torch.equal, one, first)) for one in others)


@contextlib.contextmanager
def left_as_it_was(model: Model, evaluates: bool = True) -> Iterator[None]:
    # Hooks, gradients, the random state and what modules keep are restored, and the values of parameters are not saved.
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Module)]
    # FSDP2 knows which modules it has unsharded, so their parameters are put back as sharded ones only.
    sharding: list[Any] = [
        module for module in modules if hasattr(type(module), "unshard") and hasattr(type(module), "reshard")
    ]
    for module in sharding:
        module.reshard()
    hooks = [(vars(module)[name], dict(vars(module)[name])) for module in modules for name in _HOOKS]
    state = State(modules)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(sorted(device.index or 0 for device in devices)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())  # otherwise the reducer waits for gradients that never come
        try:
            if evaluates:
                model.eval()
            yield
        finally:
            for module in sharding:
                module.reshard()
            state.put_back()
            for table, entries in hooks:
                table.clear()
                table.update(entries)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def others(embedded: torch.Tensor, exchanged: torch.Tensor) -> torch.Tensor:
    # Embeddings ``[batch, length, size]``, other ones where ``exchanged``, bool ``[batch, length]``.
    return torch.where(exchanged[..., None].to(embedded.device), embedded.roll(1, -1) * 1.25, embedded)


def one_document(length: int, device: torch.device) -> Call:
    # The lengths of a row that is one document.
    return stated(torch.tensor([0, length], dtype=torch.int32, device=device), length)


def largest_part(gradient: torch.Tensor, tokens: torch.Tensor) -> float:
    # The largest gradient of these tokens, bool ``[batch, length]``, relative to the largest of all.
    size = gradient.float().abs()
    return float((size * tokens[..., None].to(size.device)).max() / size.max().clamp(min=1e-30))


def with_leaf(
    model: Model,
    inner: Model,
    call: Call,
    exchanged: torch.Tensor | None = None,  # bool [batch, length]: tokens that get other embeddings
    shape: tuple[int, ...] | None = None,  # of the embeddings that are meant; None for any
    before_hooks: bool = False,  # which may mix tokens; those of tensor parallelism make a plain tensor of a part
) -> tuple[Any, torch.Tensor | None]:
    # The output of ``model``, and what ``inner`` was given as embeddings first: a leaf, if gradients are enabled and
    # the embeddings were seen. If an engine splits the rows, the leaf is of whole rows.
    split = model if isinstance(model, WholeRows) else None
    embedding = embedding_in_use(inner)
    leaf: torch.Tensor | None = None

    def given(embedded: torch.Tensor) -> torch.Tensor:
        nonlocal leaf
        if shape is not None and (embedded.shape[:2] if split is None else split.shape) != shape:
            return embedded
        if exchanged is not None:
            embedded = others(embedded, exchanged if split is None else split.own(exchanged.to(embedded.device)))
        if not torch.is_grad_enabled() or leaf is not None:
            return embedded
        embedded = embedded.detach()
        leaf = (embedded if split is None else split.gathered(embedded)).requires_grad_()
        own = leaf if split is None else split.part.own(leaf, 1)
        return own * 1  # some models change embeddings in place

    def hook(module: torch.nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
        return given(output) if module is embedding else output  # a replica has a copy of this hook

    if call.get("inputs_embeds") is not None:
        call = {**call, "inputs_embeds": given(call["inputs_embeds"])}
    handle = embedding.register_forward_hook(hook, prepend=before_hooks)
    try:
        return model(**call), leaf
    finally:
        handle.remove()


def outputs(model: Model, call: Call) -> torch.Tensor:
    return _per_token(model(**call), call)


def _per_token(given: Any, call: Call, slices: Sequence[RowSlice] = ()) -> torch.Tensor:
    # ``slices`` are those of a batch; without them, each row is one document.
    found = getattr(given, "logits", None)
    if found is None:
        found = getattr(given, "last_hidden_state", None)
    if found is None and isinstance(given, (tuple, list)) and given:
        found = given[0]
    shape = tuple(call["input_ids"].shape)
    if isinstance(found, torch.Tensor) and found.shape[:2] != shape:
        found = _spread(found, shape, [place for place in slices if place.real])
    if not isinstance(found, torch.Tensor) or found.shape[:2] != shape:
        what = f"{list(found.shape)}" if isinstance(found, torch.Tensor) else type(given).__name__
        raise PackingNotIsolated(
            f"expected logits or hidden states {list(shape)} + [...] for every token, found {what}. Verify the causal "
            "LM or its base model, without arguments that leave tokens' outputs out."
        )
    return found


def _spread(pooled: torch.Tensor, shape: tuple[int, ...], documents: list[RowSlice]) -> torch.Tensor:
    # A head that pools returns one vector for each document, or for each row if it knows no documents. Every token
    # gets the vector of its document.
    own = torch.arange(shape[0], device=pooled.device)[:, None].repeat(1, shape[1])
    if len(pooled) == len(documents):
        for number, document in enumerate(documents):
            document.of(own).fill_(number)
    elif len(pooled) != shape[0]:
        return pooled
    elif documents:
        raise PackingNotIsolated(
            f"the model's head makes one vector of each row, {list(pooled.shape)}, and the batch holds "
            f"{len(documents)} documents. Call fa2patch.apply(model), which pools each document, or says what to do."
        )
    return pooled[own]


def outputs_and_embeddings(
    model: Model, inner: Model, call: Call, slices: Sequence[RowSlice] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    given, seen = with_leaf(model, inner, call)
    found = _per_token(given, call, slices)
    if seen is not None:
        return found, seen
    if isinstance(model, WholeRows):
        raise PackingNotIsolated(
            f"{type(inner).__name__} takes its input embeddings from nowhere that can be seen, and its rows are split "
            "over processes. Verify the model before torch.compile."
        )
    # a compiled model does not see the new hook
    with torch.no_grad():
        leaf = embedding_in_use(inner)(call["input_ids"]).detach()
    leaf.requires_grad_()
    given = {name: value for name, value in call.items() if name != "input_ids"}
    output = getattr(model(**given, inputs_embeds=leaf * 1), "logits", None)
    if output is None:
        raise PackingNotIsolated(
            f"{type(model).__name__} takes its input embeddings from nowhere that can be seen (a compiled base "
            "model?). Verify the model before torch.compile."
        )
    return output, leaf


class Runs:
    """What is run and compared of one batch: documents whose tokens are exchanged, and documents alone.

    A document stands for a segment, too, and is named by its index in ``slices``. The caller says which model is run
    (a replica, the user's, or whole rows of a model that splits them) and in which mode, and which outputs count.
    """

    def __init__(self, model: Model, inner: Any, call: Call, slices: list[RowSlice], shape: tuple[int, ...]) -> None:
        # ``inner`` is in ``model``. It embeds the tokens, and the module that leaks is looked for in it.
        self.model, self.inner, self.call, self.slices, self.shape = model, inner, call, slices, shape
        lengths, parents = [place.length for place in slices], [place.parent for place in slices]
        self.tree = Tree(lengths, parents, torch.device("cpu"))  # a document is a root without children
        self.word = "segment" if any(place.parent >= 0 for place in slices) else "document"

    def path(self, at: int) -> list[RowSlice]:
        return [self.slices[one] for one in self.tree.path(at)]

    def alone(self, at: int, call: Call) -> Call:
        # The document in a row of its own; a segment is at the end of its path. Without a mask and with lengths, a
        # kernel computes it. As a dense batch it would run upstream's code, where Gemma 2's sdpa has no softcap and
        # GPT-2's flash attention no float32.
        path, (rows, length) = self.path(at), self.shape

        def of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            value = value[None] if value.shape == (length,) else value
            for dim in (1, value.dim() - 1):  # the latter: position ids on several axes, [axes, batch, length]
                if value.dim() > 1 and value.shape[dim] == length and value.shape[dim - 1] in (1, rows):
                    row = value.narrow(dim - 1, path[0].row if value.shape[dim - 1] == rows else 0, 1)
                    return torch.cat([row.narrow(dim, place.start, place.length) for place in path], dim)
            return value

        (tokens, *_) = passed(call, TOKENS).values()
        own = {name: of(value) for name, value in call.items() if name not in (*LENGTHS, "attention_mask")}
        return {**own, **one_document(sum(place.length for place in path), tokens.device)}

    def gradients_to(
        self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], tokens: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        # From the outputs of a run, of all tokens or of some, to its embeddings.
        total = random_sum(outputs, tokens)
        found: list[torch.Tensor | None] = [None for _ in leaves]
        if total is not None and any(parameter.requires_grad for parameter in self.model.parameters()):
            found = [*torch.autograd.grad(total, leaves, allow_unused=True)]
        elif total is not None:
            torch.autograd.backward([total])  # reentrant checkpoints refuse autograd.grad
            found = [leaf.grad for leaf in leaves]
        whole = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found)]
        return [self.model.summed(each) for each in whole] if isinstance(self.model, WholeRows) else whole

    def run(self, call: Call, exchanged: torch.Tensor | None = None) -> Any:
        # ``exchanged``: tokens that get other embeddings, bool ``[batch, length]``.
        return with_leaf(self.model, self.inner, call, exchanged)[0]

    def first_leak(
        self, at: int, call: Call, exchanged: torch.Tensor | None, bound: float, patched: bool
    ) -> tuple[str, str, str] | None:
        # Where the document differs in the batch and in another run: of the batch, or of the document alone.
        place, shape = self.slices[at], next(iter(passed(call, TOKENS).values())).shape[:2]
        there = place if shape == self.shape else RowSlice(0, shape[1] - place.length, shape[1], True)
        split = self.model if isinstance(self.model, WholeRows) else None
        here = locate.Watched(functools.partial(self.run, self.call), tuple(self.shape), place, split)
        other = locate.Watched(functools.partial(self.run, call, exchanged), tuple(shape), there, split)
        return locate.first_difference(self.inner, here, other, bound, patched, self.word == "segment")


@contextlib.contextmanager
def dtypes_saved() -> Iterator[set[torch.dtype]]:
    # They show the dtype that a model computes in, which its weights and outputs do not: autocast and sharding with
    # mixed precision take float32 weights and return float32 outputs. A compiled model saves its tensors likewise.
    seen: set[torch.dtype] = set()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if saved.dtype.is_floating_point:
            seen.add(saved.dtype)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        yield seen
