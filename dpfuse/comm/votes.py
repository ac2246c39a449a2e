"""Votes: ranks compare canonical texts, and every rank raises the same error if these differ.

Texts travel as length-checked UTF-8 bytes in uint8 tensors. Nothing that a peer sent is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dpfuse.comm import collective
from dpfuse.comm.failed import has_raised, mark_told
from dpfuse.comm.memory_errors import error_of
from dpfuse.errors import DPFuseError

__all__ = [
    "Agreed",
    "agree_on_order",
    "agree_on_success",
    "agree_on_text",
    "gather_texts",
    "order_in",
    "order_tensors",
    "report_failure",
    "share_lines",
    "share_text",
]

FAILURE = "failed: "  # first word of the text of a rank whose own checks failed
NO_MEMORY = 2  # in its header, where 1 tells of any other failure
Result = TypeVar("Result")
SHORT_TEXT = 62  # bytes
SHARED_TEXT = 510  # bytes
MAX_TEXT = 64 << 20  # bytes; longer texts are refused before memory is reserved for them


class Agreed(NamedTuple):
    """In what ranks that agree on a text may differ."""

    ready: bool  # whether all ranks are
    numbers: tuple[int, ...]  # of all ranks


def agree_on_text(
    text: str,
    group: dist.ProcessGroup,
    what: str,
    remedy: str = "",
    *,
    ready: bool = True,
    number: int = 0,
    out_of_memory: bool = False,
) -> Agreed:
    """Compare `text` over the ranks: one small fixed-size exchange, and the texts only if they differ.

    Args:
        text: canonical description, one fact per line.
        what: what the text describes, for the error.
        ready: a fact of this rank, in which ranks may differ.
        number: another one, below 2**63.
        out_of_memory: whether the text is a failure for want of memory. The error is then of torch's class, too.

    Returns:
        What the ranks have said in the last two.

    Raises:
        DPFuseError: on every rank with the same text, naming the first rank that differs from rank 0 and
            the first line in which it does.
    """
    try:
        header = _header_of(text, group, ready, number, out_of_memory)
    except Exception:  # memory may have been short for a moment, and the peers wait
        header = _header_of(text, group, ready, number, out_of_memory)
    rows: list[torch.Tensor] = []
    try:
        rows[:] = collective.all_gather(header, group)
        return _compare(rows, text, group, what, remedy)
    except DPFuseError:
        raise
    except Exception as error:
        if not rows or has_raised(error):
            raise
        # The peers go on: an error that passes must not be raised here.
        return _compare(rows, text, group, what, remedy)


def _header_of(text: str, group: dist.ProcessGroup, ready: bool, number: int, out_of_memory: bool) -> torch.Tensor:
    data = text.encode()
    failed = data.startswith(FAILURE.encode()) + out_of_memory
    header = [len(data), *hashlib.sha256(data).digest(), failed, ready, number]
    return torch.tensor(header, dtype=torch.int64, device="cpu").to(collective.group_device(group))


def _compare(rows: Sequence[torch.Tensor], text: str, group: dist.ProcessGroup, what: str, remedy: str) -> Agreed:
    """Compare the headers of texts; DPFuseError where they differ, or one of them is a failure."""
    data, device = text.encode(), rows[0].device
    headers = [row.tolist() for row in rows]
    numbers = [row.pop() for row in headers]
    readiness = [row.pop() for row in headers]
    differing = next((rank for rank, row in enumerate(headers) if row != headers[0]), None)
    failed = next((rank for rank, row in enumerate(headers) if row[-1]), None)
    if failed is not None:
        reason = _text_of(failed, headers[failed][0], data, group, device).removeprefix(FAILURE)
        raise error_of(f"{what} failed on rank {failed}: {reason}", out_of_memory=headers[failed][-1] == NO_MEMORY)
    if differing is None:
        return Agreed(all(readiness), tuple(numbers))
    ours = _text_of(0, headers[0][0], data, group, device).splitlines()
    theirs = _text_of(differing, headers[differing][0], data, group, device).splitlines()
    left, right = next(pair for pair in zip_longest(ours, theirs, fillvalue="nothing") if pair[0] != pair[1])
    error = DPFuseError(
        f"{what} differs between ranks: rank {differing} has {right!r}, rank 0 has {left!r}; expected the "
        f"same on every rank. {remedy}".rstrip()
    )
    error._lines = left, right
    raise error


def report_failure(error: BaseException, group: dist.ProcessGroup, what: str) -> None:
    """Take part in the `agree_on_text` of the peers on a rank that has failed.

    The peers raise an error with the text of `error` instead of waiting for this rank.
    """
    with suppress(DPFuseError):
        agree_on_text(
            FAILURE + (str(error) or type(error).__name__),
            group,
            what,
            out_of_memory=isinstance(error, torch.OutOfMemoryError),
        )


def agree_on_success(function: Callable[[], Result], group: dist.ProcessGroup, what: str) -> Result:
    """Call `function`, which communicates nothing, and return its result if it raises on no rank.

    Raises:
        DPFuseError: it raised on some rank; every rank raises this error, which names the first such rank.
    """
    try:
        result = function()
    except BaseException as error:
        report_failure(error, group, what)
        if not isinstance(error, Exception):
            mark_told(error)
            raise
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        raise error_of(f"{what} failed on rank {group.rank()}: {error}", out_of_memory=out_of_memory) from error
    agree_on_text("", group, what)
    return result


def gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return every rank's text, by rank; each has at most `SHORT_TEXT` bytes."""
    row = _row(text, SHORT_TEXT).to(collective.group_device(group))
    return [_text_in(other) for other in collective.all_gather(row, group)]


def share_text(text: str, group: dist.ProcessGroup) -> str:
    """Return the text of rank 0, of at most `SHARED_TEXT` bytes."""
    row = _row(text, SHARED_TEXT).to(collective.group_device(group))
    collective.broadcast(row, group)
    return _text_in(row)


def share_lines(lines: Sequence[str], group: dist.ProcessGroup, source: int = 0) -> list[str]:
    """Return the lines of rank `source`, of any number and length; they may contain ends of lines themselves."""
    data = json.dumps(list(lines)).encode()
    device = collective.group_device(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    collective.broadcast(length, group, source)
    return [str(line) for line in json.loads(_text_of(source, int(length.item()), data, group, device))]


def order_tensors(
    order: Sequence[int], marks: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `agree_on_order` exchanges: ready order and numbers, [numbers] each.

    Args:
        order: parameter indices in the order in which they became ready here; may leave some out.
        marks: ready marks of each parameter here, and what other numbers are to be compared.
    """
    device = collective.group_device(group)
    padded = [*order, *[-1] * (len(marks) - len(order))]
    return (
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor(marks, dtype=torch.int32, device=device),
    )


def agree_on_order(order: torch.Tensor, marks: torch.Tensor, group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite the order with that of rank `source`, and each number with the largest on any rank."""
    collective.broadcast(order, group, source)
    collective.all_reduce_max(marks, group)


def order_in(order: torch.Tensor) -> list[int]:
    """Return the parameter indices in a tensor of `order_tensors`."""
    return [index for index in order.tolist() if index >= 0]


def _row(text: str, limit: int) -> torch.Tensor:
    """A text in a tensor whose length is the same on all ranks: two bytes of length, then the text."""
    data = text.encode()
    assert len(data) <= limit
    return torch.frombuffer(bytearray(len(data).to_bytes(2, "big") + data.ljust(limit, b"\0")), dtype=torch.uint8)


def _text_in(row: torch.Tensor) -> str:
    data = bytes(row.cpu().numpy())
    return data[2 : 2 + int.from_bytes(data[:2], "big")].decode(errors="replace")


def _text_of(rank: int, length: int, own: bytes, group: dist.ProcessGroup, device: torch.device) -> str:
    if not 0 <= length <= MAX_TEXT:
        raise DPFuseError(f"rank {rank} announced a text of {length} bytes; expected at most {MAX_TEXT}")
    data = bytearray(own) if group.rank() == rank else bytearray(length)
    # A text of no bytes cannot be viewed as a tensor; one more byte costs nothing.
    wire = torch.frombuffer(data + b"\0", dtype=torch.uint8).to(device)
    collective.broadcast(wire, group, source=rank)
    return bytes(wire.cpu().numpy())[:length].decode(errors="replace")
