"""The engines that split rows over two processes, for ``split_rows.py``: torch's, accelerate's, Trainer's and a ring.

Neither accelerate nor Trainer starts context parallelism on a CPU. So the methods that shard a batch and prepare a
model are called on stand-ins of an accelerator and a trainer, which hold the mesh only.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from parts import told
from torch.distributed.device_mesh import init_device_mesh

from compat_matrix import tiny_models


class Torch:
    word = "cp_size"  # what the refusal says of the engine
    # The implementation of unpatched models. On a CPU, sdpa with a mask fails in one process while the other one waits
    # for it. Eager attention is computed, because torch does not replace it.
    attention = "eager"

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def prepare(self, model: Any) -> None: ...

    @contextlib.contextmanager
    def split(self, model: Any, call: dict[str, Any], more: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
        # The batch, and tensors like it, are split in place.
        from torch.distributed.tensor.experimental import context_parallel

        buffers = [value for value in call.values() if torch.is_tensor(value) and value.dim() == 2] + more
        with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
            yield call

    def starts(self) -> str:
        # The error with which the engine itself starts on a CPU.
        return ""


class Accelerate(Torch):
    # accelerate adds hooks that replace each layer's mask to torch's ``context_parallel``.

    attention = "sdpa"

    def __init__(self) -> None:
        from accelerate import ParallelismConfig

        self.config = ParallelismConfig(cp_size=2)
        self.accelerator: Any = SimpleNamespace(
            parallelism_config=self.config, torch_device_mesh=self.config.build_device_mesh("cpu")
        )

    def prepare(self, model: Any) -> None:
        from accelerate import Accelerator

        Accelerator._prepare_cp(self.accelerator, model)
        if not hasattr(self.accelerator, "_cp_context"):  # 1.12 does nothing, and would fail in its first step, while
            self.config.sp_backend = None  # its default sp_backend is set, even if nothing uses it
            Accelerator._prepare_cp(self.accelerator, model)

    @contextlib.contextmanager
    def split(self, model: Any, call: dict[str, Any], more: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
        from accelerate import Accelerator

        buffers = [value for value in call.values() if torch.is_tensor(value) and value.dim() == 2] + more
        with Accelerator.maybe_context_parallel(self.accelerator, buffers, [1] * len(buffers), set()):
            yield call

    def starts(self) -> str:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin

        try:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            Accelerator(cpu=True, parallelism_config=self.config, fsdp_plugin=plugin)
        except (ValueError, RuntimeError) as error:
            return told(error)
        return ""


class ByTrainer(Accelerate):
    # Trainer adds ``shift_labels`` and splits through accelerate.

    @contextlib.contextmanager
    def split(self, model: Any, call: dict[str, Any], more: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
        from accelerate import Accelerator

        def maybe(**given: Any) -> Any:
            given["buffers"] = given["buffers"] + more
            given["buffer_seq_dims"] = given["buffer_seq_dims"] + [1] * len(more)
            return Accelerator.maybe_context_parallel(self.accelerator, **given)

        self.accelerator.maybe_context_parallel = maybe
        trainer: Any = SimpleNamespace(accelerator=self.accelerator)
        if hasattr(transformers.Trainer, "_is_attention_mask_causal"):
            trainer._is_attention_mask_causal = transformers.Trainer._is_attention_mask_causal.__get__(trainer)
        within, call = transformers.Trainer._prepare_context_parallel_inputs(trainer, model, dict(call))
        with within():
            yield call

    def starts(self) -> str:
        try:
            arguments = transformers.TrainingArguments(
                "unused", use_cpu=True, parallelism_config=self.config, report_to="none",
                fsdp=True, fsdp_config={"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
            )  # fmt: skip
            transformers.Trainer(tiny_models.build("llama", "sdpa"), arguments)
        except (ValueError, RuntimeError) as error:
            return told(error)
        return ""


class Ring(Torch):
    # The function stands in the module's name, because ring_flash_attn needs flash-attn.

    word, package = "ring attention", "ring_flash_attn"

    @contextlib.contextmanager
    def split(self, model: Any, call: dict[str, Any], more: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
        def attention(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("this stand-in has no ring")

        attention.__module__ = "ring_flash_attn.adapters.hf_adapter"
        table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        table["ring"], was = attention, model.config._attn_implementation
        model.config._attn_implementation = "ring"
        with mock.patch.dict(sys.modules, {self.package: ModuleType(self.package)}):  # what its import leaves
            try:
                yield {name: self._half(value) for name, value in call.items()}
            finally:
                model.config._attn_implementation = was

    def _half(self, value: Any) -> Any:
        if not torch.is_tensor(value) or value.dim() != 2:
            return value
        return value.chunk(2, dim=1)[dist.get_rank()]

    def starts(self) -> str:
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            return told(error)
        return ""


ENGINES = {"torch": Torch, "accelerate": Accelerate, "Trainer": ByTrainer, "ring_flash_attn": Ring}
