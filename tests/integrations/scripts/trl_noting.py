"""What the scripts of test_trl.py share: tiny models, a tokenizer, texts, and notes of what a trainer computes.

A script is started as ``SCRIPT KIND VARIANT:STEPS:WAY,WAY ...`` and prints a JSON object. For each variant, it has one
run for each way: see ``Noting.train``. Imports take longer than short trainings, so one process does many. Ways are
``padded``, ``zeroed`` (padded, with hidden states of zero at padding), ``packed``, and ``shared`` (packed with shared
prompts).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import tempfile
from typing import Any

import tokenizers
import torch
import transformers
import trl

WORDS = sorted(set((__doc__ or "").split()))
# Metrics with these parts in their names are no results.
TIMES = ("runtime", "per_second", "step_time", "flos", "time", "num_tokens_per", "eps")


class Noting:
    """Note what trainers compute: the losses that they go back from, unrounded, and each call of a Llama.

    A call is ``[padded tokens, real tokens, tokens that the first layer computed]``. The layer may run several times in
    one call, for a proof. Calls with a cache are those of ``generate``. Models are watched from their constructor on,
    so that none is missed, whoever holds it.
    """

    def __init__(self) -> None:
        self._calls: list[list[int]] = []
        self._cached: list[list[int]] = []
        self._open: list[list[int]] = []
        self._no_grad, self._again, self._models = 0, 0, set()
        self.without_padding = False  # True: hidden states at padding are zero, as packed computation hands out
        construct = transformers.LlamaModel.__init__

        @functools.wraps(construct)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            construct(model, *args, **kwargs)
            model.register_forward_pre_hook(self._begin, with_kwargs=True)
            model.register_forward_hook(self._end)
            model.layers[0].register_forward_pre_hook(self._layer, with_kwargs=True)
            model.layers[0].mlp.register_forward_pre_hook(self._computed_again)

        transformers.LlamaModel.__init__ = __init__

    def _begin(self, model: Any, args: Any, kwargs: Any) -> None:
        if self._open:  # a proof calls the model inside of a call
            self._open.append(self._open[0])
            return
        tokens = args[0] if args else kwargs.get("input_ids")
        mask = kwargs.get("attention_mask")
        self._mask = torch.ones_like(tokens) if mask is None else mask
        self._open.append([tokens.numel(), int((self._mask != 0).sum())])
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            self._cached.append(self._open[0])
            return
        self._calls.append(self._open[0])
        self._models.add(id(model))
        self._no_grad += not torch.is_grad_enabled()

    def _end(self, model: Any, args: Any, output: Any) -> None:
        if len(self._open) == 1 and self.without_padding and self._open[0] is self._calls[-1]:
            output.last_hidden_state = output.last_hidden_state * self._mask[..., None]
        self._open.pop()

    def _layer(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._open:
            self._open[0].append((args[0] if args else kwargs["hidden_states"])[..., 0].numel())

    def _computed_again(self, *call: Any) -> None:
        self._again += not self._open  # checkpointing computes it outside of a call

    def train(self, make: Any) -> dict[str, Any]:
        # What the trainer's construction does is noted, too.
        self._calls, self._cached, self._no_grad, self._again = [], [], 0, 0
        self._models.clear()
        generated: list[Any] = []
        trainer = make(generated)
        losses: list[float] = []
        backward = trainer.accelerator.backward

        def noted(loss: torch.Tensor, **kwargs: Any) -> None:
            losses.append(float(loss.detach()))
            backward(loss, **kwargs)

        trainer.accelerator.backward = noted
        trainer.train()
        logs = [
            {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}
            for entry in trainer.state.log_history
        ]
        return {
            "losses": losses, "calls": self._calls, "cached": self._cached, "no_grad": self._no_grad,
            "models": len(self._models), "again": self._again, "logs": logs, "generated": generated,
        }  # fmt: skip


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def model(seed: int, vocabulary: int, cls: Any = transformers.LlamaForCausalLM, **others: Any) -> Any:
    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=0, **others,
    )  # fmt: skip
    return cls(config)


def text(generator: torch.Generator, longest: int, shortest: int = 1) -> str:
    length = int(torch.randint(shortest, longest, (1,), generator=generator))
    return " ".join(WORDS[at] for at in torch.randint(len(WORDS), (length,), generator=generator).tolist())


def reward(completions: list[str], **others: Any) -> list[float]:
    # The share of words of an even number of letters differs between the completions of a group.
    words = [each.split() for each in completions]
    return [sum(len(word) % 2 == 0 for word in each) / (len(each) + 1) for each in words]


def in_way(cls: Any, way: str) -> Any:
    # ``budgetN`` is packed in passes of N tokens. fa2patch must not be imported where it is not used.
    from fa2patch import packed_trainer

    if way.startswith("budget"):
        return packed_trainer(cls, share_prompts=False, max_tokens=int(way[len("budget") :]))
    return packed_trainer(cls, share_prompts=way == "shared") if way in ("packed", "shared") else cls


def trl_class(name: str) -> Any:
    homes = [trl]
    if not hasattr(trl, name):
        homes = [importlib.import_module(f"trl.experimental.{folder}") for folder in ("orpo", "cpo")]
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def config(name: str, **wanted: Any) -> Any:
    # Options that this release does not have are left out.
    cls = trl_class(name)
    common = {
        "output_dir": tempfile.mkdtemp(), "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    known = inspect.signature(cls).parameters
    return cls(**{option: value for option, value in {**common, **wanted}.items() if option in known})


def liger(name: str) -> dict[str, bool]:
    # Liger computes the loss up to 0.19, and layers since then.
    of_the_loss = "use_liger_loss" in inspect.signature(trl_class(name)).parameters
    return {"use_liger_loss" if of_the_loss else "use_liger_kernel": True}


def run(make: Any) -> None:
    # ``make(kind, variant, steps, way, generated)`` returns a trainer, and adds what it generates.
    transformers.logging.set_verbosity_error()
    noting, found = Noting(), {}
    kind, *jobs = sys.argv[1:]
    for job in jobs:
        variant, steps, ways = job.split(":")
        found[variant] = {}
        for way in ways.split(","):
            noting.without_padding = way == "zeroed"
            found[variant][way] = noting.train(functools.partial(make, kind, variant, int(steps), way))
    print(json.dumps({"trl": trl.__version__, **found}))
