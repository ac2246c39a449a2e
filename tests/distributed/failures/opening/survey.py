"""Which failures are tried, on pools of ranks; a pool is replaced where its group has ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.distributed.failures.opening.fault import DUMMY, ERRORS, OUT_OF_MEMORY, OWN, REPEAT, SKIP_OOM, Fault
from tests.distributed.failures.opening.judge import BAD, ENDINGS, Judgement, judged, signs_of
from tests.distributed.failures.opening.lines import Line
from tests.distributed.failures.opening.programs import PROGRAMS
from tests.distributed.failures.opening.trial import APART, DONE, Told, told_in, trial
from tests.ranks import RankError, RankPool

__all__ = ["STEPS", "Survey", "Verdict", "row"]

STEPS = (1, 2, 4)  # the recorded backward, the first with new buckets, and a settled one
INSIDE = 12  # of the lines inside an exchange one of so many is tried: each may end the group, which takes seconds
PATIENCE = 40.0  # seconds for one trial: a right one takes a twentieth of a second, one with stalls some 20 s
OTHERS = "line", "loss", "hook", "post", "step"  # what strikes on a second rank

# Of ranks that died or hung: the rank, how its process ended, its error, and where it was.
SAID = re.compile(
    r"^rank \d[^\n]*|exit code[^\n]*|what\(\)[^\n]*|^\w*Error: [^\n]*|(?:dpfuse|opening)/\S+\.py\W.*line \d+ in \w+",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Verdict:
    """What came of a failure, and what the ranks tell."""

    fault: Fault
    told: Sequence[Told]
    judgement: Judgement


class Survey:
    """Trials on some ranks.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._pool: RankPool | None = None
        self._folder = TemporaryDirectory(prefix="dpfuse-failures-")
        self._tried: set[tuple[object, ...]] = set()  # policy, step, kind and place

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.ask_to_end()
            self._pool.close()
        self._folder.cleanup()

    def faults(self, program: str, step: int, policy: str, *, every: bool = False, after: int = 5) -> Iterator[Fault]:
        """Return failures in one step of a program; ranks and errors take turns.

        Args:
            program, step, policy, after: of the failures.
            every: True takes each time that a line runs; False the first and the last time, and no line that was taken
                with this step and policy in an earlier program.
        """
        begin = Fault(program, 0, step, policy, after=after)
        found = chain.from_iterable(self._in_part(replace(begin, part=part), every) for part in PROGRAMS[program].parts)
        for number, fault in enumerate(found):
            errors = [OUT_OF_MEMORY, *ERRORS] if policy == SKIP_OOM else [*ERRORS]
            one = replace(fault, error=errors[number % len(errors)])
            yield one
            # Two ranks may fail in one backward, where a third one is left.
            if self._size > 2 and number % 2 and not one.is_before_the_backward:
                kind = OTHERS[number // 2 % len(OTHERS)]
                at = 1 + (one.at or number) * 7 % 400 if kind == "line" else None
                other = replace(one, rank=(one.rank + 1) % self._size, kind=kind, at=at, line=None)
                yield replace(one, also=other)

    def run(self, fault: Fault) -> Verdict:
        """Let a rank fail, and judge what all do then."""
        if self._pool is None or not self._pool.healthy:
            self._pool = RankPool(self._size)
            self._try(Fault("views"))  # what is imported and made only once, is
        told, words = self._try(fault)
        judgement = judged(fault, told)
        if any(not each.end for each in told):
            judgement = Judgement(BAD, [f"ranks died or hung: {words}", *judgement.breaches])
        in_step = judgement.ending in ENDINGS and ENDINGS[judgement.ending].end in (DONE, APART)
        if not in_step and self._pool.healthy:
            self._pool.kill()  # the group has ended, or ranks are apart
        return Verdict(fault, told, judgement)

    def _in_part(self, begin: Fault, every: bool) -> Iterator[Fault]:
        """Return failures in one part of a step, without their errors."""
        # Before its backward a rank that takes the next batch is apart from its peers, and is told so at the end.
        early = ["around"] if begin.policy == REPEAT else []
        early += ["forward"] if begin.policy in (REPEAT, DUMMY) else []
        late = [] if begin.policy == DUMMY else ["line", *OWN[1:]]
        if begin.part == "local":
            late = late[:-1] if begin.policy == REPEAT else []
        for kind in [*early, *late]:
            if kind in OWN:
                yield from (replace(begin, rank=rank, kind=kind) for rank in range(self._size))
            else:
                yield from self._lines(replace(begin, kind=kind), every)

    def _lines(self, begin: Fault, every: bool) -> Iterator[Fault]:
        verdict = self.run(begin)
        assert not verdict.judgement.breaches, f"without a failure: {row(verdict)}"
        key = begin.policy, begin.step, begin.kind
        for rank, told in enumerate(verdict.told):
            for at in self._times(key, told.passed.lines, every=every):
                if at % self._size == rank:  # what the ranks pass is nearly the same
                    yield replace(begin, rank=rank, at=at, line=told.passed.lines[at - 1])
        if not every:
            self._tried |= {(*key, line.place) for told in verdict.told for line in told.passed.lines}

    def _times(self, key: tuple[object, ...], lines: Sequence[Line], *, every: bool) -> Sequence[int]:
        times: list[int] = []
        taken: dict[str, list[int]] = {}
        inside = 0
        for at, line in enumerate(lines, 1):
            if line.exchanging:
                inside += 1
                if inside % INSIDE:
                    continue
            times.append(at)
            if (*key, line.place) not in self._tried:
                taken.setdefault(line.place, []).append(at)
        return times if every else sorted({at for each in taken.values() for at in (each[0], each[-1])})

    def _try(self, fault: Fault) -> tuple[Sequence[Told], str]:
        """Return what the ranks tell; and, where some have died or hung, what is known of it."""
        assert self._pool is not None
        folder = self._folder.name
        for path in Path(folder).iterdir():
            path.unlink()
        words = ""
        try:
            self._pool.run(trial, folder, fault, timeout=PATIENCE)
        except RankError as error:
            words = "; ".join(SAID.findall(str(error)))
        return [told_in(folder, rank) for rank in range(self._size)], words


def row(verdict: Verdict) -> str:
    """Return one trial as text: where it raised, how each attempt ended on each rank, and what does not hold."""
    fault, told = verdict.fault, verdict.told
    strikes = []
    for each in filter(None, (fault, fault.also)):
        lines = told[each.rank].passed.lines
        place = lines[-1].place if lines and each.at is not None else ""
        at = "" if each.at is None else f" at {each.at} {place}"
        strikes.append(f"rank {each.rank} {each.part} {each.kind}{at}")
    text = [
        f"{fault.program}, step {fault.step}, {len(told)} ranks, {fault.policy}, {fault.error}: {'; '.join(strikes)}"
    ]
    for rank, (one, signs) in enumerate(zip(told, signs_of(fault, told), strict=True)):
        errors = [
            f"{each.number} {each.error}: {' '.join(each.text.split())[:150]}" for each in one.attempts if each.error
        ]
        text.append(f"    rank {rank} {signs} {one.end}" + "".join(f"\n        {each}" for each in errors[:4]))
    return "\n".join([*text, *(f"  ! {each}" for each in verdict.judgement.breaches)])
