"""Find the Transformers model in an object, and the modules and models in it that a call goes through."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from .._types import Model
from ..errors import NotAModel
from . import inspecting

_INSIDE = ("_orig_mod", "module", "pretrained_model", "model")
"""Attributes in which wrappers hold the model inside."""


def is_transformers_model(module: object) -> bool:
    """Whether a module is a ``PreTrainedModel``; Transformers is not imported for this."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and issubclass(type(module), modeling.PreTrainedModel)


def _models_among(modules: Iterable[Any]) -> list[Any]:
    modeling = sys.modules.get("transformers.modeling_utils")
    return [] if modeling is None else [one for one in modules if issubclass(type(one), modeling.PreTrainedModel)]


def named_modules(module: Any, without: Collection[Any] = ()) -> dict[str, Any]:
    """The modules in a module by their names, as ``module.named_modules()`` gives them.

    Torch's own resumes a generator for each module around a module: a hundred thousand calls for 80 layers.

    Args:
        module: the module.
        without: modules that are left out with all that they hold.
    """
    kept = None if without else getattr(_walks, "kept", None)
    if kept is not None and id(module) in kept:
        walked: dict[str, Any] = kept[id(module)]
        return walked
    found: dict[Any, str] = {}
    waiting = [("", module)]
    while waiting:
        name, inner = waiting.pop()
        if inner in found or inner in without:
            continue
        found[inner] = name
        for key, child in reversed(inner._modules.items()):
            if child is not None:
                waiting.append((f"{name}.{key}" if name else key, child))
    named = {name: inner for inner, name in found.items()}
    if kept is not None:
        kept[id(module)] = named  # it holds the module itself, under an empty name
    return named


_walks = threading.local()


@contextlib.contextmanager
def walked_once() -> Iterator[None]:
    """Inside this context, each module is walked once. No module may be put into another one or taken out meanwhile."""
    before = getattr(_walks, "kept", None)
    _walks.kept = {} if before is None else before
    try:
        yield
    finally:
        _walks.kept = before


def outermost_models(module: torch.nn.Module) -> dict[str, Any]:
    """Return the Transformers models in a module that are in no other one, by name; one that is there twice, once."""
    found: dict[str, Any] = {}
    modules = named_modules(module)
    held = set(_models_among(modules.values()))
    for name, inner in modules.items():
        if inner in held and not any(name.startswith(f"{around}.") or not around for around in found):
            found[name] = inner
    return found


def transformers_model(model: object) -> Model:
    """Find the Transformers model inside the objects that training puts around it.

    Args:
        model: a Transformers model, a wrapper of PEFT, accelerate, DDP, FSDP, DeepSpeed or ``torch.compile`` around
            one, or an object that holds one, such as a model of sentence-transformers.

    Raises:
        NotAModel: there is no Transformers model in ``model``, or there are several next to each other.
    """
    found: Model = _path(model)[-1]
    return found


def makes_its_batches(model: object) -> bool:
    """Whether an object around a Transformers model turns text into batches itself, which are padded.

    Such an object holds the tokenizer: the models of sentence-transformers, pipelines.
    """
    return any(getattr(around, "tokenizer", None) is not None for around in _path(model)[:-1])


def _path(model: object) -> list[Any]:
    """The objects from ``model`` to the Transformers model inside."""
    path: list[Any] = [model]
    while not is_transformers_model(path[-1]):
        inside = _inside(path[-1])
        if inside is None or len(path) > 16:
            raise NotAModel(
                f"expected a Transformers model, or a wrapper (PEFT, accelerate, DDP, FSDP, torch.compile) around one; "
                f"found {type(model).__name__}{_not_of_torch(path[-1])}. Hand over the model object itself."
            )
        path.append(inside)
    return path


def _inside(seen: Any) -> torch.nn.Module | None:
    """The module that an object wraps, or the only Transformers model that it holds; None if there is neither."""
    wrapped = [getattr(seen, name, None) for name in _INSIDE]
    if hasattr(seen, "get_base_model"):  # PEFT
        wrapped.insert(0, seen.get_base_model())
    found = next((inner for inner in wrapped if isinstance(inner, torch.nn.Module)), None)
    if found is not None or not isinstance(seen, torch.nn.Module):
        return found
    held = outermost_models(seen)
    if len(held) > 1:
        names = ", ".join(f"{name} ({type(inner).__name__})" for name, inner in held.items())
        raise NotAModel(
            f"expected one Transformers model, found {len(held)} in this {type(seen).__name__}: {names}. Call "
            "fa2patch.apply for each of them, with padded_batches=True if their batches are padded."
        )
    return next(iter(held.values()), None)


def _not_of_torch(seen: object) -> str:
    """A model of another runtime (ONNX, OpenVINO) that an object holds, as a text for an error; empty if none."""
    holders = list(seen.modules()) if isinstance(seen, torch.nn.Module) else [seen]
    for value in (value for holder in holders for value in getattr(holder, "__dict__", {}).values()):
        if callable(value) and hasattr(value, "config") and not isinstance(value, (torch.nn.Module, type)):
            return f" around a {type(value).__name__}, which torch does not compute (choose the backend 'torch')"
    return ""


def models(model: Model, modules: Iterable[Any] | None = None) -> list[Any]:
    """Return the models whose ``forward`` a call goes through, the outermost first, the one with the layer loop last.

    These are the models that hold the embedding of the input ids. For ``GPT2LMHeadModel`` they are the model and its
    ``transformer``. For a vision-language model they include the text side, but never a vision tower. Where no model
    holds the embedding, ``base_model_prefix`` names the inner model.

    Args:
        model: the outermost model.
        modules: the modules in it, if they are at hand.
    """
    embedding = embedding_of(model)
    inside = [one for one in _models_among(modules or named_modules(model).values()) if "config" in vars(one)]
    path = [one for one in inside if embedding in named_modules(one).values()]
    if path:
        return path
    base = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    return [model] if base is model else [model, base]


def text_modules(decoder: Model) -> dict[str, Any]:
    """The modules of a decoder through which its tokens run, by their names.

    Encoders of pictures or sound that are inside the decoder are left out with all that they hold (Phi-4-multimodal
    has both). They are models of their own, with a config of another class than the decoder's.
    """
    found = named_modules(decoder)
    inner = [one for one in _models_among(found.values()) if "config" in vars(one) and one is not decoder]
    encoders = [one for one in inner if not isinstance(decoder.config, type(one.config))]
    return named_modules(decoder, encoders) if encoders else found


def embedding_of(model: Model) -> torch.nn.Module | None:
    """Return the module that embeds a model's token ids, or whatever its input is; None if the model names none."""
    try:
        embedding: torch.nn.Module | None = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return embedding


def token_embeddings(model: Model) -> torch.Tensor:
    """Return the weights of a model's token embeddings, ``[vocabulary, hidden]``.

    Raises:
        NotAModel: there are none. Image and audio models embed patches or frames, with a convolution or a linear layer.
    """
    embedding = embedding_of(model)
    weight = getattr(embedding, "weight", None)
    of_values = isinstance(embedding, (torch.nn.Linear, torch.nn.modules.conv._ConvNd))
    if not isinstance(weight, torch.Tensor) or of_values:
        raise NotAModel(
            f"expected a language model, whose get_input_embeddings() embeds token ids; found {type(model).__name__}. "
            "Images and sound are not packed: hand over the language model, or train this model padded."
        )
    return weight


def takes_no_token_ids(model: Model) -> bool:
    """Whether a model's ``forward`` takes no ``input_ids``, and the model has no token embeddings.

    Both signs are needed: a model of remote code may take ``input_ids`` and have no ``get_input_embeddings``.
    """
    forward = type(model).forward
    if inspecting.code_of(forward) is None or inspecting.takes(forward, "input_ids"):
        return False
    _, *named = inspecting.parameters(forward)
    if not named or named[0].kind in (named[0].VAR_POSITIONAL, named[0].VAR_KEYWORD):
        return False  # it hands on whatever it is given
    try:
        token_embeddings(model)
    except NotAModel:
        return True
    return False


def is_sharded(inner: Model) -> bool:
    """Whether a model is sharded, so that its ranks compute each forward together and one rank cannot run it alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if any(hasattr(p, "ds_id") or hasattr(p, "_local_tensor") for p in inner.parameters()):
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in inner.modules())
