"""Training with rows that an engine splits equals training in one process: what ulysses.py and context_parallel.py run.

The process group shares the rows of a packed batch. The right losses, gradients and weights are those of an unpatched
model in one process that is given one document after another. Both train ten steps on the mean loss of all tokens.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from engines import Engine
from ranks import of_every_rank
from stage import furthest, weights
from ulysses_rows import precision

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from fa2patch.patch.padding import pack_padded_batches

STEPS = 10
# A larger difference of a loss or gradient is a leak.
SMALL = 1e-4

# The largest relative difference of a step's loss, and of gradients and final weights by their largest value. Models
# are in double precision if they can be, because in single precision the rounding of ten steps with mixers is as large
# as this. Norms and tables of rotary embeddings are in single precision all the same, and processes sum in another
# order.
LOSS, GRADIENT, WEIGHT = 1e-6, 1e-5, 1e-5

SHARED = 12  # length of the prompt that the documents of a case share

CROSSING = ((10, 40, 14),)
TWO_ROWS = ((10, 40, 14), (5, 27, 20, 12))
# Document lengths of rows of 64 tokens. Those of ``WHOLE`` lie whole in every eighth of the row, and so in
# each of four processes.
WHOLE = ((8, 5, 3, 8, 8, 2, 6, 8, 8, 7, 1),)


@dataclass
class Case:
    family: str = "llama"
    lengths: tuple[tuple[int, ...], ...] = CROSSING  # document lengths of each row
    config: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[dict[str, Any]], dict[str, Any]] = dict  # changes the batch before rows are split
    model: Callable[[Any], Any] = lambda model: model  # changes the model that is split, once it is patched
    built: Callable[[Any], Any] = lambda model: model  # changes the models of one process and of several
    refused: str = ""  # a part of the expected error; empty if the feature is right
    # How many tokens at the start of each document have no loss. If more than 1, documents share them.
    prompts: int = 1
    call: dict[str, Any] = field(default_factory=dict)


def with_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    # With lengths of the whole rows instead of position ids, nothing has to be gathered.
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
    cu = torch.cat([starts, torch.tensor([batch["input_ids"].numel()])]).int()
    longest = int(cu.diff().max())
    rest = {name: value for name, value in batch.items() if name != "position_ids"}
    return {**rest, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda batch: {key: value for key, value in batch.items() if key != name}


def with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "attention_mask": (batch["input_ids"] != 1).long()}


def with_numbers(batch: dict[str, Any]) -> dict[str, Any]:
    return {**without("position_ids")(batch), "seq_idx": (batch["position_ids"] == 0).cumsum(-1)}


def checkpointing(reentrant: bool) -> Callable[[Any], Any]:
    def switched(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    return switched


def packing_padded_batches(model: Any) -> Any:
    # Hooks that make rows without padding must not do so with parts of rows.
    if fa2patch.status(model) is not None:
        pack_padded_batches(model)
    return model


def compiled(model: Any) -> Any:
    # a graph breaks where something else than torch's own function stands in the place of sdpa
    replaced = not inspect.isbuiltin(torch.nn.functional.scaled_dot_product_attention)
    return torch.compile(model, backend="aot_eager", fullgraph=not replaced)


def ending_early(batch: dict[str, Any]) -> dict[str, Any]:
    # rows of 63 tokens, which no number of processes here divides
    return {name: value[:, :63] for name, value in batch.items()}


def with_pictures(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "pixel_values": torch.zeros(1, 3, 8, 8), "image_grid_thw": torch.tensor([[1, 2, 2]])}


def shared(batch: dict[str, Any]) -> dict[str, Any]:
    # The documents start with equal prompts, and each prompt is kept once. Rows are filled by a short document.
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    docs = [row for row in batch["input_ids"][0].tensor_split(starts[1:]) if (row != 1).any()]
    made = fa2patch.packing.share([doc.tolist() for doc in docs], prompts=[SHARED] * len(docs))
    row, labels = dict(made.batch), made.labels
    empty = -labels.shape[1] % 4 or 4
    cu, parents = row["cu_seq_lens_q"], row["segment_parents"]
    cu = torch.cat([cu, cu[-1:] + empty])
    row["cu_seq_lens_q"] = row["cu_seq_lens_k"] = cu
    row["segment_parents"] = torch.cat([parents, torch.tensor([-1], dtype=torch.int32)])
    row["input_ids"] = torch.nn.functional.pad(row["input_ids"], (0, empty), value=1)
    row["position_ids"] = torch.cat([row["position_ids"], torch.arange(empty)[None]], dim=1)
    return {**row, "labels": torch.nn.functional.pad(labels, (0, empty), value=-100)}


class Scaled:
    """Of the user's own, and looks at one token at a time."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 1.0  # type: ignore[misc,no-any-return]


class Mixing:
    """Looks at the token before, also where that is of another document."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + 0.1 * hidden.roll(1, 1))  # type: ignore[misc,no-any-return]


def with_a_module(kind: type) -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        mlp = model.model.layers[0].mlp
        mlp.__class__ = type(kind.__name__, (kind, type(mlp)), {"__module__": __name__})
        return model

    return changed


def compiled_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def with_lora(model: Any) -> Any:
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(0)  # of its weights, which are not 0
    made = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, made).to(model.dtype)


LONGROPE = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}

CASES = {
    "ids": Case(),
    "lengths": Case(batch=with_lengths),
    "seq_idx": Case(batch=with_numbers),
    "shared prompts": Case(lengths=((20, 26, 30, 18),), prompts=SHARED, batch=shared),
    "several rows": Case(lengths=TWO_ROWS),
    "padding": Case(lengths=((10, 33, 14), (5, 27)), batch=with_mask),
    "padded rows": Case(lengths=((10, 33, 14), (5, 27)), batch=with_mask, model=packing_padded_batches),
    "one document": Case(lengths=((64,),)),
    "qwen2": Case("qwen2"),
    "window": Case("mistral", config={"sliding_window": 8}),
    "softcap": Case("gemma2"),
    "sinks": Case("gpt_oss"),
    "chunks": Case("llama4_text"),
    "latent attention": Case("deepseek_v3"),
    "one key head": Case(config={"num_key_value_heads": 1}),
    "reentrant checkpointing": Case(model=checkpointing(True)),
    "checkpointing": Case(model=checkpointing(False)),
    "mixers, documents whole": Case("jamba", WHOLE),  # in consecutive parts, and in pieces of head and tail
    "mixers, documents cut": Case("jamba", refused="carries a state along each document"),
    "longrope beyond its limit": Case("phi3", config=LONGROPE, refused="how long a document is"),
    "no position_ids": Case(batch=without("position_ids"), refused="expected position_ids"),
    "parts of different lengths": Case(lengths=((10, 33, 20),), batch=ending_early),
    "torch.compile": Case(model=compiled, batch=with_lengths),
    "unknown modules": Case(model=with_a_module(Scaled)),
    "unknown modules that mix tokens": Case(model=with_a_module(Mixing), refused="sent them a gradient|changed"),
    "LoRA (PEFT)": Case(built=with_lora),
    "compiled layers": Case(model=compiled_layers),
    "pictures": Case("qwen2_vl", batch=with_pictures, refused="pictures"),
    "a cache": Case(call={"use_cache": True, "past_key_values": "made"}, refused="PackedWithCache"),
    "labels that are not shifted": Case(call={"labels": "unshifted"}, refused="expected shift_labels"),
}  # fmt: skip


def batch_of(case: Case, docs: list[torch.Tensor]) -> dict[str, Any]:
    # Rows that end early are padded by tokens 1 with positions 0.
    ids, at = [], 0
    longest = max(map(sum, case.lengths))
    longest += -longest % 4
    for row in case.lengths:
        own = docs[at : at + len(row)]
        at += len(row)
        empty = longest - sum(row)
        positions = torch.cat([*(torch.arange(len(doc)) for doc in own), torch.arange(empty)])
        tokens = torch.cat([*own, torch.full((empty,), 1)])
        labels = torch.where((positions == 0) | (tokens == 1), -100, tokens)
        ids.append({"input_ids": tokens, "position_ids": positions, "labels": labels})
    return {name: torch.stack([row[name] for row in ids]) for name in ids[0]}


def step_of(model: Any) -> Any:
    # Adam's smallest denominator is raised, because it would amplify rounding to full steps.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def documents(case: Case) -> list[torch.Tensor]:
    docs = rows.documents(*(length for row in case.lengths for length in row))
    if case.prompts > 1:
        docs = [torch.cat([docs[0][: case.prompts], doc[case.prompts :]]) for doc in docs]
    return docs


def right(case: Case, docs: list[torch.Tensor], model: Any) -> dict[str, Any]:
    """Train an unpatched model on one document after another."""
    optimizer, losses, first = step_of(model), [], {}
    ends = torch.tensor([len(doc) for doc in docs]).cumsum(0)
    labels = torch.cat(docs)
    for end, doc in zip(ends, docs):
        labels[end - len(doc) : end - len(doc) + case.prompts] = -100
    for _ in range(STEPS):
        logits = rows.alone(model, docs)
        loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:])
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "gradients": first, "weights": weights(model)}


def split(engine: Engine, case: Case, docs: list[torch.Tensor], model: Any) -> dict[str, Any]:
    # Gradients are summed over the processes.
    optimizer, losses, first, plain = step_of(model), [], {}, model
    count = sum(len(doc) - case.prompts for doc in docs)
    with engine.split(case.batch(batch_of(case, docs))) as batch:
        model, labels = case.model(model), batch.pop("shift_labels")
        more = {"use_cache": False, **case.call}
        for name, made in {"labels": labels, "past_key_values": transformers.DynamicCache()}.items():
            more.update({name: made} if name in more else {})
        for _ in range(STEPS):
            logits = model(**batch, **more).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            loss.backward()
            found = engine.gradients(plain)
            first = first or {name: value.clone() for name, value in found.items()}
            for name, parameter in plain.named_parameters():
                parameter.grad = found.get(name)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total, group=engine.group())
            losses.append(total.item())
    return {"losses": losses, "gradients": first, "weights": weights(plain)}


def implementation(family: str) -> str:
    try:
        tiny_models.build(family, "sdpa")
    except ValueError:
        return "flex_attention"
    return "sdpa"


class Upstream(Exception):
    """The engine itself refuses a model."""


def compared(engine: Engine, case: Case, patched: bool) -> dict[str, Any]:
    docs = documents(case)

    def built(dtype: torch.dtype, attention: str = "eager") -> Any:
        return case.built(tiny_models.build(case.family, attention, dtype, **case.config)).train()

    dtype = precision(built, docs)
    expected = right(case, docs, built(dtype))
    alone = "" if patched else engine.unpatched_of.get(named_as(case), engine.unpatched)
    attention = alone or implementation(case.family)
    model = built(dtype, attention)
    try:
        engine.prepare(model, len(case.lengths))
    except ValueError as error:  # accelerate refuses windows and mixers
        raise Upstream(str(error)) from error
    torch._dynamo.reset()
    with fa2patch.apply(model) if patched else contextlib.nullcontext():
        found = split(engine, case, docs, model)
    none = {name: torch.zeros_like(gradient) for name, gradient in expected["gradients"].items()}
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], expected["losses"])),
        "gradient": furthest({**none, **found["gradients"]}, expected["gradients"]),
        "weight": furthest(found["weights"], expected["weights"]),
    }


def tried(engine: Engine, case: Case) -> dict[str, Any]:
    try:
        tiny_models.config_of(case.family)
    except (KeyError, AttributeError, ImportError):
        return {
            "found": "upstream",
            "said": f"Transformers {transformers.__version__} has no {case.family}",
            "ok": True,
        }
    try:
        off = compared(engine, case, patched=True)
    except Upstream as error:
        return {"found": "upstream", "said": str(error), "ok": True}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        ok = bool(case.refused) and re.search(case.refused, said) is not None
        return {"found": "refused" if ok else "WRONG", "said": said, "ok": ok}
    ok = not case.refused and off["loss"] <= LOSS and off["gradient"] <= GRADIENT and off["weight"] <= WEIGHT
    return {"found": "right" if ok else "WRONG", "off_by": off, "ok": ok}


def alone(engine: Engine, case: Case) -> dict[str, Any]:
    try:
        off = compared(engine, case, patched=False)
    except Exception as error:
        return {"found": "error", "said": f"{type(error).__name__}: {error}"}
    leaks = off["loss"] > SMALL or off["gradient"] > SMALL
    return {"found": "leaks" if leaks else "right", "said": "", "off_by": off["loss"] if leaks else off}


def verified(engine: Engine) -> dict[str, Any]:
    model = tiny_models.build("llama", "sdpa").train()
    try:
        engine.prepare(model)
    except ValueError as error:
        return {"found": "upstream", "said": str(error), "ok": True}
    batch, said = batch_of(Case(), documents(Case())), []
    with engine.on():
        if not engine.unpatched:  # else it cannot be computed on a CPU
            said.append(not fa2patch.verify(model, batch=batch, strict=False).ok)
        fa2patch.apply(model)
        said += [fa2patch.verify(model, batch=batch, strict=False).ok, fa2patch.verify(model, strict=False).ok]
        projection = model.model.layers[1].self_attn.o_proj
        projection.register_forward_hook(lambda module, given, output: output + 0.1 * output.roll(1, dims=1))
        leaking = fa2patch.verify(model, batch=batch, strict=False)
        said.append(leaking.first_leak == "model.layers.1.self_attn.o_proj")
        fa2patch.revert(model)
        with fa2patch.apply(tiny_models.build("bert:masked", "sdpa")) as encoder:  # the example must be padded for it
            said.append(fa2patch.verify(encoder.model, strict=False).ok)
    ok = all(all(one) for one in of_every_rank(said))
    return {"found": "right" if ok else "WRONG", "said": leaking.reason, "ok": ok}


def named_as(case: Case) -> str:
    return next(name for name, one in CASES.items() if one is case)


def named(engine: Engine, names: list[str]) -> list[str]:
    # Ulysses' loader pads rows, so its parts are always of one length
    return names or [name for name in CASES if name not in engine.has_none_of]


def table(engine: Engine, names: list[str]) -> dict[str, Any]:
    """What is found of each case, with fa2patch and without."""
    found, unpatched = {}, {}
    for name in named(engine, names):
        rings = engine.rings()
        found[name] = tried(engine, CASES[name])
        if engine.rings() > rings:
            found[name] = {"found": "WRONG", "said": "the engine's own attention has run", "ok": False}
        unpatched[name] = alone(engine, CASES[name])
        if dist.get_rank() == 0:
            print(name, found[name], unpatched[name], flush=True)
    found["verify"] = verified(engine)
    ok = all(one.pop("ok") for one in found.values())
    return {"ok": ok, "processes": dist.get_world_size(), "table": found, "alone": unpatched}
