"""``fa2patch doctor``: what this machine has, and how packed rows work here, with Transformers alone and patched.

A tiny Llama is built and verified, both unpatched and patched. Facts about other architectures in this version come
from the evidence of the compat matrix (``upstream.json``).
"""

from __future__ import annotations

import importlib
import io
import platform
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch

from .. import evidence, kernels
from ..errors import Fa2PatchError
from ..patch.applying import apply
from ..proof.inputs import example
from .models import compat
from .options import as_json_option, out_file
from .output import Shown, Table, escaped, in_one_line, print_found, progress_of, show, write_file
from .verify import Found, verified, verify_unpatched

# For each package, the module that is imported to test it: one built for another torch is installed, but does not
# import.
PACKAGES = {
    "transformers": "transformers", "wrapt": "", "flash-attn": "flash_attn", "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute", "kernels": "kernels", "accelerate": "", "peft": "", "trl": "",
}  # fmt: skip

_TRIED = {
    "alone": "alone, default cache",
    "alone_without_cache": "alone, use_cache=False",
    "patched": "with fa2patch",
}

# These were read in Transformers' sources and observed in the compat matrix, in these minors. What has no last one, no
# version was seen to mend.
DEFECTS = (
    ("4.34-4.43", "position_ids are used for rotary positions only: every packed row leaks."),
    ("4.44-4.53", "ids that never decrease are taken for one document: [0, 0, 1, ...] leaks."),
    ("4.53, 4.55-", "packing is looked for only where the batch is one row: two packed rows leak."),
    ("4.54", "a dense batch of two rows of T tokens without position_ids gets cu_seqlens [0, T]."),
    ("4.34-4.55", "the flash route's sliding window is one token wider than eager attention's."),
    ("4.42-4.43", "Gemma 2's flash attention has no sliding window."),
    ("4.34-4.39", "GPT-BigCode's flash attention divides its scale by the layer's number."),
    ("4.54", "GPT-BigCode inverts the scale of its attention."),
    ("4.52-4.57", "GraniteMoE's attention drops position_ids: packed rows leak, and did not up to 4.51."),
)


def defects_in(minor: str) -> list[str]:
    return [what for minors, what in DEFECTS if evidence.within(minor, minors)]


@click.command("doctor")
@click.option("--svg", **out_file, help="Write the screen there as a picture.")
@as_json_option
def doctor_command(svg: Path | None, as_json: bool) -> None:
    """Show what is installed here and how it treats packed rows, tried on a tiny Llama.

    Exits with 0 if fa2patch isolates documents here, with 1 if it does not.
    """
    from rich.console import Console

    with progress_of(["doctor"]) as progress:
        found = diagnose(lambda what: progress("doctor", what))
    if svg:
        console = Console(record=True, width=120, file=io.StringIO(), highlight=False)
        show(console, _shown(found))
        picture = console.export_svg(title="fa2patch doctor")
        # the reader's own monospace font, because rich's font would be fetched from the network
        write_file(svg, re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
    print_found(found, as_json, _shown(found))
    sys.exit(0 if found["ok"] else 1)


def diagnose(doing: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    # The result is JSON-compatible. `doing` is called before each step that takes time, with what it is.
    doing("importing the packages that are installed")
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": {name: _package(name) for name in PACKAGES},
        "kernels": [
            {"name": kernel.name, "usable": able, "reason": reason}
            for kernel in kernels.ORDER
            for able, reason in [kernel.available()]
        ],
    }
    doing("packed rows in a tiny Llama, with Transformers alone and patched")
    found |= _with_tiny_llama()
    known, minor = evidence.upstream(), evidence.minor_of(found["packages"]["transformers"]["version"] or "")
    found["known"] = known.get(minor)
    found["evidence_ends"] = list(known)[-1]
    found["defects"] = defects_in(minor) if minor else []
    found["ok"] = found["patched"]["state"] == "isolated"
    found["advice"] = list(_advice(found))
    return found


def _package(name: str) -> dict[str, Any]:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return {"version": None, "problem": "not installed"}
    try:
        if PACKAGES[name]:
            importlib.import_module(PACKAGES[name])
    except Exception as error:
        return {"version": version, "problem": f"does not import: {in_one_line(error)}"}
    return {"version": version, "problem": None}


def _with_tiny_llama() -> dict[str, Any]:
    try:
        model = compat("tiny_models").build("llama", "sdpa")
    except Exception as error:
        failed = {"state": "error", "reason": f"Transformers' Llama cannot be made: {in_one_line(error)}"}
        return {"seam": None, "alone": failed, "alone_without_cache": failed, "why": "", "patched": failed}
    batch = example(torch.device("cpu"), model)
    default, without, why = verify_unpatched(model, batch)
    without = default if without is None else without
    alone = {"alone": _state(default), "alone_without_cache": _state(without), "why": why}
    try:
        with apply(model) as patch:
            seam = " and ".join(sorted({layer.seam for layer in patch.layers}))
            return {"seam": seam, **alone, "patched": _state(verified(model, batch))}
    except Fa2PatchError as error:
        return {"seam": None, **alone, "patched": {"state": "refused", "reason": str(error)}}


def _state(found: Found) -> dict[str, Any]:
    if isinstance(found, str):
        return {"state": "error", "reason": found}
    return {"state": "isolated" if found.ok else "leaks", "reason": found.reason}


def _advice(found: dict[str, Any]) -> Iterator[str]:
    packages = found["packages"]
    if found["patched"]["state"] != "isolated":
        yield f"fa2patch does not work here: {found['patched'].get('reason')}"
    installed = packages["transformers"]["version"]
    if installed and found["known"] is None:
        yield (
            f"Transformers {installed} was not checked with fa2patch: the evidence ends with {found['evidence_ends']}. "
            "Only the tiny Llama above was tried here. Check your own model: `fa2patch verify MODEL`, or at all points "
            f"`fa2patch matrix --model MODEL --transformers {installed}`."
        )
    flash = [kernel for kernel in found["kernels"] if kernel["name"].startswith(("flash_attn", "torch_varlen"))]
    if found["gpus"] and not any(kernel["usable"] for kernel in flash):
        yield "A GPU without a flash kernel: see the reasons above. Upgrade torch to 2.4, or pip install flash-attn."
    if not found["gpus"]:
        yield "No GPU: packed rows run with the reference kernel, which is right and slow."
    problem = packages["flash-attn"]["problem"]
    if packages["flash-attn"]["version"] and problem:
        yield f"flash-attn is installed and {problem}. It was built for another torch or Python: reinstall it."
    if "leaks" in (found["alone"]["state"], found["alone_without_cache"]["state"]):
        yield "Call fa2patch.apply(model) before training on packed rows: Transformers alone leaks here."


def _shown(found: dict[str, Any]) -> Shown:
    # The verdict and what to do come first.
    usable = [kernel["name"] for kernel in found["kernels"] if kernel["usable"]]
    verdict = "[green]fa2patch works here.[/green]" if found["ok"] else "[red]fa2patch does not work here.[/red]"
    yield f"[bold]{verdict}[/bold] Kernels that can run, best first: {', '.join(usable)}."
    for advice in found["advice"]:
        yield f"[bold cyan]→[/bold cyan] {escaped(advice)}"
    rows = [
        ("Python", found["python"], found["platform"]),
        ("torch", found["torch"], ", ".join(found["gpus"]) or "no GPU"),
    ]
    for name, package in found["packages"].items():
        version, problem = package["version"], package["problem"]
        rows.append((name, version or "[dim]none[/dim]", escaped(problem, "red") if version and problem else ""))
    for kernel in found["kernels"]:
        able = "[green]usable[/green]" if kernel["usable"] else "[dim]not usable[/dim]"
        rows.append((f"kernel {kernel['name']}", able, escaped(kernel["reason"])))
    rows.append(("seam of Llama", found["seam"] or "none", "others may differ: fa2patch status MODEL"))
    for key, name in _TRIED.items():
        state, reason = found[key]["state"], found[key].get("reason")
        colour = "green" if state == "isolated" else "red"
        rows.append((name, escaped(state, colour), escaped(reason or "one packed row, a tiny Llama")))
    yield Table(("", "found", ""), rows)
    if found["why"]:
        yield f"[bold]One packed row, alone:[/bold] {escaped(found['why'])}"
    known = found["known"]
    if known:
        right = ", ".join(f"{row} {number}" for row, number in known["rows"].items())
        every = len(known["every_row"])
        yield (
            f"[bold]Transformers {known['release']} alone[/bold], from the compat matrix, on its flash route, is "
            f"right in so many of {known['measured']} architectures: {right}; in all of these {every}."
        )
        if known["leak"]:
            number = len(known["leak"])
            yield f"Even one plain row leaks in {number} of them: fa2patch doctor --json names them (known.leak)."
    elif found["defects"]:
        yield f"Defects known up to {found['evidence_ends']}; whether this release has them was not checked:"
    for defect in found["defects"]:
        yield f"[yellow]•[/yellow] {escaped(defect)}"
