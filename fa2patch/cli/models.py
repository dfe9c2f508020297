"""What MODEL means on the command line: a config.json, a folder, a model type, or a name on the hub."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from ..upstream.transformers_names import MODEL_TYPES, imported
from .output import in_one_line

MASKED = ":masked"  # ends the name of an encoder with its masked-LM head, for example bert:masked

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

SECONDS = 3.0  # how long the hub may take to answer, unless HF_HUB_ETAG_TIMEOUT says otherwise


def compat(name: str) -> Any:
    # Only this function imports compat_matrix. The wheel holds it as fa2patch.compat_matrix. In a clone it is the
    # folder beside fa2patch.
    installed = f"{__name__.partition('.')[0]}.compat_matrix"
    home = installed if importlib.util.find_spec(installed) else "compat_matrix"
    return importlib.import_module(f"{home}.{name}")


@dataclass
class ModelArgument:
    """What a MODEL argument was found to be, and the options that say how a model is made of it."""

    given: str
    kind: str  # "config", "folder" (with a config and no weights), "weights" (a folder), "type" or "hub"
    name: str  # the path, the model type or the name on the hub
    model_type: str = ""  # empty for an adapter's folder, which has no config.json, and for the hub
    local_only: bool = False  # it must be in the local cache: Transformers tries to reach the hub for half a minute
    attention: str | None = None
    trust: bool = False  # the modeling code that comes with the model may run
    checked: str = ""  # what say printed

    def said(self, then: str) -> str:
        what = {
            "config": f"a config of model type {self.model_type}",
            "folder": f"a folder with a config of model type {self.model_type} and no weights",
            "weights": "a folder with weights",
            "type": "a model type" if self.name == self.given else f"read as the model type {self.name}",
            "hub": "a name on the hub",
        }
        return f"{self.given}: {what[self.kind]}; {then}"

    def say(self, then: str) -> None:
        self.checked = self.said(then)
        click.echo(self.checked, err=True)


def cannot(why: str, hint: str = "MODEL") -> click.BadParameter:
    return click.BadParameter(why, param_hint=hint)


def resolve(given: str, pretrained: bool = False, hint: str = "MODEL", known: Iterable[str] = ()) -> ModelArgument:
    # The model types `known` come before those of the installed Transformers. Commands that have some do not load
    # weights, and have no --pretrained.
    path = Path(given).expanduser()
    weights = any(any(path.glob(pattern)) for pattern in _WEIGHTS)
    if path.is_file() or (path / "config.json").is_file():
        kind = "config" if path.is_file() else "weights" if weights else "folder"
        return ModelArgument(given, kind, str(path), _model_type(path, hint))
    if weights:
        return ModelArgument(given, "weights", str(path))
    folder = path.is_dir() and "/" in given  # Transformers, too, takes it before a name on the hub
    if folder or given.endswith(".json") or re.match(r"[./~]|.*/.*/|.*\\", given):
        _model_type(path, hint)  # raises the error about what is missing there
    if pretrained or "/" in given:
        return ModelArgument(given, "hub", given, local_only=must_stay_local(given, hint))
    name = model_type_of(given, known := list(known)) or model_type_of(given, names := [*known, *model_types()])
    if name is None:
        import transformers

        here = "a folder without a config.json" if path.is_dir() else "no file or folder here"
        bare = "" if known else ", or --pretrained for a name without a slash"
        raise cannot(
            f"{given!r} is {here} and no model type of Transformers {transformers.__version__}."
            f"{did_you_mean(given, names)} Expected a config.json, a folder that holds one, a model type (fa2patch "
            f"architectures lists them), or a name on the hub: org/name{bare}.",
            hint,
        )
    return ModelArgument(given, "type", name, name)


def model_types() -> list[str]:
    auto: Any = imported(MODEL_TYPES)
    return list(auto.CONFIG_MAPPING_NAMES)


def model_type_of(given: str, names: Iterable[str]) -> str | None:
    # Letter case, hyphens, underscores and dots make no difference.
    names = list(dict.fromkeys(names))
    if given in names:
        return given
    base, masked, _ = given.partition(MASKED)
    found = [name for name in names if _letters(name) == _letters(base)]
    return found[0] + masked if len(found) == 1 else None


def suggestions(given: str, names: Iterable[str]) -> list[str]:
    plain: dict[str, str] = {}
    for name in names:
        plain.setdefault(_letters(name.partition(MASKED)[0]), name)
    wanted = re.sub(r"(for|model$)[a-z]*$", "", _letters(given.partition(MASKED)[0]))  # LlamaForCausalLM
    return [plain[name] for name in get_close_matches(wanted, plain, n=3, cutoff=0.6)]


def did_you_mean(given: str, names: Iterable[str]) -> str:
    # The text begins with a space, or is empty.
    *close, last = suggestions(given, names) or [""]
    listed = f"{', '.join(close)} or {last}" if close else last
    return f" Did you mean {listed}?" if last else ""


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _model_type(path: Path, hint: str) -> str:
    models = compat("user_models.models")
    try:
        return str(models.read(path)["model_type"])
    except models.BadConfig as error:
        raise cannot(str(error), hint) from None


def config_of(found: ModelArgument) -> Any:
    # The config is at full size; that of a model type is Transformers' default.
    from transformers import AutoConfig

    try:
        if found.kind == "type":
            return AutoConfig.for_model(found.name.partition(MASKED)[0])
        path = Path(found.name)
        where = str(path.parent) if found.kind == "config" and path.name == "config.json" else found.name
        return AutoConfig.from_pretrained(where, trust_remote_code=found.trust, local_files_only=found.local_only)
    except Exception as error:  # configs of new models run code of theirs
        raise cannot(f"{found.given}: Transformers cannot read its config ({in_one_line(error)})") from None


# --- the hub: whether a model of it can be loaded, with one request of at most a few seconds -------------------------


def must_stay_local(name: str, hint: str) -> bool:
    # It must if the hub does not answer or does not have the model.
    if not _HUB_NAME.fullmatch(name):
        raise cannot(f"looked for a name on the hub, such as org/name, found {name!r}.", hint)
    from huggingface_hub import constants, try_to_load_from_cache

    problem = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        found: list[str] = []
        seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
        # a thread, because the time-out of a request does not end the look-up of the host's address
        thread = threading.Thread(target=lambda: found.append(_request(name, seconds)), daemon=True)
        thread.start()
        thread.join(seconds)
        problem = found[0] if found else f"{constants.ENDPOINT} did not answer within {seconds:g} s"
    if problem and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise cannot(
            f"{name!r} is no file or folder here, and it cannot be loaded from the hub: {problem}, and it is not in "
            "the local cache. Give a folder or a config.json, or a model type (fa2patch architectures lists them).",
            hint,
        )
    return bool(problem)


def _request(name: str, seconds: float) -> str:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError  # type: ignore[attr-defined]

    try:
        HfApi().model_info(name, timeout=seconds)
    except GatedRepoError:
        return "access to it must be asked for on its page, and then needs a token (hf auth login)"
    except RepositoryNotFoundError:
        return f"{constants.ENDPOINT} has no model of this name, or it is private and needs a token (hf auth login)"
    except Exception as error:  # requests' and httpx's errors have no common base class
        return f"{constants.ENDPOINT} cannot be reached ({in_one_line(error)[:150]})"
    return ""
