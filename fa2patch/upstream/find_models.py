"""Find the Transformers model in an object, and the modules and models in it that a call goes through."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from .._types import Model
from ..errors import NotAModel, UnsupportedModel
from . import inspecting
from .transformers_names import MODELING, PRETRAINED, loaded

_INSIDE = ("_orig_mod", "module", "pretrained_model", "model")  # attributes in which wrappers hold the model inside


def is_transformers_model(module: object) -> bool:
    # Transformers is not imported for this.
    modeling = loaded(MODELING)
    return modeling is not None and issubclass(type(module), getattr(modeling, PRETRAINED))


def _models_among(modules: Iterable[Any]) -> list[Any]:
    modeling = loaded(MODELING)
    return [] if modeling is None else [one for one in modules if issubclass(type(one), getattr(modeling, PRETRAINED))]


def named_modules(module: Any, without: Collection[Any] = ()) -> dict[str, Any]:
    """The modules in a module by their names, as ``module.named_modules()`` gives them."""
    # Torch's own resumes a generator for each module around a module: a hundred thousand calls for 80 layers.
    # `without` are modules that are left out with all that they hold.
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
    # A model that is there twice is returned once.
    found: dict[str, Any] = {}
    modules = named_modules(module)
    held = set(_models_among(modules.values()))
    for name, inner in modules.items():
        if inner in held and not any(name.startswith(f"{around}.") or not around for around in found):
            found[name] = inner
    return found


def transformers_model(model: object) -> Model:
    """Find the Transformers model inside the objects that training puts around it."""
    # Such objects are wrappers of PEFT, accelerate, DDP, FSDP, DeepSpeed or torch.compile, or hold a model, as those of
    # sentence-transformers do.
    found: Model = _path(model)[-1]
    return found


def makes_its_batches(model: object) -> bool:
    """Whether an object around a Transformers model turns text into batches itself, which are padded."""
    # Such an object holds the tokenizer: the models of sentence-transformers, pipelines.
    return any(getattr(around, "tokenizer", None) is not None for around in _path(model)[:-1])


def _path(model: object) -> list[Any]:
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
    # the module that it wraps, or the only Transformers model that it holds
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
    # A model of another runtime (ONNX, OpenVINO) is named for an error.
    holders = list(seen.modules()) if isinstance(seen, torch.nn.Module) else [seen]
    for value in (value for holder in holders for value in getattr(holder, "__dict__", {}).values()):
        if callable(value) and hasattr(value, "config") and not isinstance(value, (torch.nn.Module, type)):
            return f" around a {type(value).__name__}, which torch does not compute (choose the backend 'torch')"
    return ""


def models(model: Model, modules: Iterable[Any] | None = None) -> list[Any]:
    """Return the models whose ``forward`` a call goes through, the outermost first, that with the layer loop last."""
    # These models hold the embedding of the input ids: GPT2LMHeadModel and its `transformer`, also the text side of a
    # vision-language model, but never a vision tower.
    # `modules` are those in the model, if they are at hand.
    stacks, embedding = stacks_of(model), embedding_of(model)
    inside = [one for one in _models_among(modules or named_modules(model).values()) if "config" in vars(one)]
    if stacks is not None:  # an encoder-decoder: those around both
        return [one for one in inside if {*stacks} <= {*named_modules(one).values()} - {one}]
    tables = _tables(modules or named_modules(model).values(), embedding)
    path = [one for one in inside if not tables.isdisjoint(named_modules(one).values())]
    if path == [model]:  # its table is not in use (Switch's and T5's encoders, untied)
        path += [one for one in inside if one is not model and _embeds_as_many(one, embedding)]
    if path:
        return path
    base = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    return [model] if base is model else [model, base]


def stacks_of(model: Any) -> tuple[Any, Any] | None:
    """The encoder and the decoder of an encoder-decoder, two models inside it; None for any other model."""
    if not inspecting.takes(inspecting.forward_of(type(model)), "decoder_input_ids"):
        return None
    # up to 4.57 heads of BART's kin say nothing of them, and the model inside does
    says = next((one for one in named_modules(model).values() if hasattr(one, "get_encoder")), None)
    if says is None:  # Blip for questions, up to 4.57
        raise UnsupportedModel(
            f"{type(model).__name__} takes decoder_input_ids, and has no get_encoder() that says where its stacks are. "
            "Nothing was patched. Train this model padded."
        )
    encoder, decoder = says.get_encoder(), says.get_decoder()
    if encoder in named_modules(decoder).values():  # BLIP-2's decoder is an encoder-decoder itself
        return stacks_of(decoder)
    return encoder, decoder


def _tables(modules: Iterable[Any], embedding: torch.nn.Module | None) -> set[Any]:
    # A stack may have a table of its own with the same weight (T5, BART from 4.46 on).
    weight, tables = getattr(embedding, "weight", None), {embedding}
    for module in modules:  # no generator: it would take a call for each module of a model of 80 layers
        if isinstance(module, torch.nn.Embedding) and module._parameters.get("weight") is weight:
            tables.add(module)
    return tables


def _embeds_as_many(inner: Model, embedding: Any) -> bool:
    own = embedding_of(inner)
    takes = inspecting.takes(inspecting.forward_of(type(inner)), "input_ids")
    return takes and isinstance(own, torch.nn.Embedding) and own.weight.shape == getattr(embedding, "weight", own).shape


def embedding_in_use(model: Model) -> Any:
    # The base model may have a table of its own, with the weight of the one that the outermost model names.
    return embedding_of(models(model)[-1]) or embedding_of(model)


def text_modules(decoder: Model) -> dict[str, Any]:
    # Encoders of pictures or sound inside the decoder are left out (Phi-4-multimodal has both). They are models of
    # their own, with a config of another class than the decoder's.
    found = named_modules(decoder)
    inner = [one for one in _models_among(found.values()) if "config" in vars(one) and one is not decoder]
    encoders = [one for one in inner if not isinstance(decoder.config, type(one.config))]
    return named_modules(decoder, encoders) if encoders else found


def embedding_of(model: Model) -> torch.nn.Module | None:
    # The module embeds token ids, or whatever else the model's input is.
    try:
        embedding: torch.nn.Module | None = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        # stacks of BART's kin say nothing of it up to 4.5x
        rows = getattr(model.config, "vocab_size", None)
        return next(
            (
                child
                for child in model.children()
                if isinstance(child, torch.nn.Embedding) and len(child.weight) == rows
            ),
            None,
        )
    return embedding


def token_embeddings(model: Model) -> torch.Tensor:
    # The weights are [vocabulary, hidden]. Image and audio models have none: they embed patches or frames, with a
    # convolution or a linear layer.
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
    # Both signs are needed: a model of remote code may take `input_ids` and have no `get_input_embeddings`.
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
    # The ranks of a sharded model compute each forward together, and one rank cannot run it alone.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if any(hasattr(p, "ds_id") or hasattr(p, "_local_tensor") for p in inner.parameters()):
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in inner.modules())
