"""Small random models, batches that say in one way or another where documents start, and the rule: right or refused.

Every case of this folder gives its result to :func:`right_or_refused`: what the documents give alone, or an error of
ours that says what was found and what to do. Nothing else passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy, pad

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from compat_matrix.check.rows import documents, pack

IGNORED = -100
SCALE = 8
"""Of the weights, over what Transformers makes them: a leak through products of small numbers would not show."""

OF_THE_LARGEST = 0.01
"""A gradient that is smaller than this part of the largest is held to it: without rope a key's bias has none at all."""

DOCS = documents(5, 1, 9, 3)


def class_of(name: str) -> Any:
    """A class of Transformers, or the test is left out where this version has none."""
    cls = getattr(transformers, name, None)
    if cls is None or getattr(cls, "__module__", "").endswith("dummy_pt_objects"):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    return cls


def config_of(family: str, **changes: Any) -> Any:
    """A tiny config of a family's causal LM, or of what ``tiny_models`` has for that name."""
    if not tiny_models.is_present(family):
        pytest.skip(f"Transformers {transformers.__version__} has no {family} that can be patched")
    config = tiny_models.config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def of_family(family: str) -> tuple[Any, Any]:
    """A family's class and its tiny config, or the test is left out where this version has none."""
    config = config_of(family)
    return tiny_models.model_class(family), config


def small(cls: Any, config: Any, implementation: str = "sdpa") -> Any:
    """The same model each time it is asked for: random weights, scaled up; in eval mode, float32."""
    torch.manual_seed(0)
    try:
        model = tiny_models._load(cls, config, implementation)
    except (ValueError, ImportError):
        model = tiny_models._load(cls, config, "eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SCALE)
    return model.float().eval()


def llama(cls: Any = None, **changes: Any) -> Any:
    """A Llama of two layers, of this class (a causal LM's, where none is named)."""
    return small(cls or transformers.LlamaForCausalLM, config_of("llama", **changes))


@dataclass
class Result:
    """What is compared; None where a case has no such thing."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def right_or_refused(run: Callable[[], Result], expected: Result) -> str:
    """The rule. ``run`` patches the model and calls it; returns ``right``, or ``refused`` with the error's class."""
    try:
        found = run()
    except fa2patch.Fa2PatchError as error:
        assert_says_enough(error)
        return f"refused: {type(error).__name__}"
    assert_right(found, expected)
    return "right"


def assert_right(found: Result, expected: Result) -> None:
    if expected.loss is not None:
        assert found.loss is not None, "no loss came back"
        assert_close(
            found.loss.flatten(), expected.loss.flatten(), f"loss {float(found.loss)} ({float(expected.loss)})"
        )
    assert_close(found.logits, expected.logits, "logits")
    if expected.gradients:
        assert_same_gradients(found.gradients, expected.gradients, GRADIENT_TOLERANCE, OF_THE_LARGEST)


def assert_says_enough(error: fa2patch.Fa2PatchError) -> None:
    """What was found and what to do takes more than a few words."""
    assert len(str(error).split()) >= 8, f"an error that says too little: {error!r}"


def alone(model: Any, docs: list[torch.Tensor] = DOCS, ids: torch.Tensor | None = None) -> Result:
    """Each document through the unpatched model; the mean of the losses inside documents, and its gradients.

    ``ids``: the row's position_ids, of which each document is given its own.
    """
    model.zero_grad()
    given = [{}] * len(docs) if ids is None else [{"position_ids": one} for one in ids.split([*map(len, docs)], -1)]
    logits = [model(input_ids=doc[None], **more).logits[0] for doc, more in zip(docs, given)]
    pieces = [cross_entropy(one[:-1], doc[1:], reduction="sum") for one, doc in zip(logits, docs) if len(doc) > 1]
    loss = sum(pieces) / sum(len(doc) - 1 for doc in docs)
    return Result(torch.cat(logits).detach(), *with_gradients(model, loss))


def called(function: Callable[..., Any], model: Any, batch: dict[str, Any]) -> Result:
    """The model's own loss on a batch of one row, its gradients, and logits ``[tokens, ...]``."""
    model.zero_grad()
    output = function(**batch)
    logits = output.logits[0].detach()
    return Result(logits, *with_gradients(model, output.loss)) if output.loss is not None else Result(logits)


def with_gradients(model: Any, loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


WAYS = ("position_ids", "seq_idx", "document numbers in the mask", "lengths of keys", "all lengths")
"""In which a batch says where its documents start."""


def told(docs: list[torch.Tensor], way: str, **more: Any) -> dict[str, Any]:
    """One packed row that says in one way where documents start."""
    row = pack(docs)
    ids = row.pop("position_ids")
    lengths = torch.tensor([len(doc) for doc in docs])
    numbers = torch.repeat_interleave(torch.arange(len(docs)), lengths)[None]
    ends = pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    said: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": ids},
        "seq_idx": {"seq_idx": numbers.to(torch.int32)},
        "document numbers in the mask": {"attention_mask": numbers + 1},
        "lengths of keys": {"cu_seq_lens_k": ends},
        "all lengths": {
            "position_ids": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest,
            "max_length_k": longest,
        },
    }  # fmt: skip
    return {**row, **said[way], **more}


def labels_of(docs: list[torch.Tensor], first_label: int | None = None) -> torch.Tensor:
    """Every token's own label ``[1, length]``; the first of each document another, where one is given."""
    pieces = [doc.clone() for doc in docs]
    for piece in pieces:
        piece[0] = piece[0] if first_label is None else first_label
    return torch.cat(pieces)[None]


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """``shift_labels`` of a whole row, as who does not look at documents makes them."""
    return pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()


def own_forward(
    self: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    labels: Any = None,
    shift_labels: Any = None,
    **kwargs: Any,
) -> Any:
    """A causal LM's forward with a loss of its own, as fused losses bring one: it shifts the whole row's labels."""
    kwargs.pop("return_dict", None)
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)[0]
    logits, loss = self.lm_head(hidden), None
    if shift_labels is None and labels is not None:
        shift_labels = shifted(labels)
    if shift_labels is not None:
        loss = cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORED)
    return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@contextmanager
def replaced(cls: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """``cls.forward`` is another one meanwhile, as class-wide patches have it."""
    before = vars(cls)["forward"]
    cls.forward = forward
    try:
        yield
    finally:
        cls.forward = before
