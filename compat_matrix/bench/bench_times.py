"""Times, each beside a rival's in the same rounds: the ratios are what counts, because machines are noisy."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any, Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import BertConfig, BertModel

import fa2patch
from fa2patch import packing
from fa2patch.kernels import Options
from fa2patch.kernels.reference import Reference

from . import own_time, workloads
from .workloads import DISTRIBUTIONS, FLAN, TEXTS, Batch, documents, packed, padded, small_llama

# from q, k and v [tokens, heads, dim] to an output of q's shape
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("way", own_time.WAYS)
def bench_overhead(rows: list[Any], turns: Any, way: str) -> None:
    """The time that the patch adds on the host, without the kernel.

    The time of a patched forward minus that of the same model with the kernel called by hand, in the same round, for
    models of 2 and 32 layers: a layer takes a thirtieth of what the larger difference is larger. The table shows
    medians, and between which values half of the rounds lie. On a GPU this time is hidden while the GPU still computes
    earlier layers.
    """
    every = {layers: own_time.forwards(layers) for layers in (2, 32)}
    runs = {(layers, name): runs[name] for layers, runs in every.items() for name in (own_time.BASE, way)}
    with torch.no_grad():
        taken = turns(runs, 160, warm_up=10)
    short, long = (np.subtract(taken[n, way], taken[n, own_time.BASE]) * 1e6 for n in (2, 32))
    each = (long - short) / 30
    row: dict[str, Any] = {"batches": way}
    for what, found in (("µs per layer", each), ("µs per forward", short - 2 * each)):
        first, middle, last = np.percentile(found, (25, 50, 75)).round(1).tolist()
        row.update({what: middle, f"{what}, range": f"{first} to {last}"})
    rows.append(row)


# --- attention ------------------------------------------------------------------------------------------------

HEADS, KEY_HEADS, DIM, TOKENS = 8, 2, 64, 2048
# A padded batch of more times the row's tokens is not measured: it would take most of the part's time.
MOST_PADDING = 16


def layouts() -> dict[str, list[int]]:
    # The same tokens are 1, 2, 4, ... equal documents, and documents of many lengths.
    counts = [2**power for power in range(TOKENS.bit_length())]
    drawn = np.random.default_rng(0)
    uniform = drawn.integers(1, 64, TOKENS, endpoint=True)
    two = drawn.choice([4, TOKENS // 8], TOKENS, p=[0.9, 0.1])
    return {
        **{f"{count} x {TOKENS // count}": [TOKENS // count] * count for count in counts},
        FLAN.name: workloads.cut(FLAN.draw(TOKENS), TOKENS),
        "FLAN-like, a tenth": workloads.cut(FLAN.scaled(0.1).draw(TOKENS), TOKENS),
        "uniform, 1 to 64": workloads.cut(uniform.tolist(), TOKENS),
        f"4 or {TOKENS // 8}": workloads.cut(two.tolist(), TOKENS),
    }


def attentions(lengths: list[int], backward: bool) -> dict[str, Attention]:
    # There is no "batched" without equal lengths, and no "padded" that would hold MOST_PADDING times the tokens. torch
    # has no backward of FlexAttention on a CPU.
    kernel, where, longest = Reference(), workloads.boundaries_of(lengths), max(lengths)
    shape = len(lengths), longest
    places = torch.cat([torch.arange(length) + row * longest for row, length in enumerate(lengths)])

    def attended(*states: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in states)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def one_by_one(*states: torch.Tensor) -> torch.Tensor:
        each = zip(*(torch.split(x, lengths) for x in states))
        return torch.cat([attended(*(x[None] for x in one))[0] for one in each])

    def batched(*states: torch.Tensor) -> torch.Tensor:
        return attended(*(x.view(*shape, *x.shape[1:]) for x in states)).flatten(0, 1)

    def with_padding(*states: torch.Tensor) -> torch.Tensor:
        spread = (x.new_zeros(len(lengths) * longest, *x.shape[1:]).index_copy(0, places, x) for x in states)
        return attended(*(x.view(*shape, *x.shape[1:]) for x in spread)).flatten(0, 1)[places]

    found: dict[str, Attention] = {
        "reference": lambda q, k, v: kernel(q, k, v, where, Options(causal=True)),
        "one by one": one_by_one,
    }
    if len({*lengths}) == 1:
        found["batched"] = batched
    if len(lengths) * longest <= MOST_PADDING * sum(lengths):
        found["padded"] = with_padding
    if not backward:
        torch.compiler.reset()  # each layout is a mask function of its own, and dynamo compiles only so many
        document = torch.repeat_interleave(torch.tensor(lengths))
        size = len(document), len(document)
        mask = create_block_mask(lambda b, h, i, j: (document[i] == document[j]) & (i >= j), None, None, *size, "cpu")
        flex = torch.compile(partial(flex_attention, block_mask=mask, enable_gqa=True), dynamic=False)
        found["FlexAttention"] = lambda *states: flex(*(x.transpose(0, 1)[None] for x in states))[0].transpose(0, 1)
    return found


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("name", layouts())
def bench_kernels(rows: list[Any], turns: Any, quick: bool, name: str, backward: bool) -> None:
    """The cost of attention within documents: the reference kernel and other ways.

    One row of 2048 tokens; 8 query and 2 key heads of 64, float32, causal. The reference's time is the median of 9
    rounds, taken in turns; the other ways' times are multiples of it, medians over the rounds. *One by one*, *batched*
    (documents of equal length only) and *padded* call SDPA by hand, *padded* with padding and unpadding;
    *FlexAttention* is compiled with a document mask, and has no backward on a CPU; *reference to best* is the
    reference's time as a multiple of the best of these. NestedTensor has no causal attention on a CPU.
    """
    lengths = workloads.cut(layouts()[name], 64 if quick else TOKENS)
    drawn = torch.Generator().manual_seed(0)
    states = [torch.randn(sum(lengths), heads, DIM, generator=drawn) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    states = [x.requires_grad_(backward) for x in states]
    ways = attentions(lengths, backward)
    expected = ways["reference"](*states)

    def call(way: Attention) -> Any:
        return torch.autograd.grad(way(*states), states, torch.ones_like(expected)) if backward else way(*states)

    for way in ways.values():
        torch.testing.assert_close(way(*states), expected, atol=1e-4, rtol=0)
    taken = turns({name: partial(call, way) for name, way in ways.items()}, 9, warm_up=2)
    ratios = {way: taken.ratio(way, "reference") for way in ways if way != "reference"}
    row = {"documents": name, "pass": "fwd + bwd" if backward else "forward", "reference, ms": taken.ms("reference")}
    columns = {way: ratios.get(way, "") for way in ("one by one", "batched", "padded", "FlexAttention")}
    rows.append({**row, "reference to best": 1 / min(ratios.values()), **columns})


# --- training -------------------------------------------------------------------------------------------------


class Trainee:
    # It trains on the mini-batches one after the other.

    def __init__(self, batches: list[Batch], layers: int, hidden: int, patched: bool = False) -> None:
        self.model, self.left, self.losses = small_llama(layers, hidden), iter(batches), list[float]()
        if patched:
            fa2patch.apply(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def __call__(self) -> None:
        loss = self.model(**next(self.left), use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def bench_training(rows: list[Any], turns: Any, quick: bool, name: str) -> None:
    """Training on the same mini-batches, padded and packed.

    Llama of 4 layers, hidden size 256, float32, AdamW, 60 mini-batches of 4 documents that are 0.25 times as long as in
    the distributions. The variants start from the same weights and take each step in turns. *Limit* is the number of
    padded tokens divided by the number of real tokens in these mini-batches: the largest gain if cost were linear in
    tokens. Attention over padding is not, and can add to the gain; the optimizer's work lowers it. *Upstream* is
    Transformers alone on the packed row (sdpa, with its own block-diagonal mask). *Largest loss difference* is
    fa2patch's to padded training at any step.
    """
    steps, scale, size = (1, 0.03, (1, 64)) if quick else (60, 0.25, (4, 256))
    warm_up = 2  # allocators and the optimizer's states
    lengths = workloads.mini_batches(DISTRIBUTIONS[name].scaled(scale), steps + warm_up)
    docs = workloads.filled(lengths)
    rivals = {
        "fa2patch": Trainee([packed(batch) for batch in docs], *size, patched=True),
        "padded": Trainee([padded(batch) for batch in docs], *size),
        "upstream": Trainee([packed(batch) for batch in docs], *size),
    }
    seconds = {rival: sum(of) for rival, of in turns(rivals, steps, warm_up).items()}
    ratios = {rival: seconds["padded"] / of for rival, of in seconds.items()}
    timed = lengths[warm_up:]
    limit = workloads.padding_ratio(timed)
    losses = zip(rivals["fa2patch"].losses, rivals["padded"].losses)
    rows.append({
        "lengths": name,
        "real tokens/s": round(sum(map(sum, timed)) / seconds["fa2patch"]),
        "to padded": ratios["fa2patch"],
        "limit": limit,
        "share of it": f"{ratios['fa2patch'] / limit:.0%}",
        "upstream to padded": ratios["upstream"],
        "largest loss difference": f"{max(abs(a - b) for a, b in losses):.0e}",
    })  # fmt: skip


@pytest.mark.parametrize("completions", [2, 8, 16])
@pytest.mark.parametrize("prompt", [512, 2048])
def bench_sharing(rows: list[Any], turns: Any, quick: bool, prompt: int, completions: int) -> None:
    """One prompt with many completions: padded, packed, and packed with the prompt once.

    Forward and backward of a Llama of 4 layers, hidden size 256, float32, with the loss on the completions; medians of
    5 rounds, taken in turns. Completions have 32 to 256 tokens, evenly spread. Ratios are medians over the rounds.
    """
    shown, size = f"{prompt:,}, {completions}", (1, 64) if quick else (4, 256)
    prompt = 16 if quick else prompt
    batches = workloads.completions(prompt, completions)
    unpatched, patched = (small_llama(*size) for _ in range(2))
    fa2patch.apply(patched)

    def step(name: str) -> None:
        model = unpatched if name == "padded" else patched
        model(**batches[name], use_cache=False).loss.backward()
        model.zero_grad()

    taken = turns({name: partial(step, name) for name in batches}, 5)
    names = ("padded", "packed", "shared")
    tokens = {f"{name}: tokens": batches[name]["input_ids"].numel() for name in names}
    ms = {f"{name}, ms": taken.ms(name) for name in names}
    ratios = {f"{name} / shared": taken.ratio(name, "shared") for name in names[:2]}
    rows.append({"prompt, completions": shown, **tokens, **ms, **ratios})


# --- embeddings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["encode", "training step"])
@pytest.mark.parametrize("name", TEXTS)
def bench_embeddings(rows: list[Any], turns: Any, quick: bool, name: str, training: bool) -> None:
    """An encoder on padded batches, as sentence-transformers makes them: unpatched, and patched.

    A BERT of 4 layers, hidden size 256, float32, sdpa; medians of 7 rounds, taken in turns. *Encode*: 128 texts in
    batches of 32, sorted by length. *Training step*: forward and backward of two batches of 16 in random order. Lengths
    are lognormal: sentences have 24 tokens on average, passages 140. Ratios are medians over the rounds.
    """
    count, size = (6, 3) if quick else (128, 32)
    lengths = TEXTS[name].draw(count)[: size if training else count]
    docs = documents(lengths if training else sorted(lengths))
    step = size // 2 if training else size
    batches = [padded(docs[at : at + step]) for at in range(0, len(docs), step)]
    for batch in batches:
        del batch["labels"]
    torch.manual_seed(0)
    width = 32 if quick else 256
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 32}
    rivals = [BertModel(BertConfig(vocab_size=512, num_hidden_layers=4, **sizes)).train(training) for _ in range(2)]
    fa2patch.apply(rivals[1], padded_batches=True)

    def pooled(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (states * mask[..., None]).sum() / mask.sum()  # as sentence-transformers, without padding

    def run(model: Any) -> None:
        with torch.set_grad_enabled(training):
            outputs = [pooled(model(**batch).last_hidden_state, batch["attention_mask"]) for batch in batches]
        if training:
            sum(outputs).backward()

    taken = turns({"patched": partial(run, rivals[1]), "padded": partial(run, rivals[0])}, 7)
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    row = {"texts": f"{name}, {'training step' if training else 'encode'}", "padded: tokens": tokens}
    row |= {"patched: tokens": sum(lengths), "saved": f"{1 - sum(lengths) / tokens:.0%}"}
    rows.append({**row, "padded / patched": taken.ratio("padded", "patched")})


# --- packing --------------------------------------------------------------------------------------------------


LENGTHS: dict[str, Callable[[int], Any]] = {
    **{name: each.draw for name, each in DISTRIBUTIONS.items()},
    "uniform, 1 to 4096": lambda count: np.random.default_rng(0).integers(1, 4097, count),
    "normal, 300 ± 45": lambda count: np.random.default_rng(0).normal(300, 45, count).clip(1, 4096).round().astype(int),
    "normal, 1500 ± 225": lambda count: np.random.default_rng(0).normal(1500, 225, count).clip(1).round().astype(int),
}


@pytest.mark.parametrize("budget", [4096, 8192, 32768, 65536])
@pytest.mark.parametrize("name", LENGTHS)
def bench_packing(rows: list[Any], benchmark: Any, quick: bool, name: str, budget: int) -> None:
    """A million lengths put into rows by `packing.plan`: how full the rows are, and seconds of processor time.

    *Fewest* is `Plan.lower_bound`: no planner needs fewer rows. *Filled* is the share of the rows' places that hold
    tokens. The time is the median of 3 runs.
    """
    count = 300 if quick else 1_000_000
    lengths = np.asarray(LENGTHS[name](count))
    seconds = []

    def planned() -> Any:
        started = time.process_time()
        plan = packing.plan(lengths, budget)
        seconds.append(time.process_time() - started)
        return plan

    plan = benchmark.pedantic(planned, rounds=1 if quick else 3)
    assert np.array_equal(np.sort(plan.indices), np.arange(count))
    tokens = np.add.reduceat(lengths[plan.indices], plan.offsets[:-1])
    assert tokens.max() <= budget and tokens.sum() == lengths.sum()
    row = {"lengths": name, "tokens in a row": budget, "processor, s": round(statistics.median(seconds), 3)}
    row |= {"filled": f"{plan.fill:.2%}", "rows": len(tokens), "fewest": plan.lower_bound}
    rows.append({**row, "rows / fewest": f"{len(tokens) / plan.lower_bound:.4f}"})
