"""Why all ranks stop: the ranks that have asked for it, and their cause. Knows no group and no wish; only texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DEADLINE", "LAUNCHER", "StopReason", "cut", "reason_of"]

PROGRAM = "program"  # the cause of `dpfuse.request_stop`
DEADLINE = "deadline"  # the cause where a job is about to end; the text says when
LAUNCHER = "launcher"  # the cause where what has started the ranks has ended


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
