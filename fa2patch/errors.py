"""Errors, all subclasses of :class:`Fa2PatchError`, and four warnings.

A message says what was expected, what was found and what to do. An error of ``apply`` leaves the model and every
namespace unchanged. After an error in a forward, the patch is still usable.
"""

from __future__ import annotations

from typing import Any

# The page has a section for each class of this module.
PAGE = "https://fa2patch.github.io/fa2patch/errors.html"


class _Documented(BaseException):
    def __init__(self, *args: object, message: str | None = None) -> None:
        # A DataLoader raises a worker's error again with its text as `message`, because the class has that attribute.
        super().__init__(*(args if message is None else (message,)))

    @property
    def message(self) -> str:
        # This is the text without the address of the class's section in the documentation.
        return super().__str__()

    def __str__(self) -> str:  # here and nowhere else: texts and evidence that quote an error use ``message``
        ours = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("fa2patch."))
        return f"{self.message}\nSee {PAGE}#{ours.__name__.lower()}"


class Fa2PatchError(_Documented, Exception):
    """Base class of all errors that fa2patch raises on purpose.

    Attributes:
        message: The text without the address of the documentation, which is the last line of ``str(error)``.
    """


class UnsupportedTransformers(Fa2PatchError):
    """Transformers cannot be imported, or is older than 4.34, the first version with flash attention."""


class UnsupportedNumPy(Fa2PatchError):
    """The installed torch cannot exchange arrays with the installed NumPy, as torch before 2.3 cannot with NumPy 2."""


class NotAModel(Fa2PatchError, TypeError):
    """The object holds no Transformers model, or not one that the called function can use."""


class UnknownArchitecture(Fa2PatchError, LookupError):
    """The registry has no row for the ``model_type`` that was asked for."""


class BadArchitecture(Fa2PatchError, TypeError):
    """The argument of ``register`` is not an ``Architecture``, or an ``Architecture`` has an invalid attribute."""


class UnsupportedModel(Fa2PatchError):
    """This model has a feature that cannot be trained packed.

    Attributes:
        takes_padded_batches: Whether ``apply(model, padded_batches=True)`` does not refuse it for that feature.
    """

    takes_padded_batches: bool = False


class LayerNotPatchable(Fa2PatchError):
    """An attention layer offers no usable seam, or a module's ``forward`` cannot be read or replaced."""


class BadArgument(Fa2PatchError, ValueError):
    """An argument has an invalid value."""


class UnknownKernel(Fa2PatchError, LookupError):
    """No kernel has this name."""


class KernelUnavailable(Fa2PatchError):
    """The requested kernel cannot run on this machine, or does not support what a layer needs."""


class KernelWrong(KernelUnavailable):
    """The requested kernel fails its trial on this machine: it raises an error or differs from the reference."""


class BadPositionIds(Fa2PatchError, ValueError):
    """``position_ids`` have a wrong dtype, shape or device, or ids on three axes are ambiguous."""


class BadCuSeqlens(Fa2PatchError, ValueError):
    """``cu_seq_lens_*``, ``max_length_*`` or ``seq_idx`` do not describe the tokens of this batch."""


class BadParents(BadCuSeqlens):
    """``segment_parents`` are no tree of the segments that ``cu_seq_lens_*`` describe."""


class BoundaryConflict(Fa2PatchError, ValueError):
    """Two sources contradict each other about document starts, or a mask or jump in the ids cannot be interpreted."""


class PackedWithDenseMask(Fa2PatchError, ValueError):
    """A packed batch came with an attention mask that is not ``[batch, length]``, such as a 4-D mask."""


class PackedWithCache(Fa2PatchError, ValueError):
    """A packed batch came with a key/value cache or a recurrent state."""


class PackingNotIsolated(Fa2PatchError, RuntimeError):
    """The documents of a packed batch cannot be, or were not, kept apart.

    Attributes:
        verification: the result of ``fa2patch.verify`` if ``verify(strict=True)`` raised this error, else None.
    """

    verification: Any = None


class BadBatch(Fa2PatchError, ValueError):
    """A batch has an invalid argument, or holds nothing that ``fa2patch.verify`` can check."""


class CollatorError(Fa2PatchError, ValueError):
    """A collator cannot put the examples into one row, or has an invalid argument."""


class PackingError(Fa2PatchError, ValueError):
    """Rows cannot be planned from the given lengths or options, or sequences cannot share a row."""


class CannotRun(Fa2PatchError):
    """``fa2patch run`` cannot reach the command's Python: an option keeps it out, or it is another environment's."""


class NothingProven(_Documented, UserWarning):
    """A sharded model holds an unknown module, which one rank alone cannot prove; or a kernel's revision is unknown."""


class NothingPacked(_Documented, UserWarning):
    """A patched model was trained on several batches, and none of them said where documents start."""


class StaysPadded(_Documented, UserWarning):
    """Padded batches that should be computed packed are computed padded."""


class OtherPositions(_Documented, UserWarning):
    """The position ids of packed documents begin at 0, and the model counts from another number by itself."""


class OverBudget(_Documented, UserWarning):
    """Batches with more tokens than ``max_tokens`` are computed at once, because they cannot be computed in passes."""


def message(error: BaseException) -> str:
    return error.message if isinstance(error, _Documented) else str(error)
