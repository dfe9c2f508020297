"""The tables of every part, for the terminal and as Markdown."""

from __future__ import annotations

from typing import Callable

from . import collator_table, compile_table, dry_table, embeddings_table, kernels_table, packing_table
from .table import Found, Table


def of(results: dict[str, Found]) -> list[Table]:
    """Return all tables of these results, in the order of the parts."""
    return [table for part, found in results.items() for table in MAKE[part](found)]


def syncs(found: Found) -> list[Table]:
    """One table of reads by layers for each architecture, and one for gradient checkpointing."""
    made = []
    for architecture in next(iter(found["versions"].values()))["counts"]:
        rows = []
        for version, run in found["versions"].items():
            for way, counts in run["counts"][architecture].items():
                layers = [str(count) for count in sorted(map(int, counts))]
                refused = "refused" in counts[layers[0]]
                cells = ["refused" if refused else str(total_reads(counts[count])) for count in layers]
                longest = counts[layers[-1]]
                also = [""] * 3 if refused else [str(longest[key]) for key in ("reads", "arguments", "derived")]
                rows.append([f"{version} {way}", *cells, *also])
        named = f"{layers[0]} layers", *layers[1:]
        head = ["", *named, f"of {layers[-1]}: in Python", "at the kernel's call", "derivations"]
        notes = (
            "Each cell holds the device-to-host reads in one forward of a packed row. *At the kernel's call*: "
            "`max_seqlen` is a tensor where the kernel takes a number, and is read for each argument. *Derivations*: "
            "how often boundaries are derived from `position_ids`. *Lengths*: batches with the collator's "
            "`return_flash_attn_kwargs=True`; *refused*: that forward takes no such arguments. The reads are counted "
            "on a CPU with a stand-in for flash-attn, without the reads inside kernels."
        )
        made.append(Table(f"Reads per forward, {architecture}", head, rows, notes + _remaining(found, architecture)))
    return [*made, _checkpointed(found)]


def _checkpointed(found: Found) -> Table:
    rows = []
    for version, run in found["versions"].items():
        for way, counts in run["checkpointed"]["ways"].items():
            refused = "refused" in counts
            cells = ["refused", ""] if refused else [str(total_reads(counts)), str(counts["derived"])]
            rows.append([f"{version} {way}", *cells])
    title = f"Reads per step under gradient checkpointing, {run['checkpointed']['architecture']}"
    notes = f"Forward and backward of {run['checkpointed']['layers']} layers. The backward computes each layer again."
    return Table(title, ["", "reads", "derivations"], rows, notes)


def _remaining(found: Found, architecture: str) -> str:
    """Return the sentence about reads in Transformers' own code that remain in a patched model."""
    stay = []
    for version, run in found["versions"].items():
        for place, _ in list(run["counts"][architecture]["fa2patch"].values())[-1]["where"].items():
            if " in transformers." in place:
                stay.append(f"{version}: {place.partition(' in ')[2]}")
    return f" The reads that remain with fa2patch are in Transformers' own code: `{'`, `'.join(stay)}`." if stay else ""


def total_reads(counts: Found) -> int:
    """Return the reads in Python and at the kernel's call."""
    return int(counts["reads"] + counts["arguments"])


def overhead(found: Found) -> list[Table]:
    """Microseconds per layer and per forward, with their ranges."""
    rows = [
        [name, *(_with_range(found[way], key) for key in ("us_per_layer", "us_per_forward"))]
        for way, name in (("position_ids", "position_ids only"), ("lengths", "the collator's lengths"))
    ]
    inside = found["call"]["packed_attention_us"] - found["call"]["kernel_us"]
    lengthy = found["forwards"][-1]
    notes = (
        "A line is fitted to the time of a patched forward minus the time of the same model with the kernel called by "
        f"hand, for models of {', '.join(str(row['layers']) for row in found['forwards'])} layers. The table shows its "
        "slope and intercept, and in brackets their range over quarters of the rounds. Called by hand, the forward of "
        f"{lengthy['layers']} layers takes {lengthy['by_hand_us'] / lengthy['layers']:.0f} µs per layer. "
        f"`packed_attention` without its kernel takes {inside:.0f} µs per call. This is time of the host. On a GPU it "
        "is hidden while the GPU still computes earlier layers."
    )
    return [Table("The patch's own overhead", ["", "µs per layer", "µs per forward"], rows, notes)]


def _with_range(found: Found, key: str) -> str:
    least, most = found[f"{key}_range"]
    return f"{found[key]:.0f} ({least:.0f} to {most:.0f})"


def mixers(found: Found) -> list[Table]:
    """Times and ratios of a packed row, of its documents one by one, and of the padded batch."""

    def cells(run: Found, *names: str, digits: int) -> list[str]:
        return [f"{run[name]:.{digits}f}" if name in run else "" for name in names]

    rows = [
        [
            f"{run['family']}, {run['documents']}",
            *cells(run, "packed_ms", "padded_ms", "one_by_one_ms", digits=1),
            *cells(run, "by_padded", "by_one_by_one", "by_a_backward_each", digits=2),
            run.get("padded_is", ""),
        ]
        for run in found["rows"]
    ]
    notes = (
        f"Milliseconds of forward and backward, the median of {found['repeats']} rounds taken in turns. The ratios are "
        "the packed time divided by the other, as medians over the rounds. *Padded* is the unpatched model on the "
        "documents in one batch, with zeros on the right and an attention mask. *Its logits* says whether the "
        "unpatched model then computes what it computes for the documents alone. *One by one* is one backward of all "
        "documents' losses, as in a mini-batch's step. *A backward each* holds the activations of one document at a "
        "time and suits a CPU's caches better. The models are tiny, with one or two layers of each kind, pure-torch "
        "mixers and float32, so the patch's own cost is at its largest."
    )
    head = ["documents", "packed, ms", "padded, ms", "one by one, ms", "to padded", "to one by one"]
    head += ["to a backward each", "its logits"]
    return [Table("A packed row of a hybrid", head, rows, notes)]


def training(found: Found) -> list[Table]:
    """Throughput, optimizer steps and loss differences, padded and packed."""
    rows = []
    for run in found["runs"]:
        for name, rival in run["rivals"].items():
            rows.append(
                [
                    f"{run['distribution']}, {name}",
                    f"{rival['real_tokens_per_second']:,.0f}",
                    f"{rival['ratio_to_padded']:.2f}",
                    f"{run['limit']:.2f}",
                    f"{rival['share_of_limit']:.0%}" if name != "padded" else "",
                    str(rival["optimizer_steps"]),
                    f"{rival['largest_loss_difference']:.0e}" if name != "padded" else "",
                ]
            )
    head = ["", "real tokens/s", "to padded", "limit", "share of it", "optimizer steps", "largest loss difference"]
    notes = (
        f"Llama of {found['layers']} layers, hidden size {found['hidden_size']}, {found['dtype']}, AdamW, mini-batches "
        f"of {found['batch']} documents. The documents are {found['scale']:g} times as long as in the distributions. "
        "The variants take each step in turns. *Limit* is the number of padded tokens divided by the number of real "
        "tokens in these mini-batches: the largest gain if cost were linear in tokens. Attention over padding is not, "
        "and can add to the gain. *Upstream* is Transformers alone on the packed row (sdpa, with its own "
        "block-diagonal mask). *Largest loss difference* is the difference to padded training at any step."
    )
    return [Table("Training, padded and packed", head, rows, notes)]


def sharing(found: Found) -> list[Table]:
    """Tokens and times of each way, and the shared row's time by its limit."""
    rows = []
    for run in found["rows"]:
        ways = [run[name] for name in ("padded", "packed", "shared")]
        rows.append(
            [
                f"{run['prompt']}, {run['completions']}",
                *(f"{way['tokens']:,}" for way in ways),
                *(f"{way['median_ms']:,.0f}" for way in ways),
                *(f"{run['shared'][f'faster_than_{name}']:.2f}" for name in ("padded", "packed")),
                f"{run['by_limit']:.2f}",
            ]
        )
    head = ["prompt, completions", *(f"{way}: tokens" for way in ("padded", "packed", "shared"))]
    head += [*(f"{way}, ms" for way in ("padded", "packed", "shared")), "padded / shared", "packed / shared"]
    notes = (
        f"Forward and backward of a Llama of {found['layers']} layers, hidden size {found['hidden']}, "
        f"{found['dtype']}; medians of {found['repeats']} rounds, taken in turns. Completions have 32 to 256 tokens, "
        "evenly spread. *By limit* is the shared row's time divided by the cost of its tokens and its attention "
        "scores: its tokens in the same model with additions in the place of attention, and its scores at the packed "
        "row's cost of a score. Ratios are medians over the rounds."
    )
    return [Table("A prompt with many completions", [*head, "by limit"], rows, notes)]


def gpu(found: Found) -> list[Table]:
    """One table for each model. Ratios cover the steps that all its variants have taken."""
    made = []
    for shape, runs in found["shapes"].items():
        rows = []
        for distribution, run in runs["distributions"].items():
            for name, variant in run["variants"].items():
                if "error" in variant:
                    rows.append([f"{distribution}, {name}", variant["error"][:80], *[""] * 5])
                    continue
                ratio, share = (variant.get(key) for key in ("ratio_to_padded", "share_of_limit"))
                warned = variant.get("synchronisations_per_forward")
                rows.append(
                    [
                        f"{distribution}, {name}",
                        f"{variant['real_tokens_per_second']:,.0f}",
                        f"{ratio:.2f}" if ratio else "",
                        f"{run['limit']:.2f}",
                        f"{share:.0%}" if share and not name.startswith("padded") else "",
                        f"{variant['peak_bytes'] / 1e9:.1f}",
                        "" if warned is None else f"{warned:g}",
                    ]
                )
        head = ["", "real tokens/s", "to padded", "limit", "share of it", "peak GB", "synchronisations per forward"]
        notes = (
            f"{runs['layers']} layers, {runs['parameters'] / 1e9:.2f} G parameters, {found['dtype']}, "
            f"{found['optimizer']}, gradient checkpointing, mini-batches of {found['batch']} documents."
        )
        made.append(Table(shape, head, rows, notes))
    return made


def startup(found: Found) -> list[Table]:
    """Milliseconds of import and ``apply``."""
    rows = [
        [name, f"{found[key]['median_ms']:.0f}"]
        for key, name in (("import", "import fa2patch"), ("apply", f"fa2patch.apply, {found['layers']} layers"))
    ]
    notes = (
        f"Medians of {found['repeats']} measurements. Each import runs in a new process after `import torch`. The "
        f"model is a Llama on the meta device. The import loads these packages: {', '.join(found['imported'])}."
    )
    return [Table("Import and apply", ["", "ms"], rows, notes)]


def packing(found: Found) -> list[Table]:
    """The tables of ``packing_table``."""
    return packing_table.tables(found)


MAKE: dict[str, Callable[[Found], list[Table]]] = {
    "startup": startup,
    "syncs": syncs,
    "dry": dry_table.tables,
    "kernels": kernels_table.kernels,
    "overhead": overhead,
    "mixers": mixers,
    "training": training,
    "sharing": sharing,
    "embeddings": embeddings_table.tables,
    "packing": packing,
    "collator": collator_table.tables,
    "compile": compile_table.tables,
    "gpu": gpu,
}
