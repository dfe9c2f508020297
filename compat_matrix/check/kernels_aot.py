"""FlexAttention's kernels as fa2patch asks for them, compiled for cards that are not here.

fa2patch has no Triton kernel of its own. FlexAttention's are made by inductor, which gives them up without a device if
the few questions that it asks one are answered by a stand-in: its properties, its random state, and Triton's target.
Tensors are fake, so nothing is computed. The masks and scores are those of :mod:`fa2patch.kernels.flex`. Each kernel is
then compiled to machine code for every target; that shows that it compiles and how much shared memory it takes, and
not that its numbers are right.

It needs Triton, which a build of torch for CPUs does not bring: ``python -m pip install --no-deps --target FOLDER
triton``, then ``PYTHONPATH=FOLDER python -m compat_matrix.check.kernels_aot``. What inductor asks of a device is not
public and was tried in torch 2.13 alone, with Triton 3.8 and 3.9.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, Callable, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import Options, flex

TOKENS, BLOCK = 4096, 128


class Family(NamedTuple):
    heads: int
    key_heads: int
    dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False


FAMILIES = {
    "Llama 2 7B": Family(32, 32, 128, 128),
    "Llama 3 70B": Family(64, 8, 128, 128),
    "Qwen2.5 7B": Family(28, 4, 128, 128),
    "Mistral 7B": Family(32, 8, 128, 128, window=4096),
    "Gemma 2 9B": Family(16, 8, 256, 256, window=4096, softcap=50.0),
    "GPT-OSS 20B": Family(64, 8, 64, 64, window=128),
    "DeepSeek-V3": Family(128, 128, 192, 128),
    "Phi-2": Family(32, 32, 80, 80),
    "Falcon 7B": Family(71, 1, 64, 64),
    "MPT 7B": Family(32, 32, 128, 128, alibi=True),
    "T5 11B": Family(128, 128, 128, 128, bias=True),
}


class Target(NamedTuple):
    backend: str
    arch: int | str
    warp: int
    capability: tuple[int, int]
    shared: int  # bytes of shared memory that a block of threads may have


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD's CDNA 3 ISA, "LDS".
TARGETS = {
    "sm_80": Target("cuda", 80, 32, (8, 0), 166_912),
    "sm_90": Target("cuda", 90, 32, (9, 0), 232_448),
    "sm_100": Target("cuda", 100, 32, (10, 0), 232_448),
    "gfx942": Target("hip", "gfx942", 64, (9, 4), 65_536),
}


# flex_attention hands these to its operator in training (_apply_kernel_options).
OPTIONS = {
    "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
}  # fmt: skip


class _Made(BaseException):
    """Inductor has written the code, which is not loaded: loading it looks for a device."""


@contextlib.contextmanager
def stand_in(target: Target) -> Iterator[list[str]]:
    # It answers for a card what inductor asks of it, and gives the code that inductor writes.
    import torch._inductor.graph
    import triton
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget

    (major, minor), hip = target.capability, target.backend == "hip"
    properties = SimpleNamespace(
        name="a stand-in", major=major, minor=minor, multi_processor_count=108, regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=target.warp,
        gcnArchName=target.arch if hip else "",
        total_memory=80 << 30, shared_memory_per_block=49_152, shared_memory_per_block_optin=target.shared,
        L2_cache_size=40 << 20,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "_get_device_properties": properties, "get_device_capability": target.capability, "is_tf32_supported": True,
        "is_bf16_supported": True, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "synchronize": None, "current_stream": None, "_lazy_init": None, "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }  # fmt: skip
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget(target.backend, target.arch, target.warp), get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0), get_device_interface=lambda: torch.cuda,
    )  # fmt: skip
    written: list[str] = []

    def compiled(graph: Any) -> Any:
        code = graph.codegen()[0]
        written.append(getattr(code, "value", code))
        raise _Made

    hop = sys.modules["torch._higher_order_ops.flex_attention"]
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, a=answer, **__: a, create=True))
        stack.enter_context(mock.patch.object(torch._inductor.graph.GraphLowering, "compile_to_module", compiled))
        stack.enter_context(mock.patch.object(hop, "_permute_strides", _permuted))
        stack.enter_context(mock.patch.object(torch.version, "hip", "6.4" if hip else None))
        triton.runtime.driver.set_active(driver)
        DeviceProperties.create.cache_clear()
        yield written


def _permuted(out: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    # It does what _permute_strides does, without a copy: even a copy of fake tensors needs a device.
    made, size = [0] * out.dim(), 1
    for dim in sorted(range(out.dim()), key=lambda dim: strides[dim]):
        made[dim], size = size, size * out.shape[dim]
    return torch.empty_strided(out.shape, made, dtype=out.dtype, device=out.device)


def sources(family: Family, target: Target, tokens: int = TOKENS) -> dict[str, str]:
    with stand_in(target) as written:
        for backward in (False, True):
            torch._dynamo.reset()
            with contextlib.suppress(_Made), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                _lowered(family, tokens, backward)
    found = {}
    for way, code in zip(("forward", "backward"), written):
        for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.S):
            found[f"{way}, {name}"] = source
    return found


def _lowered(family: Family, tokens: int, backward: bool) -> None:
    # Inductor ends in _Made.
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.nn.attention.flex_attention import BlockMask

    hop: Any = sys.modules["torch._higher_order_ops.flex_attention"]
    visible, of_mask = _lifted(_mask_of(family, tokens))
    scored, of_score = _lifted(_score_of(family, tokens))

    def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    blocks = tokens // BLOCK
    states = [fake(1, family.heads, tokens, family.dim), fake(1, family.key_heads, tokens, family.dim)]
    states.append(fake(1, family.key_heads, tokens, family.value_dim))
    number, index = fake(1, 1, blocks, dtype=torch.int32), fake(1, 1, blocks, blocks, dtype=torch.int32)
    held = [fake(*x.shape, dtype=x.dtype) for x in (*of_score, *of_mask)]
    scale, at = family.dim**-0.5, len(of_score)
    output = fake(1, family.heads, tokens, family.value_dim)
    more = [output, fake(1, family.heads, tokens, dtype=torch.float32), output] if backward else []
    graphs = _graphs(hop, scored, of_score) if backward else (scored,)

    def computed(*given: torch.Tensor) -> Any:
        q, k, v, number, index, *rest = given
        buffers, last = rest[: len(held)], rest[len(held) :]
        lists = (number, index) * 4
        mask = BlockMask((tokens, tokens), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible).as_tuple()
        taken = (tuple(buffers[:at]), tuple(buffers[at:]))
        if backward:
            out, lse, grad = last
            given = (q, k, v, out, lse, grad, None, *graphs)
            return hop.flex_attention_backward(*given, mask, scale, dict(OPTIONS), *taken)[:3]
        return hop.flex_attention(q, k, v, *graphs, mask, scale, dict(OPTIONS), *taken)

    inputs = [*states, number, index, *held, *more]
    compile_fx_inner(make_fx(computed, decomposition_table=select_decomp_table())(*inputs), inputs)


def _boundaries(tokens: int) -> Boundaries:
    lengths = (tokens // 4,) * 4
    return Boundaries(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths), None, lengths)


def _mask_of(family: Family, tokens: int) -> Callable[..., torch.Tensor]:
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return flex._visible(_boundaries(tokens), tokens, tokens, True, family.window)


def _score_of(family: Family, tokens: int) -> Callable[..., torch.Tensor]:
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        slopes = torch.ones(family.heads) if family.alibi else None
        bias = torch.zeros(family.heads, tokens // 4, tokens // 4).requires_grad_() if family.bias else None
        options = Options(softcap=family.softcap, alibi_slopes=slopes, bias=bias)
        return flex._scored(options, _boundaries(tokens), tokens, tokens) or (lambda score, *_: score)


def _lifted(function: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    # The tensors that the function refers to become further arguments.
    cells = function.__closure__ or ()
    places = [at for at, cell in enumerate(cells) if isinstance(cell.cell_contents, torch.Tensor)]

    def lifted(*given: Any) -> Any:
        own, tensors = given[: len(given) - len(places)], dict(zip(places, given[len(given) - len(places) :]))
        made = tuple(CellType(tensors.get(at, cell.cell_contents)) for at, cell in enumerate(cells))
        code, defaults = function.__code__, function.__defaults__
        return FunctionType(code, function.__globals__, function.__name__, defaults, made or None)(*own)

    return lifted, [cells[at].cell_contents for at in places]


def _graphs(hop: Any, scored: Callable[..., Any], buffers: list[torch.Tensor]) -> tuple[Any, Any]:
    # The graphs are traced on a CPU: autograd asks for a real device.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.enable_grad(), TransformGetItemToIndex():
        numbers = (torch.zeros((), dtype=torch.int32) for _ in range(4))
        made: tuple[Any, Any] = hop.create_fw_bw_graph(
            scored, (torch.zeros((), requires_grad=True), *numbers), tuple(buffers)
        )
    return made


def compiled(source: str, target: Target) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    helpers = sys.modules["torch._inductor.runtime.triton_helpers"]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(helpers, "set_driver_to_gpu", lambda: None):
        file = Path(folder) / "kernel.py"
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("kernel", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = next(value for value in vars(module).values() if hasattr(value, "triton_meta"))
        config, meta = tuner.configs[0], tuner.triton_meta
        constants = {**meta["constants"], **config.kwargs}
        signature = {name: "constexpr" if name in constants else kind for name, kind in meta["signature"].items()}
        asked = ASTSource(tuner.fn, signature, constants, meta["configs"][0])
        started = time.perf_counter()
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        made = triton.compile(asked, target=GPUTarget(target.backend, target.arch, target.warp), options=options)
    machine = made.asm["cubin" if target.backend == "cuda" else "hsaco"]
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "bytes": len(machine),
        "shared": made.metadata.shared,
        "fits": made.metadata.shared <= target.shared,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.check.kernels_aot", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="F")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="T")
    given, bad = parser.parse_args(arguments), 0
    if importlib.util.find_spec("triton") is None:
        parser.error("the package triton is not installed: see the top of this file")
    for family in given.families:
        for target in map(TARGETS.__getitem__, given.targets):
            for kernel, found in _all(FAMILIES[family], target):
                bad += "error" in found or not found["fits"]
                line = {"family": family, "target": str(target.arch), "kernel": kernel, **found}
                print(json.dumps(line), flush=True)
    return 1 if bad else 0


def _all(family: Family, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    # What inductor or Triton cannot make is an error in its place.
    try:
        made = sources(family, target)
    except Exception as error:  # compilers raise errors of many types
        yield "source", {"error": f"{type(error).__name__}: {error}"[:300]}
        return
    for kernel, source in made.items():
        try:
            yield kernel, compiled(source, target)
        except Exception as error:  # compilers raise errors of many types
            yield kernel, {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    sys.exit(main())
