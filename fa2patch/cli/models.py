"""What MODEL means on the command line: a config.json, a folder, a model type, or a name on the hub."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from . import hub
from .compat import compat

MASKED = ":masked"
"""The end of the name of an encoder with its masked-LM head, for example ``bert:masked``."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")

pretrained_option = click.option(
    "--pretrained", is_flag=True, help="MODEL is a name on the hub, also without a slash (gpt2)."
)


@dataclass(frozen=True)
class Model:
    """What a MODEL argument was found to be.

    Attributes:
        given: The argument.
        kind: ``"config"``, ``"folder"`` (with a config and no weights), ``"weights"`` (a folder), ``"type"`` or
            ``"hub"``.
        name: The path, the model type or the name on the hub.
        model_type: The ``model_type``; empty for weights and for the hub.
        local_only: Whether only the local cache of the hub may be used.
    """

    given: str
    kind: str
    name: str
    model_type: str = ""
    local_only: bool = False

    def said(self, then: str) -> str:
        """One line that says what the argument was found to be, and then what is done with it."""
        what = {
            "config": f"a config of model type {self.model_type}",
            "folder": f"a folder with a config of model type {self.model_type} and no weights",
            "weights": "a folder with weights",
            "type": "a model type" if self.name == self.given else f"read as the model type {self.name}",
            "hub": "a name on the hub",
        }
        return f"{self.given}: {what[self.kind]}; {then}"


def resolve(given: str, pretrained: bool = False, hint: str = "MODEL", known: Iterable[str] = ()) -> Model:
    """Find out what a MODEL argument means.

    Args:
        given: The argument.
        pretrained: Whether the argument is a name on the hub.
        hint: The argument's name in errors.
        known: Model types that are looked at before those of the installed Transformers.

    Raises:
        click.BadParameter: It is nothing of these, or the hub does not have it or cannot be reached.
    """
    path = Path(given).expanduser()
    if pretrained:
        return Model(given, "hub", given, local_only=hub.must_stay_local(given, hint))
    if path.is_file() or (path.is_dir() and (path / "config.json").is_file()):
        weights = path.is_dir() and any(any(path.glob(pattern)) for pattern in _WEIGHTS)
        kind = "config" if path.is_file() else "weights" if weights else "folder"
        return Model(given, kind, str(path), _model_type(path, hint))
    if path.is_dir() and any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return Model(given, "weights", str(path))
    if _names_a_path(given):
        _model_type(path, hint)  # raises the error about what is missing there
    if "/" in given:
        return Model(given, "hub", given, local_only=hub.must_stay_local(given, hint))
    name = named(given, known := list(known)) or named(given, names := [*known, *model_types()])
    if name is None:
        bare = "" if hint == "--model" else ", or --pretrained for a name without a slash"
        raise click.BadParameter(f"{_unknown(given, path, names)}{bare}.", param_hint=hint)
    return Model(given, "type", name, name)


def model_types() -> list[str]:
    """The model types of the installed Transformers."""
    auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    return list(auto.CONFIG_MAPPING_NAMES)


def named(given: str, names: Iterable[str]) -> str | None:
    """The one of these model types that is meant: letter case, hyphens, underscores and dots make no difference.

    Returns:
        The model type, with ``:masked`` if that was given; None if there is none.
    """
    names = list(dict.fromkeys(names))
    if given in names:
        return given
    base, masked, _ = given.partition(MASKED)
    found = [name for name in names if _plain(name) == _plain(base)]
    return found[0] + masked if len(found) == 1 else None


def suggestions(given: str, names: Iterable[str]) -> list[str]:
    """Up to three of these model types whose spelling is close."""
    plain: dict[str, str] = {}
    for name in names:
        plain.setdefault(_plain(name.partition(MASKED)[0]), name)
    wanted = re.sub(r"(for|model$)[a-z]*$", "", _plain(given.partition(MASKED)[0]))  # LlamaForCausalLM
    return [plain[name] for name in get_close_matches(wanted, plain, n=3, cutoff=0.6)]


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """A sentence with the :func:`suggestions`, after a space; empty if there are none."""
    *close, last = suggestions(given, names) or [""]
    listed = f"{', '.join(close)} or {last}" if close else last
    return f" Did you mean {listed}?" if last else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _names_a_path(given: str) -> bool:
    return given.endswith(".json") or given.startswith((".", "/", "~")) or given.count("/") > 1 or "\\" in given


def _model_type(path: Path, hint: str) -> str:
    models = compat("user_models.models")
    try:
        return str(models.read(path)["model_type"])
    except models.BadConfig as error:
        raise click.BadParameter(str(error), param_hint=hint) from None


def _unknown(given: str, path: Path, names: Iterable[str]) -> str:
    import transformers

    meant = did_you_mean(given, names)
    here = "a folder without a config.json" if path.is_dir() else "no file or folder here"
    return (
        f"{given!r} is {here} and no model type of Transformers {transformers.__version__}.{meant} Expected a "
        "config.json, a folder that holds one, a model type (fa2patch architectures lists them), or a name on the hub: "
        "org/name"
    )


def config_of(found: Model, trust_remote_code: bool = False) -> Any:
    """The Transformers config of a model, at full size; that of a model type is Transformers' default.

    Raises:
        click.BadParameter: Transformers cannot make it.
    """
    from transformers import AutoConfig

    try:
        if found.kind == "type":
            return AutoConfig.for_model(found.name.partition(MASKED)[0])
        path = Path(found.name)
        where = str(path.parent) if found.kind == "config" and path.name == "config.json" else found.name
        return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **local(found))
    except Exception as error:  # configs of new models run code of theirs
        raise click.BadParameter(
            f"{found.given}: Transformers cannot read its config ({type(error).__name__}: {first_line(error)})",
            param_hint="MODEL",
        ) from None


def local(found: Model) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that keep it from trying to reach the hub; empty if it may."""
    return {"local_files_only": True} if found.local_only else {}


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "no message")
