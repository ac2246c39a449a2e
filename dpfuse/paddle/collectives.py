"""Exchanges facts, flags, rows of tensors and sums between the ranks of Paddle's APIs. Sends tensors, never pickles.

Without a process group, or on one rank, nothing is sent. Every exchange but the sum begins with a vote of the library
that names its purpose. So all ranks raise the same error, even if they have called different functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse import DPFuseError
from dpfuse.comm import collective, votes
from dpfuse.model.agreement import send_tensors

__all__ = ["agree", "any_rank", "broadcast", "gather_rows", "sum_over_ranks", "world_size"]

CALL = "call: "  # first words of the line that names the purpose of an exchange


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agree(text: str, what: str, remedy: str = "", *, number: int = 0) -> tuple[int, ...]:
    """Compare `text` over the ranks.

    Args:
        text: one fact per line; or why this rank fails, after `votes.FAILURE`.
        what: the subject of the text, for the error.
        remedy: what to do about a difference.
        number: in which ranks may differ.

    Returns:
        Every rank's number.

    Raises:
        DPFuseError: The texts differ, or other ranks compare something else, or one fails. Every rank raises, and the
            error has the first difference.
    """
    group = collective.resolve_group(None)
    if group is None or group.size() == 1:
        return (number,)
    text = text if text.startswith(votes.FAILURE) else f"{CALL}{what}\n{text}"
    try:
        return votes.agree_on_text(text, group, what, remedy, number=number).numbers
    except DPFuseError as error:
        if not error._lines or not all(line.startswith(CALL) for line in error._lines):
            raise
        first, other = (line.removeprefix(CALL) for line in error._lines)
        raise DPFuseError(
            f"the ranks are in different calls: rank 0 has reached {first!r}, and another rank {other!r}; expected the "
            "same on every rank. Call fit, evaluate and predict on all ranks, not on a single rank."
        ) from None


def any_rank(flag: bool, what: str = "a barrier") -> bool:
    """Whether `flag` is set on some rank. When it returns, all ranks have called it, at the place `what`.

    Raises:
        DPFuseError: Some ranks call it with another `what`. Every rank raises.
    """
    return any(agree("", what, number=int(flag)))


def broadcast(tensors: Iterable[tuple[str, Tensor]], what: str, *facts: str) -> None:
    """Overwrite the named tensors of all ranks with those of rank 0. `facts` must be equal on all ranks, too.

    Raises:
        DPFuseError: The ranks' tensors differ in name, dtype, shape or `requires_grad`, or the facts differ. Every
            rank raises.
    """
    group = collective.resolve_group(None)
    if group is None or group.size() == 1:
        return
    named = list(tensors)
    lines = [f"{name}: {one.dtype}{list(one.shape)}{' trained' * one.requires_grad}" for name, one in named]
    agree("\n".join([*facts, *lines]), what, "Build the same network on every rank.")
    send_tensors([tensor for _, tensor in named], group)


def gather_rows(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return the rows of all ranks, in the order of the ranks, on every rank. There must be several ranks.

    Each tensor is [rows, …], of any dtype; only `rows` may differ between ranks. The results are [sum of rows, …], on
    the device of the first tensor, with equal bits.

    Raises:
        DPFuseError: A tensor has another number of rows, or the ranks' tensors differ in number, shape or dtype. Every
            rank raises.
    """
    counts = agree(
        _layout(tensors, rows),
        "what the ranks gather (indices, outputs, labels)",
        "Make the network give every rank the same shapes, with one row per sample.",
        number=rows,
    )
    group = collective.resolve_group(None)
    assert group is not None
    device = collective.group_device(group)
    # One row holds a sample's part of every tensor as bytes: one collective for all dtypes.
    parts = [_as_bytes(tensor.detach().to(device).contiguous()) for tensor in tensors]
    packed = torch.cat(parts, dim=1)
    wire = packed.new_zeros(max(counts), packed.shape[1])
    wire[:rows] = packed
    gathered = collective.all_gather(wire, group)
    joined = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
    found = [tensor.new_empty(len(joined), *tensor.shape[1:], device=device) for tensor in tensors]
    for part, out in zip(joined.split([part.shape[1] for part in parts], dim=1), found, strict=True):
        _as_bytes(out).copy_(part)
    return [out.to(tensors[0].device) for out in found]


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' tensors, as part of the autograd graph of every rank."""
    result: Tensor = _SumOverRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every rank's loss depends on every rank's summand.
        return sum_over_ranks(grads[0], ctx.group), None


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as rows of bytes, one for each of its rows."""
    return tensor.view(len(tensor), tensor.numel() // len(tensor)).view(torch.uint8)


def _layout(tensors: Sequence[Tensor], rows: int) -> str:
    lines = []
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.shape[:1] != (rows,):
            return (
                f"{votes.FAILURE}tensor {index} has shape {tuple(tensor.shape)} and layout {tensor.layout} for a batch "
                f"of {rows} samples; expected a dense tensor whose dimension 0 is {rows}. Make the network give one "
                "row per sample."
            )
        lines.append(f"tensor {index}: {tensor.dtype}[*, {', '.join(map(str, tensor.shape[1:]))}]")
    return "\n".join(lines)
