"""What must hold after a failure on one rank, from what all ranks report. Pure: no process, no tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.distributed.failures.injected.cases import CASES
from tests.distributed.failures.injected.faults import Point
from tests.distributed.failures.injected.trial import Fault, Report, Step

__all__ = ["breaches", "outcome", "torn"]


def breaches(fault: Fault, reports: Sequence[Report]) -> list[str]:
    """What does not hold; empty if all is well.

    The ranks either all have the mean, or all raise in the same backward, each with an error that names the failed
    rank; where it failed, the injected exception may surface instead. They repeat the step, hear no more of it, and all
    have the mean, as in the steps after that.

    - A rank that failed before it began a collective may raise alone, if repeating the step makes all right.
    - Only a failure between the start of a collective and the return to the reducer may end the group: then every
      rank raises an error that names a rank, in each attempt.
    """
    attempts = [report.steps[0] for report in reports]
    found = []
    for rank, tries in enumerate(attempts):
        for number, step in enumerate(tries):
            if number == 0 and rank == fault.rank:
                if step.stage and not step.chained:
                    found.append(f"rank {rank}: the cause is lost in {step.error}: {step.text[:80]!r}")
            else:
                failed = None if rank == fault.rank else fault.rank
                found += [f"rank {rank}: {text}" for text in _unnamed(step, failed)]
    point = next(iter(reports[fault.rank].points[-1:]), None)
    found += _of_attempts(fault, attempts, point)
    for number in range(1, max(len(report.steps) for report in reports)):
        after = [report.steps[number] for report in reports if len(report.steps) > number]
        for rank, tries in enumerate(after):
            found += [f"{number} after, rank {rank} raises: {outcome(step)[:120]}" for step in tries if step.stage]
        if len(after) == len(reports) and not any(step.stage for tries in after for step in tries):
            found += [f"{number} after: {text}" for text in _wrong(fault, [tries[-1] for tries in after])]
    return found


def torn(attempts: Sequence[Sequence[Step]]) -> list[str]:
    """Whether some ranks are content with their first attempt while others raise, once all have ended theirs."""
    content = [str(rank) for rank, tries in enumerate(attempts) if tries and not tries[0].stage]
    if not content or len(content) == len(attempts) or not all(attempts):
        return []
    return [f"rank {', '.join(content)} content, while others raise"]


def outcome(step: Step) -> str:
    """How an attempt ended, in a few words."""
    if step.stage:
        return f"{step.error} in {step.stage}: {step.text.partition(chr(10))[0] or '(no text)'}"
    return "mean" if step.off < 0.1 else f"off by {step.off:.2g}"


def _of_attempts(fault: Fault, attempts: Sequence[Sequence[Step]], point: Point | None) -> list[str]:
    """What does not hold in the step in which a rank failed."""
    found = []
    ended = [bool(tries[-1].stage) for tries in attempts]
    if point is None or point.collectives > 0 or any(ended):
        found += torn(attempts)
    if not any(ended):
        found += _wrong(fault, [tries[-1] for tries in attempts])
        for rank, tries in enumerate(attempts):
            if len(tries) > 2:
                found.append(f"rank {rank}: raises {len(tries) - 1} times")
    elif not all(ended):
        found.append("only some ranks can go on")
    elif point is None or not point.between:
        found.append("no rank can go on, and no collective had begun")
    return found


def _unnamed(step: Step, failed: int | None = None) -> list[str]:
    """What is wrong with the error of a rank, if there is one."""
    if not step.stage:
        return []
    got = f"{step.error}: {step.text[:100]!r}"
    if not step.named:
        return [f"expected a DPFuseError, got {got}"]
    listed = re.findall(r"\branks? (\d[\d, -]*(?:and \d+)?)", step.text)
    ranks = {int(rank) for part in listed for rank in re.findall(r"\d+", part)}
    if not ranks:
        return [f"the error names no rank: {got}"]
    if failed is not None and failed not in ranks:
        return [f"the error does not name rank {failed}: {got}"]
    return []


def _wrong(fault: Fault, steps: Sequence[Step]) -> list[str]:
    off = max(step.off for step in steps)
    found = [f"gradients are off by {off:.2g}"] if off > CASES[fault.case].tolerance else []
    if len({step.digest for step in steps}) > 1:
        found.append("the ranks have different gradients")
    return found
