"""Makes the blocks of README and docs: what was found, what the patch costs, kernels, and long rows on paper."""

from __future__ import annotations

from itertools import product

from fa2patch import kernels

from .. import long_rows
from ..bench import figures
from ..cells import Results
from ..diffable import table
from ..gpu import page
from ..gpu.store import Records
from ..long_rows import DECODERS, Decoder
from .words import FOLDER, PAGE, age, wrapped

_LEFT = {
    "refused": "it refused {:,} with a reason",
    "xfail": "{:,} were known failures of Transformers",
    "fail": "{:,} failed",
}
# the names shown for the ways of the bench's part "syncs"
WAYS = {
    "upstream": "Transformers",
    "upstream, lengths": "Transformers, with lengths",
    "fa2patch": "fa2patch",
    "fa2patch, lengths": "fa2patch, with lengths",
}

ARCHITECTURE = "llama"

# tokens of a long row
ROWS = {"16k": 2**14, "64k": 2**16, "256k": 2**18, "1M": 2**20}

PROCESSES = (2, 4, 8, 16, 32)
GPUS = (8, 32)
# Bytes of a GPU of 80 GiB that the counted tensors may take. A fifth is left for what is not counted.
BUDGET = 64 * 2**30


def summary(results: Results) -> str:
    total = results.score(*results.counted)
    releases = {environment.transformers for environment in results.counted}
    devices = sorted({environment.device for environment in results.counted})
    where = "a CPU" if devices == ["cpu"] else ", ".join(devices)
    said = [
        f"When last checked, fa2patch isolated {total.states['ok']:,} of {total.present:,} combinations of model type "
        f"and Transformers release ({len(releases)} releases, on {where})",
        *(text.format(total.states[state]) for state, text in _LEFT.items() if total.states[state]),
    ]
    alone = (
        f"Without fa2patch, {total.one_row['ok']:,} of them keep the examples of one packed row apart. Only "
        f"{total.every_row:,} also do so with several rows, a mask of ones or the default cache."
    )
    told = wrapped(f"{'; '.join(said)}. {alone} {age(results)}")
    return f"{told}\n[Look up yours]({PAGE}) or read [the tables]({FOLDER}/MATRIX.md)."


def reads() -> str:
    found = [row for row in figures.committed("syncs")["rows"] if row["model"] == ARCHITECTURE]
    most = [column for column in found[0] if column.endswith(" layers")][-1]
    counts = {(row["way"], row["Transformers"]): str(row[most]) for row in found}
    releases = list(dict.fromkeys(row["Transformers"] for row in found))
    rows = [[shown, *(counts[way, release] for release in releases)] for way, shown in WAYS.items()]
    told = wrapped(
        "*With lengths*: batches with the collator's `return_flash_attn_kwargs=True`. *Refused*: that forward takes no "
        "such arguments."
    )
    return f"{table([f'reads in a forward of {most}', *releases], rows)}\n\n{told}"


def throughput(records: Records) -> str:
    found: dict[str, dict[str, str]] = {}
    for row in page.training(records):
        if row["variant"].startswith("fa2patch:") and "to padded" in row["columns"]:
            said = "{to padded:.2f} of {limit:.2f}".format(**row["columns"])
            found.setdefault(row["setting"], {})[row["lengths"]] = said
    if not found:
        return "Nothing was measured on a GPU yet."
    rows = [[setting, *(of.get(lengths, "") for lengths in page.RATIO)] for setting, of in found.items()]
    devices = dict.fromkeys(record["made"]["device"] for name, record in records.items() if name.startswith("training"))
    head = f"times the throughput of padded flash-attn, of the limit that padding sets ({', '.join(devices)})"
    return table([head, *(f"lengths like {name.partition('-')[0]}'s" for name in page.RATIO)], rows)


def overhead() -> str:
    imported, *collected, applied = figures.committed("startup")["rows"]
    ids, lengths = figures.committed("overhead")["rows"]
    of_them = "".join(f", {row['ms']:.0f} ms of them garbage collection" for row in collected)
    after, layers = imported["what"].split()[-1], applied["what"].partition(", ")[2]
    return wrapped(
        f"On a CPU, `from fa2patch import apply` takes {imported['ms']:.0f} ms after `import {after}`{of_them}, and "
        f"`apply` takes {applied['ms']:.0f} ms on {layers}. In each forward the patch takes "
        f"{ids['µs per forward']:.0f} µs, or {lengths['µs per forward']:.0f} µs with lengths, and in each layer "
        f"{ids['µs per layer']:.0f} µs, or {lengths['µs per layer']:.0f} µs with lengths."
    )


def kernel_table() -> str:
    # This is what every kernel can do at best. "fa2patch kernels" shows what it can do on a machine.
    rows = []
    for row in kernels.kernel_rows():
        can = ", ".join(row["dtypes"] or ["any"]), str(row["head_dim"] or "any"), ", ".join(row["features"])
        rows.append([f'`"{row["name"]}"`', row["what"], row["needs"], *can])
    return table(["kernel", "what", "needs", "dtypes", "head dim up to", "features"], rows)


def costs() -> str:
    model, rows = DECODERS["8B"], []
    for name, processes in product(("64k", "256k", "1M"), PROCESSES):
        tokens = ROWS[name] // processes
        found = (
            long_rows.bytes_sent_by_a_layer(tokens, processes, model.heads, model.key_heads, model.head_dim),
            long_rows.bytes_sent_by_a_step(model, tokens, processes),
            long_rows.bytes_of_activations(model, tokens, checkpointing=False),
            long_rows.bytes_of_activations(model, tokens),
            long_rows.bytes_of_logits(model, tokens),
        )
        rows.append([name, str(processes), f"{tokens:,}", *map(size, found)])
    head = ["row", "processes", "tokens of a process", "a layer sends", "a step sends", "activations"]
    return table([*head, "with checkpointing", "logits"], rows)


def engines() -> str:
    rows = (
        [name, model, *(engine(decoder, tokens, count) for count in GPUS)]
        for name, tokens in ROWS.items()
        for model, decoder in DECODERS.items()
    )
    return table(["row", "model", *(f"{count} GPUs" for count in GPUS)], rows)


def engine(model: Decoder, tokens: int, gpus: int) -> str:
    # Ways with fewer processes for a row come first.
    left = BUDGET - long_rows.bytes_of_states(model, gpus)
    if left < 0:
        return "weights and optimizer do not fit"
    for processes in (1, *PROCESSES):
        if processes > gpus or model.heads % processes:
            continue
        own = tokens / processes
        kept, logits = long_rows.bytes_of_activations(model, own), long_rows.bytes_of_logits(model, own)
        ways = {
            "": long_rows.bytes_of_activations(model, own, checkpointing=False) + logits,
            "checkpointing": kept + logits,
            "checkpointing, loss in chunks": kept,
        }
        for way, needed in ways.items():
            if needed <= left:
                ulysses = f"Ulysses over {processes}" if processes > 1 else ""
                return ", ".join(filter(None, ["ZeRO-3", ulysses, way]))
    return "does not fit"


def size(number: float) -> str:
    value, unit = (number / 2**30, "GiB") if number >= 2**30 else (number / 2**20, "MiB")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
