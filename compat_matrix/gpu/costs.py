"""Times on this device: of a kernel, of Triton's check of lengths, and of packed rows beside what they replace."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity

import fa2patch
from fa2patch import kernels
from fa2patch.documents import given_boundaries
from fa2patch.kernels import Options

from .. import tiny_models
from ..bench import workloads
from ..check.rows import documents, pack
from .models import Found, big, synchronize

# Rows that kernels are timed on: one that the host is slower for than the GPU, and two large ones
ROWS = {"1,300 tokens": (900, 250, 100, 50), "16,384 tokens": (1024,) * 16, "16,384 tokens, short": (64,) * 256}

# The hybrids whose mixers take their kernels from a package, by its import name
HYBRIDS = {
    "qwen3_next": "fla", "qwen3_5_text": "fla", "mamba2": "mamba_ssm", "bamba": "mamba_ssm", "jamba": "mamba_ssm",
    "falcon_h1": "mamba_ssm", "lfm2": "causal_conv1d",
}  # fmt: skip
# lengths of documents in rows of about a thousand tokens
OF_HYBRIDS = {"1 to 256": (256, 1, 128, 30, 200, 90, 7, 60, 33, 150, 69), "16 x 64": (64,) * 16, "256 x 4": (4,) * 256}

PASSAGES = workloads.TEXTS["passages"]


def turns(rivals: Mapping[str, Callable[[], Any]], device: str, rounds: int = 9) -> Found:
    """Median milliseconds of each rival, and how many times as long each other one takes as the first."""
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(1 + rounds if device == "cuda" else 2):  # the first one is not timed
        for name, rival in rivals.items():
            synchronize(device)
            started = time.perf_counter()
            rival()
            synchronize(device)
            taken[name] += [time.perf_counter() - started] if turn else []
    first, *others = taken
    row: Found = {f"{name}, ms": 1e3 * statistics.median(seconds) for name, seconds in taken.items()}
    ratios = {name: statistics.median(b / a for a, b in zip(taken[first], taken[name])) for name in others}
    return {**row, **{f"{name} / {first}": ratio for name, ratio in ratios.items()}}


def microseconds(call: Callable[[], Any], device: str) -> tuple[float, float]:
    # of the host, and until the device is done
    calls = 30 if device == "cuda" else 1
    for _ in range(5):
        call()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - started
    synchronize(device)
    return 1e6 * host / calls, 1e6 * (time.perf_counter() - started) / calls


def kernel(device: str, name: str) -> Found:
    """A forward and backward of a layer with 32 heads of 128."""
    row: Found = {"kernel": name}
    for label, lengths in ROWS.items():
        boundaries = workloads.boundaries_of(lengths)
        boundaries.cu_seqlens = boundaries.cu_seqlens.to(device)
        size = (sum(lengths), 32, 128) if device == "cuda" else (sum(lengths), 1, 8)
        states = [torch.randn(*size, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

        def call(states: Any = states, boundaries: Any = boundaries) -> None:
            output = kernels.named(name)(states[0], states[1], states[2], boundaries, Options())
            torch.autograd.grad(output, states, output)

        host, done = microseconds(call, device)
        row[f"{label}, µs"] = f"{host:.0f} / {done:.0f}"
    return {"row": row}


def check_of_lengths(device: str) -> Found:
    """Triton's check and the operators that it replaces: launches, and their share of a forward at 7B."""
    lengths = workloads.FLAN.draw(16) if device == "cuda" else [9, 5]
    batch = workloads.packed(workloads.documents(lengths, 97), lengths=True)
    row = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items() if name != "labels"}
    model = workloads.causal_lm("Llama-2-7B", device)
    fa2patch.apply(model)

    def looked() -> None:
        ends, keys = row["cu_seq_lens_q"], row["cu_seq_lens_k"]
        more = {"cu_seqlens_k": keys, "position_ids": row["position_ids"]}
        given_boundaries.from_cu_seqlens(ends, max(lengths), (1, sum(lengths)), **more)

    with torch.no_grad():
        whole = microseconds(lambda: model.model(**row, use_cache=False), device)[1]
    found: Found = {"tokens": sum(lengths), "a forward at 7B, µs": round(whole)}
    by_triton = given_boundaries._checked_by_triton
    for name, by in (("Triton", by_triton), ("operators", lambda *unused: False)):
        given_boundaries._checked_by_triton = by
        try:
            host, done = microseconds(looked, device)
            with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                looked()
                synchronize(device)
        finally:
            given_boundaries._checked_by_triton = by_triton
        launches = sum("CUDA" in str(event.device_type) for event in seen.events())
        found |= {f"{name}, launches": launches, f"{name}, µs": f"{host:.0f} / {done:.0f}"}
        found[f"{name}, share of the forward"] = f"{done / whole:.2%}"
    return {"row": found}


def memory_of_trial(device: str) -> Found:
    """The peak of a first step, in which kernels are tried, beside that of a later one."""
    model = tiny_models.build("llama", "sdpa", torch.bfloat16, **big("llama")).to(device)
    fa2patch.apply(model)
    row = {name: x.to(device) for name, x in pack(documents(*[64] * 16)).items()}
    peaks = []
    for _ in range(2):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model(**row).logits.sum().backward()
        model.zero_grad()
        synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0)
    return {"row": {"peak of the first step, MB": peaks[0], "of the second, MB": peaks[1]}}


# --- packed rows beside what they replace ---------------------------------------------------------------------


def hybrid(device: str, family: str) -> Found:
    try:
        __import__(HYBRIDS[family])
    except Exception as error:  # a build for another torch raises errors of many types
        if device == "cuda":
            return {"refused": {HYBRIDS[family]: f"{type(error).__name__}: {error}".splitlines()[0]}}
    single, patched = (tiny_models.build(family, dtype=torch.bfloat16, **big(family)).to(device) for _ in range(2))
    patch = fa2patch.apply(patched)
    rows = {f"{family}, {name}": _of_row(patched, single, lengths, device) for name, lengths in OF_HYBRIDS.items()}
    for row in rows.values():
        row["kernels"] = ", ".join(sorted({str(layer.kernel) for layer in patch.layers}))
    return {"rows": rows}


def _of_row(patched: Any, single: Any, lengths: tuple[int, ...], device: str) -> Found:
    docs = [doc.to(device) for doc in documents(*lengths)]
    row = {name: value.to(device) for name, value in pack(documents(*lengths)).items()}
    made = workloads.padded([doc.tolist() for doc in docs])
    batch = {name: made[name].to(device) for name in ("input_ids", "attention_mask")}

    def learned(model: Any, **inputs: Any) -> None:
        model(**inputs, use_cache=False).logits.square().sum().backward()

    def one_by_one() -> None:
        for doc in docs:
            learned(single, input_ids=doc[None])

    rivals = {"packed": partial(learned, patched, **row), "one by one": one_by_one}
    rivals["padded"] = partial(learned, single, **batch)
    started = time.perf_counter()
    rivals["packed"]()
    synchronize(device)
    first = time.perf_counter() - started
    return {**turns(rivals, device), "first batch, s": round(first, 2)}


def shared(device: str, prompt: str, completions: str) -> Found:
    """Completions of one prompt: in a row that has it once, packed without sharing, and padded."""
    batches = workloads.completions(int(prompt) if device == "cuda" else 16, int(completions), 97)
    models = {name: workloads.causal_lm("TinyLlama-1.1B", device) for name in ("patched", "padded")}
    fa2patch.apply(models["patched"])

    def step(name: str) -> None:
        given = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in batches[name].items()}
        models["padded" if name == "padded" else "patched"](**given, use_cache=False).loss.backward()

    return {"row": turns({name: partial(step, name) for name in batches}, device)}


def encoder(device: str, implementation: str) -> Found:
    """Padded batches of ModernBERT-base: patched, and as Transformers computes them, which may take padding out."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    masked_lm: Any = AutoModelForMaskedLM
    config = AutoConfig.for_model("modernbert", **({} if device == "cuda" else {"num_hidden_layers": 2}))
    docs = workloads.documents(PASSAGES.draw(64 if device == "cuda" else 4))
    padded = {name: x.to(device) for name, x in workloads.padded(docs).items()}
    rivals = {}
    for name, loaded in (("patched", "sdpa"), (implementation, implementation)):
        with torch.device(device):
            model = masked_lm.from_config(config, attn_implementation=loaded).to(torch.bfloat16).train()
        if name == "patched":
            fa2patch.apply(model, padded_batches=True)
        rivals[name] = partial(lambda of: of(**padded).loss.backward(), model)
    return {"row": {"padding": 1 - sum(map(len, docs)) / padded["labels"].numel(), **turns(rivals, device)}}


def evaluation(device: str) -> Found:
    """A whole evaluation by sentence-transformers, before and after its encoder is patched."""
    try:
        from sentence_transformers import SentenceTransformer, evaluation, models
    except Exception as error:
        return {"refused": {"sentence-transformers": f"{type(error).__name__}: {error}".splitlines()[0]}}
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = Tokenizer(kinds.WordLevel({"[PAD]": 0, "[UNK]": 1} | {f"w{at}": at for at in range(2, 97)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    width, layers, count = (768, 12, 512) if device == "cuda" else (64, 2, 8)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
    texts = [" ".join(f"w{token}" for token in doc) for doc in workloads.documents(PASSAGES.draw(count), 97)]
    with tempfile.TemporaryDirectory() as home:
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(home)
        BertModel(BertConfig(vocab_size=97, intermediate_size=4 * width, **sizes)).save_pretrained(home)
        model = SentenceTransformer(modules=[models.Transformer(home), models.Pooling(width)], device=device)
    half = count // 2
    judge = evaluation.EmbeddingSimilarityEvaluator(texts[:half], texts[half:], [at / half for at in range(half)])
    row, scores = turns({"padded": lambda: judge(model)}, device, 3), [judge(model)]
    fa2patch.apply(model)
    row |= turns({"patched": lambda: judge(model)}, device, 3)
    scores.append(judge(model))
    apart = max(abs(scores[0][name] - scores[1][name]) for name in scores[0])
    return {"row": {**row, "scores differ by": apart}, "wrong": {"scores": f"{apart:.1e}"} if apart > 1e-3 else {}}
