"""What the scripts about Ulysses share: register it, cut batches as DeepSpeed's loader does, and join the parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from ranks import finish
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compat_matrix.check.rows import alone

try:
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
except ModuleNotFoundError:
    deepspeed = None

IGNORED = -100

TAKES_FLEX = deepspeed is not None and tuple(map(int, deepspeed.__version__.split(".")[:2])) >= (0, 19)

_WRAPPER = """
def wrapping(held):
    def uattn_wrapper(*args, **kwargs):
        raise AssertionError(f"a packed batch was given to {held}")
    return uattn_wrapper
"""

_FUNCTIONS = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS}


def register(model: Any, processes: int, rows: int = 1) -> Any:
    # Ulysses splits rows as accelerate sets it up with ``sp_size``; the result is its ``mpu``.
    # What was registered before is taken back: DeepSpeed 0.18 knows no FlexAttention, and replaces every
    # implementation. Without DeepSpeed, a function is registered that has what fa2patch looks at, and computes nothing.
    if deepspeed is None:
        return _look_alike(model.config._attn_implementation)
    for name, function in _FUNCTIONS.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None:  # the groups stay, and are made once only
        parallel_state_sp.initialize_sequence_parallel = lambda **_: None
    taken = model.config._attn_implementation
    taken = taken if taken == "sdpa" or TAKES_FLEX else "sdpa"
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation=taken,
        sequence_parallel_size=processes, micro_batch_size=rows, seq_length=None, seq_length_is_variable=True,
    )  # fmt: skip


def _look_alike(implementation: str) -> None:
    # fa2patch tells the function from a user's own by the file that defines it, which lies in DeepSpeed.
    packages = Path("/packages")
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.sequence_parallel"):  # what its import leaves
        package = sys.modules.setdefault(name, ModuleType(name))
        folder = packages / name.replace(".", "/")
        package.__file__, package.__path__ = str(folder / "__init__.py"), [str(folder)]
    home = folder / "ulysses_sp.py"
    defined: dict[str, Any] = {"__name__": "deepspeed.runtime.sequence_parallel.ulysses_sp"}
    held = type("UlyssesSPAttentionHF", (), {"process_group": dist.group.WORLD, "disable_in_eval": False})()
    exec(compile(_WRAPPER, str(home), "exec"), defined)
    uattn_wrapper = defined["wrapping"](held)
    ALL_ATTENTION_FUNCTIONS[implementation] = uattn_wrapper


def group() -> Any:
    if deepspeed is None:
        return dist.group.WORLD
    return parallel_state_sp.get_sequence_parallel_group()


def precision(
    build: Callable[[torch.dtype], Any], docs: list[torch.Tensor], otherwise: torch.dtype = torch.float32
) -> torch.dtype:
    # Double precision is taken if an unpatched model can be computed in it, because processes sum in another order.
    # 4.57's DeepSeek V3 cannot: its experts mix single with double precision.
    try:
        alone(build(torch.float64), docs)
    except Exception:
        return otherwise
    return torch.float64


def shifted(batch: dict[str, Any]) -> dict[str, Any]:
    # Labels are shifted before rows are split, as in ``UlyssesSPDataLoaderAdapter`` and in Trainer.
    batch = dict(batch)
    if "labels" in batch:
        batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)[:, 1:].contiguous()
    return batch


def part(batch: dict[str, Any]) -> dict[str, Any]:
    batch = shifted(batch)
    length = batch["input_ids"].shape[1]
    return {name: own(value) if has_tokens(value, length) else value for name, value in batch.items()}


def has_tokens(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == length


def own(values: torch.Tensor) -> torch.Tensor:
    # ``values`` are [..., length].
    length = values.shape[-1] // dist.get_world_size(group())
    return values.narrow(-1, dist.get_rank(group()) * length, length).contiguous()


def whole(values: torch.Tensor) -> torch.Tensor:
    # ``values`` are [batch, length, ...].
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group()))]
    dist.all_gather(parts, values.detach().contiguous(), group=group())
    return torch.cat(parts, dim=1)


def gradients(model: Any, sharing: Any = None) -> dict[str, torch.Tensor]:
    # Gradients are summed over the processes, and reset. An expert may get tokens in one process only. Parameters
    # without a gradient in any process are left out.
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        has_one = torch.tensor(parameter.grad is not None, dtype=torch.int64)
        for value in (gradient, has_one):
            dist.all_reduce(value, group=sharing or group())
        if has_one:
            found[name] = gradient
    model.zero_grad()
    return found


def run(main: Callable[[], dict[str, Any]], out: str) -> None:
    torch.set_num_threads(1)
    if deepspeed is None:
        dist.init_process_group("gloo")
    else:
        deepspeed.init_distributed("gloo", verbose=False)
    finish(out, main())
