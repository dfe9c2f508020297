"""Rows that are split over processes, by context parallelism or by DeepSpeed's Ulysses.

    python long_rows.py --engine cp                          two processes on a CPU, a tiny Llama with random weights
    python long_rows.py                                      the same with Ulysses
    torchrun --nproc-per-node 8 long_rows.py --model NAME --sp-size 8 --row-length 262144

With ``--engine cp`` it trains with torch's ``context_parallel`` and FSDP2, else with accelerate and ZeRO-3. With the
tiny model, the loss of each row is also computed in one process, by an unpatched model that is given one document after
another. Documents are functions of the standard library, in bytes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import os
import subprocess
import sys
import tempfile
import warnings
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import fa2patch

END = 256
"""The token behind each document of bytes."""


def main(argv: list[str] | None = None) -> int:
    """Train, or start the processes that train; returns the exit code."""
    options = parsed(argv)
    if options.engine == "sp":
        require_deepspeed()
    if "RANK" not in os.environ:
        return start(options, sys.argv[1:] if argv is None else argv)
    {"sp": train_with_ulysses, "cp": train_with_context_parallelism}[options.engine](options)
    return 0


def require_deepspeed() -> None:
    """Exit with what to install, if DeepSpeed or accelerate is missing or too old."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        import accelerate
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"{error}. Ulysses needs DeepSpeed and accelerate: pip install deepspeed accelerate. Or take --engine cp"
        ) from None
    if not hasattr(accelerate, "ParallelismConfig") or not hasattr(accelerate.utils, "DeepSpeedSequenceParallelConfig"):
        raise SystemExit("Ulysses needs accelerate 1.12 or later: pip install -U accelerate")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=["sp", "cp"], default="sp", help="sp: DeepSpeed's Ulysses, cp: torch's "
                        "context_parallel (%(default)s)")  # fmt: skip
    parser.add_argument("--model", help="a causal LM, with its tokenizer, in place of the tiny Llama")
    parser.add_argument("--sp-size", type=int, default=2, help="processes that share a row (%(default)s)")
    parser.add_argument("--row-length", type=int, default=1024, help="tokens of a row (%(default)s)")
    parser.add_argument("--attn-implementation", default="sdpa", help="of the model; accelerate knows sdpa, "
                        "flash_attention_2 and flash_attention_3 under sp_size (%(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (%(default)s)")
    options = parser.parse_args(argv)
    if options.sp_size < 2:
        parser.error(f"--sp-size: expected 2 or more, found {options.sp_size}")
    multiple = options.sp_size if options.engine == "sp" else 2 * options.sp_size
    if options.row_length < 1 or options.row_length % multiple:
        parser.error(f"--row-length: expected a multiple of {multiple}, found {options.row_length}")
    return options


def start(options: argparse.Namespace, argv: list[str]) -> int:
    """Start as many processes as share a row, with torchrun; returns their exit code."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.sp_size)]
    with tempfile.TemporaryDirectory() as folder:  # a lock of an interrupted build elsewhere would block for ever
        variables = {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": folder, **os.environ}
        return subprocess.run([sys.executable, *command, str(Path(__file__)), *argv], env=variables).returncode


def train_with_context_parallelism(options: argparse.Namespace) -> None:
    """Train in one of the processes, with FSDP2 over all of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.experimental import context_parallel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world = dist.get_world_size()
    if world % options.sp_size:
        raise SystemExit(f"--sp-size: expected a divisor of the number of processes {world}, found {options.sp_size}")
    mesh = init_device_mesh(device, (world // options.sp_size, options.sp_size), mesh_dim_names=("dp", "cp"))
    model, documents = loaded(options)
    alone = None if options.model else copy.deepcopy(model)  # not patched
    fa2patch.apply(model.to(device).train())
    every = mesh[("dp", "cp")]._flatten("dp_cp")
    for layer in model.model.layers:
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if options.model else 2e-3)

    lengths = [len(document["input_ids"]) for document in documents]
    dp = mesh["dp"]
    sampler = fa2patch.packing.PackedBatchSampler(
        lengths, options.row_length, dp.size(), dp.get_local_rank(), too_long="drop"
    )
    collate = fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=2 * options.sp_size, pad_token_id=0)
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=collate)
    for step, batch in enumerate(islice((batch for _ in count() for batch in loader), options.steps), 1):
        batch = {name: value.to(device) for name, value in batch.items()}
        labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()
        row = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "shift_labels": labels}
        whole = None if alone is None or dp.size() > 1 else loss_of_documents(alone, model, row)
        tokens = (labels != -100).sum()
        dist.all_reduce(tokens)
        tokens //= options.sp_size  # every process of a group has counted the same row
        buffers = [*row.values()]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers={*buffers}):
            labels = row.pop("shift_labels").flatten()  # this process's part, as all of the row
            logits = model(**row, use_cache=False).logits.flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / tokens
            (loss * world).backward()  # FSDP takes the mean of gradients
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        say(options, step, float(loss), whole, row["input_ids"].shape[1])
    finish()


def say(options: argparse.Namespace, step: int, loss: float, whole: float | None, own: int) -> None:
    """Print a step's loss, from the first process."""
    beside = "" if whole is None else f", {whole:.6f} in one process"
    if dist.get_rank() == 0:
        of = f"{own} of {own * options.sp_size} tokens in each process"
        print(f"step {step}: loss {loss:.6f}{beside}; {of}", flush=True)


def finish() -> None:
    """End the process."""
    dist.barrier()
    sys.stdout.flush()
    if not torch.cuda.is_available():
        os._exit(0)  # shutting down gloo's threads sometimes aborts the process
    dist.destroy_process_group()


def train_with_ulysses(options: argparse.Namespace) -> None:
    """Train in one of the processes, with ZeRO-3."""
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, ParallelismConfig, PartialState
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    warnings.simplefilter("ignore", FutureWarning)  # of DeepSpeed's calls of torch
    on_gpus = torch.cuda.is_available()
    PartialState(**({} if on_gpus else {"backend": "gloo"}))  # without a backend, a CPU's process would be alone
    world = dist.get_world_size()
    if world % options.sp_size:
        raise SystemExit(f"--sp-size: expected a divisor of the number of processes {world}, found {options.sp_size}")
    attention = DeepSpeedSequenceParallelConfig(
        sp_attn_implementation=options.attn_implementation, sp_seq_length_is_variable=True
    )
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(on_gpus)),
        parallelism_config=ParallelismConfig(
            sp_size=options.sp_size, dp_shard_size=world // options.sp_size, sp_handler=attention
        ),
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    model, documents = loaded(options)
    alone = None if options.model else copy.deepcopy(model)  # not patched
    fa2patch.apply(model)

    lengths = [len(document["input_ids"]) for document in documents]
    sampler = fa2patch.packing.PackedBatchSampler(lengths, options.row_length, rank="all", too_long="drop")
    to = options.sp_size if on_gpus else options.row_length  # gloo gathers rows of equal lengths only
    collate = fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=to, pad_token_id=0)  # and no lengths of documents
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if options.model else 2e-3)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)

    found = fa2patch.verify(model, strict=False)  # on every rank
    accelerator.print("verify:", str(found).splitlines()[0])
    for step, batch in enumerate(islice((batch for _ in count() for batch in loader), options.steps), 1):
        whole = loss_alone(alone, model, batch)
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        say(options, step, loss.item(), whole, batch["input_ids"].shape[1])
    finish()


def settings(on_gpus: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. ZeRO-3, because the gradients are too large by sp_size with ZeRO-1 and 2."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": on_gpus},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "overlap_comm": on_gpus},
    }


def loaded(options: argparse.Namespace) -> tuple[Any, list[dict[str, list[int]]]]:
    """The model and its documents."""
    torch.manual_seed(0)
    sources = functions()
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        kind = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        model = AutoModelForCausalLM.from_pretrained(
            options.model, torch_dtype=kind, attn_implementation=options.attn_implementation
        )
        model.gradient_checkpointing_enable()
        return model, [{"input_ids": tokenizer(source)["input_ids"]} for source in sources]
    config = LlamaConfig(
        vocab_size=END + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=options.row_length,
        attn_implementation=options.attn_implementation,
    )  # fmt: skip
    return LlamaForCausalLM(config), [{"input_ids": [*source.encode(), END]} for source in sources]


def functions() -> list[str]:
    """The functions of a few modules of the standard library."""
    found = []
    for module in (argparse, ast, inspect, subprocess, tempfile):
        source = inspect.getsource(module)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        found += [ast.get_source_segment(source, node) or "" for node in nodes]
    return found


def group() -> Any:
    """The processes that share a row."""
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import get_sequence_parallel_group

    return get_sequence_parallel_group()


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of all tokens of the rows, in every process. The loader has shifted the labels."""
    from torch.distributed.nn.functional import all_gather

    labels = batch["shift_labels"].flatten()
    inputs = {name: value for name, value in batch.items() if name != "shift_labels"}
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
    own = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens, group=group())
    return sum(all_gather(own, group=group())) / tokens


@torch.no_grad()
def loss_alone(alone: Any, model: Any, batch: dict[str, torch.Tensor]) -> float | None:
    """The same row's loss, by an unpatched model that gets one document after another; None without such a model."""
    if alone is None:
        return None
    import deepspeed

    parameters = list(accelerated(model).parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        for own, parameter in zip(alone.parameters(), parameters):
            own.copy_(parameter)
    return loss_of_row(alone, {name: whole(batch[name]) for name in ("input_ids", "position_ids", "shift_labels")})


@torch.no_grad()
def loss_of_documents(alone: Any, model: Any, row: dict[str, torch.Tensor]) -> float:
    """The row's loss, by an unpatched model that gets one document after another."""
    for own, parameter in zip(alone.parameters(), model.parameters()):
        own.copy_(parameter.full_tensor())
    return loss_of_row(alone, row)


def loss_of_row(alone: Any, row: dict[str, torch.Tensor]) -> float:
    """The mean loss of a row's tokens, document by document."""
    ids, positions, labels = (row[name][0].cpu() for name in ("input_ids", "position_ids", "shift_labels"))
    loss = torch.zeros(())
    for at in torch.arange(len(ids)).tensor_split((positions == 0).nonzero().flatten()[1:]):
        logits = alone(input_ids=ids[None, at]).logits[0].float()
        loss += torch.nn.functional.cross_entropy(logits, labels[at], reduction="sum")
    return float(loss / (labels != -100).sum())


def accelerated(model: Any) -> Any:
    """The Transformers model in DeepSpeed's engine."""
    return getattr(model, "module", model)


def whole(part: torch.Tensor) -> torch.Tensor:
    """The rows ``[rows, length]`` of which each process has a part."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group()))]
    dist.all_gather(parts, part.contiguous(), group=group())
    return torch.cat(parts, dim=1)


if __name__ == "__main__":
    raise SystemExit(main())
