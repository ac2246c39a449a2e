"""Many trials on one pool of ranks, which is replaced where a trial has left it unusable."""

from __future__ import annotations

import json
import random
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import monotonic

from tests.distributed.failures.injected.cases import CASES
from tests.distributed.failures.injected.faults import ERRORS, KINDS, Point
from tests.distributed.failures.injected.judge import breaches, torn
from tests.distributed.failures.injected.trial import Fault, Report, Step, steps_of, trial, words_of
from tests.ranks import RankError, RankPool

__all__ = ["Survey", "Verdict"]

PATIENCE = 10.0  # seconds for one trial, of which a right one takes a tenth of a second
GRACE = 2.0  # seconds in which a rank that raised alone may make all right by repeating its step


@dataclass(frozen=True)
class Verdict:
    """What came of a fault.

    Attributes:
        fault: what was done.
        point: where it raised; None where it did not come to that.
        last: whether the rank began no collective of this backward afterwards: its peers cannot hear of it any more.
        attempts: how those of each rank ended, up to the end of the trial or of the ranks.
        breaches: what does not hold.
    """

    fault: Fault
    point: Point | None
    last: bool
    attempts: Sequence[Sequence[Step]]
    breaches: Sequence[str]


class Survey:
    """Trials on `size` ranks.

    Args:
        size: number of ranks.
        patience: seconds after which a trial counts as hung.
    """

    def __init__(self, size: int, patience: float = PATIENCE) -> None:
        self.size = size
        self._patience = patience
        self._pool: RankPool | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="dpfuse-injected-")
        self._tried: set[tuple[bool, str]] = set()  # whether in the recorded backward, and the place
        self._points = lru_cache(maxsize=None)(self._count_points)

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None and self._pool.healthy:
            self._end_pool()
        self._folder.cleanup()

    def points(self, case: str, step: int, rank: int, kind: str) -> Sequence[Point]:
        """Where this rank could fail."""
        return self._points(case, step, kind)[rank]

    def all_faults(self, case: str, step: int, kind: str, *, every: bool = False) -> Iterator[Fault]:
        """Faults at the points of one backward: on one rank after the other, with any error.

        Args:
            case, step, kind: of the faults.
            every: False takes the first and the last time at which a place is passed, and no place that was tried in
                the same kind of backward of an earlier case; True takes every time.
        """
        number = 0
        for rank in range(self.size):
            for at in self._times(case, step, rank, kind, every=every):
                number += 1
                # Each on one rank only: what ranks pass is nearly the same.
                if number % self.size == rank:
                    yield Fault(case, step, rank, kind, at, random.Random(at).choice([*ERRORS]))
            number = 0
        if not every:
            for rank in range(self.size):
                self._tried |= {(step == 1, point.place) for point in self.points(case, step, rank, kind)}

    def some_faults(self, case: str, count: int, seed: int) -> list[Fault]:
        """So many faults at random, spread over steps, ranks and kinds."""
        chance = random.Random(f"{case} {seed}")
        steps = CASES[case].steps
        faults = []
        for number in range(count):
            kind = KINDS[number % 3 == 2]
            step, rank = steps[number % len(steps)], chance.randrange(self.size)
            times = [*self._times(case, step, rank, kind, every=False)]
            if times:
                faults.append(Fault(case, step, rank, kind, chance.choice(times), chance.choice([*ERRORS])))
        return faults

    def run(self, fault: Fault) -> Verdict:
        """Let a rank fail, and judge what all do then."""
        assert fault.at is not None
        points = self.points(fault.case, fault.step, fault.rank, fault.kind)
        expected = points[fault.at - 1] if fault.at <= len(points) else None
        last = max(point.collectives for point in points)
        try:
            reports = self._try(fault)
        except RankError as error:
            attempts = self._told()
            is_last = expected is not None and expected.collectives == last
            return Verdict(fault, expected, is_last, attempts, torn(attempts) or self._deaths(error))
        here = reports[fault.rank]
        point = here.points[-1] if here.raised else None
        if any(report.steps[-1][-1].stage for report in reports):
            self._end_pool()  # the group has ended
        attempts = [[step for tries in report.steps for step in tries] for report in reports]
        is_last = point is not None and point.collectives == last
        return Verdict(fault, point, is_last, attempts, breaches(fault, reports))

    def _times(self, case: str, step: int, rank: int, kind: str, *, every: bool) -> Sequence[int]:
        """Numbers of points."""
        points = self.points(case, step, rank, kind)
        if every:
            return range(1, len(points) + 1)
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for at, point in enumerate(points, 1):
            if (step == 1, point.place) not in self._tried:
                first.setdefault(point.place, at)
                last[point.place] = at
        return sorted({*first.values(), *last.values()})

    def _count_points(self, case: str, step: int, kind: str) -> Sequence[Sequence[Point]]:
        fault = Fault(case, step, 0, kind)
        reports = self._try(fault)
        found = breaches(fault, reports)
        assert not found, f"{fault} without any failure: {found}"
        return [report.points for report in reports]

    def _try(self, fault: Fault) -> Sequence[Report]:
        if self._pool is None or not self._pool.healthy:
            self._pool = RankPool(self.size)
            self._pool.run(trial, replace(fault, at=None), self._folder.name, timeout=60)
        for rank in range(self.size):
            Path(steps_of(self._folder.name, rank)).unlink(missing_ok=True)
        over = threading.Event()
        watcher = threading.Thread(target=self._end_torn_trial, args=(over,))
        watcher.start()
        try:
            return self._pool.run(trial, fault, self._folder.name, timeout=self._patience)
        finally:
            over.set()
            watcher.join()

    def _end_torn_trial(self, over: threading.Event) -> None:
        """Do not wait for ranks of which some have gone on while others repeat the step: they wait for each other."""
        since = 0.0
        while not over.wait(0.1):
            if not since and torn(self._told()):
                since = monotonic()
            elif since and monotonic() > since + GRACE:
                assert self._pool is not None
                self._pool.end_processes()  # the thread that waits for them hears of it
                return

    def _told(self) -> list[list[Step]]:
        """How the attempts of each rank have ended so far."""
        told = []
        for rank in range(self.size):
            path = Path(steps_of(self._folder.name, rank))
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            told.append([Step(**json.loads(line)) for line in lines if line.endswith("\n")])
        return told

    def _end_pool(self) -> None:
        assert self._pool is not None
        self._pool.kill()

    def _deaths(self, error: RankError) -> list[str]:
        """How each rank ended that did not answer: its exit code and last words, or where it hangs."""
        found = []
        for part in re.split(r"^(?=rank \d+[: ])", str(error), flags=re.MULTILINE):
            lines = [line.strip() for line in part.splitlines() if line.strip()]
            if not lines:
                continue
            rank = re.findall(r"\d+", lines[0])[0]
            text = f"{lines[0]} "
            if "no answer" in lines[0]:
                main = re.split(r"hread 0x", part)[-1]
                frames = re.findall(r'File ".*?([^/"]+/[^/"]+)", line (\d+) in (\w+)', main)
                text += " < ".join(f"{file}:{line} {function}" for file, line, function in frames[:3])
            else:
                words = Path(words_of(self._folder.name, int(rank))).read_text(errors="replace").strip().splitlines()
                text += " ".join([*lines[1:2], *words[-1:]])
            found.append(text[:400])
        return found
