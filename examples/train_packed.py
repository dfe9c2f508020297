"""Train one small model twice on the same mini-batches, padded and packed, and compare.

    pip install 'fa2patch[demo]'
    python train_packed.py

The data is Python's own standard library: the input is a function's signature, the output its docstring. No GPU,
network or login is needed. Two lines of train_once.py, which trains one variant in a separate process, make the packed
run:

    fa2patch.apply(model)
    collator = fa2patch.DataCollatorWithFlattening()

With `--model` and `--data` the same script is a start for your own fine-tuning.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union

try:
    import matplotlib
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as error:
    raise SystemExit(f"{error}. This example needs a little more: pip install 'fa2patch[demo]'") from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from made_by import made_by

QUICK = {"steps": 8, "batch_size": 8, "eval_every": 4, "max_length": 256}
END = "<|end|>"
KEYS = "'prompt' and 'completion', or 'text'"
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
GREY, BLUE = "#b8bec9", "#1f5fd0"
VALIDATION_SHARE = 0.05

Text = tuple[str, str]  # prompt, completion
Example = dict[str, list[int]]
Run = dict[str, Any]  # what train_once.py measured
Node = Union[ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef]


class DataError(Exception):
    """The data cannot be used for training. The message says where, what was expected and what was found."""


# --- texts --------------------------------------------------------------------------------------------------


def signature(node: Node) -> str:
    """Return a definition's first line."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{kind} {node.name}({ast.unparse(node.args)}){returns}:"


def documented(body: list[ast.stmt], context: list[str]) -> Iterator[Text]:
    """Yield every documented class and function: its signature after those of its module and classes, and its
    docstring.
    """
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [*context, signature(node)]
            docstring = ast.get_docstring(node)
            if docstring:
                yield "\n".join(inner) + "\n", docstring
            yield from documented(node.body, inner)


def standard_library() -> list[Text]:
    """Return signatures and docstrings of the running Python's standard library, in the order of its file names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[Text, None] = {}  # an ordered set: the library has a few exact duplicates
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError):
                continue  # templates and deliberately broken files
            module = ".".join(part for part in parts if part != "__init__")
            texts.update(dict.fromkeys(documented(tree.body, [f"# {module}"])))
    if not texts:
        raise DataError(f"expected the standard library's source under {root}, found none; pass --data")
    return list(texts)


def read_row(line: str) -> Text:
    """Return prompt and completion of one line of a JSON Lines file. `text` is a completion without a prompt."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"expected a JSON object, found no JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(row, dict):
        raise DataError(f"expected a JSON object, found {type(row).__name__}")
    if "messages" in row:
        raise DataError(
            f"expected {KEYS}; found 'messages'. Turn each chat into 'text' first, with "
            "tokenizer.apply_chat_template(messages, tokenize=False)"
        )
    wanted = ("text",) if "text" in row else ("prompt", "completion")
    for key in wanted:
        if key not in row:
            raise DataError(f"expected {KEYS}; found {sorted(row) or 'no keys'}")
        if not isinstance(row[key], str):
            raise DataError(f"expected a string under {key!r}, found {type(row[key]).__name__}")
        try:
            row[key].encode()
        except UnicodeEncodeError as error:
            raise DataError(f"expected Unicode text under {key!r}, found {error.reason}") from None
    if not row[wanted[-1]]:
        raise DataError(f"expected something to learn under {wanted[-1]!r}, found an empty string")
    return row.get("prompt", "") if "text" not in row else "", row[wanted[-1]]


def read_jsonl(file: Path) -> list[Text]:
    """Read a JSON Lines file; raise :class:`DataError` with the line that cannot be used."""
    texts = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        texts.append(read_row(line.rstrip()))
                    except DataError as error:
                        raise DataError(f"{file}, line {number}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: expected a readable UTF-8 file, found: {error}") from None
    return texts


def split(texts: list[Text], limit: int) -> tuple[list[Text], list[Text]]:
    """Split texts into training and validation by a hash of the text, so that its position does not matter."""
    by_hash = sorted(texts, key=lambda text: hashlib.sha256("\0".join(text).encode()).digest())
    held_out = min(limit, max(1, round(len(texts) * VALIDATION_SHARE)))
    return by_hash[held_out:], by_hash[:held_out]


# --- tokens -------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[Text]) -> Tokenizer:
    """Train a byte-level BPE on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(("".join(text) for text in texts), trainer)
    return tokenizer


class Encoder:
    """Turns texts into token ids and labels, with the model's tokenizer or with one trained here."""

    def __init__(self, model: str | None, texts: Iterable[Text]) -> None:
        self.start: list[int] = []
        if model is None:
            own = train_tokenizer(texts)
            self.encode = lambda text: own.encode(text).ids
            self.end = [own.token_to_id(END)]
            self.vocab_size = own.get_vocab_size()
        else:
            from transformers import AutoTokenizer

            try:
                theirs = AutoTokenizer.from_pretrained(model)
            except (OSError, ValueError) as error:
                raise DataError(f"--model {model}: {error}") from None
            self.encode = lambda text: theirs(text, add_special_tokens=False)["input_ids"]
            self.start = [theirs.bos_token_id] if theirs.bos_token_id is not None else []
            self.end = [theirs.eos_token_id] if theirs.eos_token_id is not None else []
            self.vocab_size = len(theirs)

    def examples(self, texts: Iterable[Text], max_length: int) -> list[Example]:
        """Return one example for each text that has a target within `max_length`; the prompt's labels are -100."""
        found = []
        for prompt, completion in texts:
            given = self.start + self.encode(prompt) if prompt else self.start
            ids = (given + self.encode(completion) + self.end)[:max_length]
            if len(ids) > max(1, len(given)):  # a first token is never predicted
                found.append({"input_ids": ids, "labels": [-100] * len(given) + ids[len(given) :]})
        return found


# --- two runs -----------------------------------------------------------------------------------------------


def run(variants: Sequence[str], job: dict[str, Any]) -> list[Run]:
    """Train the variants, each in a process of its own, with steps in turns, and return their measurements."""
    with tempfile.TemporaryDirectory() as scratch:
        running = {variant: started(variant, job, Path(scratch)) for variant in variants}
        while running:
            for variant, process in list(running.items()):
                if takes_a_turn(process):
                    continue
                del running[variant]
                if process.wait():
                    for other in running.values():
                        other.kill()
                    raise SystemExit(f"The {variant} run failed; its own message is above.")
        return [json.loads(Path(scratch, f"{variant}.json").read_text(encoding="utf-8")) for variant in variants]


def started(variant: str, job: dict[str, Any], scratch: Path) -> subprocess.Popen[str]:
    """Start the process of a variant. It waits for its first turn."""
    job_file, result_file = scratch / f"job_{variant}.json", scratch / f"{variant}.json"
    job_file.write_text(json.dumps({**job, "variant": variant, "scratch": str(scratch)}), encoding="utf-8")
    # One GPU: the Trainer splits a mini-batch by rows among visible GPUs, and a packed batch has one row.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    if job["model"] is None:  # with several threads, other programs distort the timing
        environment.setdefault("OMP_NUM_THREADS", "1")
    script = Path(__file__).with_name("train_once.py")
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(job_file), str(result_file)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def takes_a_turn(process: subprocess.Popen[str]) -> bool:
    """Let a process take its next step; False if it has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write("your turn\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    for line in process.stdout:
        if line == "your turn\n":
            return True
        print(line, end="")  # what Trainer and other packages print
    return False


def compare(padded: Run, packed: Run) -> dict[str, Any]:
    """Return the comparison of both runs, or exit if their mini-batches differ."""
    for key in ("checksum", "real", "targets"):
        if [batch[key] for batch in padded["batches"]] != [batch[key] for batch in packed["batches"]]:
            raise SystemExit(f"The two runs cannot be compared: their mini-batches differ ({key}).")
    gaps = [
        (abs(one - other), step)
        for (step, one), (_, other) in zip(padded["validation_curve"], packed["validation_curve"])
    ]
    return {
        "real_tokens": real_tokens(padded),
        "padded_tokens_per_real_token": computed_tokens(padded) / real_tokens(padded),
        "throughput_ratio": packed["real_tokens_per_second"] / padded["real_tokens_per_second"],
        "largest_validation_difference": max(gaps)[0],
        "largest_validation_difference_at_step": max(gaps)[1],
    }


# --- report -------------------------------------------------------------------------------------------------


def real_tokens(run: Run) -> int:
    """Return the run's tokens without padding."""
    return sum(batch["real"] for batch in run["batches"])


def computed_tokens(run: Run) -> int:
    """Return the run's tokens with padding."""
    return sum(batch["computed"] for batch in run["batches"])


def table(padded: Run, packed: Run) -> Table:
    """Return the table of costs and outcomes for the terminal."""
    held = "GPU" if padded["on_gpu"] else "process"
    logged = [0, *(step for step, _ in padded["train_curve"])]
    costs: list[tuple[str, str, Callable[[Run], Any]]] = [
        ("real tokens per second", "{:,.0f}", lambda run: run["real_tokens_per_second"]),
        ("training time, s", "{:.1f}", lambda run: run["training_seconds"]),
        ("  of the processor, s", "{:.1f}", lambda run: run["processor_seconds"]),
        ("wall time with evaluation, s", "{:.1f}", lambda run: run["wall_seconds"]),
        ("tokens computed", "{:,}", computed_tokens),
        ("  of them padding", "{:.1%}", lambda run: 1 - real_tokens(run) / computed_tokens(run)),
        (f"peak memory of the {held}, MB", "{:,.0f}", lambda run: run["peak_memory_bytes"] / 1e6),
        ("  of it added by training, MB", "{:,.0f}", lambda run: run["training_memory_bytes"] / 1e6),
    ]
    outcomes: list[tuple[str, str, Callable[[Run], Any]]] = [
        ("optimizer steps", "{}", lambda run: run["optimizer_steps"]),
        (
            f"train loss, mean of steps {logged[-2] + 1} to {logged[-1]}",
            "{:.4f}",
            lambda run: run["train_curve"][-1][1],
        ),
        ("validation loss at the end", "{:.4f}", lambda run: run["validation_curve"][-1][1]),
    ]
    table = Table("", "padded", "packed", "packed / padded")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, form, get in costs:
        ratio = f"{get(packed) / get(padded):.2f}" if get(padded) else ""
        table.add_row(name, form.format(get(padded)), form.format(get(packed)), ratio)
    table.add_section()
    for name, form, get in outcomes:
        table.add_row(name, form.format(get(padded)), form.format(get(packed)))
    return table


def remarks(padded: Run, packed: Run, both: dict[str, Any]) -> str:
    """Return the text below the table."""
    own_layout = abs(packed["validation_loss_in_own_layout"] - packed["validation_curve"][-1][1])
    return (
        f"Throughput: {both['throughput_ratio']:.2f} times the padded run's. These very mini-batches hold "
        f"{both['padded_tokens_per_real_token']:.2f} padded tokens per real token, the limit where cost is "
        "linear in tokens: work done once per step (the optimizer) pulls the ratio below it, work that grows "
        "faster (attention on padding, larger tensors) pushes it above. The first step and evaluation are not "
        "timed. The runs took their steps in turns, so that other programs slow both of them down.\n\n"
        f"Same training: both runs took the same {packed['optimizer_steps']} mini-batches in the same order "
        "(compared by checksum). Their validation curves, measured on the same padded batches, differ by "
        f"{both['largest_validation_difference']:.1e} at most, at step "
        f"{both['largest_validation_difference_at_step']}. Measured on packed batches, the packed model's "
        f"last validation loss differs by {own_layout:.1e}.\n"
    )


def plot(padded: Run, packed: Run, both: dict[str, Any], made: dict[str, Any], file: Path) -> None:
    """Draw both validation curves over the steps, with throughput and memory beside them."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.2), dpi=160, gridspec_kw={"width_ratios": (1.2, 1)}, layout="constrained"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y" if axes is left else "x", color="#e6e8ec")
        axes.set_axisbelow(True)
    draw_curves(left, padded, packed, both)
    draw_bars(right, padded, packed, both)
    code = f", commit {made['commit']}" if made["commit"] else ""
    note = f"{made['command']}    {made['date']}{code}, transformers {made['versions']['transformers']}"
    figure.supxlabel(note, x=0.005, ha="left", fontsize=8, color="#707784")
    figure.savefig(file)
    plt.close(figure)


def draw_curves(axes: Axes, padded: Run, packed: Run, both: dict[str, Any]) -> None:
    """Draw both validation curves."""
    thick = {"color": GREY, "linewidth": 8, "solid_capstyle": "round"}
    axes.plot(*zip(*padded["validation_curve"]), label="padded", **thick)
    axes.plot(*zip(*packed["validation_curve"]), label="packed", color=BLUE, linewidth=1.8, marker="o", ms=4)
    axes.set_title("Same loss", loc="left", fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("validation loss (nats per token)")
    note = f"largest difference {both['largest_validation_difference']:.0e}"
    axes.legend(frameon=False, loc="upper right", title=note, alignment="left")


def draw_bars(axes: Axes, padded: Run, packed: Run, both: dict[str, Any]) -> None:
    """Draw throughput and memory relative to the padded run, with their limit."""
    pairs = [
        ("real tokens\nper second", "real_tokens_per_second", "{:,.0f}", 1),
        ("memory added\nby training", "training_memory_bytes", "{:,.0f} MB", 1e6),
    ]
    limit = both["padded_tokens_per_real_token"]
    width = 1.15 * max([limit, *(packed[key] / padded[key] for _, key, _, _ in pairs)])

    def write(text: str, x: float, y: float, align: str = "left", **how: Any) -> None:
        gap = (6 if align == "left" else -6, 0)
        axes.annotate(text, (x, y), gap, textcoords="offset points", ha=align, va="center", **how)

    for place, (_, key, form, unit) in enumerate(pairs):
        ratio = packed[key] / padded[key]
        for y, length, run, colour in ((place - 0.2, 1, padded, GREY), (place + 0.2, ratio, packed, BLUE)):
            axes.barh(y, length, height=0.36, color=colour)
            inside = length > width / 2
            text = form.format(run[key] / unit) + (f"  ({ratio:.2g}×)" if run is packed else "")
            write(text, 0 if inside else length, y, color="white" if inside and run is packed else "black")
    axes.plot([limit, limit], [-0.6, 0.42], color="black", linewidth=1.2, linestyle="--")
    write(f"padded / real tokens = {limit:.2g}", limit, -0.52, "right" if limit > width / 2 else "left")
    axes.set_yticks(range(len(pairs)), [name for name, *_ in pairs])
    axes.set_ylim(1.5, -0.65)
    axes.set_xlim(0, width)
    axes.set_xlabel("relative to the padded run")
    axes.set_title("Less work", loc="left", fontweight="bold")


# --- command line -------------------------------------------------------------------------------------------


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers from ``minimum`` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number from {minimum} on, found {text!r}")
        return int(text)

    return parse


def options(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE.jsonl", help="your own data; per line prompt and completion, or text")
    add("--model", metavar="NAME_OR_PATH", help="a causal LM, with its tokenizer, in place of the small Llama")
    add("--steps", type=at_least(2), default=200, help="optimizer steps (%(default)s)")
    add("--batch-size", type=at_least(1), default=16, help="documents per mini-batch (%(default)s)")
    add("--max-length", type=at_least(2), default=512, help="tokens; longer documents are cut off (%(default)s)")
    add("--eval-every", type=at_least(1), default=20, help="steps between evaluations (%(default)s)")
    add("--learning-rate", type=float, help="2e-3 for the small Llama, 2e-5 for --model")
    add("--seed", type=int, default=0, help="of the weights and of the order of the documents (%(default)s)")
    add("--output", type=Path, default=Path("runs/train_packed"), help="for results and plot (%(default)s)")
    quick = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in QUICK.items())
    add("--quick", action="store_true", help=f"only see that it runs: fewer held out, {quick}")
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def prepare(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return the job: data and settings, the same for both variants."""
    texts = read_jsonl(arguments.data) if arguments.data else standard_library()
    train_texts, held_out_texts = split(texts, limit=32 if arguments.quick else 128)
    encoder = Encoder(arguments.model, train_texts)
    train = encoder.examples(train_texts, arguments.max_length)
    validation = encoder.examples(held_out_texts, arguments.max_length)
    if not train or not validation:
        raise DataError(
            f"{arguments.data}: expected a document to train on and another to hold out, each with something "
            f"to learn within {arguments.max_length} tokens; found {len(train)} and {len(validation)} in "
            f"{len(texts)} rows"
        )
    learning_rate = arguments.learning_rate
    if learning_rate is None:
        learning_rate = 2e-5 if arguments.model else 2e-3
    lengths = sorted(len(example["input_ids"]) for example in train)
    source = arguments.data or f"The standard library of Python {platform.python_version()}"
    console.print(
        f"{source}: {len(train):,} documents to train on, {len(validation)} held out, "
        f"{len(texts) - len(train) - len(validation):,} left out. Tokens per document: "
        f"median {lengths[len(lengths) // 2]}, longest {lengths[-1]}. Vocabulary: {encoder.vocab_size:,}."
    )
    return {
        "train": train,
        "validation": validation,
        "vocab_size": encoder.vocab_size,
        "model": arguments.model,
        "steps": arguments.steps,
        "batch_size": arguments.batch_size,
        "max_length": arguments.max_length,
        "eval_every": arguments.eval_every,
        "learning_rate": learning_rate,
        "seed": arguments.seed,
    }


def main(argv: list[str] | None = None) -> None:
    """Run both variants, write results and plot, and print the comparison."""
    arguments = options(argv)
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    console = Console(highlight=False, markup=False)
    try:
        job = prepare(arguments, console)
    except DataError as error:
        raise SystemExit(f"train_packed.py: {error}") from None
    packed, padded = run(("packed", "padded"), job)  # packed first, as it may be refused at once
    both = compare(padded, packed)

    arguments.output.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:] if argv is None else argv
    results = {
        **made_by(["python", "examples/train_packed.py", *given]),
        "settings": {key: value for key, value in job.items() if key not in ("train", "validation")},
        "comparison": both,
        "runs": [padded, packed],
    }
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    plot(padded, packed, both, results, arguments.output / "curves.png")
    console.print(
        f"\n{padded['model_class']}, {padded['parameters'] / 1e6:.1f} M parameters, {padded['device']}, "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    )
    console.print(table(padded, packed))
    console.print(remarks(padded, packed, both))
    console.print(f"{arguments.output / 'results.json'}\n{arguments.output / 'curves.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
