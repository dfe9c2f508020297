"""The checks: each is a function of a :class:`~..training.Stage` that returns a finding.

A finding is a dictionary for JSON. It has ``ok`` and the numbers behind it, or ``skipped`` with the reason.
"""

from __future__ import annotations

from typing import Any, Callable

from . import batches, curve, evaluation, fused, fused_training, lora, options, own

CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "curve": curve.curve,
    "accumulation": options.accumulation,
    "checkpointing": options.checkpointing,
    "lengths": batches.lengths,
    "counting": batches.counting,
    "verified": batches.verified,
    "streaming": batches.streaming,
    "evaluation": evaluation.evaluation,
    "predict": evaluation.predict,
    "resume": options.resume,
    "lora": lora.lora,
    "dora": lora.dora,
    "qlora": lora.qlora,
    "completion_collator": own.completion_collator,
    "own_padding_free": own.padding_free,
    "own_packing": own.packing,
}
"""The checks of every stack that does not name its own."""

NAMED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "liger_on_the_class": fused.liger_on_the_class,
    "liger_on_the_object": fused.liger_on_the_object,
    "cut_cross_entropy": fused.cut_cross_entropy,
    "trl_fused_head": fused.trl_fused_head,
    "trainer_with_liger": fused_training.trainer_with_liger,
    "sft_with_its_fused_head": fused_training.sft_with_its_fused_head,
    "run_with_liger": fused_training.run_with_liger,
}
"""Further checks, which run only where a stack's ``checks`` name them."""
