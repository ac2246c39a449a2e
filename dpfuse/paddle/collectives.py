"""Exchanges facts, flags and rows of tensors between the ranks of the high-level API. Sends tensors, never pickles.

The only file of the high-level API that calls collectives. Without a process group, or on one rank, nothing is sent.
Every exchange begins with one of fixed size that names its purpose. So all ranks raise the same error, even if they
have called different functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse import DPFuseError

__all__ = ["agree", "any_rank", "broadcast", "gather_rows", "world_size"]

TEXT_BYTES = 1024  # of a rank's text in an error; the rest is cut off
PROBLEM = "cannot be gathered: "  # first words of the text of a rank with failed checks


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agree(text: str, what: str, remedy: str) -> None:
    """Compare `text` over the ranks.

    Args:
        text: one fact per line.
        what: the subject of the text, for the error.
        remedy: what to do about a difference.

    Raises:
        DPFuseError: The texts differ, or other ranks compare something else. Every rank raises, and the error has the
            first difference.
    """
    _compare(text, what, remedy)


def any_rank(flag: bool, what: str = "a barrier") -> bool:
    """Whether `flag` is set on some rank. When it returns, all ranks have called it.

    Args:
        flag: this rank's flag.
        what: the place in the program, for the error.

    Raises:
        DPFuseError: Some ranks call it with another `what`. Every rank raises.
    """
    return any(_compare("", what, "", int(flag)))


def broadcast(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Overwrite the named tensors of all ranks with those of rank 0.

    Raises:
        DPFuseError: The ranks' tensors differ in name, dtype or shape. Every rank raises.
    """
    if world_size() == 1:
        return
    named = list(tensors)
    facts = [f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in named]
    agree("\n".join(facts), what, "Build the same network on every rank.")
    for _, tensor in named:
        wire = tensor.detach().to(_device()).contiguous()
        dist.broadcast(wire, 0)
        tensor.data.copy_(wire)  # on rank 0, too: read-only memory is an error on all ranks


def gather_rows(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return the rows of all ranks, in the order of the ranks, on every rank.

    Args:
        tensors: each [rows, …], any dtype. Only `rows` may differ between ranks.
        rows: samples in this rank's batch.

    Returns:
        As many tensors, [sum of rows, …], on the device of the first tensor, with equal bits.

    Raises:
        DPFuseError: A tensor has another number of rows, or the ranks' tensors differ in number, shape or dtype. Every
            rank raises.
    """
    counts = _compare(
        _layout(tensors, rows),
        "what the ranks gather (indices, outputs, labels)",
        "Make the network give every rank the same shapes, with one row per sample.",
        rows,
    )
    if world_size() == 1:
        return list(tensors)
    # One row holds a sample's part of every tensor as bytes: one collective for all dtypes.
    parts = [_as_bytes(tensor.detach().to(_device()).contiguous()) for tensor in tensors]
    packed = torch.cat(parts, dim=1)
    wire = packed.new_zeros(max(counts), packed.shape[1])
    wire[:rows] = packed
    joined = torch.cat([part[:count] for part, count in zip(_all_gather(wire), counts, strict=True)])
    found = [tensor.new_empty(len(joined), *tensor.shape[1:], device=_device()) for tensor in tensors]
    for part, out in zip(joined.split([part.shape[1] for part in parts], dim=1), found, strict=True):
        _as_bytes(out).copy_(part)
    return [out.to(tensors[0].device) for out in found]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as rows of bytes, one for each of its rows."""
    return tensor.view(len(tensor), tensor.numel() // len(tensor)).view(torch.uint8)


def _layout(tensors: Sequence[Tensor], rows: int) -> str:
    lines = []
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.shape[:1] != (rows,):
            return (
                f"{PROBLEM}tensor {index} has shape {tuple(tensor.shape)} and layout {tensor.layout} for a batch of "
                f"{rows} samples; expected a dense tensor whose dimension 0 is {rows}"
            )
        lines.append(f"tensor {index}: {tensor.dtype}[*, {', '.join(map(str, tensor.shape[1:]))}]")
    return "\n".join(lines)


def _compare(text: str, what: str, remedy: str, number: int = 0) -> list[int]:
    """Return every rank's `number` if the texts are equal and name no problem. Else raise one error on all ranks."""
    if world_size() == 1:
        if text.startswith(PROBLEM):
            raise DPFuseError(f"{what}: {text}. {remedy}")
        return [number]
    problem = text.startswith(PROBLEM)
    text = f"{what}\n{text}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    header = torch.tensor([digest, number, problem], dtype=torch.int64, device=_device())
    headers = [row.tolist() for row in _all_gather(header)]
    if all(row[0] == headers[0][0] and not row[2] for row in headers):
        return [row[1] for row in headers]
    wire = torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)
    found = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in _all_gather(wire.to(_device()))]
    places, _, texts = zip(*(each.partition("\n") for each in found), strict=True)
    if len(set(places)) > 1:
        got = "; ".join(f"rank {rank} has reached {place!r}" for rank, place in enumerate(places))
        raise DPFuseError(
            f"the ranks are in different calls: {got}; expected the same on every rank. Call fit, evaluate and predict "
            "on all ranks, not on a single rank."
        )
    for rank, (other, row) in enumerate(zip(texts, headers, strict=True)):
        if row[2]:
            raise DPFuseError(f"{what}: on rank {rank} it {other}. {remedy}")
    lines = list(zip(*(other.splitlines() for other in texts), strict=False))
    line = next((line for line in lines if len(set(line)) > 1), texts)
    got = "; ".join(f"rank {rank} has {' '.join(part.split())!r}" for rank, part in enumerate(line))
    raise DPFuseError(f"{what} differ between ranks: {got}; expected the same on every rank. {remedy}")


def _all_gather(wire: Tensor) -> list[Tensor]:
    received = [torch.empty_like(wire) for _ in range(world_size())]
    dist.all_gather(received, wire)
    return received


def _device() -> torch.device:
    """Return the device from which tensors are sent: the GPU only if the group cannot send from the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
