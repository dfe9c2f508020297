"""The engines that split the rows of a batch over processes, as ``split_training.py`` drives them.

torch's ``context_parallel`` replaces sdpa while a batch is split, and accelerate adds hooks that drop each layer's
mask. Neither accelerate nor Trainer starts it on a CPU, so that what they do to a model and to a batch is called
without the rest.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import ulysses_rows
from torch.distributed.device_mesh import init_device_mesh

IGNORED = -100


class Engine:
    has_none_of: tuple[str, ...] = ()  # cases of split_training.py
    unpatched = ""  # the implementation with which an unpatched model can be computed on a CPU, if it is another one

    def group(self) -> Any:
        return dist.group.WORLD

    def prepare(self, model: Any, rows: int = 1) -> None: ...

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        # Rows are split inside, without a batch of its own.
        yield

    def split(self, batch: dict[str, Any]) -> contextlib.AbstractContextManager[dict[str, Any]]:
        # This process's part, with shift_labels in the place of labels. Forward and backward run inside.
        raise NotImplementedError

    def gradients(self, model: Any) -> dict[str, torch.Tensor]:
        return ulysses_rows.gradients(model, self.group())


class Ulysses(Engine):
    has_none_of = ("parts of different lengths",)

    def group(self) -> Any:
        return ulysses_rows.group()

    def prepare(self, model: Any, rows: int = 1) -> None:
        ulysses_rows.register(model, dist.get_world_size(), rows)

    @contextlib.contextmanager
    def split(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield ulysses_rows.part(batch)


class Torch(Engine):
    # On a CPU torch has no ring for sdpa, and one process may wait for another that has failed. Eager attention is
    # computed, because torch does not replace it.
    unpatched = "eager"

    def __init__(self, balanced: bool = True) -> None:
        self.mesh, self.balanced = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), balanced

    @contextlib.contextmanager
    def _within(self, buffers: list[torch.Tensor]) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        options = inspect.unwrap(context_parallel).__globals__["_cp_options"]
        was, options.enable_load_balance = options.enable_load_balance, self.balanced
        dims = [each.dim() - 1 for each in buffers]
        try:
            with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={*buffers}):
                yield
        finally:
            options.enable_load_balance = was

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with self._within([torch.zeros(1, 2 * dist.get_world_size())]):
            yield

    @contextlib.contextmanager
    def split(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        batch = ulysses_rows.shifted(batch)
        length = batch["input_ids"].shape[1]
        own = {name: value.clone() for name, value in batch.items() if ulysses_rows.has_tokens(value, length)}
        with self._within([*own.values()]):
            yield {**batch, **own}


class Accelerate(Torch):
    def prepare(self, model: Any, rows: int = 1) -> None:
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)


ENGINES = {
    "ulysses": Ulysses,
    "torch": Torch,
    "plain": lambda: Torch(balanced=False),
    "accelerate": Accelerate,
}
