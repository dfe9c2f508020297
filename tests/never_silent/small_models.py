"""Small random models, batches that tell in different ways where documents start, and the rule: right or refused.

Every case of this folder passes its result to :func:`right_or_refused`. It must equal the documents run alone, or be an
error of fa2patch that says what was found and what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import GRADIENT_TOLERANCE, assert_close, assert_same_gradients
from compat_matrix.check.rows import documents, pack

IGNORED = -100
# A factor on the weights that Transformers initialises. With small weights a leak would be too small to detect.
SCALE = 8

# Gradients smaller than this fraction of the largest are compared relative to it: without rope a key's bias has a
# gradient of zero.
OF_THE_LARGEST = 0.01

DOCS = documents(5, 1, 9, 3)


def class_of(name: str) -> Any:
    cls = getattr(transformers, name, None)
    if cls is None or getattr(cls, "__module__", "").endswith("dummy_pt_objects"):
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    return cls


def config_of(family: str, **changes: Any) -> Any:
    if not tiny_models.is_present(family):
        pytest.skip(f"Transformers {transformers.__version__} has no {family} that can be patched")
    config = tiny_models.config_of(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def small(cls: Any, config: Any, implementation: str = "sdpa") -> Any:
    # The scaled random weights are the same in every call. The model is in float32 and eval mode.
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


def of_family(family: str, implementation: str = "sdpa", **changes: Any) -> Any:
    config = config_of(family, **changes)
    return small(tiny_models.model_class(family), config, implementation)


def llama(cls: Any = None, **changes: Any) -> Any:
    return small(cls or transformers.LlamaForCausalLM, config_of("llama", **changes))


def patched(model: Any = None, change: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    model = llama() if model is None else model
    if change is not None:
        change(model)
    fa2patch.apply(model, **options)
    return model


def without_dropout(model: Any) -> Any:
    # A model in training then computes as in evaluation.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def takes_any_name(model: Any) -> bool:
    # Not every version of the forward has ``**kwargs``.
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


@dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None = None  # None in cases without a loss
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def right_or_refused(run: Callable[[], Result], expected: Result) -> str:
    # ``run`` patches a model and calls it. ``expected`` is the result of the documents run alone.
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
    # What was found and what to do takes at least eight words.
    assert len(str(error).split()) >= 8, f"an error that says too little: {error!r}"


@contextmanager
def refusal(match: str | None = None, error: Any = fa2patch.Fa2PatchError) -> Iterator[Any]:
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert_says_enough(caught.value)


def logits_alone(model: Any, docs: list[torch.Tensor] = DOCS, **call: Any) -> torch.Tensor:
    # The logits of all documents are [tokens, ...]; a classifier's are [documents, ...].
    with torch.no_grad():
        found = [model(input_ids=doc[None], **call).logits for doc in docs]
    return torch.cat([logits[0] if logits.ndim == 3 else logits for logits in found])


def alone(model: Any, docs: list[torch.Tensor] = DOCS, ids: torch.Tensor | None = None) -> Result:
    # The loss is the mean over targets inside documents. Each document gets its part of the row's position ids.
    model.zero_grad()
    given = [{}] * len(docs) if ids is None else [{"position_ids": one} for one in ids.split([*map(len, docs)], -1)]
    logits = [model(input_ids=doc[None], **more).logits[0] for doc, more in zip(docs, given)]
    pieces = [cross_entropy(one[:-1], doc[1:], reduction="sum") for one, doc in zip(logits, docs) if len(doc) > 1]
    loss = sum(pieces) / sum(len(doc) - 1 for doc in docs)
    return Result(torch.cat(logits).detach(), *with_gradients(model, loss))


def called(model: Any, batch: dict[str, Any], function: Callable[..., Any] | None = None) -> Result:
    # The model computes its own loss on one row. The logits are [tokens, ...]. ``function`` is called in the place of
    # the model.
    model.zero_grad()
    output = (model if function is None else function)(**batch)
    logits = output.logits[0].detach()
    return Result(logits, *with_gradients(model, output.loss)) if output.loss is not None else Result(logits)


def with_gradients(model: Any, loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


# A batch tells in one of these ways where its documents start.
WAYS = ("position_ids", "seq_idx", "document numbers in the mask", "lengths of keys", "all lengths")


def told(docs: list[torch.Tensor] = DOCS, way: str = "position_ids", **more: Any) -> dict[str, Any]:
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


def labels_of(docs: list[torch.Tensor] = DOCS, first_label: int | None = None) -> torch.Tensor:
    # Each token is its own label. ``first_label`` replaces the first label of each document.
    pieces = [doc.clone() for doc in docs]
    for piece in pieces:
        piece[0] = piece[0] if first_label is None else first_label
    return torch.cat(pieces)[None]


def labelled(way: str = "position_ids", **more: Any) -> dict[str, Any]:
    # The labels cross documents.
    return told(DOCS, way, **{"labels": labels_of(DOCS, 7), **more})


def padded(docs: list[torch.Tensor] = DOCS, pad_id: int = 0) -> dict[str, torch.Tensor]:
    ids, mask, labels = (
        pad_sequence(rows, batch_first=True, padding_value=value)
        for rows, value in ((docs, pad_id), ([torch.ones_like(doc) for doc in docs], 0), (docs, IGNORED))
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    # Made without regard to documents.
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
    # The forward computes its own loss, like fused losses: it shifts the whole row's labels.
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
    # A patch of a whole class does this.
    before = vars(cls)["forward"]
    cls.forward = forward
    try:
        yield
    finally:
        cls.forward = before
