"""What is measured: lengths of documents, batches of them, models with random weights, and the peak of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fa2patch
from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels import Options

Batch = dict[str, Any]

# --- lengths --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    # A lognormal distribution of document lengths in tokens, clipped to the longest. Apart from the cut-off, the
    # padding depends on sigma alone, so scaled() keeps it.

    name: str
    mean: float
    sigma: float
    longest: int = 4096

    def draw(self, count: int, seed: int = 0) -> list[int]:
        centre = np.log(self.mean) - self.sigma**2 / 2
        drawn = np.random.default_rng(seed).lognormal(centre, self.sigma, count)
        return [int(length) for length in np.clip(np.rint(drawn), 1, self.longest)]

    def scaled(self, factor: float) -> Distribution:
        # Shorter documents are for training on a CPU.
        return Distribution(self.name, self.mean * factor, self.sigma, max(1, round(self.longest * factor)))


# They are tuned so that mini-batches of four hold about as much padding as the published speed-ups of padding-free
# training require (2.0 for FLAN, 1.4 for OrcaMath). They are consistent with those numbers but are not measurements of
# those data sets.
DISTRIBUTIONS = {
    each.name: each for each in (Distribution("FLAN-like", 300, 0.9), Distribution("OrcaMath-like", 400, 0.4))
}
FLAN = DISTRIBUTIONS["FLAN-like"]

# of texts that are embedded
TEXTS = {each.name: each for each in (Distribution("sentences", 24, 0.6, 128), Distribution("passages", 140, 0.6, 500))}


def cut(lengths: Sequence[int], tokens: int) -> list[int]:
    # The last length is cut to fit.
    ends = np.minimum(np.cumsum(lengths), tokens)
    return [int(length) for length in np.diff(ends, prepend=0) if length]


def mini_batches(distribution: Distribution, steps: int, batch: int = 4) -> list[list[int]]:
    # Each document has at least two tokens, so that it has a target.
    drawn = [max(2, length) for length in distribution.draw(steps * batch)]
    return [drawn[start : start + batch] for start in range(0, len(drawn), batch)]


def padding_ratio(batches: Sequence[Sequence[int]]) -> float:
    # Packing can gain so much where cost is linear in tokens.
    return sum(len(batch) * max(batch) for batch in batches) / sum(map(sum, batches))


# --- batches --------------------------------------------------------------------------------------------------


def documents(lengths: Sequence[int], vocabulary: int = 512, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def filled(lengths: Sequence[Sequence[int]], vocabulary: int = 512) -> list[list[list[int]]]:
    drawn = iter(documents([*itertools.chain(*lengths)], vocabulary))
    return [[*itertools.islice(drawn, len(batch))] for batch in lengths]


def padded(docs: Sequence[Sequence[int]]) -> Batch:
    rows = [torch.tensor(document) for document in docs]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    # Nothing predicts a first token.
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(docs: Sequence[Sequence[int]], lengths: bool = False) -> Batch:
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    return collate([{"input_ids": list(document)} for document in docs])


def completions(prompt: int, count: int, vocabulary: int = 512) -> dict[str, Batch]:
    # Completions of one prompt, with 32 to 256 tokens each, in a row that has the prompt once, packed, and padded. The
    # prompt is not learned.
    lengths = [32 + round(at * 224 / (count - 1)) for at in range(count)]
    asked, *answers = documents([prompt, *lengths], vocabulary)
    sequences = [asked + answer for answer in answers]
    row = fa2patch.packing.share(sequences, prompts=[prompt] * count, least=1)
    found = {"shared": {**row.batch, "labels": row.labels}, "packed": packed(sequences, lengths=True)}
    found["padded"] = padded(sequences)
    found["padded"]["labels"][:, :prompt] = -100
    for start in found["packed"]["cu_seq_lens_q"].tolist()[:-1]:
        found["packed"]["labels"][0, start : start + prompt] = -100
    return found


def boundaries_of(lengths: Sequence[int]) -> Boundaries:
    return fa2patch.boundaries(torch.cat([torch.arange(length) for length in lengths])[None])


# --- models ---------------------------------------------------------------------------------------------------

# Configurations of published models, as far as they differ from COMMON. Nothing is downloaded.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {"num_key_value_heads": 32, "intermediate_size": 11008},
    "Mistral-7B": {"model_type": "mistral", "sliding_window": 4096},
    "TinyLlama-1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
    },
    "Granite-8B-code": {"num_hidden_layers": 36, "vocab_size": 49152, "tie_word_embeddings": True},
}

COMMON = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "use_cache": False,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
# A toy model shows within seconds on a CPU that everything runs.
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 97, "num_hidden_layers": 2}


def config(shape: str, toy: bool = False) -> Any:
    from transformers import AutoConfig

    numbers = {**COMMON, **SHAPES[shape]}
    if toy:
        groups = numbers["num_attention_heads"] // numbers["num_key_value_heads"]
        numbers.update(TOY, num_key_value_heads=max(1, TOY["num_attention_heads"] // groups))
    return AutoConfig.for_model(**numbers)


def causal_lm(shape: str, device: str, implementation: str = "sdpa") -> Any:
    # a toy on a CPU
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM
    with torch.device(device):
        model = made.from_config(config(shape, toy=device == "cpu"), attn_implementation=implementation)
    return model.to(torch.bfloat16).train()


def small_llama(layers: int, hidden: int, implementation: str = "sdpa") -> Any:
    # Heads have 32 dimensions, there are half as many key heads, and the weights are always the same.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = hidden // 32
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 8 // 3 // 16 * 16, "num_hidden_layers": layers}
    sizes.update(num_attention_heads=heads, num_key_value_heads=max(1, heads // 2))
    config = LlamaConfig(vocab_size=512, max_position_embeddings=4096, use_cache=False, **sizes)
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).train()


BY_HAND = "fa2patch_bench_by_hand"


class ByHand:
    """The lowest possible cost of a packed batch: every layer calls ``kernel`` with precomputed boundaries."""

    # It registers itself with Transformers' registries of attention and mask functions (4.53 on) under BY_HAND, and
    # adds nothing else. Set "boundaries" and load a model with that attention. It can compute no other batch.
    def __init__(self, kernel: Any, of: Boundaries | None = None) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self.kernel, self.boundaries = kernel, of
        AttentionInterface.register(BY_HAND, self.attend)
        AttentionMaskInterface.register(BY_HAND, lambda *unused, **ignored: None)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        # query, key and value are [1, heads, length, dim], and the output is [1, length, heads, dim].
        q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        asked = Options(scale=options.get("scaling"), window=options.get("sliding_window"))
        return self.kernel(q, k, v, self.boundaries, asked)[None], None


# --- memory ---------------------------------------------------------------------------------------------------


def peak_of(step: Callable[[], Any]) -> int:
    """The bytes that a call has in use at its peak beyond those in use before it; on Linux, or on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in use now (proc(5))
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
