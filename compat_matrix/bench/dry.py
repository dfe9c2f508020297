"""What every GPU kernel's path dispatches beyond the kernel, traced without a device, by version of torch.

Nothing is computed: ``FakeTensorMode`` runs torch's own fake kernels, which give shapes. The tensors of a forward alone
are fake CUDA tensors. Those of forward and backward are fake CPU tensors, because torch's autograd engine asks a CUDA
tensor's device for its stream; the forward's counts are the same on both. fa2patch's own code runs around the call of
a kernel. Where torch has no such kernel, an operator of torch that returns tensors of the right shape takes its place.

FlexAttention's own kernels are not part of it.

``python -m compat_matrix.bench.dry`` prints one JSON object for this torch. With ``--schemas``, the schemas of torch's
attention operators are written into ``aten_schemas.json``, beside those of other versions.
``tests/kernels/test_schemas.py`` holds fa2patch's calls against that file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fa2patch import evidence
from fa2patch.documents.boundaries import Boundaries
from fa2patch.documents.spans import Spans, on_the_host
from fa2patch.documents.trees import Tree
from fa2patch.kernels import Options, asked_by, packed_attention
from fa2patch.kernels import flex as flex_module
from fa2patch.kernels.aten import Efficient, TorchVarlen
from fa2patch.kernels.flex import Flex
from fa2patch.kernels.protocol import Kernel
from fa2patch.kernels.varlen import PARAMETERS, EntryPoint, FlashAttn, FlashAttn3, FlashAttn4

from .. import environments
from .operators import KINDS, OF_STAND_INS, OPERATORS, counted

# The last release of each minor. Each environment takes about 5 GB, unless the package index has a build for CPUs.
TORCH = (
    "2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0",
)  # fmt: skip

TRANSFORMERS = environments.newest().transformers
SCHEMAS = Path(__file__).with_name("aten_schemas.json")

# --- kernels, and fake functions where torch has none ---------------------------------------------------------

_library = torch.library.Library(OF_STAND_INS, "DEF")
_library.define("made(Tensor[] like) -> Tensor[]")
_library.impl("made", lambda like: [torch.empty_like(x) for x in like], "Meta")


def _made(*like: torch.Tensor) -> list[torch.Tensor]:
    # One operator stands for a kernel. It returns tensors of these shapes.
    return list(torch.ops.fa2patch_dry.made(like))


class _Attention(torch.autograd.Function):
    # One operator forward and one backward, as in the autograd functions of flash-attn and of FlexAttention.

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        ctx.save_for_backward(q, k, v, *([] if sinks is None else [sinks]))
        return tuple(_made(q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, of_lse: torch.Tensor) -> Any:
        found = _made(*ctx.saved_tensors)
        return (*found, *[None] * (4 - len(found)))


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    # It stands for flash_attn_varlen_func: q, k and v are [tokens, heads, head dim], and the output has q's layout.
    sinks = next((arguments[name] for name in PARAMETERS["sinks"] if name in arguments), None)
    return _Attention.apply(q, k, v, sinks)[0]  # type: ignore[no-untyped-call]


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
    # It stands for flex_attention: q, k and v are [1, heads, tokens, head dim], and the output has q's layout.
    laid = [x.transpose(1, 2) for x in (q, k, v)]
    output, lse = (x.transpose(1, 2) for x in _Attention.apply(*laid, None))  # type: ignore[no-untyped-call]
    if arguments.get("return_aux"):  # from torch 2.9 on, in the place of return_lse
        return output, SimpleNamespace(lse=lse)
    return (output, lse) if arguments.get("return_lse") else output


def _block_mask(visible: Callable[..., Any], *unused: Any) -> Any:
    # It stands for a compiled create_block_mask: one operator, made of a tensor that "visible" refers to.
    held = (cell.cell_contents for cell in visible.__closure__ or ())
    return _made(next(x for x in held if isinstance(x, torch.Tensor)))[0]


def kernels() -> dict[str, tuple[Kernel, Callable[..., torch.Tensor]]]:
    # Best first, as "auto" tries them on a GPU. Each has the same computation by hand, for documents without options:
    # call(q, k, v, cu_seqlens, longest, scale).

    def here(kernel: type[Kernel], **members: Any) -> Kernel:
        made: Kernel = type(kernel.__name__, (kernel,), {"available": lambda self: (True, ""), **members})()
        return made

    def entry(kernel: type[Kernel]) -> Kernel:
        names = frozenset(PARAMETERS[feature][0] for feature in kernel.FEATURES if feature in PARAMETERS)
        return here(kernel, found=lambda self: EntryPoint(_varlen, names))

    def flash(q: Any, k: Any, v: Any, cu: Any, longest: int, scale: float) -> Any:
        operator = torch.ops.aten._flash_attention_forward.default
        return operator(q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale)[0]

    def efficient(q: Any, k: Any, v: Any, cu: Any, longest: int, scale: float) -> Any:
        operator, rows = torch.ops.aten._efficient_attention_forward.default, [x[None] for x in (q, k, v)]
        return operator(*rows, None, cu, cu, longest, longest, 0.0, 1, True, scale=scale)[0].squeeze(0)

    made: list[Any] = [
        (entry(kernel), lambda q, k, v, *_: _varlen(q, k, v)) for kernel in (FlashAttn3, FlashAttn, FlashAttn4)
    ]
    made += [(here(TorchVarlen), flash), (here(Efficient), efficient)]
    if importlib.util.find_spec("torch.nn.attention.flex_attention"):  # from torch 2.5 on
        own = here(Flex, attend=lambda self, *given: flex_module.compute(_flex, _block_mask, *given))
        made.append((own, lambda q, k, v, *_: _flex(*(x.transpose(0, 1)[None] for x in (q, k, v)))))
    return {kernel.name: (kernel, call) for kernel, call in made}


# --- tracing --------------------------------------------------------------------------------------------------

LENGTHS, PARENTS, SPANS, HEADS = (70, 50, 10, 90, 60), (-1, 0, 0, 2, 2), ((5, 15), (140, 150)), 8


class Case(NamedTuple):
    key_heads: int = HEADS
    head_dim: int = 64
    value_dim: int = 0  # 0 stands for head_dim
    window: int | None = None
    sinks: bool = False
    trees: bool = False
    spans: bool = False


CASES = {
    "plain": Case(),
    "grouped heads": Case(key_heads=2),
    "window": Case(window=20),
    "sinks": Case(sinks=True),
    "MLA": Case(head_dim=192, value_dim=128),
    "head dim 80": Case(head_dim=80),
    "head dim 100": Case(head_dim=100),
    "trees": Case(trees=True),
    "spans": Case(spans=True),
}


def trace(kernel: Kernel, by_hand: Any, case: Case) -> dict[str, Any]:
    # By direction: the counts of the "first" layer, of a "later" one and of the "bare" kernel. A direction that torch
    # cannot trace has the reason "why" in their place. So has a case that the kernel does not support.
    rows, sinks = _states(case, "cpu", False)
    asked = asked_by(*rows, Options(window=case.window, sinks=sinks), case.trees, case.spans)
    able, why = kernel.supports(asked._replace(device="cuda", gradients=True))
    if not able:
        return {"why": why}
    forward = _tried(kernel, by_hand, case, "cuda", backward=False)
    if "why" in forward:  # a build of torch for CPUs cannot run every fake kernel for CUDA
        forward = _tried(kernel, by_hand, case, "cpu", backward=False)
    return {"forward": forward, "backward": _tried(kernel, by_hand, case, "cpu", backward=True)}


def _tried(kernel: Kernel, by_hand: Any, case: Case, device: str, backward: bool) -> dict[str, Any]:
    found = {}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(backward):
            rows, sinks = _states(case, device, backward)
            boundaries, options = _boundaries(case, device), Options(window=case.window, sinks=sinks)
            for name in ("first", "later", *(["bare"] if case == Case() else [])):
                with counted() as counts:
                    if name == "bare":
                        flat = [x.flatten(0, 1) for x in rows]
                        output = by_hand(*flat, boundaries.cu_seqlens, boundaries.max_seqlen, case.head_dim**-0.5)
                    else:
                        output = packed_attention(*rows, boundaries, options, kernel)
                if backward:
                    grad = torch.empty_like(output)
                    with counted() as counts:
                        torch.autograd.grad(output, [x for x in (*rows, sinks) if x is not None], grad)
                found[name] = dict(counts)
    except Exception as error:  # torch raises errors of many types where it cannot trace
        return {"why": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
    return found


def _states(case: Case, device: str, gradients: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    sizes = ((HEADS, case.head_dim), (case.key_heads, case.head_dim), (case.key_heads, case.value_dim or case.head_dim))
    made: Any = {"device": device, "dtype": torch.bfloat16, "requires_grad": gradients}
    sinks = torch.empty(HEADS, **made) if case.sinks else None
    return [torch.empty(1, sum(LENGTHS), *size, **made) for size in sizes], sinks


def _boundaries(case: Case, device: str) -> Boundaries:
    # They hold what the forward has read from the device before the first layer.
    ends = np.cumsum([0, *LENGTHS])
    made: Any = {"dtype": torch.int32, "device": device}
    parents = torch.empty(len(LENGTHS), **made) if case.trees else None
    until = torch.empty(sum(LENGTHS), **made) if case.spans else None
    boundaries = Boundaries(torch.empty(len(ends), **made), max(LENGTHS), None, LENGTHS, parents, until=until)
    if case.trees:
        boundaries.made[Tree] = Tree(LENGTHS, PARENTS, boundaries.cu_seqlens.device)
    if case.spans:
        seen = np.arange(sum(LENGTHS))
        for start, stop in SPANS:
            seen[start:stop] = stop - 1
        boundaries.made[Spans] = on_the_host(seen, ends)
    return boundaries


# --- rows -----------------------------------------------------------------------------------------------------


def here() -> dict[str, Any]:
    traced = {case: {name: trace(*bare, CASES[case]) for name, bare in kernels().items()} for case in CASES}
    plain = traced["plain"]
    cases = {case: {name: _cells(found, plain[name]) for name, found in of.items()} for case, of in traced.items()}
    return {"torch": torch.__version__.partition("+")[0], "cases": cases}


def _cells(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    # A row has what a later layer starts beyond what the kernel starts when it is called by hand.
    if "why" in found:
        return {"forward: kernel calls": found["why"]}
    cells: dict[str, Any] = {}
    once, reads = {}, 0
    for way in ("forward", "backward"):
        if "why" in found[way]:
            cells[f"{way}: kernel calls"] = f"not traced: {found[way]['why']}"
            continue
        first, later, bare = found[way]["first"], found[way]["later"], plain[way]["bare"]
        cells[f"{way}: kernel calls"] = later["kernel"]
        cells |= {f"{way}: {kind}": later[kind] - bare[kind] for kind in ("copies", "others")}
        reads += later["reads"] + first["reads"]
        if way == "forward":
            once["once per batch"] = sum(first[kind] - later[kind] for kind in KINDS)
    return {**cells, **once, "reads": reads}


def merged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # Kernels and versions of torch with the same numbers share a row. What the batch's first layer adds may differ
    # between these versions. It is that of the newest.
    every = [run["torch"] for run in runs]
    rows = []
    for case in runs[0]["cases"]:
        same: dict[str, list[Any]] = {}  # by kernel and numbers: the versions, and the cells of the newest
        for run in runs:
            for kernel, cells in run["cases"][case].items():
                key = json.dumps([kernel, {name: cells[name] for name in cells if name != "once per batch"}])
                same[key] = [[*same.get(key, [[]])[0], run["torch"]], kernel, cells]
        names: dict[str, list[str]] = {}
        for versions, kernel, cells in same.values():
            names.setdefault(json.dumps({"torch": in_words(versions, every), **cells}), []).append(kernel)
        rows += [{"layer": f"{case}: {', '.join(of)}", **json.loads(cells)} for cells, of in names.items()]
    return rows


def in_words(some: list[str], every: list[str]) -> str:
    # It is "all", or runs such as "2.4 to 2.6".
    minors = [version.rpartition(".")[0] for version in every]
    found = evidence.stretches(minors, {version.rpartition(".")[0] for version in some})
    return "all" if some == every else ", ".join(" to ".join(dict.fromkeys(run)) for run in found)


# --- in other versions ----------------------------------------------------------------------------------------


def measure(folder: Path) -> list[dict[str, Any]]:
    # folder: of the versions' environments
    from ..screen import Console, track  # not above: the environments have no rich

    runs = []
    with environments.only_our_packages() as packages:
        for version in track(TORCH, "dry", console=Console(stderr=True)):
            wanted = environments.Version(f"torch-{version}", TRANSFORMERS, "3.11", version, pins=())
            python = environments.make(wanted, folder.resolve())
            said = environments.printed("compat_matrix.bench.dry", python=python, packages=packages)
            runs.append(json.loads(said))
    return merged(runs)


def with_version(known: dict[str, list[str]], version: str, schemas: list[str]) -> dict[str, list[str]]:
    # This version's schemas take the place of those known for it. Schemas and versions are sorted.
    pairs = [(schema, other) for schema, others in known.items() for other in others if other != version]
    pairs += [(schema, version) for schema in schemas]
    found: dict[str, list[str]] = {}
    for schema, of in sorted(pairs, key=lambda one: (one[0].partition("(")[0], *map(int, one[1].split(".")))):
        found.setdefault(schema, []).append(of)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.dry", description=__doc__)
    parser.add_argument("--schemas", action="store_true")
    if parser.parse_args().schemas:
        schemas = [str(getattr(torch.ops.aten, name).default._schema) for name in OPERATORS]
        known = json.loads(SCHEMAS.read_text(encoding="utf-8"))
        found = with_version(known, torch.__version__.partition("+")[0], schemas)
        SCHEMAS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs a traceback for each error of a fake kernel
    torch.set_num_threads(1)
    print(json.dumps(here()))


if __name__ == "__main__":
    main()
