"""The experiment of arXiv 2407.09105 (table 2) on a small model: what each way of batching costs, and what it learns.

    pip install 'fa2patch[demo]'
    python reproduce_paper.py

Every variant trains the same model from the same weights on the same documents for one epoch, with the same recipe, and
is measured on the same held-out documents, padded. paper_variants.py describes the variants. The data is the same as in
train_packed.py; with `--model`, `--data` and the sizes you can run your own experiment, on a GPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from made_by import made_by
from paper_report import figure, findings, markdown, speed_of, summaries
from paper_variants import VARIANTS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from train_packed import DataError, Encoder, at_least, read_jsonl, split, standard_library

QUICK = {"documents": 96, "held_out": 16, "seeds": [0], "max_length": 64, "row_length": 128, "evaluations": 2}

Job = dict[str, Any]
Run = dict[str, Any]  # what paper_once.py measured


def options(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE.jsonl", help="your own data; per line prompt and completion, or text")
    add("--model", metavar="NAME_OR_PATH", help="a causal LM, with its tokenizer, in place of the small Llama")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where there is one")
    add("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME", help="(all)")
    add("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2], help="each trains every variant (0 1 2)")
    add("--documents", type=at_least(1), default=3200, help="to train on, once (%(default)s)")
    add("--held-out", type=at_least(1), default=256, help="documents of the validation set (%(default)s)")
    add("--max-length", type=at_least(2), default=256, help="tokens; longer documents are cut off (%(default)s)")
    add("--row-length", type=at_least(2), default=512, help="tokens of a filled row (%(default)s)")
    add("--batch-size", type=at_least(1), default=4, help="documents, or filled rows, of a mini-batch (%(default)s)")
    add("--accumulate", type=at_least(1), default=2, help="mini-batches per optimizer step (%(default)s)")
    add("--learning-rate", type=float, help="2e-3 for the small Llama, 2e-5 for --model; the same for all variants")
    add("--evaluations", type=at_least(1), default=8, help="points of the validation curve (%(default)s)")
    add("--jobs", type=at_least(1), default=1, help="runs at a time, a thread each (%(default)s)")
    add("--output", type=Path, default=Path("runs/paper"), help="for results, table and figures (%(default)s)")
    add("--quick", action="store_true", help="only see that it runs: seconds per variant")
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    arguments = parser.parse_args(argv)
    if arguments.row_length < arguments.max_length:
        parser.error(f"--row-length {arguments.row_length} is shorter than --max-length {arguments.max_length}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    return arguments


def prepare(arguments: argparse.Namespace) -> Job:
    """Return the job: data and settings, the same for every variant and seed."""
    texts = read_jsonl(arguments.data) if arguments.data else standard_library()
    train_texts, held_out_texts = split(texts, limit=arguments.held_out)
    encoder = Encoder(arguments.model, train_texts)
    train = encoder.examples(train_texts, arguments.max_length)[: arguments.documents]
    validation = encoder.examples(held_out_texts, arguments.max_length)
    if len(train) < arguments.batch_size or not validation:
        raise DataError(
            f"{arguments.data}: expected a mini-batch of {arguments.batch_size} documents to train on and one more to "
            f"hold out, found {len(train)} and {len(validation)} in {len(texts)} rows"
        )
    names = ("model", "max_length", "row_length", "batch_size", "accumulate", "evaluations", "learning_rate")
    job = {name: getattr(arguments, name) for name in names}
    if job["learning_rate"] is None:
        job["learning_rate"] = 2e-5 if arguments.model else 2e-3
    return {**job, "train": train, "validation": validation, "vocab_size": encoder.vocab_size}


def run(job: Job, variant: str, seed: int, device: str) -> Run:
    """Train one variant in a new process and return its measurements."""
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    # One GPU: the Trainer splits a mini-batch by rows among visible GPUs, and a packed batch has one row.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    environment["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else visible
    if job["model"] is None:  # with several threads, other programs distort the timing
        environment.setdefault("OMP_NUM_THREADS", "1")
    script = str(Path(__file__).with_name("paper_once.py"))
    with tempfile.TemporaryDirectory() as scratch:
        job_file, result_file = Path(scratch, "job.json"), Path(scratch, "result.json")
        job = {**job, "variant": variant, "seed": seed, "scratch": scratch}
        job_file.write_text(json.dumps(job), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", script, str(job_file), str(result_file)],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{variant}, seed {seed} failed:\n{done.stderr[-3000:]}")
        return dict(json.loads(result_file.read_text(encoding="utf-8")))


def run_all(job: Job, arguments: argparse.Namespace, console: Console) -> list[Run]:
    """Run every variant with one seed, then with the next, so that other load on the machine affects all variants."""
    pairs = [(variant, seed) for seed in arguments.seeds for variant in arguments.variants]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(arguments.jobs) as pool:
        task = progress.add_task("runs", total=len(pairs))

        def one(pair: tuple[str, int]) -> Run:
            found = run(job, *pair, arguments.device)
            speed = found[speed_of([found])]
            said = (
                f"{found['optimizer_steps']:5} steps {speed:9,.0f} tokens/s   validation {found['validation_loss']:.4f}"
            )
            progress.console.print(f"seed {found['seed']}  {found['variant']:26}{said}")
            progress.advance(task)
            return found

        return list(pool.map(one, pairs))


def main(argv: list[str] | None = None) -> None:
    """Run the experiment and write results, table and figures."""
    warnings.simplefilter("ignore")
    arguments = options(argv)
    console = Console(highlight=False, markup=False)
    try:
        job = prepare(arguments)
    except DataError as error:
        raise SystemExit(f"reproduce_paper.py: {error}") from None
    runs = run_all(job, arguments, console)
    given = sys.argv[1:] if argv is None else argv
    results = {
        **made_by(["python", "examples/reproduce_paper.py", *given]),
        "settings": {key: value for key, value in job.items() if key not in ("train", "validation")}
        | {"documents": len(job["train"]), "held_out": len(job["validation"])},
        "summaries": summaries(runs),
        "findings": findings(runs),
        "runs": runs,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report = markdown(results)
    (arguments.output / "TABLE.md").write_text(report, encoding="utf-8")
    figure(results, arguments.output / "figures.png")
    console.print(report, soft_wrap=True)


if __name__ == "__main__":
    main()
