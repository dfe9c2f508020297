"""Fused losses of other packages on packed rows, by token and by document: ``fused_losses.py NAME ...``.

The names are of functions in compat_matrix.ecosystem.checks.fused, followed by "by document" for batches of
``loss_weights="document"``. Prints a JSON object: the cases of each name, each "right", "refused: ERROR" or how far
off.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import transformers

import fa2patch
from compat_matrix.ecosystem.checks import fused

DOCUMENT = " by document"
CUT = fused._cut


def batches_by_document():
    features = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in fused.documents()]
    collate = fa2patch.DataCollatorWithFlattening
    return {
        "ids": dict(collate(loss_weights="document")(features)),
        "lengths": dict(collate(loss_weights="document", return_flash_attn_kwargs=True)(features)),
    }


def expected_by_document(adapters):
    model = fused._made(adapters).train()
    losses = []
    for one in fused.documents():
        if len(one) > 1:
            losses.append(torch.nn.functional.cross_entropy(model(input_ids=one[None]).logits[0, :-1], one[1:]))
    return fused._with_gradients(model, sum(losses) / len(losses))


def cut(self, input_ids=None, labels=None, **kwargs):
    """The forward of the checks, which returns logits if there are no labels, as Liger's forwards do."""
    if labels is not None:
        return CUT(self, input_ids=input_ids, labels=labels, **kwargs)
    hidden = self.model(input_ids=input_ids, **{**kwargs, "use_cache": False})[0]
    return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden))


def main(*names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    by_token = fused.batches, fused.expected
    found = {}
    for name in names:
        of_documents = name.endswith(DOCUMENT)
        fused._cut = cut if of_documents else CUT
        fused.batches, fused.expected = (batches_by_document, expected_by_document) if of_documents else by_token
        finding = getattr(fused, name.replace(DOCUMENT, ""))(None)
        found[name] = finding.get("cases", finding)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
