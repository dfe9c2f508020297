"""Make the model that ``fa2patch verify`` or ``status`` looks at: with its weights, tiny, or without weights."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import click
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import Fa2PatchError, NotAModel
from ..patch.applying import apply
from ..upstream.find_models import token_embeddings
from ..upstream.transformers_names import WITHOUT_INITIALIZATION, imported
from .models import MASKED, ModelArgument, cannot, compat, config_of
from .output import escaped, in_one_line, print_found

RANDOM = "checks a tiny model with random weights."
# A tiny model stands in for a config.json. Its sizes are not checked.
STANDS_IN = "a tiny model of its kind, with random weights, stands in for it."


class Refused(click.ClickException):
    # A refusal is a result: it is printed on stdout, and the command exits with 1.

    def __init__(self, found: ModelArgument, model: object, reason: str, **more: Any) -> None:
        super().__init__(reason)
        self.found = {"model": type(model).__name__, "checked": found.checked, **more}
        self.as_json = click.get_current_context().params["as_json"]

    def show(self, file: Any = None) -> None:
        name = escaped(self.found["model"], "bold")
        print_found(self.found, self.as_json, [f"{name}: [yellow]refused[/yellow]: {escaped(self.message)}"])


def loaded_or_tiny(found: ModelArgument, dtype: torch.dtype) -> Any:
    if found.kind in ("weights", "hub"):
        return _loaded(found, dtype)
    tiny_models, name = compat("tiny_models"), found.name
    if found.kind != "type":
        try:
            name = str(compat("user_models.matrix").model(name).architecture)
        except compat("user_models.models").BadConfig as error:
            raise cannot(str(error)) from None
    elif not tiny_models.is_present(name) and tiny_models.is_present(name + MASKED):
        name += MASKED
    if not tiny_models.is_present(name):
        # No tiny model is made of this kind of model. If fa2patch does not refuse it, the argument is the error.
        found.attention = None
        whole = fake(found, None)
        try:
            with apply(whole):
                what = f"no tiny model is made of {type(whole).__name__}"
        except Fa2PatchError as error:
            raise _not_ok(found, whole, error) from None
        raise cannot(f"{found.given}: {what}. Give one with weights: a folder, or a name on the hub.")
    try:
        made = tiny_models.build(name, found.attention or "sdpa", dtype)
    except Exception as error:  # Transformers refuses the config, or the implementation
        raise cannot(f"{found.given}: Transformers cannot make a tiny model of it: {in_one_line(error)}") from None
    if found.kind == "type":
        found.say(f"{RANDOM} --pretrained loads the weights of that name from the hub.")
    else:
        found.say(f"{STANDS_IN} Its sizes are not tried: fa2patch status {found.given} makes it at full size.")
    return made


def _loaded(found: ModelArgument, dtype: torch.dtype) -> Any:
    try:
        if found.kind == "weights" and not found.model_type:  # an adapter's folder has no config.json
            cls: Any = importlib.import_module("transformers").AutoModelForCausalLM
        else:
            cls = _class_of(config_of(found), found.trust)
        model = cls.from_pretrained(
            found.name, torch_dtype=dtype, local_files_only=found.local_only, **_options(cls, found)
        )
    except click.ClickException:
        raise
    except Exception as error:
        raise cannot(f"{found.given} does not load: {in_one_line(error)}") from None
    found.say("loads its weights.")
    try:
        token_embeddings(model)
    except NotAModel as error:
        raise _not_ok(found, model, error) from None
    return model.eval()


def _not_ok(found: ModelArgument, model: object, error: Exception) -> Refused:
    return Refused(found, model, str(error), ok=False, fa2patch={"error": str(error)})


def fake(found: ModelArgument, dtype: torch.dtype | None) -> Any:
    # The model has its full size and fake tensors, which need no weights and no memory.
    config, is_type = config_of(found), found.kind == "type"
    then = "uses Transformers' default config of it, without weights." if is_type else "at full size, without weights."
    try:
        made = _without_weights(config, found, dtype)
    except Exception as error:
        if not (is_type and compat("tiny_models").is_present(found.name)):
            why = f"{found.given}: Transformers cannot make a model of this config: {in_one_line(error)}"
            raise cannot(why) from None
        # some default configs cannot be made, for example DBRX's
        made = _without_weights(compat("tiny_models").config_of(found.name), found, dtype)
        then = "uses a tiny config, without weights."
    found.say(then)
    return made


def _without_weights(config: Any, found: ModelArgument, dtype: torch.dtype | None) -> Any:
    cls = _class_of(config, found.trust, found.name.endswith(MASKED))
    said = vars(config).get("dtype") or vars(config).get("torch_dtype") or "bfloat16"
    config.dtype = wanted = dtype or getattr(torch, str(said).replace("torch.", ""))
    make = getattr(cls, "_from_config", None) or cls.from_config
    # some ways of filling weights look at values, which fake tensors do not have
    no_init_weights = getattr(imported(WITHOUT_INITIALIZATION), "no_init_weights", contextlib.nullcontext)
    before = torch.get_default_dtype()
    torch.set_default_dtype(wanted)  # for versions before 5.0, which do not read config.dtype here
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
            return make(config, **_options(cls, found)).eval()
    finally:
        torch.set_default_dtype(before)


def _options(cls: Any, found: ModelArgument) -> dict[str, Any]:
    # only auto classes take the option
    trust = {"trust_remote_code": found.trust} if hasattr(cls, "_model_mapping") else {}
    return {**trust, **({"attn_implementation": found.attention} if found.attention else {})}


# A config's class is looked for in this order. Not every version of Transformers has all of them.
_AUTO = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM", "AutoModel",
)  # fmt: skip


def _class_of(config: Any, trust: bool, masked: bool = False) -> Any:
    # With `masked` it is the masked-LM class, where a model type has a causal one too.
    transformers = importlib.import_module("transformers")
    if trust and getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    for name in () if masked else getattr(config, "architectures", None) or ():
        if hasattr(getattr(transformers, name, None), "from_pretrained"):
            return getattr(transformers, name)
    names = ("AutoModelForMaskedLM", *_AUTO) if masked else _AUTO
    for auto in (getattr(transformers, name, None) for name in names):
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"Transformers {transformers.__version__} has no model class for {type(config).__name__}")
