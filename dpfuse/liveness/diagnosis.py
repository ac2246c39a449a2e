"""Judge ranks that wait: from what is known of all ranks, find which rank failed, and say so in words. Pure functions.

Knows no thread, no network and no process group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from math import inf, isfinite
from typing import Any

from dpfuse.comm.waiting import Doing, describe_place

__all__ = [
    "Diagnosis",
    "End",
    "EndKind",
    "RankState",
    "Status",
    "end_with",
    "find_cause",
    "judge",
    "names",
    "printable",
]

SILENT = 3.0  # seconds without a heartbeat after which a rank counts as silent; it sends one every half second
FAILED_GRACE = 1.0  # seconds to wait for a rank that failed: its last message may still arrive
NORMAL_GRACE = 5.0  # the same for a rank that ended normally: its last data may still arrive
WARN_AFTER = 10.0  # seconds of waiting
MAX_TEXT = 400  # characters of a peer's text in a message
MAX_LINES = 12  # of a report
CALLS = {Doing.SAVE: "save_checkpoint()", Doing.LOAD: "load_checkpoint()"}
MAX_SPANS = 16  # of ranks in one line of it
# The texts with which back ends report the end of a peer; the peer's own error says more.
PEER_HAS_ENDED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


@dataclass(frozen=True)
class Status:
    """What a heartbeat says about its rank; times in seconds."""

    doing: Doing = Doing.BETWEEN
    step: int = 1  # the synchronised backward that runs or comes next
    bucket: int = -1  # the last one sent, or waited for
    wrapper: int = 0
    age: float = 0.0  # since the rank last moved
    waits: bool = False  # for its peers, in a collective of dpfuse
    limit: float = inf  # stall_timeout: how long it waits for a silent peer
    at: str = ""  # the user's line, if the rank has not moved for a while
    call: str = ""  # the function of torch.distributed in which the rank is blocked
    blocked: float = 0.0  # for how long
    failed_step: int = 0  # the last step in which a forward has raised; 0: none has
    error: str = ""  # what it raised

    def message(self) -> list[Any]:
        """Return the status as JSON values."""
        limit = self.limit if isfinite(self.limit) else -1
        times = round(self.age, 2), round(self.blocked, 2)
        place = int(self.doing), self.step, self.bucket, self.wrapper
        texts = self.at[:MAX_TEXT], self.call[:MAX_TEXT]
        return [*place, times[0], self.waits, limit, *texts, times[1], self.failed_step, self.error[:MAX_TEXT]]

    @classmethod
    def from_message(cls, message: Any) -> Status:
        """Return the status that a message holds.

        Raises:
            ValueError: the message is not a status.
        """
        kinds = (int, int, int, int, (int, float), bool, (int, float), str, str, (int, float), int, str)
        if not isinstance(message, list) or len(message) != len(kinds):
            raise ValueError("a status has twelve parts")
        for value, kind in zip(message, kinds, strict=True):
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # type: ignore[arg-type]
                raise ValueError(f"{value!r:.50} is not part of a status")
        doing, step, bucket, wrapper, age, waits, limit, at, call, blocked, failed_step, error = message
        if not 0 <= age < inf or not 0 <= blocked < inf or limit != limit or len(at + call + error) > 3 * MAX_TEXT:
            raise ValueError("a status is out of range")
        limit = float(limit) if limit > 0 else inf
        texts = printable(at), printable(call)
        failed = failed_step, printable(error)
        return cls(Doing(doing), step, bucket, wrapper, float(age), waits, limit, *texts, blocked, *failed)

    def __str__(self) -> str:
        where = describe_place(self.wrapper, self.doing, self.step, self.bucket, waits=self.waits)
        if self.call:
            where += f" and is blocked in torch.distributed's {self.call}"
        if self.age >= 1:
            where += f", for {self.age:.0f} s"
        where += f", at {self.at}" if self.at else ""
        if self.failed_step and self.doing is Doing.BETWEEN:  # as after the last batch
            where += (
                f"; its forward has raised in step {self.failed_step} with {self.error}, so if it skipped the batch, "
                "it has fewer than the others"
            )
        return where


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
    secondary: bool = False  # whether the failure of another rank caused it
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
            else "ended suddenly (killed, or its machine failed)"
        )


def end_with(error: BaseException, kind: EndKind = EndKind.FAILED) -> End:
    """Return the end of a rank of which `error` is the reason."""
    name, told = type(error).__name__, _text_of(error)
    text = f"{name}: {told}" if told else name
    return End(kind, text.partition("\n")[0][:MAX_TEXT], _is_secondary(error))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as problem:  # of the user's __str__, which may raise anything
        return f"<str() of it raised {type(problem).__name__}>"


def _is_secondary(error: BaseException | None) -> bool:
    """Whether an exception only says that another rank has failed."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        text = _text_of(error)
        if getattr(error, "ranks", ()) or (isinstance(error, RuntimeError) and any(t in text for t in PEER_HAS_ENDED)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class RankState:
    """What is known of one rank."""

    status: Status | None = None  # None: no heartbeat has come from it
    silence: float = 0.0  # seconds since its last heartbeat, or from its last heartbeat to its end
    end: End | None = None

    @property
    def alive(self) -> bool:
        """Whether the rank runs Python and can be reached."""
        return self.status is not None and self.end is None and self.silence < SILENT

    def __str__(self) -> str:
        if self.status is None:
            return "has never sent a heartbeat" if self.end is None else str(self.end)
        if self.end is not None:
            return f"{self.end}; its last heartbeat, {max(0.0, self.silence):.1f} s before, said that it {self.status}"
        if self.silence >= SILENT:
            return (
                f"has sent no heartbeat for {self.silence:.0f} s: it runs no Python (stopped, or a call that holds "
                f"Python's lock) or cannot be reached; its last heartbeat said that it {self.status}"
            )
        return str(self.status)


@dataclass(frozen=True)
class Diagnosis:
    """What to tell ranks that wait."""

    fatal: bool  # whether the wait cannot succeed
    ranks: tuple[int, ...]  # those that are waited for, or have failed
    waited: float  # seconds
    text: str


def judge(states: Mapping[int, RankState], *, whole_job: bool) -> Diagnosis | None:
    """Return what to tell the ranks that wait, if one of them has waited for too long; else None.

    A finding is fatal only if the wait cannot succeed. A rank that is alive and computes is waited for without limit.

    Args:
        whole_job: whether the group has all ranks of the job. In a smaller group, a rank that is blocked in a
            collective of the user may wait for a rank outside the group.
    """
    waiting = {rank: one.status for rank, one in states.items() if one.alive and one.status and one.status.waits}
    if not waiting:
        return None
    waited = max(status.age for status in waiting.values())
    limit = min(status.limit for status in waiting.values())

    def found(fatal: bool, ranks: Collection[int], why: str) -> Diagnosis:
        return Diagnosis(fatal, tuple(sorted(ranks)), waited, f"{why}\n{report(states)}")

    if isfinite(limit):
        causes = _causes(states)
        ends = [end for rank in causes if (end := states[rank].end) is not None]
        grace = min(FAILED_GRACE if any(end.failed for end in ends) else NORMAL_GRACE, limit)
        if ends and min(waited, max(end.ago for end in ends)) >= grace:
            several = f"{names(causes)} ended; first, " if len(causes) > 1 else ""
            return found(True, causes, f"{several}rank {causes[0]} {ends[0]}{_advice(states, ends[0])}")
        silent = [rank for rank, one in states.items() if one.status and not one.end and one.silence >= limit]
        if silent:
            return found(
                True,
                silent,
                f"{names(silent)} sent no heartbeat for {limit:g} s, which is stall_timeout; expected two per "
                "second. Look at that process, its machine and the network",
            )
        blocked = _deadlocked(states, limit, whole_job)
        if blocked:
            return found(
                True,
                blocked,
                f"all ranks have waited for {limit:g} s, which is stall_timeout, but not for the same collective; "
                "expected the same collectives in the same order on all ranks"
                + (
                    _missed_call(states)
                    or ". Give all ranks the same number of batches, or train inside `with model.join():` of "
                    "DistributedDataParallel"
                ),
            )
    if waited >= min(WARN_AFTER, limit / 2):
        others = [rank for rank in states if rank not in waiting]
        told = names(waiting)
        why = f"{told} still wait{'s' * (len(waiting) == 1)} for others{_missed_call(states)}:"
        return found(False, others, why)
    return None


def find_cause(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Return why a collective has failed at once; None if no rank is known to have ended."""
    causes = _causes(states)
    if not causes:
        return None
    first = causes[0]
    return Diagnosis(True, (first,), 0.0, f"rank {first} {states[first]}{_advice(states, states[first].end)}")


def _missed_call(states: Mapping[int, RankState]) -> str:
    """Return what to do where a rank waits in a call of every rank, and another one has gone on; else nothing."""
    for rank, one in states.items():
        called = one.status
        if called is None or not called.waits or called.doing not in CALLS:
            continue
        for other, peer in states.items():
            status = peer.status
            if status is None or status.doing is called.doing or status.wrapper != called.wrapper:
                continue
            has_gone_on = (status.waits or status.call) and status.step >= called.step
            if peer.end is not None or has_gone_on:
                return (
                    f". Every rank calls {CALLS[called.doing]}: rank {rank} waits in it, and rank {other} is "
                    "elsewhere. Take the call out of `if rank == 0:`; rank 0 alone writes the file"
                )
    return ""


def _advice(states: Mapping[int, RankState], end: End | None) -> str:
    """Return what to do about an end that is no failure: fewer calls or batches than its peers, or a hidden error."""
    if end is None or end.failed:
        return ""
    return _missed_call(states) or (
        ". If its batches ran out, give all ranks the same number of batches, or train inside `with model.join():` of "
        "DistributedDataParallel. If it caught an exception, let it raise the exception again"
    )


def report(states: Mapping[int, RankState]) -> str:
    """Return what each rank does, one line for all ranks that do the same."""
    keys = sorted(((_group_key(one), rank) for rank, one in states.items()), key=lambda pair: pair[0])
    groups = [[rank for _, rank in same] for _, same in groupby(keys, key=lambda pair: pair[0])]
    groups.sort(key=lambda ranks: (len(ranks), ranks))
    lines = [f"  {names(ranks)}{': each' if len(ranks) > 1 else ''} {states[ranks[0]]}" for ranks in groups[:MAX_LINES]]
    more = sum(map(len, groups[MAX_LINES:]))
    return "\n".join(lines + ([f"  and {more} ranks elsewhere"] if more else []))


def printable(text: str, *, lines: bool = False) -> str:
    """Return a peer's text without control characters, which a terminal would obey; `lines` keeps line breaks."""
    return "".join(char if char.isprintable() or (lines and char == "\n") else " " for char in text)


def _deadlocked(states: Mapping[int, RankState], limit: float, whole_job: bool) -> list[int]:
    """Return the ranks that block the others, if no rank can ever go on; else an empty list."""
    kinds: dict[str, list[int]] = {}
    for rank, one in states.items():
        status = one.status
        if not one.alive or status is None:
            return []
        if status.waits and status.age >= limit:
            # Another bucket is not another collective: one rank may already have data that still travels to another.
            kinds.setdefault(str(status.doing), []).append(rank)
        elif status.call and status.blocked >= limit and whole_job:
            kinds.setdefault(f"{status.call}()", []).append(rank)
        else:
            return []
    if len(kinds) < 2:
        return []  # all wait for the same collective, which a slow network may still deliver
    calls = [rank for kind, ranks in kinds.items() if kind.endswith("()") for rank in ranks]
    return calls or min(kinds.values(), key=lambda ranks: (len(ranks), ranks))


def _causes(states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that ended first-hand, not because others had; in the order in which they ended."""
    ended = {rank: one.end for rank, one in states.items() if one.end is not None}
    kinds = {rank: 2 if end.secondary else 0 if end.failed else 1 for rank, end in ended.items()}
    causes = [rank for rank, kind in kinds.items() if kind == min(kinds.values())]
    return sorted(causes, key=lambda rank: -ended[rank].ago)


def _group_key(one: RankState) -> str:
    """Return a text that is equal for ranks that do the same, whatever their times."""
    status = one.status
    if status is None:
        return "never"
    place = (status.doing, status.step, status.bucket, status.wrapper, status.waits, status.at, status.call)
    end = None if one.end is None else (one.end.kind, one.end.error)
    return repr((end, one.alive, place))


def names(ranks: Collection[int]) -> str:
    """Return "rank 3", or "ranks 0-6, 9"."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    if len(texts) > MAX_SPANS:
        texts[MAX_SPANS:] = ["…"]
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(texts)}"
