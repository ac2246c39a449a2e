"""Find ranks that are late in each step, and communication that has become slow: from seconds by phase to a finding.

Pure: knows no thread, no network and no clock. It runs on the first rank, which gets the seconds of all ranks.

A step ends at the same moment on all ranks, about, for each of them needs the gradients of all. So all ranks have the
same time from one end to the next. A rank that was busy longer than all others waited less, and the others waited for
it. What even this rank waits for is communication.

Single steps say little, since each rank is late now and then. So medians over a window of blocks of steps are compared
with how far the blocks differ. Two windows are used. The short one finds a delay of a fifth of a step in two seconds.
The long one has blocks of eight times as many steps: it finds smaller delays, and those of some steps only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from dpfuse.comm.step_clock import NAMES, WAITING
from dpfuse.liveness.diagnosis import names

__all__ = ["Late", "LateRanks", "SlowLink"]

Numbers = np.ndarray[Any, np.dtype[np.float64]]

BLOCKS = 20  # at least, in a window
SECONDS = 1.7  # at least, in a window
COARSE = 8  # short blocks in a long one
KEPT, IN_ALL = 256, 1 << 17  # steps of which some ranks have not told yet; what is kept of them, over ranks
LEAST = 0.03  # of a step; a rank that is less late is not late
OFTEN = 0.8  # a rank is late in this part of the blocks of a window
SPREAD = 1.5  # a rank is late by at least this many times the spread of the blocks
# Other programs on a busy machine make a rank late in several phases, now and then. So a lateness in several phases is
# watched longer, and must be this many times the spread of the blocks.
STEADY = 3.0
ENDS = 0.5  # a finding ends when the value falls below this part of what makes one begin
MAIN = 0.85  # a lateness is in one phase if this part of it is there; else it is in several phases
ALSO = 0.25  # a further phase is named, too, if this part of a lateness is there
DOUBLED = 2.0  # communication is slow if each rank waits this many times as long as usual
NOTICED = 0.08  # of a step; a smaller growth of communication is not told
SLOWER = 1.1  # times the usual busy seconds: then the machines are slow, and not only the link
USUAL = 512  # short blocks, of which the median is usual
BEATS = 24  # heartbeats of which the rates of connections are kept
FRACTION = 0.5  # of the rate of before: a connection through a slow link delivers at no more
TINY = 1e-9  # bytes per second
LONGEST_NAMES = 200  # characters of two addresses
LONGEST = 1e9  # seconds of a phase in a whole training
DEVIATION = 1.4826  # of a normal distribution, in medians of absolute deviations


@dataclass(frozen=True)
class Late:
    """Ranks that are late together; mostly one."""

    ranks: tuple[int, ...]
    phases: tuple[str, ...]  # the longest first
    since: int  # the step, counted from 1
    seconds: float  # for which each of them is busy in a step beyond the median of the other ranks
    gain: float  # seconds by which a step would be shorter without them: it then waits for the slowest of the others
    step: float  # seconds of a step

    def __str__(self) -> str:
        """A sentence without a full stop."""
        those = "them" if len(self.ranks) > 1 else "it"
        return (
            f"{self.name} {_ms(self.seconds)} ({self.seconds / self.step:.0%}) late in {' and '.join(self.phases)} "
            f"since step {self.since:,}; without {those} a step takes {self.without:.2f} of the time"
        )

    @property
    def without(self) -> float:
        """What part of the time a step would take without these ranks."""
        return 1 - self.gain / self.step

    @property
    def name(self) -> str:
        """The ranks, with the verb."""
        return f"{names(self.ranks)} {'is' if len(self.ranks) == 1 else 'are'}"

    def numbers(self) -> dict[str, float]:
        """Return what a log can show."""
        return {
            "late_rank": self.ranks[0],
            "late_ranks": len(self.ranks),
            "late_phase": NAMES.index(self.phases[0]),
            "late_since": self.since,
            "late_seconds": self.seconds,
            "step_without_late": self.without,
        }


@dataclass(frozen=True)
class SlowLink:
    """Communication that takes at least twice as long as usual, while backward waits for its end."""

    since: int  # the step, counted from 1
    seconds: float  # for which each rank waits in a step, at least
    usual: float  # the same before
    step: float  # seconds of a step
    rank: int | None  # at the end of that link; None if it cannot be told

    def __str__(self) -> str:
        """A sentence without a full stop."""
        return (
            f"every rank waits {_ms(self.seconds)} ({self.seconds / self.step:.0%} of a step) for communication since "
            f"step {self.since:,}, {_ms(self.usual)} before; no rank is late, so it is the link"
            f"{'' if self.rank is None else f' of rank {self.rank}, which delivers at a lower rate than before'}"
        )

    def numbers(self) -> dict[str, float]:
        """Return what a log can show."""
        rank = {} if self.rank is None else {"slow_link_rank": self.rank}
        numbers = {"slow_link_since": self.since, "slow_link_seconds": self.seconds, "slow_link_usual": self.usual}
        return {**numbers, **rank}


@dataclass
class LateRanks:
    """Judges the seconds of all ranks.

    Example:
        >>> ranks = LateRanks(2)
        >>> for step in range(1, 31):
        ...     for rank, forward in enumerate((0.05, 0.06)):  # rank 1 needs 10 ms more, for which rank 0 waits
        ...         ranks.add(rank, [(step, [0.0, forward * step, 0.0, 0.0, 0.0, (0.06 - forward) * step])])
        >>> ranks.judge()
        ['rank 1 is 10 ms (17%) late in forward since step 2; without it a step takes 0.83 of the time']
    """

    size: int  # number of ranks
    late: Late | None = None  # now
    link: SlowLink | None = None  # now
    _told: dict[int, dict[int, list[float]]] = field(default_factory=dict)  # by step and rank
    _step: int = 0  # the last one of which all have told
    _table: Numbers | None = None  # what they told then, [ranks, phases]
    _short: _RecentBlocks = field(default_factory=lambda: _RecentBlocks(1))
    _long: _RecentBlocks = field(default_factory=lambda: _RecentBlocks(COARSE))
    _found_in: _RecentBlocks | None = None  # the blocks that have shown the late ranks, and will show the end of that
    # By rank and the addresses of both ends of its connections: step and rate.
    _rates: dict[tuple[int, str, str], deque[tuple[int, float]]] = field(default_factory=dict)
    # Of each block: seconds that all ranks wait at least, and the median of those in which they are busy.
    _usual: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=USUAL))

    def add(self, rank: int, sums: Sequence[Any], rates: Sequence[Any] = ()) -> None:
        """Take what a rank tells: what its `StepClock.taken` and `DeliveryRates.read` have returned.

        Raises:
            ValueError: they are not what a clock can show.
        """
        for one in sums:
            match one:
                case (int(step), [*seconds]) if len(seconds) == len(NAMES) and all(map(_is_time, seconds)):
                    if step > self._step:
                        self._told.setdefault(step, {})[rank] = seconds
                case _:
                    raise ValueError("these are not the seconds of the phases")
        for one in rates:
            match one:
                case [str(own), str(peer), float(rate)] if rate >= 0 and len(own + peer) < LONGEST_NAMES:
                    if sums:
                        told = self._rates.setdefault((rank, own, peer), deque(maxlen=BEATS))
                        told.append((sums[-1][0], rate))
                case _:
                    raise ValueError("these are not the rates of connections")

    def numbers(self) -> dict[str, float]:
        """Return what `metrics()` shows of what is found now."""
        return {**(self.late.numbers() if self.late else {}), **(self.link.numbers() if self.link else {})}

    def judge(self) -> list[str]:
        """Return what has begun and what has ended since the last call, as sentences without a full stop."""
        new = sum(1 for _ in self._blocks())
        if not new:
            return []
        changes = self._judge_ranks()
        if self.late is None:
            changes += self._judge_link(new)
        return changes

    def _blocks(self) -> Iterator[None]:
        """Put what all ranks have told into the windows; yield once for each block."""
        for step in sorted(step for step, told in self._told.items() if len(told) == self.size):
            table = np.array([self._told[step][rank] for rank in range(self.size)])
            if self._table is not None:
                for window in (self._short, self._long):
                    window.add(self._step + 1, step - self._step, table - self._table)
                yield
            self._step, self._table = step, table
        self._told = {step: told for step, told in self._told.items() if step > self._step}
        while len(self._told) > max(1, min(KEPT, IN_ALL // self.size)):
            del self._told[min(self._told)]

    def _judge_ranks(self) -> list[str]:
        changes = []
        window, found = self._short, self._short.late(spread_out=False)
        if found is None:
            window, found = self._long, self._long.late(spread_out=True)
        now, shown = self.late, self._found_in
        if now is not None and shown is not None:
            # It may be found in more phases than before, or in fewer: this is no news.
            same = found is not None and found.ranks == now.ranks and found.phases[0] in now.phases
            if found is not None and same:
                self.late = Late(now.ranks, now.phases, now.since, found.seconds, found.gain, found.step)
                return []
            if found is None and shown.lateness(now) >= ENDS * LEAST:
                return []
            in_phases = " and ".join(now.phases)
            changes.append(f"{now.name} no longer late in {in_phases}, after step {self._short.last_step:,}")
        self.late, self._found_in = found, window
        return changes if found is None else [*changes, str(found)]

    def _judge_link(self, new: int) -> list[str]:
        exposed, busy, step = self._short.exposed()
        now, slow = float(np.median(exposed)), self.link
        if slow is not None:
            if now - slow.usual >= ENDS * max((DOUBLED - 1) * slow.usual, NOTICED * slow.step):
                return []
            self.link = None
            return [
                f"every rank waits {_ms(now)} in a step for communication again, after {_ms(slow.seconds)} since step "
                f"{slow.since:,}"
            ]
        self._usual.extend(zip(exposed[-new:].tolist(), busy[-new:].tolist(), strict=True))
        if len(self._usual) < 2 * len(exposed):
            return []
        usual, usually_busy = np.median(list(self._usual)[: -len(exposed)], 0).tolist()
        if float(np.median(busy)) > SLOWER * usually_busy:
            return []  # all that the ranks do takes longer: their machines have other work
        spread = DEVIATION * float(np.median(np.abs(exposed - now)))
        needed = max((DOUBLED - 1) * usual, NOTICED * step, SPREAD * spread)
        # Where other programs want the cores, some exchanges wait long, and others hardly.
        if now - usual < needed or np.quantile(exposed, 1 - OFTEN) - usual < needed / 2:
            return []
        since = self._short.began(exposed - usual)
        self.link = SlowLink(since, now, usual, step, self._at_slow_end(since))
        return [str(self.link)]

    def _at_slow_end(self, since: int) -> int | None:
        """Return the rank at the end of the slow link; None if it cannot be told.

        Since that step, connections through this link deliver at a fraction of the rate of before, and no others do.
        """
        parts: dict[tuple[str, str], float] = {}
        ranks: dict[str, int] = {}  # the first one at each address
        for (rank, own, peer), told in sorted(self._rates.items()):
            before = [rate for step, rate in told if step < since]
            after = [rate for step, rate in told if step >= since]
            if len(before) > 1 and len(after) > 1:
                ranks.setdefault(own, rank)
                part = float(np.median(after)) / max(TINY, float(np.median(before)))
                parts[own, peer] = min(part, parts.get((own, peer), part))
        lowest = min(parts, key=parts.__getitem__, default=None)
        if lowest is None or parts[lowest] > FRACTION:
            return None
        slow = [pair for pair, part in parts.items() if part <= parts[lowest] / FRACTION]
        ends = set(lowest).intersection(*slow)
        # With one connection, that end is named which sends through the link.
        end = lowest[0] if lowest[0] in ends else lowest[1]
        return ranks.get(end) if end in ends else None


class _RecentBlocks:
    """The newest blocks of steps. Each block is made of `count` short ones."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._blocks: deque[tuple[int, float, Numbers]] = deque()  # first step, seconds, [ranks, phases] of a step
        self._part: list[tuple[int, int, Numbers]] = []
        self.last_step = 0

    def add(self, first: int, steps: int, seconds: Numbers) -> None:
        """Take a short block: its first step, how many steps, and the seconds [ranks, phases] of all of them."""
        self.last_step = first + steps - 1
        self._part.append((first, steps, seconds))
        if len(self._part) < self._count:
            return
        total = np.sum([each for *_, each in self._part], axis=0)
        steps = sum(each for _, each, _ in self._part)
        self._blocks.append((self._part[0][0], float(total.sum(1).mean()), total / steps))
        self._part = []
        while len(self._blocks) > BLOCKS and self._seconds - self._blocks[0][1] >= SECONDS:
            self._blocks.popleft()

    @property
    def _seconds(self) -> float:
        return sum(seconds for _, seconds, _ in self._blocks)

    @property
    def _is_full(self) -> bool:
        return len(self._blocks) >= BLOCKS and self._seconds >= SECONDS

    def late(self, *, spread_out: bool) -> Late | None:
        """Return which ranks are late, if any are. `spread_out`: also those that are late in several phases."""
        if not self._is_full:
            return None
        table, busy, step = self._read()
        medians = np.median(busy, 0)
        order = np.argsort(-medians)
        gaps = -np.diff(medians[order])[: max(1, len(order) // 2)]
        count = int(np.argmax(gaps)) + 1
        those, others = order[:count], order[count:]
        ahead = busy[:, those].min(1)
        more = ahead - np.median(busy[:, others], 1)
        usual = float(np.median(more))
        spread = DEVIATION * float(np.median(np.abs(more - usual)))
        if usual < max(LEAST * step, SPREAD * spread) or np.quantile(more, 1 - OFTEN) <= 0:
            return None
        gain = float(np.median(ahead - busy[:, others].max(1)))
        if gain < 0:
            return None
        excess = np.median(table[:, those, :WAITING].mean(1) - np.median(table[:, others, :WAITING], 1), 0).clip(0)
        largest = np.argsort(-excess)
        if excess[largest[0]] < MAIN * excess.sum():
            steady = usual >= STEADY * spread and np.quantile(more, 1 - OFTEN) >= usual / 2
            if not spread_out or not steady:
                return None
        phases = tuple(NAMES[phase] for phase in largest if excess[phase] >= ALSO * excess.sum())
        ranks = tuple(sorted(int(rank) for rank in those))
        return Late(ranks, phases, self.began(more), usual, gain, step)

    def lateness(self, late: Late) -> float:
        """Return for what part of a step these ranks are busy longer than others now; -inf if too few blocks tell."""
        if not self._is_full:
            return -inf
        _, busy, step = self._read()
        others = [rank for rank in range(busy.shape[1]) if rank not in late.ranks]
        more = busy[:, late.ranks].min(1) - np.median(busy[:, others], 1)
        return float(np.median(more)) / step

    def exposed(self) -> tuple[Numbers, Numbers, float]:
        """Return, of a step, seconds that all ranks wait at least, those in which the median rank is busy, and all.

        The first two are of each block, and the last is the median of the blocks.
        """
        table, busy, step = self._read()
        return table[:, :, WAITING].min(1), np.median(busy, 1), step

    def _read(self) -> tuple[Numbers, Numbers, float]:
        """Return the seconds of a step: [blocks, ranks, phases], the busy ones [blocks, ranks], and the median."""
        table = np.stack([each for *_, each in self._blocks])
        return table, table[:, :, :WAITING].sum(2), float(np.median(table.sum(2).mean(1)))

    def began(self, values: Numbers) -> int:
        """Return the first step of the block from which on these values, one of each block, are large."""
        usual = float(np.median(values))
        sums = np.cumsum(np.clip(values - usual / 2, -usual, usual)[::-1])[::-1]  # no block counts for several
        return self._blocks[int(np.argmax(sums))][0]


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < LONGEST


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
