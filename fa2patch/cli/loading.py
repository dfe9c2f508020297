"""Make the model that ``fa2patch verify`` checks: with its weights, or tiny with random weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

from .models import MASKED, ModelArgument, compat, config_of, first_line, local

if TYPE_CHECKING:
    import torch

RANDOM = "checks a tiny model with random weights."
DEFAULT = "uses Transformers' default config of it, without weights."


class Refused(Exception):
    """The model is refused; the message says why.

    Attributes:
        model: The name of the model's class.
        then: What was done to find out, for the line that says what MODEL was.
    """

    def __init__(self, model: str, then: str, reason: str) -> None:
        super().__init__(reason)
        self.model, self.then = model, then


def loaded_or_tiny(found: ModelArgument, dtype: torch.dtype, attention: str | None, trust: bool) -> tuple[Any, str]:
    """The model to check, in eval mode on the CPU, and the words that say how it was made.

    Raises:
        Refused: ``apply`` refuses a model of this kind, which therefore is not made.
        click.BadParameter: The model does not load, or cannot be made.
    """
    if found.kind in ("weights", "hub"):
        return _loaded(found, dtype, attention, trust), "loads its weights."
    tiny_models = compat("tiny_models")
    architecture = found.name if found.kind == "type" else _file(found)
    if found.kind == "type" and not tiny_models.is_present(architecture):
        architecture = next(filter(tiny_models.is_present, [architecture + MASKED]), architecture)
    if not tiny_models.is_present(architecture):
        raise _refusal(found, trust)
    then = RANDOM
    if found.kind == "type" and "/" not in found.given:
        then += " --pretrained loads the weights of that name from the hub."
    try:
        return tiny_models.build(architecture, attention or "sdpa", dtype), then
    except Exception as error:  # Transformers refuses the config, or the implementation
        raise click.BadParameter(
            f"{found.given}: Transformers cannot make a tiny model of it: {type(error).__name__}: {first_line(error)}",
            param_hint="MODEL",
        ) from None


def _file(found: ModelArgument) -> str:
    try:
        return str(compat("user_models.matrix").model(found.name).architecture)
    except compat("user_models.models").BadConfig as error:
        raise click.BadParameter(str(error), param_hint="MODEL") from None


def _loaded(found: ModelArgument, dtype: torch.dtype, attention: str | None, trust: bool) -> Any:
    from ..errors import NotAModel
    from ..upstream.find_models import token_embeddings
    from .preview import class_of

    more = {"attn_implementation": attention} if attention else {}
    try:
        if found.kind == "weights" and not found.model_type:  # an adapter's folder has no config.json
            cls: Any = importlib.import_module("transformers").AutoModelForCausalLM
        else:
            cls = class_of(config_of(found, trust), trust_remote_code=trust)
        auto = {"trust_remote_code": trust} if hasattr(cls, "_model_mapping") else {}
        model = cls.from_pretrained(found.name, torch_dtype=dtype, **auto, **more, **local(found))
    except click.ClickException:
        raise
    except Exception as error:
        raise click.BadParameter(
            f"{found.given} does not load: {type(error).__name__}: {first_line(error)}", param_hint="MODEL"
        ) from None
    try:
        token_embeddings(model)
    except NotAModel as error:
        raise Refused(type(model).__name__, "loads its weights.", str(error)) from None
    return model.eval()


def _refusal(found: ModelArgument, trust: bool) -> Exception:
    """The refusal of a kind of model that no tiny model is made of, or an error if it is not refused."""
    from ..errors import Fa2PatchError
    from ..patch.applying import apply

    (made, _), then = fake(found, None, trust, None)
    try:
        with apply(made):
            pass
    except Fa2PatchError as error:
        return Refused(type(made).__name__, then, str(error))
    return click.BadParameter(
        f"{found.given}: no tiny model is made of {type(made).__name__}. Give one with weights: a folder, or a name on "
        "the hub.",
        param_hint="MODEL",
    )


def fake(
    found: ModelArgument, attention: str | None, trust: bool, dtype: torch.dtype | None
) -> tuple[tuple[Any, Any], str]:
    """The model of a config at full size with fake tensors and their mode, and the words that say how it was made.

    Raises:
        click.BadParameter: Transformers cannot make it.
    """
    from .preview import without_weights

    masked = found.name.endswith(MASKED)
    config, then = config_of(found, trust), "at full size, without weights."
    if found.kind == "type":
        then = DEFAULT
    try:
        return without_weights(config, attention, trust, dtype, masked), then
    except Exception as error:
        tiny_models = compat("tiny_models")
        if found.kind == "type" and tiny_models.is_present(found.name):
            # some default configs cannot be made, for example DBRX's
            config = tiny_models.config_of(found.name)
            return without_weights(config, attention, trust, dtype, masked), "uses a tiny config, without weights."
        raise click.BadParameter(
            f"{found.given}: Transformers cannot make a model of this config: {type(error).__name__}: "
            f"{first_line(error)}",
            param_hint="MODEL",
        ) from None
