"""The engines that split the rows of a batch over processes, as ``split_training.py`` drives them.

torch's ``context_parallel`` replaces sdpa while a batch is split, and accelerate adds hooks that drop each layer's
mask. Neither accelerate nor Trainer starts it on a CPU, so that what they do to a model and to a batch is called
without the rest.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cpu_ring
import torch
import torch.distributed as dist
import transformers
import ulysses_rows
from torch.distributed.device_mesh import init_device_mesh


class Engine:
    unpatched_of: dict[str, str] = {}  # another implementation than `unpatched`, by case
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

    def rings(self) -> int:
        # how often the engine's own attention has run
        return 0

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
    # Its hooks drop every mask, so torch's ring computes a packed row as one document. It is made to run on a CPU.

    def __init__(self) -> None:
        super().__init__()
        self.unpatched_of: dict[str, str] = {}
        if cpu_ring.available():
            cpu_ring.register()
            # of other batches, one process may fail while the others wait for it
            self.unpatched_of = dict.fromkeys(("ids", "lengths", "several rows", "one document"), "sdpa")

    def rings(self) -> int:
        return cpu_ring.Calls.forward

    def prepare(self, model: Any, rows: int = 1) -> None:
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)


class ByTrainer(Accelerate):
    # Trainer chooses what is split, makes shift_labels and missing ids, and leaves other columns whole.

    has_none_of = ("no position_ids",)

    @contextlib.contextmanager
    def split(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        def maybe(buffers: list[torch.Tensor], **given: Any) -> Any:
            return self._within(buffers)

        config = SimpleNamespace(cp_enabled=True, cp_backend="torch")
        accelerator = SimpleNamespace(parallelism_config=config, maybe_context_parallel=maybe)
        trainer: Any = SimpleNamespace(accelerator=accelerator)
        if hasattr(transformers.Trainer, "_is_attention_mask_causal"):
            trainer._is_attention_mask_causal = transformers.Trainer._is_attention_mask_causal.__get__(trainer)
        own = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
        model = SimpleNamespace()  # without a config it asks for no attn_implementation
        within, own = transformers.Trainer._prepare_context_parallel_inputs(trainer, model, own)  # type: ignore[arg-type]
        own.pop("labels", None)
        with within():
            yield own


class Ring(Engine):
    # The package's own substitute_hf_flash_attn. Its attention needs flash-attn, and is not called.

    has_none_of = ("parts of different lengths",)
    unpatched = "eager"

    def prepare(self, model: Any, rows: int = 1) -> None:
        # Version 0.1.8 cannot be imported beside the newest Transformers.
        if importlib.util.find_spec("flash_attn") is None:  # its modules import names only
            for name in ("flash_attn", "flash_attn.flash_attn_interface"):
                sys.modules[name] = mock.MagicMock(__version__="2.8.3", __spec__=None)
        try:
            self.adapters = importlib.import_module("ring_flash_attn.adapters.hf_adapter")
        except ImportError as error:
            raise ValueError(str(error).partition(" (")[0]) from error
        finally:
            for name in ("flash_attn", "flash_attn.flash_attn_interface"):
                if isinstance(sys.modules.get(name), mock.MagicMock):
                    del sys.modules[name]
        with self.on():
            pass

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        flash = sys.modules["transformers.modeling_flash_attention_utils"]
        table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        with (
            mock.patch.object(flash, "_flash_attention_forward", flash._flash_attention_forward),
            mock.patch.dict(getattr(table, "_global_mapping", table)),
        ):
            self.adapters.substitute_hf_flash_attn(dist.group.WORLD, 1)
            yield

    @contextlib.contextmanager
    def split(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.on():
            yield ulysses_rows.part(batch)


ENGINES = {
    "ulysses": Ulysses,
    "torch": Torch,
    "plain": lambda: Torch(balanced=False),
    "accelerate": Accelerate,
    "Trainer": ByTrainer,
    "ring_flash_attn": Ring,
}
