"""One class per situation, all under :class:`Fa2PatchError`.

Every message says what was looked for, what was found and what to do. An error raised by ``apply`` leaves
the model and every namespace as they were; one raised in a forward leaves the patch usable.
"""

from __future__ import annotations

from typing import Any


class Fa2PatchError(Exception):
    """Base of everything that fa2patch raises on purpose."""


class UnsupportedTransformers(Fa2PatchError):
    """Transformers is missing or older than the first version with flash attention."""


class NotAModel(Fa2PatchError, TypeError):
    """What was handed to ``apply`` holds no Transformers model."""


class UnknownArchitecture(Fa2PatchError, LookupError):
    """The model's ``model_type`` has no row in the registry."""


class BadArchitecture(Fa2PatchError, TypeError):
    """What was handed to ``register`` is no row, or a row's attributes are not what they must be."""


class UnsupportedModel(Fa2PatchError):
    """The architecture is known, but this model of it cannot be trained packed."""


class LayerNotPatchable(Fa2PatchError):
    """An attention layer offers no seam, so nothing was patched."""


class BadArgument(Fa2PatchError, ValueError):
    """An argument is none of the values that it can take."""


class UnknownKernel(Fa2PatchError, LookupError):
    """No kernel has this name."""


class KernelUnavailable(Fa2PatchError):
    """The kernel asked for cannot run here, or not on what a layer asks of it."""


class KernelWrong(KernelUnavailable):
    """Tried on this machine, the kernel asked for fails, or computes something else than the reference."""


class BadPositionIds(Fa2PatchError, ValueError):
    """``position_ids`` of a wrong dtype or shape."""


class BadCuSeqlens(Fa2PatchError, ValueError):
    """``cu_seq_lens_*`` (or ``seq_idx``) that do not describe the tokens of this batch."""


class BoundaryConflict(Fa2PatchError, ValueError):
    """Two sources say where documents start, and they contradict each other."""


class PackedWithDenseMask(Fa2PatchError, ValueError):
    """A packed batch came with a 3-D or 4-D attention mask."""


class PackedWithCache(Fa2PatchError, ValueError):
    """A packed batch came with a key/value cache."""


class PackingNotIsolated(Fa2PatchError, RuntimeError):
    """A packed batch cannot be computed with its documents kept apart.

    Attributes:
        verification: what ``fa2patch.verify`` found, where it raised this.
    """

    verification: Any = None


class BadBatch(Fa2PatchError, ValueError):
    """A batch in which there is nothing to verify."""


class CollatorError(Fa2PatchError, ValueError):
    """Examples that cannot be put into one row."""


class NothingProven(UserWarning):
    """A sharded model holds a module that is not known, and could not be seen to keep documents apart."""


class NothingPacked(UserWarning):
    """A patched model is being trained, and no batch says where documents start."""
