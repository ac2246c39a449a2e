"""How a failure may end, and what does not hold of what the ranks tell. Uses no process."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tests.distributed.failures.opening.fault import INTERRUPT, OUT_OF_MEMORY, OWN, SKIP_OOM, Fault
from tests.distributed.failures.opening.oracle import differs, mean_of
from tests.distributed.failures.opening.programs import PROGRAMS
from tests.distributed.failures.opening.trial import APART, DONE, ENDED, STUCK, Attempt, Told

__all__ = ["BAD", "ENDINGS", "Judgement", "judged", "signs_of"]


@dataclass(frozen=True)
class Ending:
    """One way in which a failure may end.

    The attempts of a rank, from the failed one on, are a sign each: `.` is good, `x` has raised the planted exception,
    `o` is good though its forward has raised it first, `e` has raised a DPFuseError that names the rank, `?` has raised
    something else.

    Attributes:
        failed, peers: the attempts of a rank that has failed, and of any other one.
        end: how the program of every rank has ended.
        skips: whether the peers hear that memory ran out, so that every program may skip the batch.
    """

    failed: str
    peers: str
    end: str = DONE
    skips: bool = False


BAD = "bad"
NONE = "no failure"
RECOVERED = "recovered"
SILENT = "silent"
ONE_EACH = "one error each"
ALL = "all raised"
GROUP_ENDED = "group ended"
PROGRAM_ENDED = "program ended"

ENDINGS = {
    # The line was not reached.
    NONE: Ending(r"\.+", r"\.+"),
    # The library has gone on after an exception in it, and all is right.
    RECOVERED: Ending(r"\.+", r"\.+"),
    # Before the backward. The failed rank tries it again, and peers learn nothing.
    SILENT: Ending(r"(o|x\.)\.*", r"\.+"),
    # In the backward, or in the vote on buckets: each rank has one exception, for the same backward.
    ONE_EACH: Ending(r"x\.+", r"e\.+", skips=True),
    # After the report has left: the peers have stepped, so that the weights differ, and every rank is told.
    ALL: Ending(r"xe", r"\.e", APART),
    # In the start of a collective, of which it is unknown how far it came; or between those of a vote.
    GROUP_ENDED: Ending(r"xe+", r"\.?e+", STUCK),
    # The exception has ended the program of the failed rank, and its peers raise since it is gone.
    PROGRAM_ENDED: Ending(r"xe*", r"\.?e+", ENDED),
}


@dataclass(frozen=True)
class Judgement:
    """What came of a failure: its ending, or `BAD`, and what does not hold."""

    ending: str
    breaches: Sequence[str] = ()


def judged(fault: Fault, told: Sequence[Told]) -> Judgement:
    """Say how a failure has ended, and what does not hold."""
    failed = _failed(fault, told)
    signs = _signs(told, failed)
    name = next((name for name in _possible(fault, told, failed) if _fits(name, told, signs, failed)), None)
    if name is None:
        return Judgement(BAD, ["no ending that the rule allows"])
    # A rank has one attempt more than its peers where they have learned nothing of the failed one.
    attempts = [
        each.attempts[sign.startswith("x") and name == SILENT :] for each, sign in zip(told, signs, strict=True)
    ]
    found = [*_wrong_steps(fault, name, attempts), *_wrong_classes(fault, name, attempts, failed)]
    if ENDINGS[name].end == DONE and len({each.weights for each in told}) > 1:
        found.append("the weights of the ranks differ at the end")
    return Judgement(BAD if found else name, found)


def signs_of(fault: Fault, told: Sequence[Told]) -> list[str]:
    """Return the attempts of each rank, a sign for each."""
    return _signs(told, _failed(fault, told))


def _signs(told: Sequence[Told], failed: Collection[int]) -> list[str]:
    return ["".join(_sign(each, rank, failed) for each in one.attempts) for rank, one in enumerate(told)]


def _failed(fault: Fault, told: Sequence[Told]) -> set[int]:
    """Return the ranks that have failed. If there are two, the library may have gone on after what struck on one."""
    struck = {rank: fault.of(rank) for rank, each in enumerate(told) if each.passed.raised}
    seen = {rank for rank in struck if any(each.planted for each in told[rank].attempts)}
    if not seen:
        return set(struck)
    return {rank for rank, own in struck.items() if rank in seen or own is None or not _may_recover(own)}


def _may_recover(fault: Fault) -> bool:
    return fault.error != INTERRUPT and fault.kind not in OWN


def _sign(attempt: Attempt, rank: int, failed: Collection[int]) -> str:
    if not attempt.error:
        return "o" if attempt.planted else "."
    if attempt.planted and rank in failed:
        return "x"
    return "e" if attempt.named and _names(attempt.text, rank, failed) else "?"


def _names(text: str, rank: int, failed: Collection[int]) -> bool:
    """Whether the text of an error that `rank` raised names a rank that has failed."""
    lists = re.findall(r"ranks? (\d+(?:(?:, | and )\d+)*)", text)
    found = {int(each) for one in lists for each in re.findall(r"\d+", one)}
    if rank not in failed:
        found.discard(rank)  # each error names the rank that raises it
    return bool(found & {*failed}) or (len(failed) > 1 and "several ranks" in text)


def _possible(fault: Fault, told: Sequence[Told], failed: Collection[int]) -> list[str]:
    """Return the endings that the rule allows."""
    if not failed:
        return [NONE]
    dropped = any(each.passed.dropped for each in told)
    recovers = [RECOVERED] if _may_recover(fault) or dropped else []
    if fault.is_before_the_backward:
        # It is open whether peers learn of a backward that was not to be averaged.
        averages = fault.part != "local" or fault.kind in ("forward", "around")
        return [*recovers, SILENT] if averages else [*recovers, SILENT, ONE_EACH]
    found = [*recovers, ONE_EACH, ALL]
    lines = [line for rank in failed for line in told[rank].passed.lines]
    exchanging = any(line.exchanging or line.voting for line in lines)
    # An optimizer that divides the weights waits in its step for the rank that has lost the mean. And its step that has
    # failed is no OutOfMemoryError.
    sharded = PROGRAMS[fault.program].sharded
    if exchanging or sharded:
        found.append(GROUP_ENDED)
    if fault.policy == SKIP_OOM and (fault.error != OUT_OF_MEMORY or exchanging or sharded):
        found.append(PROGRAM_ENDED)
    return found


def _fits(name: str, told: Sequence[Told], signs: Sequence[str], failed: Collection[int]) -> bool:
    ending = ENDINGS[name]
    fit = all(re.fullmatch(ending.failed if rank in failed else ending.peers, sign) for rank, sign in enumerate(signs))
    lengths = {len(sign) - (name == SILENT and sign.startswith("x")) for sign in signs}
    return fit and all(each.end == ending.end for each in told) and (ending.end != DONE or len(lengths) == 1)


def _wrong_steps(fault: Fault, name: str, attempts: Sequence[Sequence[Attempt]]) -> list[str]:
    """Find attempts in which ranks had other batches, weights or means."""
    found = []
    sharded = PROGRAMS[fault.program].sharded
    for place, row in enumerate(zip(*attempts, strict=False)):
        good = [each for each in row if not each.error]
        if not good:
            continue
        numbers = [each.number for each in row]
        where = f"in attempt {place + 1}, of batches {numbers}"
        if len(set(numbers)) > 1:
            found.append(f"other batches {where}")
        if len({each.before for each in row}) > 1:
            found.append(f"other weights {where}")
        if sharded and name != ONE_EACH and len(good) < len(row):
            continue  # a rank has not updated its part, so the weights are half updated; all are told, or the job ends
        if not sharded and len({each.mean for each in good}) > 1:
            found.append(f"other gradients {where}")
        expected = mean_of(fault.program, good[0].before, tuple((each.number, each.dummy) for each in row))
        if any(differs(each.mean, expected, of_weights=sharded) for each in good):
            found.append(f"a wrong mean {where}")
    return found


def _wrong_classes(
    fault: Fault, name: str, attempts: Sequence[Sequence[Attempt]], failed: Collection[int]
) -> list[str]:
    """Find exceptions that are of another class than their cause, for `except torch.OutOfMemoryError`."""
    found = []
    memory = fault.error == OUT_OF_MEMORY
    for rank, row in enumerate(attempts):
        for each in row:
            if not each.error:
                continue
            own = rank in failed and each.planted
            if own and each.error != fault.error and not each.named:
                found.append(f"rank {rank} raised {each.error} in place of {fault.error}")
            # A step of a ShardedOptimizer has left half updated weights: no program may skip its batch.
            half_updated = own and each.named and name == ALL
            tells = memory and ((own and not half_updated) or ENDINGS[name].skips)
            if each.out_of_memory != tells and not (memory and name in (GROUP_ENDED, PROGRAM_ENDED)):
                found.append(
                    f"rank {rank} raised {each.error}, which is {'an' if each.out_of_memory else 'no'} OutOfMemoryError"
                )
    return found
