"""Part ``sharing``: one prompt with many completions, padded, packed, and packed with the prompt once.

A step is forward and backward of a small Llama, with the loss on the completions. The limit of the shared row is made
of two costs that are measured in the same rounds: that of its tokens, which is the model with additions in the place of
attention, and that of its attention scores, which cost as much each as in the packed row.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from rich.progress import Progress

import fa2patch

from . import timing
from .models import BY_HAND, ByHand, small_llama
from .training import documents, packed, padded

PROMPTS, COMPLETIONS, SHORTEST, LONGEST = (512, 2048), (2, 8, 16), 32, 256
LAYERS, HIDDEN, REPEATS = 4, 256, 5
QUICK = {"prompts": (16,), "completions": (2,), "layers": 1, "hidden": 64, "repeats": 1}

Batch = dict[str, Any]


def measure(progress: Progress, quick: bool = False) -> Any:
    """Measure all prompts with all numbers of completions, and return the result of the part."""
    size: dict[str, Any] = QUICK if quick else {
        "prompts": PROMPTS, "completions": COMPLETIONS, "layers": LAYERS, "hidden": HIDDEN, "repeats": REPEATS,
    }  # fmt: skip
    cases = [(prompt, count) for prompt in size["prompts"] for count in size["completions"]]
    models = _models(size["layers"], size["hidden"])
    task = progress.add_task("sharing", total=len(cases))
    rows = []
    for prompt, count in cases:
        rows.append({"prompt": prompt, "completions": count, **compared(models, prompt, count, size["repeats"])})
        progress.update(task, advance=1)
    return {"rows": rows, **{name: size[name] for name in ("layers", "hidden", "repeats")}, "dtype": "float32"}


def _models(layers: int, hidden: int) -> dict[str, Any]:
    """Return the same model unpatched, patched, and with additions in the place of attention."""
    ByHand(lambda q, k, v, *unused: q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)).register()
    models = {name: small_llama(layers, hidden) for name in ("unpatched", "patched")}
    fa2patch.apply(models["patched"])
    return {**models, "no attention": small_llama(layers, hidden, BY_HAND)}


def compared(models: dict[str, Any], prompt: int, completions: int, repeats: int) -> dict[str, Any]:
    """Return the tokens, scores and median milliseconds of each way, and the shared row's time by its limit."""
    between = [round(at * (LONGEST - SHORTEST) / max(1, completions - 1)) for at in range(completions)]
    lengths = [SHORTEST + more for more in between]
    asked, *answers = documents([[prompt, *lengths]])[0]
    sequences = [asked + answer for answer in answers]
    batches = {
        "padded": _without_prompt(padded(sequences), prompt),
        "packed": _without_prompts(packed(sequences, lengths=True), [prompt] * completions),
        "shared": shared(asked, answers),
    }
    rivals = {name: _step(models["unpatched" if name == "padded" else "patched"], batches[name]) for name in batches}
    for name in ("packed", "shared"):
        rivals[f"{name} tokens"] = _step(models["no attention"], _plain(batches[name]))
    taken = timing.rounds(rivals, repeats, warm_up=1)
    of_packed, of_shared = scores([(0, len(each)) for each in sequences]), _scores_of_tree(prompt, lengths)
    ratios = []
    for times in zip(*(taken[name] for name in ("packed", "shared", "packed tokens", "shared tokens"))):
        packed_time, shared_time, packed_tokens, shared_tokens = times
        ratios.append(shared_time / (shared_tokens + (packed_time - packed_tokens) * of_shared / of_packed))
    found: dict[str, Any] = {
        name: {"tokens": batch["input_ids"].numel(), **timing.summary(taken[name])} for name, batch in batches.items()
    }
    found["packed"]["scores"], found["shared"]["scores"] = of_packed, of_shared
    for name in ("padded", "packed"):
        quotients = [one / other for one, other in zip(taken[name], taken["shared"])]
        found["shared"][f"faster_than_{name}"] = round(statistics.median(quotients), 3)
    return {**found, "by_limit": round(statistics.median(ratios), 3)}


def shared(prompt: list[int], completions: list[list[int]]) -> Batch:
    """Return the row with the prompt once. Each completion's segment starts with the prompt's last token."""
    segments = [prompt[:-1], *([prompt[-1], *completion] for completion in completions)]
    starts = [0, *[len(prompt) - 1] * len(completions)]
    ends = torch.tensor([0, *map(len, segments)]).cumsum(0).int()
    ids = torch.tensor([token for segment in segments for token in segment])[None]
    labels = ids.clone()
    labels[0, : len(prompt) - 1] = -100
    labels[0, ends[:-1].long()] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(at, at + len(s)) for at, s in zip(starts, segments)])[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(map(len, segments))),
        "segment_parents": torch.tensor([-1, *[0] * len(completions)], dtype=torch.int32),
    }


def scores(segments: list[tuple[int, int]]) -> int:
    """Return the number of attention scores of segments ``(tokens before it on its path, its own tokens)``."""
    return sum(length * before + length * (length + 1) // 2 for before, length in segments)


def _scores_of_tree(prompt: int, lengths: list[int]) -> int:
    return scores([(0, prompt - 1), *((prompt - 1, length + 1) for length in lengths)])


def _without_prompt(batch: Batch, prompt: int) -> Batch:
    batch["labels"][:, :prompt] = -100
    return batch


def _without_prompts(batch: Batch, prompts: list[int]) -> Batch:
    for start, prompt in zip(batch["cu_seq_lens_q"].tolist(), prompts):
        batch["labels"][0, start : start + prompt] = -100
    return batch


def _plain(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}


def _step(model: Any, batch: Batch) -> Any:
    def step() -> None:
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad()

    return step
