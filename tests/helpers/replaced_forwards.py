"""Losses that other packages compute in a replaced forward, on a packed row: Liger's, cut-cross-entropy's, TRL's head.

A case must either match the loss and gradients of the documents run alone with Transformers' own loss, or be refused by
an error of fa2patch. Every token is a label, including each document's first, so that a loss which learns those is off.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from stage import furthest, tiny_llama

import fa2patch

# Relative bound on the loss, and on each gradient by its largest value. Fused kernels add up in chunks.
BOUND = 1e-4

# Liger's fused loss without its other kernels, which change nothing here and take minutes under the interpreter.
LOSS_ALONE = {"rope": False, "rms_norm": False, "swiglu": False}

Gradients = dict[str, torch.Tensor]


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 500, (length,), generator=generator) for length in (5, 1, 9, 3)]


def weights_of(ids: torch.Tensor, by: str | None) -> torch.Tensor:
    # The weights are those of a document's tokens without its first one.
    if by == "token":
        return (ids[1:] % 5 + 1) / 2
    return torch.full((len(ids) - 1,), 1 / (len(ids) - 1) if by == "document" else 1.0)


def batches(by: str | None) -> dict[str, dict[str, Any]]:
    features = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in documents()]
    if by == "token":
        for feature, one in zip(features, documents()):
            feature["loss_weights"] = [1.0, *weights_of(one, by).tolist()]
    options: dict[str, Any] = {"separator_id": None} if by is None else {"loss_weights": by}
    found = {}
    for name, lengths in (("ids", False), ("lengths", True)):
        collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths, **options)
        found[name] = dict(collate(features))
        if by is None:
            found[name]["labels"] = found[name]["input_ids"].clone()
    return found


def expected(adapters: bool, by: str | None) -> tuple[torch.Tensor, Gradients]:
    model = tiny_llama()
    model = (_adapted(model) if adapters else model).train()
    losses, counts = [], []
    for one in documents():
        if len(one) > 1:
            logits = model(input_ids=one[None]).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, one[1:], reduction="none")
            losses.append((each * weights_of(one, by)).sum())
            counts.append(1 if by == "document" else len(one) - 1)
    return _with_gradients(model, sum(losses) / sum(counts))


def _with_gradients(model: Any, loss: Any) -> tuple[torch.Tensor, Gradients]:
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _adapted(model: Any) -> Any:
    import peft

    torch.manual_seed(0)
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


@contextmanager
def restored() -> Iterator[None]:
    from transformers import LlamaForCausalLM

    before = vars(LlamaForCausalLM)["forward"]
    try:
        yield
    finally:
        LlamaForCausalLM.forward = before


def judged(run: Callable[[], Any], wrong: Callable[[Any], str]) -> str:
    # Returns "right", "refused: ..." or what ``wrong`` says of the result.
    try:
        with restored():
            return wrong(run()) or "right"
    except fa2patch.Fa2PatchError as error:
        return f"refused: {type(error).__name__}"


def cases(name: str, by: str | None = None) -> dict[str, str]:
    # Before and after ``apply``, with and without LoRA, with ids and lengths. ``by`` is the collator's option
    # ``loss_weights``: "document", "token" or None.
    found = {}
    for adapters in (False, True):
        right, gradients = expected(adapters, by)

        def wrong(result: tuple[torch.Tensor, Gradients], right: Any = right, gradients: Any = gradients) -> str:
            loss, off = float(result[0]), furthest(result[1], gradients)
            if not abs(loss / float(right) - 1) <= BOUND:
                return f"loss {loss:.4f} for {float(right):.4f}"
            return "" if off <= BOUND else f"gradients off by {off:.0e}"

        for order in ("before apply", "after apply"):
            for told, batch in batches(by).items():
                step = functools.partial(_step, name, order, adapters, batch)
                found[f"{order}, {told}{', LoRA' if adapters else ''}"] = judged(step, wrong)
    return found


def _step(name: str, order: str, adapters: bool, batch: dict[str, Any]) -> tuple[torch.Tensor, Gradients]:
    model = tiny_llama()
    patch = None
    try:
        if order == "after apply":
            patch = fa2patch.apply(model)
        REPLACED[name](model)
        outer = _adapted(model) if adapters else model
        if order == "before apply":
            patch = fa2patch.apply(outer)
        outer.train()
        if name != "trl_fused_head":
            return _with_gradients(outer, outer(**batch).loss)
        output = outer(**batch, fused_lm_head=True)  # whose log-probabilities SFTTrainer makes its loss of
        return _with_gradients(outer, -output.log_probs.sum() / output.label_mask.sum())
    finally:
        if patch is not None:
            patch.revert()


def _liger_on_the_class(model: Any) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(**LOSS_ALONE)


def _liger_on_the_object(model: Any) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, **LOSS_ALONE)


def _cut_cross_entropy(model: Any) -> None:
    # The package's torch path is set on the object, as ``cce_patch`` sets its own. No release can do that yet.
    model.forward = types.MethodType(_cut, model)


def _cut(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    from cut_cross_entropy import linear_cross_entropy
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.model(input_ids=input_ids, **{**kwargs, "use_cache": False})[0]
    if labels is None:  # as Liger's forwards do
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
    # torch.compile wraps one line of torch here; which labels it learns shows without a compiler
    with torch.compiler.set_stance("force_eager"):
        loss = linear_cross_entropy(hidden, self.lm_head.weight, labels, shift=True, impl="torch_compile")
    return CausalLMOutputWithPast(loss=loss)


def _trl_fused_head(model: Any) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)


REPLACED: dict[str, Callable[[Any], None]] = {
    "liger_on_the_class": _liger_on_the_class,
    "liger_on_the_object": _liger_on_the_object,
    "cut_cross_entropy": _cut_cross_entropy,
    "trl_fused_head": _trl_fused_head,
}
