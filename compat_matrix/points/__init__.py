"""What must hold in a cell. A point is a function of a :class:`Cell`; it returns, or raises with what it found."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable

import torch

from .. import own_models, tiny_configs, tiny_models

TOLERANCE = 1e-5
"""Of the largest value compared, in float32."""

GRADIENT_TOLERANCE = 5e-5
"""The same for gradients: sums over all tokens, in another order where experts see another number of them."""

POINTS: dict[str, Callable[[Cell], None]] = {}


def point(function: Callable[[Cell], None]) -> Callable[[Cell], None]:
    POINTS[function.__name__] = function
    return function


class NotApplicable(Exception):
    """This family has no such feature in this version; the reason goes into the evidence."""


@dataclass
class Cell:
    """One family, loaded with one attention implementation, in the installed Transformers."""

    family: str
    implementation: str

    def model(self, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        return tiny_models.build(self.family, self.implementation, dtype or self.dtype, **changes)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.family in tiny_models.IN_DOUBLE_PRECISION else torch.float32

    @property
    def of_gradients(self) -> dict[str, float]:
        """How near gradients must be. Without rope that of a key's bias is 0, and all there is of it is rounding."""
        seed = self.family in tiny_models.SEEDS
        return {} if seed else {"tolerance": GRADIENT_TOLERANCE, "floor": 0.01}

    def reference(self, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        """The same weights, unpatched, eager (Falcon's eager code fails on one token: sdpa)."""
        return tiny_models.build(
            self.family, "sdpa" if own_models.kind(self.family) == "falcon" else "eager", dtype or self.dtype, **changes
        )


def documents(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, tiny_configs.VOCABULARY, (length,), generator=generator) for length in lengths]


def pack(docs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row: input_ids and position_ids ``[1, length]``."""
    return {
        "input_ids": torch.cat(docs)[None],
        "position_ids": torch.cat([_count(doc) for doc in docs], dim=1),
    }


def takes_cache(model: Any) -> bool:
    """Whether its forward can be told to use no cache: one that only encodes cannot."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    encodes = "MaskedLM" in type(model).__name__
    return any(p.name == "use_cache" or (p.kind is p.VAR_KEYWORD and not encodes) for p in parameters)


def alone(model: Any, docs: list[torch.Tensor], counts_itself: bool = False, **call: Any) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of each document run on its own; ``counts_itself``: given no position_ids."""
    if not takes_cache(model):
        call.pop("use_cache", None)
    elif "use_cache" in inspect.signature(type(model).forward).parameters and not _shares_keys(model):
        call.setdefault("use_cache", False)  # 4.51's Llama 4 has a cache in bfloat16 only
    counts_otherwise = not counts_itself and getattr(model.config, "model_type", None) in tiny_models.NOT_FROM_ZERO
    positions: list[dict[str, Any]] = [{"position_ids": _count(doc)} if counts_otherwise else {} for doc in docs]
    if _has_mrope(getattr(model.config, "text_config", model.config)):  # 4.53's Qwen2-VL fails on a row without a mask
        for doc, more in zip(docs, positions):
            more["attention_mask"] = torch.ones(1, len(doc), dtype=torch.long)
    return torch.cat([model(input_ids=doc[None], **more, **call).logits[0] for doc, more in zip(docs, positions)])


def _shares_keys(model: Any) -> bool:
    """Whether some layers find earlier ones' keys and values in the cache, and compute others without one."""
    return bool(getattr(getattr(model.config, "text_config", model.config), "num_kv_shared_layers", 0))


def _has_mrope(config: Any) -> bool:
    return any("mrope_section" in (getattr(config, name, None) or ()) for name in ("rope_scaling", "rope_parameters"))


def _count(doc: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(doc))[None]


def loss_of(logits: torch.Tensor, docs: list[torch.Tensor]) -> torch.Tensor:
    """Sum of next-token losses inside documents, from logits ``[tokens, vocabulary]``."""
    pieces = zip(logits.split([len(doc) for doc in docs]), docs)
    return sum(
        torch.nn.functional.cross_entropy(piece[:-1].float(), doc[1:], reduction="sum")
        for piece, doc in pieces
        if len(doc) > 1
    )


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE, at_least: float = 1e-30
) -> None:
    """``found`` within ``tolerance`` of the largest value of ``expected``, or of ``at_least`` where that is larger."""
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}")
    scale = expected.abs().max().clamp(min=at_least)
    error = ((found - expected).abs().max() / scale).item()
    if not error <= tolerance:
        raise AssertionError(f"{what}: off by {error:.1e} of the scale, allowed {tolerance:.0e}")


def assert_unmoved(cell: Cell, after: torch.Tensor, before: torch.Tensor) -> None:
    """Bit for bit the same; to rounding where experts multiply another number of tokens at a time."""
    if tiny_models.is_mixture(cell.family):
        tolerance = TOLERANCE if before.dtype == torch.float32 else 1e-2
        assert_close(after.float(), before.float(), "logits after another document changed", tolerance)
    elif not torch.equal(before, after):
        raise AssertionError(f"a changed document moved another one's logits by {(before - after).abs().max():.1e}")


def assert_same_gradients(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE, floor: float = 0.0
) -> None:
    """Every gradient within ``tolerance`` of its largest value, or of ``floor`` of the largest of all."""
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients: other parameters: {sorted(found.keys() ^ expected.keys())[:4]}")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert_close(found[name], gradient, f"gradient of {name}", tolerance, at_least=max(floor * largest, 1e-30))


from . import harmless, isolation, training, windows  # noqa: E402, F401
