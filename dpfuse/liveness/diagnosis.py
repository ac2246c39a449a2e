"""From what is known of all ranks: has one of them to be waited for no longer, and why, in words? Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from math import inf, isfinite
from typing import Any

from dpfuse.engine.waiting import Doing, describe_place

__all__ = ["End", "EndKind", "Finding", "Seen", "Status", "blame", "clean", "end_with", "judge"]

SILENT = 3.0  # seconds without a heartbeat after which a rank counts as silent; two come in each
DIED_GRACE = 1.0  # seconds that a rank still waits for one that died, whose last message may be on its way
LEFT_GRACE = 5.0  # the same for one that ended normally, whose last data may be
WARN_AFTER = 10.0  # seconds of waiting
MAX_TEXT = 400  # characters of a peer's text in a message
MAX_LINES = 12  # of a report
# The texts with which back ends report that a peer is gone; the peer's own error says more.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


@dataclass(frozen=True)
class Status:
    """What a rank tells of itself; times in seconds."""

    doing: Doing = Doing.BETWEEN
    step: int = 1  # the synchronised backward that is running or comes next
    bucket: int = -1  # the last one sent, or waited for
    wrapper: int = 0
    age: float = 0.0  # since it last moved
    waits: bool = False  # for its peers, in a collective of ours
    limit: float = inf  # of waiting for a peer that is silent
    at: str = ""  # the user's line, where it has not moved for a while
    call: str = ""  # the function of torch.distributed in which it is blocked
    blocked: float = 0.0  # since when

    def message(self) -> list[Any]:
        """As it travels."""
        limit = self.limit if isfinite(self.limit) else -1
        times = round(self.age, 2), round(self.blocked, 2)
        place = int(self.doing), self.step, self.bucket, self.wrapper
        return [*place, times[0], self.waits, limit, self.at[:MAX_TEXT], self.call[:MAX_TEXT], times[1]]

    @classmethod
    def from_message(cls, message: Any) -> Status:
        """Raises ValueError for what is none."""
        kinds = (int, int, int, int, (int, float), bool, (int, float), str, str, (int, float))
        if not isinstance(message, list) or len(message) != len(kinds):
            raise ValueError("a status has ten parts")
        for value, kind in zip(message, kinds, strict=True):
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # type: ignore[arg-type]
                raise ValueError(f"{value!r:.50} is no part of a status")
        doing, step, bucket, wrapper, age, waits, limit, at, call, blocked = message
        if not 0 <= age < inf or not 0 <= blocked < inf or limit != limit or len(at) + len(call) > 2 * MAX_TEXT:
            raise ValueError("a status is out of range")
        limit = float(limit) if limit > 0 else inf
        return cls(Doing(doing), step, bucket, wrapper, float(age), waits, limit, clean(at), clean(call), blocked)

    def __str__(self) -> str:
        where = describe_place(self.wrapper, self.doing, self.step, self.bucket, waits=self.waits)
        if self.call:
            where += f" and is blocked in torch.distributed's {self.call}"
        if self.age >= 1:
            where += f", for {self.age:.0f} s"
        return where + (f", at {self.at}" if self.at else "")


class EndKind(IntEnum):
    """How a rank stopped taking part in a group."""

    NORMAL = 0  # its process ended without an error, or destroyed the group
    FAILED = 1  # its process ended with an error, or suddenly
    LEFT = 2  # its process lives, but joins no further collective of the group


@dataclass(frozen=True)
class End:
    """The end of a rank's part in a group."""

    kind: EndKind
    error: str = ""  # "ValueError: …", if the rank could send it
    echo: bool = False  # whether another rank's end is the reason
    ago: float = 0.0  # seconds

    @property
    def failed(self) -> bool:
        """Whether an error or a sudden end is the reason."""
        return self.kind is not EndKind.NORMAL

    def __str__(self) -> str:
        if self.kind is EndKind.LEFT:
            return f"left its process group: {self.error}"
        if self.error:
            return f"ended with {self.error}"
        return (
            "ended without an error, or has destroyed the process group"
            if self.kind is EndKind.NORMAL
            else "ended suddenly (killed, or its machine is gone)"
        )


def end_with(error: BaseException, kind: EndKind = EndKind.FAILED) -> End:
    """Return the end of a rank of which `error` is the reason."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return End(kind, text.partition("\n")[0][:MAX_TEXT], _is_echo(error))


def _is_echo(error: BaseException | None) -> bool:
    """Whether an exception only says that another rank has ended."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if getattr(error, "ranks", ()) or (isinstance(error, RuntimeError) and any(t in str(error) for t in ECHOES)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class Seen:
    """What is known of one rank."""

    status: Status | None = None  # None: nothing was ever heard of it
    silence: float = 0.0  # seconds since its last heartbeat, or between that and its end
    end: End | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs Python and can be reached."""
        return self.status is not None and self.end is None and self.silence < SILENT

    def __str__(self) -> str:
        if self.status is None:
            return "was never heard of" if self.end is None else str(self.end)
        if self.end is not None:
            return f"{self.end}; {self.silence:.1f} s before that it said that it {self.status}"
        if self.silence >= SILENT:
            return (
                f"has sent no heartbeat for {self.silence:.0f} s: it runs no Python (stopped, or a call that holds "
                f"Python's lock) or cannot be reached; the last that it said is that it {self.status}"
            )
        return str(self.status)


@dataclass(frozen=True)
class Finding:
    """What is to be said about ranks that wait."""

    fatal: bool  # whether waiting has no use
    ranks: tuple[int, ...]  # those that are waited for, or to blame
    waited: float  # seconds
    text: str


def judge(seen: Mapping[int, Seen], *, whole_job: bool) -> Finding | None:
    """What is to be said, if some rank has waited for too long.

    Nothing is ever fatal that may still end well: a rank that is alive and computes is waited for as long as it takes.

    Args:
        seen: what is known of the ranks.
        whole_job: whether they are all of the job. Otherwise one that is blocked in a collective of the user's may
            wait for a rank that is not among them.

    Returns:
        What is to be said; None where no rank waits for long.
    """
    waiting = {rank: one.status for rank, one in seen.items() if one.alive and one.status and one.status.waits}
    if not waiting:
        return None
    waited = max(status.age for status in waiting.values())
    limit = min(status.limit for status in waiting.values())

    def found(fatal: bool, ranks: Collection[int], why: str) -> Finding:
        return Finding(fatal, tuple(sorted(ranks)), waited, f"{why}\n{report(seen)}")

    if isfinite(limit):
        causes = _causes(seen)
        ends = [end for rank in causes if (end := seen[rank].end) is not None]
        grace = min(DIED_GRACE if any(end.failed for end in ends) else LEFT_GRACE, limit)
        if ends and min(waited, max(end.ago for end in ends)) >= grace:
            return found(True, causes, f"{_listed(causes)} {ends[0]}")
        silent = [rank for rank, one in seen.items() if one.status and not one.end and one.silence >= limit]
        if silent:
            return found(
                True,
                silent,
                f"{_listed(silent)} sent no heartbeat for {limit:g} s, which is stall_timeout; expected two in each. "
                "Look at that process, its machine and the network",
            )
        blocked = _deadlocked(seen, limit, whole_job)
        if blocked:
            return found(
                True,
                blocked,
                f"all ranks have waited for {limit:g} s, which is stall_timeout, and not for the same; expected the "
                "same collectives in the same order on all of them. Give all ranks the same number of steps",
            )
    if waited >= min(WARN_AFTER, limit / 2):
        return found(
            False, [rank for rank in seen if rank not in waiting], f"{_listed(waiting)} still waits for others:"
        )
    return None


def blame(seen: Mapping[int, Seen]) -> Finding | None:
    """Why a collective has failed at once; None where no rank is known to have ended."""
    causes = _causes(seen)
    if not causes:
        return None
    first = causes[0]
    return Finding(True, (first,), 0.0, f"rank {first} {seen[first]}")


def report(seen: Mapping[int, Seen]) -> str:
    """What each rank does, a line for all that do the same."""
    texts = sorted(((_gist(one), rank) for rank, one in seen.items()), key=lambda pair: pair[0])
    groups = [[rank for _, rank in same] for _, same in groupby(texts, key=lambda pair: pair[0])]
    groups.sort(key=lambda ranks: (len(ranks), ranks))
    lines = [f"  {_listed(ranks)} {seen[ranks[0]]}" for ranks in groups[:MAX_LINES]]
    more = sum(map(len, groups[MAX_LINES:]))
    return "\n".join(lines + ([f"  and {more} ranks elsewhere"] if more else []))


def _deadlocked(seen: Mapping[int, Seen], limit: float, whole_job: bool) -> list[int]:
    """Those that are in the way, where all ranks are blocked for good; else none."""
    kinds: dict[str, list[int]] = {}
    for rank, one in seen.items():
        status = one.status
        if not one.alive or status is None:
            return []
        if status.waits and status.age >= limit:
            # One may have received what is still on its way to another: another bucket is no other collective.
            kinds.setdefault(str(status.doing), []).append(rank)
        elif status.call and status.blocked >= limit and whole_job:
            kinds.setdefault(f"{status.call}()", []).append(rank)
        else:
            return []
    if len(kinds) < 2:
        return []  # all wait for the same, which the network may still bring
    calls = [rank for kind, ranks in kinds.items() if kind.endswith("()") for rank in ranks]
    return calls or min(kinds.values(), key=lambda ranks: (len(ranks), ranks))


def _causes(seen: Mapping[int, Seen]) -> list[int]:
    """Ranks that ended, and not because others had; the first to do so first."""
    ended = {rank: one.end for rank, one in seen.items() if one.end is not None}
    kinds = {rank: 2 if end.echo else 0 if end.failed else 1 for rank, end in ended.items()}
    causes = [rank for rank, kind in kinds.items() if kind == min(kinds.values())]
    return sorted(causes, key=lambda rank: -ended[rank].ago)


def _gist(one: Seen) -> str:
    """What is equal where two ranks do the same, whatever the seconds."""
    status = one.status
    if status is None:
        return "never"
    place = (status.doing, status.step, status.bucket, status.wrapper, status.waits, status.at, status.call)
    end = None if one.end is None else (one.end.kind, one.end.error)
    return repr((end, one.alive, place))


def _listed(ranks: Collection[int]) -> str:
    """ "rank 3", or "ranks 0-6, 9"."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    names = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(_first(names, 16))}"


def _first(names: Sequence[str], count: int) -> list[str]:
    return [*names[:count], "…"] if len(names) > count else list(names)


def clean(text: str, *, lines: bool = False) -> str:
    """A peer's text without anything that a terminal would obey; `lines` keeps its lines."""
    return "".join(char if char.isprintable() or (lines and char == "\n") else " " for char in text)
