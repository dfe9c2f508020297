"""Training at size on this device, padded and packed: throughput, and memory with and without the model's states."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import fa2patch
from fa2patch import kernels

from ..bench import workloads
from ..bench.workloads import BY_HAND, DISTRIBUTIONS
from .models import Found, synchronize

# Unknown code, such as that of LoRA, is proven in the first, second, fourth, eighth and sixteenth batch.
WARM_UP, STEPS = 8, 7
TOY_SCALE = 0.02  # of documents on a CPU, which only shows that it runs
BUDGET, BATCHES = 16_384, 4  # tokens of a pass, and mini-batches of which a step has as many passes as it needs


@dataclass(frozen=True)
class Setting:
    shape: str  # of workloads.SHAPES
    documents: int  # of a mini-batch
    lora: bool = False  # else all weights are trained
    checkpointing: bool = False


SETTINGS = {
    f"{setting.shape}{' with LoRA' * setting.lora}{', checkpointing' * setting.checkpointing}, "
    f"{setting.documents} documents": setting
    for setting in (
        Setting("TinyLlama-1.1B", 16),
        Setting("Mistral-7B", 4, lora=True),
        Setting("TinyLlama-1.1B", 4),
        Setting("Mistral-7B", 16, lora=True),
        Setting("Llama-2-7B", 16, checkpointing=True),
        Setting("Llama-2-7B", 4, checkpointing=True),
    )
}


def train(device: str, name: str, variant: str) -> Found:
    """Train a setting's model in one way.

    ``padded`` and ``upstream`` are Transformers alone, on padded and on packed batches. In ``by-hand``, every layer
    calls a kernel with boundaries that are there: the lowest cost of a packed batch. ``budget`` takes steps of more
    documents, in passes. ``+lengths``: with the collator's ``return_flash_attn_kwargs=True``.
    """
    training = Training(device, SETTINGS[name], variant)
    return {"rows": {distribution: training.on(distribution) for distribution in DISTRIBUTIONS}}


class Training:
    # The weights keep changing, which does not affect speed.

    def __init__(self, device: str, setting: Setting, variant: str) -> None:
        self.device, self.setting, self.cuda = device, setting, device == "cuda"
        self.kind, _, name = variant.partition(":")
        name, _, lengths = name.partition("+")
        self.lengths, self.pads = bool(lengths), self.kind in ("padded", "padded_batches")
        self.by_hand = workloads.ByHand(kernels.named(name)) if self.kind == "by-hand" else None
        own = self.kind in ("fa2patch", "budget", "padded_batches")
        self.model = self._built(BY_HAND if self.by_hand else "sdpa" if own else name)
        if own:
            fa2patch.apply(self.model, kernel=name, padded_batches=self.pads)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, 1e-5, fused=self.cuda)

    def _built(self, implementation: str) -> Any:
        torch.manual_seed(0)
        model = workloads.causal_lm(self.setting.shape, self.device, implementation)
        if self.setting.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.setting.lora:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
        return model

    def on(self, distribution: str) -> Found:
        drawn = DISTRIBUTIONS[distribution].scaled(1 if self.cuda else TOY_SCALE)
        steps = WARM_UP + STEPS if self.cuda else 2
        count = self.setting.documents * (BATCHES if self.kind == "budget" else 1)
        lengths = workloads.mini_batches(drawn, steps, count)
        largest = max(range(len(lengths)), key=lambda step: len(lengths[step]) * max(lengths[step]))
        lengths.insert(0, lengths.pop(largest))  # so that no timed step waits for memory
        docs = workloads.filled(lengths, self.model.config.vocab_size)
        batches = [(self._passes(each), cuts) for each, cuts in zip(docs, lengths)]
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        for step, (passes, cuts) in enumerate(batches):
            if step == min(WARM_UP, steps - 1):
                synchronize(self.device)
                started = time.perf_counter()
            self._step(passes, cuts)
        synchronize(self.device)
        seconds = time.perf_counter() - started
        timed = lengths[min(WARM_UP, steps - 1) :]
        row: Found = {"real tokens/s": round(sum(map(sum, timed)) / seconds)}
        if self.pads or self.by_hand:  # of the same mini-batches
            row["limit"] = round(workloads.padding_ratio(timed), 4)
        if self.cuda:
            peak, states = torch.cuda.max_memory_allocated(), self.states
            row |= {"peak, GB": round(peak / 1e9, 2), "peak less states, GB": round((peak - states) / 1e9, 3)}
        return row

    def _passes(self, docs: list[list[int]]) -> Any:
        if self.pads:
            return [(workloads.padded(docs), 1.0)]
        batch = workloads.packed(docs, self.lengths)
        if self.kind != "budget":
            return [(batch, 1.0)]
        passes = fa2patch.packing.passes(batch, BUDGET, too_long="alone")
        return [*zip(passes, passes.shares.tolist())]

    def _step(self, passes: Any, cuts: list[int]) -> None:
        for batch, share in passes:
            loss = self.model(**self._moved(batch, cuts), use_cache=False).loss
            (loss * share).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _moved(self, batch: dict[str, Any], cuts: list[int]) -> dict[str, Any]:
        if self.by_hand is not None:
            self.by_hand.boundaries = made = workloads.boundaries_of(cuts)
            made.cu_seqlens = made.cu_seqlens.to(self.device)
        return {k: x.to(self.device) if isinstance(x, torch.Tensor) else x for k, x in batch.items()}

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and what the optimizer keeps."""
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.trained, *(x for x in kept if isinstance(x, torch.Tensor))]
        return sum(x.numel() * x.element_size() for x in tensors)


KINDS = {"optimizer": ("adam", "multi_tensor"), "matrix products": ("gemm", "matmul", "cutlass", "nvjet"),
         "attention": ("flash", "fmha", "attention")}  # fmt: skip


def profile(device: str, name: str, variant: str) -> Found:
    """Say what a step's time goes into: the device's kernels by kind, and the rest of the time, in which it waits."""
    from torch.profiler import ProfilerActivity

    training = Training(device, SETTINGS[name], variant)
    training.on("FLAN-like")
    lengths = workloads.mini_batches(DISTRIBUTIONS["FLAN-like"].scaled(1 if training.cuda else TOY_SCALE), 3)
    batches = [training._passes(docs) for docs in workloads.filled(lengths, training.model.config.vocab_size)]
    synchronize(device)
    started = time.perf_counter()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * training.cuda]) as found:
        for passes, cuts in zip(batches, lengths):
            training._step(passes, cuts)
        synchronize(device)
    took = (time.perf_counter() - started) * 1e6
    spent: Counter[str] = Counter()
    for event in found.events():
        if "CUDA" in str(event.device_type):
            kinds = (kind for kind, clues in KINDS.items() if any(clue in event.name.lower() for clue in clues))
            spent[next(kinds, "other kernels")] += event.time_range.elapsed_us()
    row = {kind: f"{us / took:.0%}" for kind, us in spent.items()}
    return {"row": {"variant": variant, **row, "the device waits": f"{1 - sum(spent.values()) / took:.0%}"}}
