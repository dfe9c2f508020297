"""Training under Ulysses equals training in one process: ``ulysses.py [FEATURE ...] OUT``.

The process group shares the rows of a packed batch. The right losses, gradients and weights are those of an unpatched
model in one process that is given one document after another. Both train ten steps on the mean loss of all tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
import ulysses_rows
from ranks import of_every_rank
from stage import furthest, weights
from traffic import Traffic, traffic

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from compat_matrix.long_rows import bytes_sent_by_a_forward, bytes_sent_by_a_layer
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
# Document lengths of rows of 64 tokens. Those of ``WHOLE`` lie whole in each of four processes, too.
WHOLE = ((12, 4, 16, 14, 2, 13, 3),)


@dataclass
class Case:
    family: str = "llama"
    lengths: tuple[tuple[int, ...], ...] = CROSSING  # document lengths of each row
    config: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[dict[str, Any]], dict[str, Any]] = dict  # changes the batch before rows are split
    model: Callable[[Any], Any] = lambda model: model  # changes the model before it is patched
    refused: str = ""  # a part of the expected error; empty if the feature is right
    # How many tokens at the start of each document have no loss. If more than 1, documents share them.
    prompts: int = 1
    call: dict[str, Any] = field(default_factory=dict)
    # False for an architecture that the matrix does not have. No rank can prove it by itself.
    proven: bool = True


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
    return torch.compile(model, backend="aot_eager", fullgraph=True)


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
    "chunks": Case("llama4_text", proven=False),
    "latent attention": Case("deepseek_v3"),
    "one key head": Case(config={"num_key_value_heads": 1}),
    "reentrant checkpointing": Case(model=checkpointing(True)),
    "checkpointing": Case(model=checkpointing(False)),
    "mixers, documents whole": Case("jamba", WHOLE),
    "mixers, documents cut": Case("jamba", refused="carries a state along each document"),
    "longrope beyond its limit": Case("phi3", config=LONGROPE, refused="how long a document is"),
    "no position_ids": Case(batch=without("position_ids"), refused="expected position_ids"),
    "torch.compile": Case(model=compiled, batch=with_lengths),
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


def split(case: Case, docs: list[torch.Tensor], model: Any) -> dict[str, Any]:
    # Gradients are summed over the processes.
    optimizer, losses, first, plain = step_of(model), [], {}, model
    model = case.model(model)
    whole = case.batch(batch_of(case, docs))
    batch = ulysses_rows.part(whole)
    labels = batch.pop("shift_labels")
    count = sum(len(doc) - case.prompts for doc in docs)
    more = {"use_cache": False, **case.call}
    for name, made in {"labels": labels, "past_key_values": transformers.DynamicCache()}.items():
        more.update({name: made} if name in more else {})
    for _ in range(STEPS):
        logits = model(**batch, **more).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        found = ulysses_rows.gradients(plain)
        first = first or {name: value.clone() for name, value in found.items()}
        for name, parameter in plain.named_parameters():
            parameter.grad = found.get(name)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=ulysses_rows.group())
        losses.append(total.item())
    return {"losses": losses, "gradients": first, "weights": weights(plain)}


def implementation(family: str) -> str:
    try:
        tiny_models.build(family, "sdpa")
    except ValueError:
        return "flex_attention"
    return "sdpa"


def compared(case: Case, patched: bool) -> dict[str, Any]:
    docs = documents(case)

    def built(dtype: torch.dtype, attention: str = "eager") -> Any:
        return tiny_models.build(case.family, attention, dtype, **case.config).train()

    dtype = ulysses_rows.precision(built, docs)
    expected = right(case, docs, built(dtype))
    model = built(dtype, implementation(case.family))
    ulysses_rows.register(model, dist.get_world_size(), len(case.lengths))
    torch._dynamo.reset()
    prove = {} if case.proven else {"prove": False}
    with fa2patch.apply(model, **prove) if patched else contextlib.nullcontext():
        found = split(case, docs, model)
    none = {name: torch.zeros_like(gradient) for name, gradient in expected["gradients"].items()}
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], expected["losses"])),
        "gradient": furthest({**none, **found["gradients"]}, expected["gradients"]),
        "weight": furthest(found["weights"], expected["weights"]),
    }


def tried(case: Case) -> dict[str, Any]:
    try:
        off = compared(case, patched=True)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        ok = bool(case.refused) and case.refused in said
        return {"found": "refused" if ok else "WRONG", "said": said, "ok": ok}
    ok = not case.refused and off["loss"] <= LOSS and off["gradient"] <= GRADIENT and off["weight"] <= WEIGHT
    return {"found": "right" if ok else "WRONG", "off_by": off, "ok": ok}


def alone(case: Case) -> dict[str, Any]:
    try:
        off = compared(case, patched=False)
    except Exception as error:
        return {"found": "error", "said": f"{type(error).__name__}: {error}"}
    leaks = off["loss"] > SMALL or off["gradient"] > SMALL
    return {"found": "leaks" if leaks else "right", "said": "", "off_by": off["loss"] if leaks else off}


def verified() -> dict[str, Any]:
    model = tiny_models.build("llama", "sdpa").train()
    ulysses_rows.register(model, dist.get_world_size())
    batch = batch_of(Case(), documents(Case()))
    unpatched = fa2patch.verify(model, batch=batch, strict=False)
    fa2patch.apply(model)
    patched, example = fa2patch.verify(model, batch=batch, strict=False), fa2patch.verify(model, strict=False)
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_hook(lambda module, given, output: output + 0.1 * output.roll(1, dims=1))
    leaking = fa2patch.verify(model, batch=batch, strict=False)
    fa2patch.revert(model)
    with fa2patch.apply(tiny_models.build("bert:masked", "sdpa")) as encoder:  # the example must be padded for it
        both_ways = fa2patch.verify(encoder.model, strict=False)
    named = leaking.first_leak == "model.layers.1.self_attn.o_proj"
    said = [patched.ok, example.ok, not unpatched.ok, named, both_ways.ok]
    ok = all(all(one) for one in of_every_rank(said))
    return {"found": "right" if ok else "WRONG", "said": leaking.reason, "ok": ok}


def sent() -> dict[str, Any]:
    # The bytes of one step are compared with those of the paper, and with what is sent without fa2patch.
    found: dict[str, Any] = {"ok": True}
    for family in ("llama", "deepseek_v3"):
        model = tiny_models.build(family, "sdpa").train()
        layers = model.config.num_hidden_layers
        ulysses_rows.register(model, dist.get_world_size())
        alone = one_step(model, with_ids) if family == "llama" else None
        for name, change in {"ids": with_ids, "lengths": with_lengths}.items():
            with fa2patch.apply(model):
                one = counted(model, change, layers)
            found["ok"] = found["ok"] and all(value["counted"] == value["on paper"] for value in one.values())
            if alone is not None and name == "ids":
                for value, (step, what) in zip(one.values(), WAYS):
                    value["without fa2patch"] = alone[step].sent[what] / (1 if what == "all_gather" else layers)
            found[f"{family}, {name}"] = one
    return found


WAYS = (("forward", "all_to_all_single"), ("backward", "all_to_all_single"), ("forward", "all_gather"))


def with_ids(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def one_step(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Traffic]:
    batch = ulysses_rows.part(change(batch_of(Case(), documents(Case()))))
    labels = batch.pop("shift_labels")
    with traffic() as forward:
        logits = model(**batch, use_cache=False).logits
    with traffic() as backward:
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return {"forward": forward, "backward": backward}


def counted(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]], layers: int) -> dict[str, dict[str, float]]:
    step, processes, tokens = one_step(model, change), dist.get_world_size(), sum(CROSSING[0])
    paper = bytes_sent_by_a_layer(tokens // processes, processes, itemsize=4, **heads_of(model.config))
    ids = 0 if change is with_lengths else bytes_sent_by_a_forward(tokens // processes, processes)
    return {
        "a layer's forward": {"counted": step["forward"].sent["all_to_all_single"] / layers, "on paper": paper},
        "a layer's backward": {"counted": step["backward"].sent["all_to_all_single"] / layers, "on paper": paper},
        "position_ids": {"counted": step["forward"].sent["all_gather"], "on paper": ids},
        "calls in a layer's forward": {"counted": step["forward"].calls["all_to_all_single"] / layers, "on paper": 2},
    }


def heads_of(config: Any) -> dict[str, int]:
    # The heads are named as :func:`bytes_sent_by_a_layer` takes them.
    queries, dim = config.num_attention_heads, getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // queries
    heads = {"heads": queries, "key_heads": config.num_key_value_heads, "head_dim": dim, "value_dim": dim}
    if hasattr(config, "v_head_dim"):  # latent attention has a key for every query head, and narrower values
        wide = config.qk_nope_head_dim + config.qk_rope_head_dim
        heads = {**heads, "key_heads": queries, "head_dim": wide, "value_dim": config.v_head_dim}
    return heads


def main() -> dict[str, Any]:
    names = sys.argv[1:-1] or list(CASES)
    table, unpatched = {}, {}
    for name in names:
        table[name], unpatched[name] = tried(CASES[name]), alone(CASES[name])
        if dist.get_rank() == 0:
            print(name, table[name], unpatched[name], flush=True)
    table["verify"], counted = verified(), sent()
    ok = counted.pop("ok") and all(one.pop("ok") for one in table.values())
    return {"ok": ok, "processes": dist.get_world_size(), "table": table, "alone": unpatched, "bytes": counted}


if __name__ == "__main__":
    ulysses_rows.run(main, sys.argv[-1])
