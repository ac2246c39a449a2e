"""The judge: what it makes of what was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.fault import RIGHT, Fault, Outcome, Run, Verdict, named, shortfalls
from tests.faults.judge import judge

TIMEOUT = 15.0
FAULT = Fault("planted", "0", "something", lambda job: None, named("rank 1", "weight"))
GOOD = [{"at": 1.0, "began": True}, {"at": 2.0, "off": 1e-7}, {"at": 3.0, "ended": True}]
TOLD = "DPFuseError: Rank 1 has another 'weight'"


def seen(codes: Any = (0, 0), told: Any = (GOOD, GOOD), printed: Any = ("", ""), ended: Any = (4.0, 4.5)) -> Run:
    return Run(list(codes), list(ended), list(told), list(printed), 0)


def off(value: float, steps: int = 1) -> list[dict[str, Any]]:
    return [GOOD[0], *[{"at": 2.0, "off": value}] * steps, GOOD[2]]


@pytest.mark.parametrize(
    ("outcome", "run"),
    [
        (Outcome.RIGHT, seen()),
        (Outcome.CORRUPT, seen(told=(GOOD, off(0.1)))),
        (Outcome.CORRUPT, seen(told=(GOOD, off(float("inf"))))),
        (Outcome.CORRUPT, seen(told=(GOOD, off(float("nan"))))),
        # An error comes too late for an optimizer that has stepped.
        (Outcome.LATE, seen((1, 1), told=(off(0.1), GOOD), printed=(TOLD, TOLD))),
        (Outcome.LATE, seen((1, 1), told=(off(0.1, 10), GOOD), printed=(TOLD, TOLD))),
        (Outcome.CORRUPT, seen((1, 1), told=(off(0.1, 11), GOOD), printed=(TOLD, TOLD))),
        (Outcome.CORRUPT, seen((None, 1), told=(GOOD, off(0.1, 11)))),
        (Outcome.CORRUPT, seen(told=([GOOD[0], {"at": 2.0, "same": [1]}, GOOD[2]], GOOD))),
        (Outcome.WARNED, seen(told=([GOOD[0], {"at": 2.0, "same": [1]}, GOOD[2]], GOOD), printed=("", TOLD))),
        (Outcome.NAMED, seen((1, 1), printed=(TOLD, TOLD))),
        (Outcome.UNNAMED, seen((1, 1), printed=(TOLD, "Connection closed by peer"))),
        (Outcome.UNNAMED, seen((1, 0), printed=(TOLD, TOLD))),
        (Outcome.UNNAMED, seen(told=(GOOD, GOOD[:2]))),
        (Outcome.HANG, seen((None, 1), printed=(TOLD, TOLD))),
        (Outcome.HANG, seen((1, 1), printed=(TOLD, TOLD), ended=(16.0, 15.5))),
        (Outcome.CRASH, seen((-6, 1), printed=(TOLD, TOLD))),
    ],
)
def test_the_worst_that_was_seen_counts(outcome: Outcome, run: Run) -> None:
    assert judge(FAULT, run, TIMEOUT).outcome is outcome


def test_who_is_to_end_by_the_fault_need_not_say_why() -> None:
    fault = replace(FAULT, victims=(1,))
    assert judge(fault, seen((1, -9), told=(GOOD, GOOD[:2]), printed=(TOLD, "")), TIMEOUT).outcome is Outcome.NAMED
    # But it must end.
    assert judge(fault, seen((1, None), told=(GOOD, GOOD[:2]), printed=(TOLD, "")), TIMEOUT).outcome is Outcome.HANG


def test_seconds_count_from_the_fault_to_the_last_end() -> None:
    planted = [GOOD[0], {"at": 2.5, "planted": True}, GOOD[2]]
    assert judge(FAULT, seen(told=(GOOD, planted)), TIMEOUT).seconds == 2.0
    assert judge(FAULT, seen(), TIMEOUT).seconds == 3.5


def test_seconds_to_the_error_and_to_the_end_are_told_apart() -> None:
    raised = [*GOOD[:2], {"at": 2.25, "raised": True}]
    verdict = judge(FAULT, seen((1, 1), told=(raised, raised), printed=(TOLD, TOLD)), TIMEOUT)
    assert (verdict.seconds, verdict.gone) == (1.2, 3.5)


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (Verdict(Outcome.NAMED, 2.0, 0, "", 11.9), []),
        (Verdict(Outcome.RIGHT, 2.0, 0, ""), ["right, expected named error"]),
        (Verdict(Outcome.NAMED, 2.1, 0, ""), ["it took 2.1 s"]),
        (Verdict(Outcome.NAMED, 2.0, 0, "", 12.1), ["the last rank ended after 12.1 s"]),
        (Verdict(Outcome.NAMED, 2.0, 1, ""), ["1 processes outlived the ranks"]),
    ],
)
def test_what_falls_short_is_said(verdict: Verdict, says: list[str]) -> None:
    short = shortfalls(named("word", within=2.0), verdict)
    assert [any(one.startswith(text) for one in short) for text in says] == [True] * len(short)
    assert len(short) == len(says)


def test_no_error_is_named_where_no_words_are_asked_for() -> None:
    run = seen((1, 1), printed=(TOLD, TOLD))
    assert judge(replace(FAULT, expected=RIGHT), run, TIMEOUT).outcome is Outcome.UNNAMED
