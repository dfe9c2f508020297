"""The order in which torch's ``context_parallel`` splits a packed row, so that its parts weigh the same.

torch gives each process a piece of a row's head and one of its tail, which balances one document. It hands the tensors
of a batch to one function, before it knows anything else. Among them, position ids are known by what they hold. Rows
of one document, rows of which no document would be cut, several rows, and batches that say nothing are split as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ..._torch import SDPA
from ..._types import Function
from ...binding import bind
from ...documents import tensors
from ...documents.parts import Order, Pieces, consecutive, head_and_tail

# of torch's module
SHARDS, BALANCES, OPTIONS = "_context_parallel_buffers", "_create_default_load_balancer", "_cp_options"
BALANCER = "load_balancer"  # an argument of the first: what makes the order

_ORDER = "fa2patch_order"  # on torch's options, which hold for one batch


def bind_to(module: ModuleType, user: Any) -> None:
    """Balance packed rows while the user has a binding, if this torch takes an order."""
    shards = getattr(module, SHARDS, None)
    if shards is not None and BALANCER in inspect.signature(shards).parameters and hasattr(module, BALANCES):
        bind(module, SHARDS, functools.partial(_sharding_balanced, vars(module)), user)
        bind(module, BALANCES, functools.partial(_balancing, vars(module)), user)


def order_of(options: Any) -> Order | None:
    # of the batch that is split now
    found: Order | None = getattr(options, _ORDER, None)
    return found


def arranged(order: Order, length: int, parts: int) -> Order:
    # rows of other lengths are those of a proof or of verify
    return order if order.length == length else consecutive(length, parts)


def _sharding_balanced(variables: dict[str, Any], original: Function) -> Function:
    @functools.wraps(original)
    def sharded(mesh: Any, buffers: Any, dims: Any, load_balancer: Any = None, **more: Any) -> Any:
        # its newer form wraps modules, whose attention is torch's
        replaces = getattr(variables.get("_dispatch_mode"), "name", "") == "MONKEY_PATCH"
        order = _order_of(buffers, mesh.size(), load_balancer is not None) if replaces else None
        setattr(variables[OPTIONS], _ORDER, order)
        balancer = load_balancer if order is None else _Balancer(order)
        return original(mesh, buffers, dims, balancer, **more)

    return sharded


def _balancing(variables: dict[str, Any], original: Function) -> Function:
    @functools.wraps(original)
    def balancer(length: int, *more: Any, **given: Any) -> Any:
        # torch puts outputs back in order by the same, inside the context of a batch
        order = order_of(variables[OPTIONS]) if torch.nn.functional.scaled_dot_product_attention is not SDPA else None
        ours = order is not None and order.length == length
        return _Balancer(order) if ours and order is not None else original(length, *more, **given)

    return balancer


class _Balancer:
    # what torch asks of its own: indices [1, length]

    def __init__(self, order: Order) -> None:
        self.order = order

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        return torch.from_numpy(self.order.places if restore else self.order.tokens)[None]


def _order_of(buffers: Sequence[Any], parts: int, mirrored: bool) -> Order | None:
    # `mirrored`: whether torch would take pieces of the row's head and tail
    rows = [each for each in buffers if isinstance(each, torch.Tensor) and each.dim() == 2 and len(each) == 1]
    rows = [each[0] for each in rows if each.dtype == torch.int64 and each.shape[1] > 1]
    if not rows:
        return None
    # ids count on or start from 0, and start more than once
    counts = torch.stack([((row[1:] == row[:-1] + 1) | (row[1:] == 0)).all() & (row[0] == 0) for row in rows])
    restarts = torch.stack([(row[1:] == 0).any() for row in rows])
    found = tensors.read(counts & restarts).tolist()
    if True not in found:
        return None
    ids = rows[found.index(True)]
    starts = tensors.read((ids == 0).nonzero().flatten())
    lengths = [*map(int, [*starts[1:] - starts[:-1], len(ids) - starts[-1]])]
    usual = (head_and_tail if mirrored else consecutive)(len(ids), parts)
    if not Pieces.of(lengths, usual).cut:
        return None  # every document lies whole in a part, where mixers need it, and nothing is sent
    from ...packing.parts import balanced  # which few need

    return balanced(lengths, parts)
