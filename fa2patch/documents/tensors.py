"""What is asked of a batch's tensors: types and shapes, and values by a read or by an assertion on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .._torch import compiling
from ..errors import BadCuSeqlens, BadPositionIds, BoundaryConflict, PackingNotIsolated

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def read(tensor: torch.Tensor) -> NDArray[Any]:
    # Every read of boundaries from the device goes through this function.
    try:
        return tensor.detach().cpu().numpy()
    except Exception as error:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not wrapped:
            raise
        raise PackingNotIsolated(
            "a batch says where documents start, and its values cannot be read here: its tensors stand for others "
            f"({type(error).__name__} of a {type(tensor).__name__}), as under FakeTensorMode, aot_function and "
            "torch.func.vmap over batches. Take the patch off for this: fa2patch.revert(model). torch.compile looks at "
            "every batch."
        ) from error


def largest(numbers: torch.Tensor) -> int:
    return int(read(numbers).max())


def ends_of(lengths: Iterable[int], device: torch.device) -> torch.Tensor:
    # int32 [documents + 1]: 0, then the end of each document
    return to_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)


# Devices that numbers are sent to without waiting. Apple's would read memory that may hold something else by then,
# without an error (pytorch#139550, #189690).
NOT_WAITED_FOR = ("cuda",)


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    return numbers.to(device, non_blocking=device.type in NOT_WAITED_FOR)


LONGEST = 254  # characters: torch raises an error for a longer message of an assertion on a CUDA device

CUT = "... The same batch on a CPU says all."


def assert_async(held: torch.Tensor, message: str) -> None:
    # This does not synchronise. The message has at most LONGEST characters.
    torch.ops.aten._assert_async.msg(held, message)


def fitting(messages: Iterable[str]) -> str:
    """The text of one assertion for several messages: all of them, or what fits of their first sentences."""
    different = list(dict.fromkeys(messages))
    whole = " Or: ".join(different)
    if len(whole) <= LONGEST:
        return whole
    first = " Or: ".join(message.partition(". ")[0].rstrip(".") + "." for message in different)
    return first if len(first) <= LONGEST else first[: LONGEST - len(CUT)] + CUT


class Check(NamedTuple):
    """What must be True, and the error with ``{}`` in the place of each number."""

    held: Any  # a bool tensor without dimensions; a bool if it was compared on the host
    error: type[Exception]
    message: str
    numbers: tuple[int, ...] = ()


def require(held: torch.Tensor, error: type[Exception], message: str, *numbers: int) -> None:
    require_all([Check(held, error, message, numbers)])


def require_all(checks: list[Check]) -> None:
    if compiling():  # a number in the message would become a constant of the graph
        texts = [check.message.format(*["(given)"] * len(check.numbers)) for check in checks]
    elif isinstance(checks[0].held, torch.Tensor) and checks[0].held.device.type != "cpu":
        texts = [check.message.format(*check.numbers) for check in checks]
    else:
        return require_here(checks)
    # All conditions are one assertion, because each assertion is a launch.
    held = [check.held for check in checks]
    assert_async(torch.stack(held).all() if len(held) > 1 else held[0], fitting(texts))


def require_here(checks: list[Check]) -> None:
    # Tensors among the conditions are on a CPU, and no graph is being captured.
    for check in checks:
        if not (read(check.held) if isinstance(check.held, torch.Tensor) else check.held):
            raise check.error(check.message.format(*check.numbers))


def check_position_ids(position_ids: Any, shape: tuple[int, int] | None = None) -> None:
    if not isinstance(position_ids, torch.Tensor):
        raise BadPositionIds(
            f"position_ids: expected an integer tensor, found {type(position_ids).__name__}. "
            "Pass what the collator returns."
        )
    if position_ids.dtype not in _INTEGERS:
        raise BadPositionIds(f"position_ids: expected integers, found {position_ids.dtype}. Convert them with .long().")
    if position_ids.layout is not torch.strided or position_ids.is_nested:
        raise BadPositionIds(f"position_ids: expected a dense tensor, found {described(position_ids)}.")
    found = tuple(position_ids.shape)
    if position_ids.dim() not in (1, 2, 3) or 0 in found:
        raise BadPositionIds(
            "position_ids: expected [batch, length], or [axes, batch, length] for mRoPE, "
            f"with at least one token; found {list(found)}."
        )
    if shape is not None and (found[-1] != shape[1] or (len(found) > 1 and found[-2] not in (1, shape[0]))):
        raise BadPositionIds(
            f"position_ids: expected [{shape[0]}, {shape[1]}] as the batch's ids, found {list(found)}. "
            "One position id is needed for each token."
        )


def check_cu_seqlens(cu_seqlens: Any) -> None:
    if not is_integers(cu_seqlens) or cu_seqlens.numel() < 2:
        raise BadCuSeqlens(f"cu_seq_lens: expected an integer tensor [documents + 1], found {described(cu_seqlens)}.")


def check_max_seqlen(max_seqlen: Any) -> None:
    if isinstance(max_seqlen, torch.Tensor):
        good, found = is_integers(max_seqlen) and max_seqlen.numel() > 0, described(max_seqlen)
    else:
        good = max_seqlen is None or (isinstance(max_seqlen, (int, np.integer)) and bool(max_seqlen < 2**31))
        found = "" if good else repr(max_seqlen)
    if not good:
        raise BadCuSeqlens(f"max_length: expected the longest document's length, an int, found {found}.")
    if isinstance(max_seqlen, torch.Tensor):
        check_readable("max_length", max_seqlen, BadCuSeqlens)


def check_seq_idx(seq_idx: Any, shape: tuple[int, int]) -> None:
    if not _is_dense(seq_idx) or seq_idx.dtype not in (*_INTEGERS, torch.bool):
        raise BadCuSeqlens(f"seq_idx: expected an integer tensor [batch, length], found {described(seq_idx)}.")
    if tuple(seq_idx.shape) not in (shape, (1, shape[1]), shape[1:]):
        raise BadCuSeqlens(f"seq_idx: expected [{shape[0]}, {shape[1]}], found {list(seq_idx.shape)}.")
    check_readable("seq_idx", seq_idx, BadCuSeqlens)


def check_mask(attention_mask: torch.Tensor, shape: tuple[int, int]) -> None:
    if not _is_dense(attention_mask) or attention_mask.is_complex():
        raise BoundaryConflict(f"attention_mask: expected a tensor of numbers, found {described(attention_mask)}.")
    if tuple(attention_mask.shape) != shape:
        raise BoundaryConflict(
            f"attention_mask: expected [{shape[0]}, {shape[1]}], found {list(attention_mask.shape)}."
        )


def check_readable(name: str, tensor: torch.Tensor, error: type[Exception]) -> None:
    if tensor.device.type == "meta":
        raise error(f"{name}: expected a tensor with values, found one on the meta device.")


def is_integers(value: Any) -> bool:
    tensor = isinstance(value, torch.Tensor)  # _is_dense, without its call: each forward asks twice
    return tensor and value.dtype in _INTEGERS and value.layout == torch.strided and not value.is_nested


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    return f"{value.dtype} {list(value.shape)}" if _is_dense(value) else f"{value.dtype} {value.layout}"
