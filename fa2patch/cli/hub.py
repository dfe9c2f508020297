"""Whether a model of the hub can be loaded. It takes one request and at most a few seconds."""

from __future__ import annotations

import os
import re
import threading

import click

SECONDS = 3.0
"""How long the hub may take to answer, unless ``HF_HUB_ETAG_TIMEOUT`` says otherwise."""

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def must_stay_local(name: str, hint: str) -> bool:
    """Whether a model must be loaded from the local cache, because the hub does not answer or does not have it.

    Then ``local_files_only=True`` keeps Transformers from trying to reach the hub, which takes it half a minute.

    Raises:
        click.BadParameter: The hub has no such model, or the model is not in the cache and the hub does not answer.
    """
    if not _NAME.fullmatch(name):
        raise click.BadParameter(f"looked for a name on the hub, such as org/name, found {name!r}.", param_hint=hint)
    from huggingface_hub import constants

    offline = bool(constants.HF_HUB_OFFLINE)
    problem = "HF_HUB_OFFLINE is set" if offline else _asked(name)
    if not problem:
        return False
    if not _is_cached(name):
        raise click.BadParameter(
            f"{name!r} is no file or folder here, and it cannot be loaded from the hub: {problem}, and it is not in "
            "the local cache. Give a folder or a config.json, or a model type (fa2patch architectures lists them).",
            param_hint=hint,
        )
    return True


def _asked(name: str) -> str:
    """The reason why the hub cannot deliver a model; empty if it can."""
    found: list[str] = []
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    # a thread, because the time-out of a request does not end the look-up of the host's address
    thread = threading.Thread(target=lambda: found.append(_request(name, seconds)), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"{_endpoint()} did not answer within {seconds:g} s"


def _request(name: str, seconds: float) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError  # type: ignore[attr-defined]

    try:
        HfApi().model_info(name, timeout=seconds)
    except GatedRepoError:
        return "access to it must be asked for on its page, and then needs a token (hf auth login)"
    except RepositoryNotFoundError:
        return f"{_endpoint()} has no model of this name, or it is private and needs a token (hf auth login)"
    except Exception as error:  # requests' and httpx's errors have no common base class
        return f"{_endpoint()} cannot be reached ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
    return ""


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def config_file(name: str, local_only: bool) -> str:
    """The path of a model's config.json, which is downloaded unless it is in the cache or ``local_only`` is set."""
    from huggingface_hub import hf_hub_download

    return str(hf_hub_download(name, "config.json", local_files_only=local_only))
