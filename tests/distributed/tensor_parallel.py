"""Split the heads of models over processes by ``tp_plan="auto"``: ``tensor_parallel.py OUT``, run by torchrun.

Every process has whole rows, so it has the boundaries. A model that is sharded and patched trains on packed batches,
and is compared with a model that is neither and trains on the documents one by one. Another document's tokens must not
change a bit. Without fa2patch, only the logits are compared.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from parts import (
    FOUR,
    Batch,
    Case,
    Cell,
    alone,
    apart_from,
    between,
    cell,
    features,
    furthest,
    joined,
    judged,
    packed,
    told,
)  # fmt: skip
from ranks import finish, of_every_rank
from split_models import NEWER, Models, apart, sharded

import fa2patch
from compat_matrix import tiny_models

STEPS = 3
RATE = 0.005
# How much the weights of a third model differ. A delta net computes in single precision: with weights so little apart,
# the gradients of the third step are a thousandth apart, and the logits some hundred-thousandths. No bound of gradients
# and logits is below what this model shows.
SHAKEN = 1e-9
# Relative to the largest value of the same tensor. Models are in double precision, but norms and tables of rotary
# embeddings are in single precision, and sums over processes are taken in another order.
BOUNDS = {"loss": 1e-6, "logits": 1e-5, "gradients": 1e-5, "weights": 1e-5}
# What another document may change in a mixture of experts in double precision: see ``fa2patch.verify``.
ROUNDING = 1e-9

# A plan for GPT-OSS's attention. The model's own plan shards the experts too in Transformers 4, where their gradients
# are wrong, and nothing but the head in Transformers 5.
SINKS = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.sinks": "rowwise" if NEWER else "local_rowwise",
    **({"layers.*.self_attn": "local_params"} if NEWER else {}),
}


def cases() -> dict[str, Case]:
    # Transformers 4 cannot train a bias of a layer that is split by rows
    trainable = {**FOUR, "attention_bias": NEWER}
    return {
        **features(),
        "sinks": Case("gpt_oss", changes=trainable),
        "Qwen2": Case("qwen2"),
        "experts (Mixtral)": Case("mixtral"),
        "mixers and experts (Jamba)": Case("jamba"),
        "GPT-OSS with its own plan": Case("gpt_oss", changes=trainable),
        "GPT-OSS with biases": Case("gpt_oss"),
    }


# These plans are used in the place of the config's own.
PLANS = {"sinks": SINKS}


def moved(model: Any, batch: Batch) -> float:
    # The largest change of a document's logits when another document's own tokens are replaced.
    with torch.no_grad():
        before = model(**batch.call, use_cache=False).logits.flatten(0, 1)
        largest = 0.0
        for at, places in enumerate(batch.places):
            ids = batch.call["input_ids"].clone()
            ids.view(-1)[batch.own(at)] = (ids.view(-1)[batch.own(at)] + 1).clamp(min=3) % tiny_models.VOCABULARY
            change = (model(**{**batch.call, "input_ids": ids}, use_cache=False).logits.flatten(0, 1) - before).abs()
            assert change[places].max() > 1e-3, "the model's outputs do not depend on its tokens"
            largest = max([largest, *(float(change[one].max()) for i, one in enumerate(batch.places) if i != at)])
    return largest


def trained(case: Case, models: Models) -> dict[str, Any]:
    # ``wrong`` of the result names wrong gradients, and ``near`` says whether the logits of every step are within their
    # bound.
    batch, model = case.batch(), models.load(case, split=True)
    reference, third = models.load(case, split=False), shaken(models.load(case, split=False))
    fa2patch.apply(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=RATE, foreach=False) for one in (model, reference, third)]
    off: dict[str, Any] = {"moved": moved(model, batch), **dict.fromkeys(BOUNDS, 0.0)}
    off.update(sharded=sharded(model, reference), near=True)
    for _ in range(STEPS):
        found = model(**batch.call, labels=batch.labels, use_cache=False)
        right, expected = alone(reference, batch)
        near, nearly = alone(third, batch)
        for loss in (found.loss, expected, nearly):
            loss.backward()
        gradients = apart(model, reference, "grad")
        bound = max(BOUNDS["gradients"], *apart(third, reference, "grad").values())
        off["loss"] = max(off["loss"], apart_from(found.loss.detach(), expected.detach()))
        logits = furthest(found.logits, batch, right)
        off["logits"] = max(off["logits"], logits)
        off["near"] = off["near"] and logits < max(BOUNDS["logits"], between(near, right))
        off["gradients"] = max(off["gradients"], *gradients.values())
        off["wrong"] = sorted(name for name, far in gradients.items() if far >= bound)
        if off["wrong"]:
            break  # other weights would follow
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    off["weights"] = max(apart(model, reference, "data").values())
    return off


@torch.no_grad()
def shaken(model: Any) -> Any:
    drawn = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.mul_(1 + SHAKEN * torch.randn(weight.shape, generator=drawn, dtype=weight.dtype))
    return model


def without(case: Case, models: Models) -> Cell:
    batch, model, reference = case.batch(), models.load(case, split=True), models.load(case, split=False)
    try:
        found = model(**batch.call, labels=batch.labels, use_cache=False)
        right, expected = alone(reference, batch)
        found.loss.backward()
    except Exception as error:
        return cell("error", told(error))
    off_by = max(furthest(found.logits, batch, right), apart_from(found.loss.detach(), expected.detach()))
    return judged(off_by, BOUNDS["logits"])


def with_fa2patch(case: Case, models: Models) -> Cell:
    # An error is upstream's own if the unpatched sharded model cannot train on one document either, and so are wrong
    # gradients if the same ones are wrong there.
    try:
        off = trained(case, models)
    except fa2patch.Fa2PatchError as error:
        return cell("refused", told(error))
    except Exception as error:
        upstreams = _failure_alone(case, models)
        return cell("upstream", upstreams) if upstreams else cell("wrong", told(error))
    bound = ROUNDING if tiny_models.is_mixture(case.family) else 0.0
    right = off["near"] and all(off[name] < BOUNDS[name] for name in ("loss", "weights"))
    right = right and not off["wrong"] and off["moved"] <= bound
    said = f"{off['sharded']}; " + ", ".join(f"{name} {off[name]:.1e}" for name in (*BOUNDS, "moved"))
    if off["wrong"] and off["moved"] <= bound and off["wrong"] == wrong_alone(case, models):
        return cell("upstream", f"{said}; wrong gradients without fa2patch, too: {off['wrong']}", off["logits"])
    return cell("right" if right else "wrong", said, max(off[name] for name in BOUNDS))


def _failure_alone(case: Case, models: Models) -> str:
    try:
        wrong_alone(case, models)
    except Exception as error:
        return told(error)
    return ""


def wrong_alone(case: Case, models: Models) -> list[str]:
    document = case.batch().documents[0][None]
    pair = [models.load(case, split=True), models.load(case, split=False)]
    for model in pair:
        model(input_ids=document, labels=document, use_cache=False).loss.backward()
    return sorted(name for name, far in apart(*pair, "grad").items() if far >= BOUNDS["gradients"])


def verified(models: Models) -> tuple[Cell, Cell]:
    # ``verify`` is asked on every rank, also about a planted leak.
    case, batch = Case(), packed((5, 9), (9, 5)).call
    model, plain = models.load(case, split=True), models.load(case, split=True)
    fa2patch.apply(model)
    said = of_every_rank(fa2patch.verify(model, batch=batch, strict=False).ok)
    planted = {"on every rank": None, "on the last rank only": dist.get_world_size() - 1}
    leaks = {}
    for name, only in planted.items():
        if only in (None, dist.get_rank()):
            handle = model.model.layers[1].self_attn.q_proj.register_forward_hook(
                lambda module, given, output: output + output.mean(1, keepdim=True)
            )
        found = fa2patch.verify(model, batch=batch, strict=False)
        leaks[name] = of_every_rank((found.ok, found.first_leak))
        if only in (None, dist.get_rank()):
            handle.remove()
    seen = all(not ok and leak for leak_of in leaks.values() for ok, leak in leak_of)
    where = {name: sorted({str(leak) for _, leak in found}) for name, found in leaks.items()}
    told_leaks = "; ".join(f"a leak in q_proj {name}: {', '.join(leak)}" for name, leak in where.items())
    found = fa2patch.verify(plain, batch=batch, strict=False)
    off_by = max(document.moved for document in found.documents)
    return cell("right" if all(said) and seen else "wrong", told_leaks), judged(off_by, BOUNDS["logits"], found.reason)


def with_accelerate() -> tuple[Cell, Cell]:
    # accelerate's ``tp_size`` fails on a CPU. Where it does not, it must be compared as well.
    from accelerate import Accelerator, ParallelismConfig

    try:
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=dist.get_world_size()))
    except (ValueError, RuntimeError) as error:
        return cell("upstream", told(error)), cell("error", told(error))
    return cell("wrong", "accelerate runs on a CPU, and nobody has compared it"), cell("right")


def main(out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = Models()
    finding: dict[str, Any] = {"processes": dist.get_world_size(), "bounds": BOUNDS, "steps": STEPS}
    finding["table"], finding["alone"] = {}, {}
    for name, case in cases().items():
        models.plan = PLANS.get(name)
        finding["alone"][name] = joined(without(case, models))
        finding["table"][name] = joined(with_fa2patch(case, models))
    models.plan = None
    finding["table"]["verify"], finding["alone"]["verify"] = (joined(found) for found in verified(models))
    by_accelerate = "accelerate's tp_size"
    finding["table"][by_accelerate], finding["alone"][by_accelerate] = with_accelerate()
    finding["ok"] = all(found["found"] in ("right", "upstream") for found in finding["table"].values())
    finish(out, finding)


if __name__ == "__main__":
    main(*sys.argv[1:])
