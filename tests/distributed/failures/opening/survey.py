"""Many trials on one pair of ranks, which is replaced where a trial has ended the group, as the contract allows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.distributed.failures.opening.lines import ERRORS, Passed
from tests.distributed.failures.opening.programs import PROGRAMS
from tests.distributed.failures.opening.trial import Fault, Told, breaches, trials
from tests.ranks import RankError, RankPool

__all__ = ["STEPS", "Survey", "row"]

STEPS = (1, 2, 4)  # the recorded backward, the first with new buckets, and a settled one
INSIDE = 12  # of the lines inside an exchange one of so many is tried: each ends the group, which takes seconds
PATIENCE = 20.0  # seconds for one trial, of which a right one takes a twentieth of a second


@dataclass(frozen=True)
class Verdict:
    """What came of a fault: what the ranks tell, and what does not hold."""

    fault: Fault
    told: Sequence[Told]
    breaches: Sequence[str]


class Survey:
    """Trials on two ranks."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None
        self._tried: set[tuple[int, str]] = set()  # the step, and the place

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None and self._pool.healthy:
            self._pool.kill()

    def faults(self, program: str, step: int, *, last: bool = False, every: bool = False) -> Iterator[Fault]:
        """Return faults at the lines of one step of a program; ranks and errors take turns.

        Args:
            program, step: of the faults.
            last: whether up to the last collective, and not only up to the first one.
            every: True takes each time that a line runs; False the first and the last time, and no line of the library
                that was taken in this step of an earlier program.
        """
        number = 0
        for place in PROGRAMS[program].places:
            told = self._try(Fault(program, 0, step, place))
            found = breaches(Fault(program, 0, step, place), told)
            assert not found, f"{program}, step {step}, without a fault: {found}"
            for rank, each in enumerate(told):
                end = max(each.passed.collectives, default=0) if last or place == "local" else 1
                for at in self._times(step, each.passed, end, every=every):
                    if at % len(told) == rank:  # what the ranks pass is nearly the same
                        number += 1
                        yield Fault(program, rank, step, place, at, [*ERRORS][number % len(ERRORS)], end or None)
            if not every:
                self._tried |= {(step, name) for each in told for name in each.passed.places}

    def run(self, fault: Fault) -> Verdict:
        """Let a rank fail, and judge what both do then."""
        try:
            told = self._try(fault)
        except RankError as error:
            words = re.findall(r"rank \d[^\n]*|exit code[^\n]*|what\(\)[^\n]*", str(error))
            return Verdict(fault, [], [f"ranks died or hung: {words}"])
        return Verdict(fault, told, breaches(fault, told))

    def _times(self, step: int, passed: Passed, end: int, *, every: bool) -> Sequence[int]:
        times: list[int] = []
        taken: dict[str, list[int]] = {}
        inside = 0
        for at, (name, collectives) in enumerate(zip(passed.places, passed.collectives, strict=True), 1):
            if end and collectives >= end:
                break
            if passed.exchanging[at - 1]:
                inside += 1
                if inside % INSIDE:
                    continue
            times.append(at)
            if (step, name) not in self._tried:
                taken.setdefault(name, []).append(at)
        return times if every else sorted({at for each in taken.values() for at in (each[0], each[-1])})

    def _try(self, fault: Fault) -> Sequence[Told]:
        if self._pool is None or not self._pool.healthy:
            self._pool = RankPool(2)
            self._pool.run(trials, [Fault(fault.program, 0, 1)], timeout=60)
        told = [each[0] for each in self._pool.run(trials, [fault], timeout=PATIENCE)]
        if any(each.steps[-1].error for each in told):
            self._pool.kill()  # the group has ended
        return told


def row(verdict: Verdict) -> str:
    """Return one trial as text: where it raised, how each step ended on each rank, and what does not hold."""
    fault = verdict.fault
    place = verdict.told[fault.rank].passed.places[-1] if verdict.told else ""
    lines = [f"{fault.program} step {fault.step} {fault.place} rank {fault.rank} at {fault.at} {fault.error} {place}"]
    for rank, told in enumerate(verdict.told):
        ends = (f"{step.number} {step.error or step.digest} {step.text[:80]}".strip() for step in told.steps)
        lines.append(f"    rank {rank}: {' | '.join(ends)}")
    return "\n".join([*lines, *(f"  ! {text}" for text in verdict.breaches)])
