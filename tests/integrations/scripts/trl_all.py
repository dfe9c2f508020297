"""Train every trainer of the installed TRL for a few steps: ``trl_all.py [TRAINER ...]``.

Each trainer is run as it is (``plain``), with models that are patched (``apply``), with models that compute padded
batches packed (``padded_batches``), and as a ``packed_trainer``. Prints a JSON object: for each trainer and way, how
far its losses (``off``) and its steps (``moved``) are from those of the plain run, how many padded calls of models were
computed packed and how many not, and why; or why the trainer was not run.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import pkgutil
import sys
import tempfile
import warnings
from typing import Any, Callable

import datasets
import torch
import transformers
import trl
from trl_noting import Noting, in_way, model, text, tokenizer

import fa2patch
from fa2patch.errors import StaysPadded

WAYS = ("plain", "apply", "padded_batches", "packed_trainer")
NEEDS_A_SERVER = "it needs a server of vLLM"
NOT_RUN = {
    "AsyncGRPO": NEEDS_A_SERVER,
    "AsyncDistillation": NEEDS_A_SERVER,
    "ServerDistillation": NEEDS_A_SERVER,
    "PAPO": "it trains on pictures",
    "IterativeSFT": "its batches are made by the program that calls step()",
}
TEMPLATE = (
    "{% for m in messages %}{{ ' ' + m['content'] }}{% if m['role'] == 'assistant' %} </s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} {% endif %}"
)
Rows = list[dict[str, Any]]
TRAINED: dict[str, Any] = {}  # the model of the last trainer that was run in a way
BEFORE: list[torch.Tensor] = []  # the weights of the last trainer's model before the first step


def rows_of(kind: str) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)
    rows: Rows = []
    for at in range(16):
        prompt, chosen, rejected = (text(generator, longest) for longest in (20, 24, 8))
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": chosen}]
        rows.append({
            "pairs": {"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected},
            "triples": {"prompt": prompt, "chosen": chosen, "rejected": rejected, "reference": text(generator, 9)},
            "judged": {"prompt": prompt, "completion": " " + chosen, "label": at % 2 > 0},
            "texts": {"text": f"{prompt} {chosen}"},
            "steps": {"prompt": prompt, "completions": [chosen, rejected], "labels": [at % 2 > 0, at % 3 > 0]},
            "prompts": {"prompt": prompt},
            "turns": {"messages": turns},
            "first turns": {"prompt": turns[:1]},
            "with context": {"prompt": turns[:1], "privileged_context": rejected},
            "answered": {"prompt": prompt, "answer": rejected},
            "ids": {"input_ids": words()(prompt)["input_ids"]},
        }[kind])  # fmt: skip
    return datasets.Dataset.from_list(rows)


def reward(completions: list[Any], **others: Any) -> list[float]:
    # The number of different letters, which differs between completions.
    return [len(set(one if isinstance(one, str) else one[0]["content"])) / 10 for one in completions]


class Judge:
    def judge(self, prompts: list[str], completions: list[list[str]], **others: Any) -> list[Any]:
        return [int(len(first) < len(second)) for first, second in completions]


GROUPS = {"num_generations": 4, "max_completion_length": 8, "beta": 0.04, "per_device_train_batch_size": 8}
SHORT = {"max_length": 64, "max_prompt_length": 32}
STUDENT = {"lmbda": 0.0, "max_length": 64, "max_new_tokens": 8, "max_completion_length": 8}


def with_teacher(make: Callable[..., Any]) -> dict[str, Any]:
    return {"teacher_model": make(1)}


def with_reference(make: Callable[..., Any]) -> dict[str, Any]:
    return {"ref_model": make(1)}


def with_rewards(make: Callable[..., Any]) -> dict[str, Any]:
    return {"reward_funcs": reward}


def with_a_judge(make: Callable[..., Any]) -> dict[str, Any]:
    scores = make(2, transformers.LlamaForSequenceClassification, num_labels=1)
    read = dict.fromkeys(("reward_processing_class", "reward_processing_classes"), words())
    return {"ref_model": make(1), "reward_funcs": scores, "reward_model": scores, **read}


def with_values(make: Callable[..., Any]) -> dict[str, Any]:
    heads = (make(seed, transformers.LlamaForSequenceClassification, num_labels=1) for seed in (2, 3))
    return {"ref_model": make(1), **dict(zip(("reward_model", "value_model"), heads))}


def nothing(make: Callable[..., Any]) -> dict[str, Any]:
    return {}


RECIPES: dict[str, tuple[str, Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "SFT": ("texts", nothing, {"max_length": 64}),
    "DPO": ("pairs", with_reference, {}),
    "CPO": ("pairs", nothing, SHORT),
    "ORPO": ("pairs", nothing, SHORT),
    "TPO": ("triples", nothing, {}),
    "KTO": ("judged", with_reference, {}),
    "BCO": ("judged", with_reference, SHORT),
    "Reward": ("pairs", nothing, {"max_length": 64}),
    "PRM": ("steps", nothing, SHORT),
    "GRPO": ("prompts", with_rewards, GROUPS),
    "GFPO": ("prompts", with_rewards, GROUPS),
    "GMPO": ("prompts", with_rewards, GROUPS),
    "GRPOWithReplayBuffer": ("prompts", with_rewards, GROUPS),
    "RLOO": ("prompts", with_rewards, GROUPS),
    "A2PO": ("answered", with_rewards, {"max_completion_length": 8, "num_generations": 4}),
    "SDPO": ("prompts", with_rewards, {"max_completion_length": 8, "num_generations": 4}),
    "SDFT": ("with context", nothing, {"max_completion_length": 8, "distillation_topk": 5, "num_generations": 4}),
    "GKD": ("turns", with_teacher, STUDENT),
    "GOLD": ("turns", with_teacher, {**STUDENT, "use_uld_loss": False}),
    "IWOPD": ("turns", with_teacher, {**STUDENT, "lmbda": 1.0}),
    "Distillation": ("first turns", with_teacher, {"max_completion_length": 8}),
    "OnlineDPO": ("prompts", with_a_judge, {"max_new_tokens": 8}),
    "NashMD": ("prompts", with_a_judge, {"max_new_tokens": 8}),
    "XPO": ("prompts", with_a_judge, {"max_new_tokens": 8}),
    "PPO": ("ids", with_values, {"response_length": 8, "total_episodes": 8, "num_ppo_epochs": 1}),
}
HEADS = {
    "Reward": (transformers.LlamaForSequenceClassification, {"num_labels": 1}),
    "PRM": (transformers.LlamaForTokenClassification, {"num_labels": 2}),
}


@functools.cache
def words() -> Any:
    made = tokenizer()
    made.chat_template = TEMPLATE
    return made


@functools.cache
def folder_of(seed: int, head: Any, *settings: tuple[str, Any]) -> str:
    # Some trainers load the model a second time, from this folder.
    folder = tempfile.mkdtemp()
    model(seed, len(words()), head, bos_token_id=1, eos_token_id=2, **dict(settings)).save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


def trainers() -> dict[str, type]:
    # Experimental trainers are also named by their room if the name is taken.
    found: dict[str, type] = {}
    for room in ("trl.trainer", "trl.experimental"):
        try:
            package = importlib.import_module(room)
        except ImportError:
            continue
        for info in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not info.ispkg and not info.name.endswith("_trainer"):
                continue
            try:
                module = importlib.import_module(info.name)
            except Exception:  # what this one needs is not installed
                continue
            for name, cls in inspect.getmembers(module, inspect.isclass):
                defined = cls.__module__ == info.name and issubclass(cls, transformers.Trainer)
                if defined and not name.startswith("_"):
                    taken = room.endswith("experimental") and name in found
                    found[f"{info.name.split('.')[2]}.{name}" if taken else name] = cls
    return found


def config_of(cls: type, options: dict[str, Any]) -> Any:
    # Options that the config does not have are left out.
    name = cls.__name__.replace("Trainer", "Config")
    homes = [cls.__module__.rpartition(".")[0], cls.__mro__[1].__module__.rpartition(".")[0], "trl"]
    made = next(getattr(sys.modules[home], name) for home in homes if hasattr(sys.modules[home], name))
    common = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no",
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "seed": 0,
    }  # fmt: skip
    known = inspect.signature(made).parameters
    return made(**{option: value for option, value in {**common, **options}.items() if option in known})


def make(cls: type, way: str, generated: list[Any], **changed: Any) -> Any:
    # ``changed`` are options of its config. The way ``budgetN`` is a packed trainer with N tokens.
    name, known = cls.__name__.removesuffix("Trainer"), inspect.signature(cls.__init__).parameters
    kind, given, options = RECIPES["PPO" if "policy" in known else name]

    def made(seed: int, head: Any = transformers.LlamaForCausalLM, **settings: Any) -> Any:
        one = head.from_pretrained(folder_of(seed, head, *settings.items()))
        if way in ("apply", "padded_batches"):
            fa2patch.apply(one, padded_batches=way == "padded_batches")
        return one

    head, settings = HEADS.get(name, (transformers.LlamaForCausalLM, {}))
    several = {parameter.name for one in cls.__mro__ for parameter in _parameters(one)} if "kwargs" in known else known
    more = {argument: value for argument, value in given(made).items() if argument in several}
    if "reward_model" in more and "reward_funcs" in more:
        del more["reward_model"]
    wanted = fa2patch.packed_trainer(cls) if way == "packed_trainer" else in_way(cls, way)
    reads = copy.copy(words())
    reads.padding_side = "left" if kind in ("prompts", "answered", "ids") else "right"
    more |= {
        "model": made(0, head, **settings),
        "args": config_of(cls, {**options, **changed}),
        "processing_class": reads,
    }
    if "policy" in known:
        more |= {"policy": more.pop("model"), "config": more.pop("args"), "ref_policy": made(1)}
    if kind == "ids":
        more["eval_dataset"] = rows_of(kind)
    transformers.set_seed(1)
    trainer = wanted(train_dataset=rows_of(kind), **more)
    TRAINED[way] = trainer.model
    BEFORE[:] = [weights(trainer.model)]
    return trainer


def _parameters(cls: type) -> Any:
    return inspect.signature(vars(cls)["__init__"]).parameters.values() if "__init__" in vars(cls) else ()


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def compared(found: dict[str, Any], plain: dict[str, Any], said: list[str], moved: float) -> dict[str, Any]:
    losses, expected = found["losses"], plain["losses"]
    size = max(*map(abs, expected), 1e-2)  # a loss of advantages is 0 in the first step but for rounding
    padded = [call for call in found["calls"] if call[0] > call[1]]
    packed = [call for call in padded if call[-1] <= call[1]]
    return {
        "off": max(abs(one - other) for one, other in zip(losses, expected)) / size
        if len(losses) == len(expected)
        else -1.0,
        "moved": moved,
        "packed": len(packed),
        "padded": len(padded) - len(packed),
        "why": said,
    }


def judged(noting: Noting, cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for way in WAYS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run = noting.train(functools.partial(make, cls, way))
            except Exception as error:
                found[way] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
                if way == "plain":
                    return {"not run": found[way]["error"]}
                continue
        said = sorted({one.message.message for one in caught if isinstance(one.message, StaysPadded)})
        after = weights(TRAINED[way])
        if way == "plain":
            plain, end = run, after
        far = (after - end).norm() / (end - BEFORE[0]).norm().clamp(min=1e-9)
        found[way] = compared(run, plain, said, float(far))
    return found


def main(chosen: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    noting, found = Noting(), {}
    for name, cls in trainers().items():
        short = cls.__name__.removesuffix("Trainer")
        if chosen and name not in chosen:
            continue
        if short in NOT_RUN or short not in RECIPES:
            found[name] = {"not run": NOT_RUN.get(short, "no recipe")}
        else:
            found[name] = judged(noting, cls)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    print(json.dumps({"trl": trl.__version__, "trainers": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
