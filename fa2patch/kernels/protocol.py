"""What a kernel is, and what a layer asks of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ..errors import KernelUnavailable

if TYPE_CHECKING:
    from ..documents.boundaries import Boundaries
    from .options import Options

FEATURES = ("window", "softcap", "sinks", "alibi", "dropout", "deterministic")
"""What a layer may ask for besides plain attention; ``deterministic`` (in its backward) is torch's global switch."""

HALF = (torch.float16, torch.bfloat16)


class Asked(NamedTuple):
    """What a layer asks of a kernel, as far as a kernel may not have it.

    Attributes:
        device: its type, as ``"cuda"``.
        features: those of :data:`FEATURES` that are needed.
        gradients: whether a backward will follow.
    """

    device: str
    dtype: torch.dtype
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    features: tuple[str, ...]
    gradients: bool = True


def asked_by(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Asked:
    """What a call with these asks for; heads and dims are the last two dimensions of q, k and v."""
    needed = (
        options.window is not None,
        options.softcap is not None,
        options.sinks is not None,
        options.alibi_slopes is not None,
        options.dropout > 0,
        torch.are_deterministic_algorithms_enabled(),
    )
    features = tuple(name for name, is_needed in zip(FEATURES, needed) if is_needed)
    heads, dims = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
    gradients = torch.is_grad_enabled() and any(states.requires_grad for states in (q, k, v))
    return Asked(q.device.type, q.dtype, *heads, *dims, options.causal, features, gradients)


class Kernel:
    """Variable-length attention over documents laid end to end.

    The capitals say what it can do at its best; tables of kernels are made from them.

    Attributes:
        name: what ``apply(model, kernel=...)`` calls it.
        what: which code it is, in a few words.
        needs: what must be there.
        DEVICES: types of device; None is every one.
        DTYPES: None is every one.
        MAX_HEAD_DIM: of q, k and v; None is any. Smaller dimensions that a kernel does not have are padded with zeros.
        MULTIPLE: what head dimensions are padded to; 1 where q and v may differ too.
        FEATURES: see :data:`FEATURES`.
        BACKWARD: whether it has a backward. A kernel without one computes only what needs no gradients.
    """

    name: str
    what: str
    needs: str
    DEVICES: tuple[str, ...] | None = ("cuda",)
    DTYPES: tuple[torch.dtype, ...] | None = HALF
    MAX_HEAD_DIM: int | None = 256
    MULTIPLE = 8
    FEATURES: frozenset[str] = frozenset()
    BACKWARD = True

    def available(self) -> tuple[bool, str]:
        """Whether it can run on this machine, and the reason where not."""
        raise NotImplementedError

    def features(self) -> frozenset[str]:
        """Those of :data:`FEATURES` that the one installed here has."""
        return self.FEATURES

    def supports(self, asked: Asked) -> tuple[bool, str]:
        """Whether it can compute this, and the reason where not."""
        if asked.gradients and not self.BACKWARD:
            return False, "it has no backward"
        missing = [name for name in asked.features if name not in self.features()]
        if missing:
            return False, f"it has no {', no '.join(missing)}" + (" backward" if missing[-1] == "deterministic" else "")
        if self.DEVICES is not None and asked.device not in self.DEVICES:
            return False, f"it needs a {' or '.join(self.DEVICES)} device, found {asked.device}"
        if self.DTYPES is not None and asked.dtype not in self.DTYPES:
            expected = " or ".join(str(dtype).replace("torch.", "") for dtype in self.DTYPES)
            return False, f"it needs {expected}, found {str(asked.dtype).replace('torch.', '')}"
        largest = max(asked.head_dim, asked.value_dim)
        if self.MAX_HEAD_DIM is not None and largest > self.MAX_HEAD_DIM:
            return False, f"its head dimensions end at {self.MAX_HEAD_DIM}, found {largest}"
        return True, ""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
    ) -> torch.Tensor:
        """q ``[tokens, query heads, head dim]``, k and v with theirs -> ``[tokens, query heads, value head dim]``.

        Raises:
            KernelUnavailable: it is not here.
        """
        able, reason = self.available()
        if not able:
            raise KernelUnavailable(f"kernel={self.name!r} cannot run here: {reason}.")
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        value_dim = v.shape[-1]
        if self.MULTIPLE > 1:
            dim = max(q.shape[-1], value_dim)
            dim += -dim % self.MULTIPLE
            q, k, v = (x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1])) for x in (q, k, v))
        output = self.attend(q, k, v, boundaries, options, scale)
        return output if output.shape[-1] == value_dim else output[..., :value_dim].contiguous()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        boundaries: Boundaries,
        options: Options,
        scale: float,
    ) -> torch.Tensor:
        """As ``__call__``, head dimensions padded, with the scale of those that were not."""
        raise NotImplementedError
