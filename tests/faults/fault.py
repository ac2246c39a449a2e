"""The words of the suite: a fault, what is expected, what came of it. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

__all__ = ["NOTHING", "RIGHT", "Expected", "Fault", "Outcome", "Run", "Verdict", "named", "shortfalls"]

ENDING = 10.0  # seconds that interpreters may take to end on a busy machine


class Outcome(Enum):
    """What can come of a fault, best first."""

    RIGHT = "right"
    NAMED = "named error"
    WARNED = "named warning"
    UNNAMED = "error"
    LATE = "late error"
    CRASH = "crash"
    ORPHANS = "orphans"
    LOST = "lost"
    HANG = "hang"
    CORRUPT = "silent corruption"


@dataclass(frozen=True)
class Expected:
    """What dpfuse owes."""

    outcome: Outcome
    # In what every rank prints, in capitals or not; {peer} is the other rank.
    words: tuple[str, ...] = ()
    within: float = 0.0  # seconds from the fault until every rank knows


RIGHT = Expected(Outcome.RIGHT)
NOTHING = Expected(Outcome.CORRUPT)  # what no default looks for


def named(*words: str, within: float = 5.0) -> Expected:
    """An error on every rank that has all of `words`, in so many seconds."""
    return Expected(Outcome.NAMED, words, within)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        name: of the case.
        hazard: the group and number of the hazard in the list that the suite was built from.
        done: what is done, in a few words.
        program: run on every rank.
        expected: of dpfuse.
        options: further arguments of dpfuse's wrappers.
        victims: ranks whose own end is part of the fault: not judged by what they say.
        limit: seconds after which whoever is left is killed.
        slow: run in `make test-all` only.
        cable: for a fault of the network: what is done to the cable between two machines, as `network.CABLES` has it.
        elsewhere: expected with other wrappers, by their name, where that is something else.
    """

    name: str
    hazard: str
    done: str
    program: Callable[..., None]
    expected: Expected
    options: Mapping[str, Any] = field(default_factory=dict)
    victims: tuple[int, ...] = ()
    limit: float = 60.0
    slow: bool = False
    cable: str = ""
    elsewhere: Mapping[str, Expected] = field(default_factory=dict)

    def on(self, face: str) -> Fault:
        """The same fault, with what is expected with this wrapper."""
        return replace(self, expected=self.elsewhere.get(face, self.expected))


@dataclass(frozen=True)
class Run:
    """What was seen of a program, by rank."""

    codes: list[int | None]  # exit codes, negative ones are signals; None: killed at the limit
    ended: list[float]  # when each was gone, by the clock that all processes share
    told: list[list[dict[str, Any]]]
    printed: list[str]
    left: int  # processes that outlived the ranks


@dataclass(frozen=True)
class Verdict:
    """What came of a fault.

    Args:
        outcome: the worst that was seen.
        seconds: from the fault until the last rank had raised its error, or had ended.
        left: processes that outlived the ranks.
        detail: what was seen, for who wants to know why.
        gone: seconds from the fault until the last rank had ended.
    """

    outcome: Outcome
    seconds: float
    left: int
    detail: str
    gone: float = 0.0


def shortfalls(expected: Expected, verdict: Verdict) -> list[str]:
    """What came of a fault, where it is not what is expected."""
    short = []
    if verdict.outcome is not expected.outcome:
        short.append(f"{verdict.outcome.value}, expected {expected.outcome.value}: {verdict.detail}")
    if expected.within and verdict.seconds > expected.within:
        short.append(f"it took {verdict.seconds} s, expected at most {expected.within}: {verdict.detail}")
    if expected.within and verdict.gone > expected.within + ENDING:
        short.append(f"the last rank ended after {verdict.gone} s, the error came after {verdict.seconds}")
    if verdict.left:
        short.append(f"{verdict.left} processes outlived the ranks: {verdict.detail}")
    return short
