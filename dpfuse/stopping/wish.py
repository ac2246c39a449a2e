"""The wish of this process that all ranks stop together, and why they do. Knows no group, no wrapper and no signal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DEADLINE", "LAUNCHER", "StopReason", "Wish", "cut", "reason_of", "request_stop", "wish"]

PROGRAM = "program"  # the cause of `dpfuse.request_stop`
DEADLINE = "deadline"  # the cause where a job is about to end; the text says when
LAUNCHER = "launcher"  # the cause where what has started the ranks has ended


class Wish:
    """Whether this process wants all ranks to stop, and why.

    A handler of a signal may make it, at any moment. So it is one assignment, without a lock.

    Attributes:
        words: the cause and, after a blank, a text of the program; empty without a wish.
        told: whether the program has read that all ranks stop. If it then ends well, the launcher knows why.
        forgotten: how often `dpfuse.forget_stop` was called, on all ranks.
    """

    def __init__(self) -> None:
        self.words = ""
        self.forgotten = 0
        self.told = False

    def make(self, cause: str, text: str = "") -> None:
        """Wish that all ranks stop. The first wish stays."""
        if not self.words:
            self.words = f"{cause} {text}".rstrip()

    def forget(self) -> None:
        """Wish it no more."""
        self.words, self.told = "", False


wish = Wish()  # of this process
os.register_at_fork(after_in_child=wish.forget)  # a worker of a DataLoader wishes nothing


def request_stop(reason: str = "") -> None:
    """Ask all ranks to stop together. One rank is enough, from any thread.

    All ranks learn of it in the next backward that synchronises, on a GPU in the one after it: `model.stop_requested`
    is then true on each of them. Beside other dimensions of a mesh, all groups of the mesh learn of it some backwards
    later. This adds no collective to a step. Where no backward follows, call `dpfuse.agree_to_stop`.

    Args:
        reason: for `model.stop_reason`, such as "the disk is full". At most 54 bytes of it travel.

    Raises:
        TypeError: the reason is no text.

    Example:
        >>> import torch, torch.distributed as dist, dpfuse
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        >>> dpfuse.request_stop("a key was pressed")
        >>> model.stop_requested
        False
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.stop_requested, str(model.stop_reason)
        (True, 'rank 0 has asked: a key was pressed')
        >>> dist.destroy_process_group()
        >>> dpfuse.forget_stop()
    """
    if not isinstance(reason, str):
        raise TypeError(
            f"request_stop() got a reason of type {type(reason).__name__}, expected a text. Pass what a reader of the "
            "log is to know, such as 'the disk is full', or nothing."
        )
    wish.make(PROGRAM, " ".join(reason.split()))


@dataclass(frozen=True)
class StopReason:
    """Why all ranks stop. It is the same on each of them.

    Attributes:
        ranks: of the group, those that have asked. Beside other dimensions of a mesh, their ranks in the job.
        cause: of the first of them: the name of a signal, such as "SIGTERM"; "program", "deadline" or "launcher".
        text: of the first of them: as `dpfuse.request_stop` has got it, or when its job ends; empty otherwise.

    Example:
        >>> import dpfuse
        >>> str(dpfuse.StopReason((1,), "SIGTERM"))
        'rank 1 got SIGTERM'
        >>> str(dpfuse.StopReason((0, 2), "program", "the disk is full"))
        'rank 0 has asked: the disk is full; asked, too: rank 2'
    """

    ranks: tuple[int, ...]
    cause: str
    text: str = ""

    def __str__(self) -> str:
        first, *others = self.ranks
        why = f"got {self.cause}"
        if self.cause == PROGRAM:
            why = f"has asked{f': {self.text}' if self.text else ''}"
        elif self.cause == DEADLINE:
            why = f"is near its deadline, {self.text}"
        elif self.cause == LAUNCHER:
            why = "has lost its launcher"
        if not others:
            return f"rank {first} {why}"
        return f"rank {first} {why}; asked, too: rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"


def reason_of(words: Sequence[str]) -> StopReason | None:
    """Return why ranks stop of which each has gathered these words; None if no rank wishes it.

    Example:
        >>> reason_of(["", "program a key", "SIGTERM"])
        StopReason(ranks=(1, 2), cause='program', text='a key')
    """
    ranks = tuple(rank for rank, said in enumerate(words) if said)
    if not ranks:
        return None
    cause, _, text = words[ranks[0]].partition(" ")
    return StopReason(ranks, cause, text)


def cut(words: str, most: int) -> str:
    """Return the beginning that takes at most so many bytes, in whole characters. What is no text becomes "?".

    Example:
        >>> cut("größer", 4)
        'grö'
    """
    return words.encode(errors="replace")[:most].decode(errors="ignore")
