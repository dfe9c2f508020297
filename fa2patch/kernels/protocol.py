"""The base class of kernels, and the description of a call that a kernel must support.

For most kernels, spans (tokens of a picture, which see each other in both directions) are computed by a second call. It
has the spans' queries, with the keys of their document up to the span's end, and replaces results of the first call.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .._torch import compiling, constant, uncompiled
from ..documents.boundaries import Boundaries, Keys
from ..documents.tensors import ends_of, require, to_device
from ..errors import KernelUnavailable, PackingNotIsolated
from .options import FEATURES, Options, described_call

HALF = (torch.float16, torch.bfloat16)

IN_32_BITS = 2**31 - 1  # some kernels count elements in 32 bits


class Asked(NamedTuple):
    """The properties of a call that a kernel may not support.

    Attributes:
        device: type of the device, such as ``"cuda"``.
        dtype: dtype of q, k and v.
        heads: number of query heads.
        key_heads: number of key and value heads.
        head_dim: head dimension of q and k.
        value_dim: head dimension of v.
        causal: whether a query sees no later key.
        features: the names in :data:`FEATURES` that the call needs.
        gradients: whether a backward may follow.
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


def asked_by(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, trees: bool = False, spans: bool = False,
    pairs: bool = False,
) -> Asked:  # fmt: skip
    """Describe a call with these arguments. The last two dimensions of q, k and v are heads and head dimension."""
    return asked_as(described_call(q, k, v, options, trees, spans, pairs))


def asked_as(described: tuple[Any, ...]) -> Asked:
    *call, needed, gradients = described
    always = ("deterministic",) if torch.are_deterministic_algorithms_enabled() else ()
    features = tuple([name for name, is_needed in zip(FEATURES, needed) if is_needed or name in always])
    return Asked._make([*call, features, gradients])


# Kinds of devices, as the table of ``fa2patch kernels`` names them
NVIDIA, OLDER_NVIDIA, AMD = "NVIDIA, 8.0 and newer", "NVIDIA, older", "AMD (ROCm)"
HUAWEI, INTEL, APPLE = "Huawei (Ascend)", "Intel (XPU)", "Apple (MPS)"


class Kernel:
    """Base class of kernels: variable-length attention over documents laid end to end.

    The attributes in capitals describe the best build of a kernel. The tables of kernels are made from them.

    Attributes:
        name: the kernel's name in ``apply(model, kernel=...)``.
        what: the implementation, in a few words.
        needs: requirements, in a few words.
        DEVICES: supported device types; None means all.
        RUNS_ON: the kinds of devices for which it is listed.
        DTYPES: supported dtypes; None means all.
        MAX_HEAD_DIM: largest head dimension of q, k and v; None means no limit.
        MULTIPLE: q, k and v are padded with zeros to head dimensions that are multiples of this: to one head dimension,
            unless :meth:`takes` says that v's may differ. With 1 they are not padded.
        CAPABILITY: lowest and highest major number of the compute capability of NVIDIA's devices that it has code for.
        MADE_FOR: the major numbers of the devices that it was written for, where ``auto`` tries it before the others.
        FEATURES: the supported names in :data:`FEATURES`.
        GATHERS: whether :meth:`attend` gets k and v of a tree gathered: those of each segment's path, end to end, with
            the ends of ``boundaries.keys``.
        MASKS: whether :meth:`attend` computes spans itself, from ``boundaries.until``. For other kernels it is called a
            second time, for the queries of the spans.
        BACKWARD: whether the kernel has a backward. Without one it computes only calls that need no gradients.
        LARGEST: the largest ``(tokens + 128 * documents) * heads * head dim`` of one call, with a head dimension
            rounded up to a multiple of 64. A larger row is computed some heads at a time. None means no limit.
        alike: the head dimensions of q and of v that are padded to one although :meth:`takes` says that they may
            differ, because a build failed its trial with them.
    """

    name: str
    what: str
    needs: str
    DEVICES: tuple[str, ...] | None = ("cuda",)
    RUNS_ON: tuple[str, ...] = (NVIDIA,)
    DTYPES: tuple[torch.dtype, ...] | None = HALF
    MAX_HEAD_DIM: int | None = 256
    CAPABILITY: tuple[float, float] = (0, float("inf"))
    MADE_FOR: tuple[int, ...] = ()
    MULTIPLE = 8
    FEATURES: frozenset[str] = frozenset()
    GATHERS = True
    MASKS = False
    BACKWARD = True
    LARGEST: int | None = None
    alike: frozenset[tuple[int, int]] = frozenset()

    def available(self) -> tuple[bool, str]:
        """Whether the kernel can run on this machine, and the reason if not."""
        raise NotImplementedError

    def features(self) -> frozenset[str]:
        """The names in :data:`FEATURES` that the installed build supports."""
        return self.FEATURES

    def supports(self, asked: Asked) -> tuple[bool, str]:
        """Whether the kernel supports this kind of call, and the reason if not."""
        if asked.gradients and not self.BACKWARD:
            return False, "it has no backward"
        missing = [name for name in asked.features if name not in self.features()]
        if missing:
            return False, f"it has no {', no '.join(missing)}" + (" backward" if missing[-1] == "deterministic" else "")
        if self.DEVICES is not None and asked.device not in self.DEVICES:
            return False, f"it needs a {' or '.join(self.DEVICES)} device, found {asked.device}"
        here = capability() if asked.device == "cuda" else None
        if here is not None and not self.CAPABILITY[0] <= here[0] <= self.CAPABILITY[1]:
            return False, f"it has no code for compute capability {here[0]}.{here[1]}"
        if self.DTYPES is not None and asked.dtype not in self.DTYPES:
            expected = " or ".join(str(dtype).replace("torch.", "") for dtype in self.DTYPES)
            return False, f"it needs {expected}, found {str(asked.dtype).replace('torch.', '')}"
        largest = max(asked.head_dim, asked.value_dim)
        if self.MAX_HEAD_DIM is not None and largest > self.MAX_HEAD_DIM:
            return False, f"its head dimensions end at {self.MAX_HEAD_DIM}, found {largest}"
        return True, ""

    def takes(self, head_dim: int, value_dim: int) -> bool:
        """Whether :meth:`attend` takes v with another head dimension than q and k. Both are already padded."""
        return False

    def rounded(self, dim: int) -> int:
        """The smallest head dimension from ``dim`` on that :meth:`attend` takes."""
        return dim + -dim % self.MULTIPLE

    def padded(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """The head dimensions to which q and k, and v, are padded with zeros."""
        if self.MULTIPLE == 1:
            return head_dim, value_dim
        dims = self.rounded(head_dim), self.rounded(value_dim)
        differ = self.takes(*dims) and (head_dim, value_dim) not in self.alike
        return dims if differ else (max(dims), max(dims))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options
    ) -> torch.Tensor:
        """Compute the attention.

        Args:
            q: ``[tokens, query heads, head dim]``.
            k: ``[tokens, key heads, head dim]``.
            v: ``[tokens, key heads, value head dim]``.
            boundaries: boundaries of the documents.
            options: the layer's options.

        Returns:
            A contiguous tensor ``[tokens, query heads, value head dim]``.

        Raises:
            KernelUnavailable: the kernel cannot run on this machine.
        """
        able, reason = self.available()
        if not able:
            raise KernelUnavailable(f"kernel={self.name!r} cannot run here: {reason}.")
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        value_dim, tokens, keys = v.shape[-1], max(q.shape[0], k.shape[0]), None
        if self.GATHERS and boundaries.parents is not None:
            keys = boundaries.keys(tokens).tokens
            assert keys is not None, "it has parents"
            tokens = max(tokens, keys.shape[0])
        dim, of_values = self.padded(q.shape[-1], value_dim)
        if self.LARGEST is not None:
            documents = tokens // 16 if boundaries.uncounted else boundaries.cu_seqlens.shape[0]
            size = (tokens + 128 * documents) * (-max(dim, of_values) // 64 * -64)
            if size * q.shape[1] > self.LARGEST:
                return _some_heads_at_a_time(self, q, k, v, boundaries, options, size)
        if keys is not None:
            k, v = k.index_select(0, keys), v.index_select(0, keys)
        if dim != q.shape[-1]:
            q, k = F.pad(q, (0, dim - q.shape[-1])), F.pad(k, (0, dim - k.shape[-1]))
        if of_values != value_dim:
            v = F.pad(v, (0, of_values - value_dim))
        output = self.attend(q, k, v, boundaries, options, scale)
        if boundaries.until is not None and options.causal and not self.MASKS:
            output = _with_spans(self, output, q, k, v, boundaries, options, scale)
        if output.shape[-1] != value_dim:
            output = output[..., :value_dim]
        return output.contiguous()  # some models call .view on the output of attention

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options, scale: float
    ) -> torch.Tensor:
        """Compute the attention for ``__call__``, with padded head dimensions.

        ``boundaries.keys`` says which keys the queries of each document see. There are more of them than queries for
        spans, which see all of these keys, and with ``boundaries.parents``: then a query sees the keys of its segment's
        path up to its own, and the last query of a segment is at the last of the segment's keys.

        ``scale`` is the factor of the logits, from ``options`` or the head dimension before padding.
        """
        raise NotImplementedError


def _some_heads_at_a_time(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries, options: Options,
    size: int,  # (tokens + 128 * documents) * head dim
) -> torch.Tensor:  # fmt: skip
    # Backwards of flash attention count the elements of an accumulator, ``size * heads``, in 32 bits: FlashAttention 2
    # up to 2.8.3 (flash-attention#1500 and #2260), and FlashAttention 4 where a stride is large (#2611), so each part
    # is made contiguous. Beyond the limit the device faults, and no exception is raised.
    assert kernel.LARGEST is not None
    most, groups = kernel.LARGEST // size, q.shape[1] // k.shape[1]
    if not most:
        raise KernelUnavailable(
            f"kernel={kernel.name!r} counts in 32 bits: expected (tokens + 128 * documents) * head dim up to "
            f"{kernel.LARGEST:,}, found {size:,} in a row of {q.shape[0]:,} tokens. Pack shorter rows, or use "
            "kernel='reference'."
        )
    heads = most // groups * groups or max(each for each in range(1, most + 1) if groups % each == 0)
    queries = torch.split(q, heads, 1)
    keys, values = (torch.split(x, max(heads // groups, 1), 1) for x in (k, v))
    outputs = []
    for number, own in enumerate(queries):
        at, seen = slice(number * heads, (number + 1) * heads), number * len(keys) // len(queries)
        of_part = options.with_heads(operator.itemgetter(at))
        states = own.contiguous(), keys[seen].contiguous(), values[seen].contiguous()
        outputs.append(kernel(*states, boundaries, of_part))
    return torch.cat(outputs, 1)


@constant
def capability() -> tuple[int, int] | None:
    # On ROCm such numbers mean something else.
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


@dataclass(eq=False)
class _SpanBoundaries(Boundaries):
    """The boundaries of the second call: of each span's queries, and of its keys, which have been gathered."""

    of_keys: Keys | None = None

    def keys(self, tokens: int) -> Keys:
        assert self.of_keys is not None
        return self.of_keys


@uncompiled
def _with_spans(
    kernel: Kernel, output: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, boundaries: Boundaries,
    options: Options, scale: float,
) -> torch.Tensor:  # fmt: skip
    spans = boundaries.spans
    if spans is None or not spans.counts:
        return output
    if _SpanBoundaries not in boundaries.made:
        device = output.device
        of_keys = Keys(None, ends_of(spans.key_counts, device), max(spans.key_counts))
        queries = _SpanBoundaries(ends_of(spans.counts, device), spans.longest, None, spans.counts, of_keys=of_keys)
        boundaries.made[_SpanBoundaries] = (
            queries,
            *(to_device(torch.from_numpy(tokens), device) for tokens in spans[:2]),
        )
    queries, at, seen = boundaries.made[_SpanBoundaries]
    states = q.index_select(0, at), k.index_select(0, seen), v.index_select(0, seen)
    # a window hides nothing of a span from its queries: require_within has refused a shorter one
    found = kernel.attend(*states, queries, replace(options, causal=False), scale)
    return output.index_copy(0, at, found.to(output.dtype))


def require_within(window: int, boundaries: Boundaries) -> None:
    message = (
        "a picture (or a prefix) whose tokens see each other in both directions is longer than the sliding window of "
        "{} tokens, and releases of Transformers differ in what that hides. Use smaller pictures or shorter prefixes, "
        "or train padded."
    )
    if boundaries.until is not None and compiling():
        token = torch.arange(boundaries.until.shape[0], device=boundaries.until.device)
        require(((boundaries.until - token) < window).all(), PackingNotIsolated, message, window)
    elif boundaries.spans is not None and boundaries.spans.longest > window:
        raise PackingNotIsolated(message.format(window))
