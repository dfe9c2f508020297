"""Losses that other packages compute in a replaced forward: Liger's, cut-cross-entropy's, TRL's fused head.

A case must either match the loss and gradients of the documents run alone with Transformers' own loss, or be refused by
an error of fa2patch; the finding says which. Every token is a label, including each document's first, so that a loss
which learns those is off.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fa2patch

from ..training import Stage, furthest, tiny_llama

BOUND = 1e-4
"""Relative bound on the loss, and on each gradient by its largest value. Fused kernels add up in chunks."""

Finding = dict[str, Any]
Forward = Callable[..., Any]


def documents() -> list[torch.Tensor]:
    """Return four documents of random token ids."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 500, (length,), generator=generator) for length in (5, 1, 9, 3)]


def batches() -> dict[str, dict[str, Any]]:
    """Return one packed batch twice, with position ids only and with lengths. Every token is its own label."""
    features = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in documents()]
    found = {}
    for name, lengths in (("ids", False), ("lengths", True)):
        batch = dict(fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths, separator_id=None)(features))
        batch["labels"] = batch["input_ids"].clone()
        found[name] = batch
    return found


def expected(adapters: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and gradients of the documents run alone, by the unpatched model."""
    model = _made(adapters).train()
    pieces = []
    for one in documents():
        logits = model(input_ids=one[None]).logits[0, :-1]
        pieces.append(torch.nn.functional.cross_entropy(logits, one[1:], reduction="sum"))
    loss = sum(pieces) / sum(len(one) - 1 for one in documents())
    return _with_gradients(model, loss)


def _with_gradients(model: Any, loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _made(adapters: bool) -> Any:
    model = tiny_llama()
    return _adapted(model) if adapters else model


def _adapted(model: Any) -> Any:
    import peft

    torch.manual_seed(0)
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


@contextmanager
def restored() -> Iterator[None]:
    """Restore Llama's forward after the block."""
    from transformers import LlamaForCausalLM

    before = vars(LlamaForCausalLM)["forward"]
    try:
        yield
    finally:
        LlamaForCausalLM.forward = before


def judged(run: Callable[[], tuple[torch.Tensor, Any]], right: tuple[torch.Tensor, Any]) -> str:
    """Return ``right``, ``refused: ...`` or how far the loss or the gradients are off."""
    try:
        loss, gradients = run()
    except fa2patch.Fa2PatchError as error:
        return f"refused: {type(error).__name__}"
    off = abs(float(loss) / float(right[0]) - 1)
    if not off <= BOUND:
        return f"loss {float(loss):.4f} for {float(right[0]):.4f}"
    apart = furthest(gradients, right[1]) if right[1] else 0.0
    return "right" if apart <= BOUND else f"gradients off by {apart:.0e}"


def finding(cases: dict[str, str]) -> Finding:
    """Return the finding of these cases: it is ok if each is right or refused."""
    return {"ok": all(said == "right" or said.startswith("refused") for said in cases.values()), "cases": cases}


def in_both_orders(replace: Callable[[Any], None], of_losses: Forward | None = None) -> Finding:
    """Check a replaced forward in all combinations: before and after ``apply``, with and without LoRA, ids and lengths.

    Args:
        replace: replaces the model's forward.
        of_losses: computes the loss of a model and a batch; by default it is the output's ``loss``.
    """
    cases = {}
    for adapters in (False, True):
        right = expected(adapters)
        for order in ("before apply", "after apply"):
            for told, batch in batches().items():
                name = f"{order}, {told}{', LoRA' if adapters else ''}"
                with restored():
                    cases[name] = judged(lambda: _step(replace, order, adapters, batch, of_losses), right)  # noqa: B023
    return finding(cases)


def _step(
    replace: Callable[[Any], None], order: str, adapters: bool, batch: dict[str, Any], of_losses: Forward | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = tiny_llama()
    patch = None
    try:
        if order == "after apply":
            patch = fa2patch.apply(model)
        replace(model)
        outer = _adapted(model) if adapters else model
        if order == "before apply":
            patch = fa2patch.apply(outer)
        outer.train()
        loss = of_losses(outer, batch) if of_losses else outer(**batch).loss
        return _with_gradients(outer, loss)
    finally:
        if patch is not None:
            patch.revert()


def _missing(package: str) -> Finding | None:
    return None if importlib.util.find_spec(package) else {"skipped": f"no {package} in this stack"}


LOSS_ALONE = {"rope": False, "rms_norm": False, "swiglu": False}
"""Liger's fused loss without its other kernels, which change nothing here and take minutes under the interpreter."""


def liger_on_the_class(stage: Stage) -> Finding:
    """Liger's fused loss, applied to the Llama class."""
    return _liger(lambda liger, model: liger(**LOSS_ALONE))


def liger_on_the_object(stage: Stage) -> Finding:
    """Liger's fused loss, applied to the model object."""
    return _liger(lambda liger, model: liger(model=model, **LOSS_ALONE))


def _liger(replace: Callable[[Any, Any], None]) -> Finding:
    missing = _missing("liger_kernel")
    if missing:
        return missing
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    return in_both_orders(lambda model: replace(apply_liger_kernel_to_llama, model))


def cut_cross_entropy(stage: Stage) -> Finding:
    """The package's torch path, in a forward on the object as ``cce_patch`` sets it (no release can do that yet)."""
    missing = _missing("cut_cross_entropy")
    return missing or in_both_orders(lambda model: setattr(model, "forward", types.MethodType(_cut, model)))


def _cut(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    from cut_cross_entropy import linear_cross_entropy
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.model(input_ids=input_ids, **{**kwargs, "use_cache": False})[0]
    # torch.compile wraps one line of torch here; which labels it learns shows without a compiler
    with torch.compiler.set_stance("force_eager"):
        loss = linear_cross_entropy(hidden, self.lm_head.weight, labels, shift=True, impl="torch_compile")
    return CausalLMOutputWithPast(loss=loss)


def trl_fused_head(stage: Stage) -> Finding:
    """TRL's ``add_fused_lm_head``, which SFTTrainer applies to every model: the loss from its log-probabilities."""
    missing = _missing("trl")
    if missing:
        return missing
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        return {"skipped": "this TRL has no fused head"}

    def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch, fused_lm_head=True)
        return -output.log_probs.sum() / output.label_mask.sum()

    return in_both_orders(utils.add_fused_lm_head, loss)
