"""A backward of one rank fails at any line of the library, or in its program: for one failure each rank has one error.

`python -m tests.distributed.failures.opening` prints what every rank does, line by line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from tests.distributed.failures.opening import __main__ as command
from tests.distributed.failures.opening.fault import DUMMY, OUT_OF_MEMORY, POLICIES, REPEAT, SKIP, SKIP_OOM, Fault
from tests.distributed.failures.opening.judge import BAD, ENDINGS, judged
from tests.distributed.failures.opening.lines import Line, Passed
from tests.distributed.failures.opening.oracle import Bits, bits_of, mean_of
from tests.distributed.failures.opening.programs import PROGRAMS
from tests.distributed.failures.opening.survey import STEPS, Survey, row
from tests.distributed.failures.opening.trial import APART, DONE, ENDED, STUCK, Attempt, Told

ENOUGH = 3  # bad ends after which a test stops
TURNS = SKIP, REPEAT, SKIP_OOM
# Each program is tried with one step and one policy, and the first one with all of them.
SAMPLE = [("views", step, policy) for step, policy in zip(STEPS, TURNS, strict=True)]
# A mean that a rank has lost ends the group of a divided optimizer, after stall_timeout: each night.
SAMPLE += [
    (program, STEPS[place % 3], TURNS[place // 3 % 3])
    for place, program in enumerate(PROGRAMS)
    if place and program != "sharded"
]
OFTEN = ("ddp", "unused", "accumulating", "micro-batches", "direct", "checks")  # in `make test`, beside one of `views`


@pytest.fixture(scope="module")
def surveys() -> Iterator[dict[int, Survey]]:
    made = {size: Survey(size) for size in (2, 3)}
    yield made
    for survey in made.values():
        survey.close()


def assert_all_end_well(survey: Survey, faults: Iterable[Fault]) -> list[str]:
    """Return how they have ended."""
    endings, rows = [], []
    for fault in faults:
        verdict = survey.run(fault)
        endings.append(verdict.judgement.ending)
        if verdict.judgement.breaches:
            rows.append(row(verdict))
        if len(rows) == ENOUGH:
            break
    if rows:
        pytest.fail("\n".join(rows), pytrace=False)
    return endings


def some(faults: Iterable[Fault], count: int, begin: int = 0) -> Sequence[Fault]:
    """Return `count` of these failures, at equal distances, without those that may end the group and take seconds."""
    found = [fault for fault in faults if fault.line is None or not fault.line.exchanging]
    return found[begin % max(1, len(found) // count) :: max(1, len(found) // count)][:count]


@pytest.mark.parametrize(
    ("program", "step", "policy"),
    [pytest.param(*case, marks=() if case is SAMPLE[2] or case[0] in OFTEN else pytest.mark.slow) for case in SAMPLE],
)
def test_one_failure_is_one_error(surveys, program, step, policy):
    faults = some(surveys[2].faults(program, step, policy, every=True), 8, 7 * SAMPLE.index((program, step, policy)))
    if policy == SKIP_OOM:  # another exception ends the processes, which takes a second
        faults = [*(replace(fault, error=OUT_OF_MEMORY) for fault in faults[1:]), faults[0]]
    assert_all_end_well(surveys[2], faults)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_fails_in_its_backward(surveys, program):
    places = enumerate(("loss", "hook", "post"))
    faults = [Fault(program, rank=number % 2, step=2, kind=kind) for number, kind in places]
    assert {*assert_all_end_well(surveys[2], faults)} == {"one error each"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_failed_forward_is_silent(surveys, program):
    faults = surveys[2].faults(program, 2, DUMMY)
    assert {*assert_all_end_well(surveys[2], islice(faults, 2))} == {"silent"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", ["views", "micro-batches"])
def test_two_ranks_of_three_fail(surveys, program):
    faults = [fault for fault in surveys[3].faults(program, 2, SKIP, every=True) if fault.also is not None]
    assert_all_end_well(surveys[3], some(faults, 4))


def test_the_group_ends_with_a_failure_inside_a_collective(surveys):
    faults = surveys[2].faults("views", 4, REPEAT, every=True)
    inside = [fault for fault in faults if fault.line is not None and fault.line.exchanging]
    assert_all_end_well(surveys[2], inside[: len(inside) // 2 + 1 : len(inside) // 2])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_failure_is_one_error_at_each_line(surveys, policy):
    """Each line is tried in the first program that runs it, by ranks and errors in turn."""
    for program in PROGRAMS:
        for step in STEPS:
            assert_all_end_well(surveys[2], surveys[2].faults(program, step, policy))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_failure_is_one_error_on_three_ranks(surveys, program):
    for step in STEPS:
        for policy in POLICIES:
            assert_all_end_well(surveys[3], some(surveys[3].faults(program, step, policy, every=True), 40))


# What the judge finds. Two ranks train "views", and rank 0 fails in step 1.

FAULT = Fault("views", after=3)
NAMED = "the backward failed on rank 0 of 2, so rank 1 has none"
LOST = "rank {rank}: rank 0 has not used the mean of the last averaged backward"
WEIGHTS: Bits = bits_of([*PROGRAMS["views"].made().parameters()])


def good(number: int, *, of: Sequence[int] | None = None, **fields: Any) -> Attempt:
    """Return an attempt with the right mean of the batches of these numbers, by default of `number` on both ranks."""
    mean = mean_of("views", WEIGHTS, tuple((each, "") for each in of or (number, number)))
    return Attempt(number, before=WEIGHTS, mean=mean, **fields)


def failed(
    number: int, text: str = NAMED, *, named: bool = True, planted: bool = False, memory: bool = False
) -> Attempt:
    error = "DPFuseError" if named else "RuntimeError"
    return Attempt(number, error, text, named, memory, planted, before=WEIGHTS)


def planted(number: int, error: str = "RuntimeError") -> Attempt:
    return Attempt(number, error, "planted", False, error == OUT_OF_MEMORY, True, before=WEIGHTS)


def told(
    *attempts: Attempt,
    end: str = DONE,
    raised: bool = False,
    exchanging: bool = False,
    dropped: bool = False,
    weights: int = 0,
) -> Told:
    lines = [Line("engine/bucket.py:1 send", exchanging)] if raised else []
    return Told([*attempts], Passed(lines, raised, dropped), end, (*WEIGHTS, b"%d" % weights))


def skipping(*first: Attempt, begin: int = 2, **fields: Any) -> Told:
    """Return a rank that takes the next batches, up to number 4, after these attempts."""
    return told(*first, *map(good, range(begin, 5)), **fields)


MEMORY = replace(FAULT, error=OUT_OF_MEMORY)
OUT = skipping(planted(1, OUT_OF_MEMORY), raised=True)
SKIPPED = skipping(planted(1), raised=True), skipping(failed(1))
RAISED = (
    told(planted(1), failed(2, LOST.format(rank=0)), end=APART, raised=True),
    told(good(1), failed(2, LOST.format(rank=1)), end=APART),
)
OVER = (
    told(planted(1), failed(2), failed(3), end=STUCK, raised=True, exchanging=True),
    told(failed(1), failed(2), failed(3), end=STUCK),
)
VOTING = replace(OVER[0], passed=Passed([Line("engine/sync.py:1 _rebuild", False, True)], True)), OVER[1]
FORWARD = replace(FAULT, kind="forward", policy=REPEAT)
LOCAL = replace(FAULT, part="local", policy=REPEAT)


@pytest.mark.parametrize(
    ("fault", "ranks", "expected"),
    [
        (FAULT, [skipping(begin=1), skipping(begin=1)], "no failure"),
        (FAULT, [skipping(begin=1, raised=True), skipping(begin=1)], "recovered"),
        (
            replace(FAULT, error="KeyboardInterrupt"),
            [told(*map(good, range(1, 5)), raised=True, dropped=True), skipping(begin=1)],
            "recovered",
        ),
        (FAULT, SKIPPED, "one error each"),
        (FAULT, RAISED, "all raised"),
        (FAULT, OVER, "group ended"),
        (FAULT, VOTING, "group ended"),
        (FORWARD, [skipping(good(1, planted=True), raised=True), skipping(begin=1)], "silent"),
        (LOCAL, [skipping(planted(1), begin=1, raised=True), skipping(begin=1)], "silent"),
        (
            MEMORY,
            [OUT, skipping(failed(1, memory=True))],
            "one error each",
        ),
        (
            replace(FAULT, policy=SKIP_OOM),
            [told(planted(1), end=ENDED, raised=True), told(failed(1), end=ENDED)],
            "program ended",
        ),
    ],
)
def test_what_counts_as_a_right_end(fault, ranks, expected):
    judgement = judged(fault, ranks)
    assert (judgement.ending, [*judgement.breaches]) == (expected, [])


NO_ENDING = "no ending that the rule allows"


@pytest.mark.parametrize(
    ("fault", "ranks", "breach"),
    [
        pytest.param(FAULT, [skipping(planted(1), failed(2), begin=3, raised=True), SKIPPED[1]], NO_ENDING, id="twice"),
        pytest.param(FAULT, [SKIPPED[0], skipping(begin=1)], NO_ENDING, id="no rank is told"),
        pytest.param(FAULT, [SKIPPED[0], skipping(failed(1), failed(2), begin=3)], NO_ENDING, id="a peer raises twice"),
        pytest.param(FAULT, [SKIPPED[0], skipping(failed(1, "on rank 1 of 2"))], NO_ENDING, id="another rank named"),
        pytest.param(FAULT, [SKIPPED[0], skipping(failed(1, named=False))], NO_ENDING, id="an error of another kind"),
        pytest.param(FAULT, [skipping(failed(1), raised=True), SKIPPED[1]], NO_ENDING, id="not the planted one"),
        pytest.param(FAULT, [RAISED[0], skipping(good(1), failed(2), begin=3)], NO_ENDING, id="not told"),
        pytest.param(FAULT, [OVER[0], told(good(1), good(2), end=DONE)], NO_ENDING, id="goes on without a group"),
        pytest.param(FAULT, [replace(OVER[0], passed=Passed([], True)), OVER[1]], NO_ENDING, id="no collective ran"),
        pytest.param(FAULT, [told(planted(1), end="", raised=True), told(end="")], NO_ENDING, id="hung"),
        pytest.param(FORWARD, [skipping(good(1, planted=True), raised=True), SKIPPED[1]], NO_ENDING, id="not silent"),
        pytest.param(
            replace(FAULT, error="KeyboardInterrupt"),
            [skipping(begin=1, raised=True), skipping(begin=1)],
            NO_ENDING,
            id="an interrupt is lost",
        ),
        pytest.param(
            FAULT,
            [SKIPPED[0], told(failed(1), good(1, of=(2, 1)), good(2, of=(3, 2)), good(3, of=(4, 3)))],
            "other batches in attempt 2, of batches [2, 1]",
            id="apart by a batch",
        ),
        pytest.param(
            FAULT,
            [told(planted(1), *(good(each, of=(each, each - 1)) for each in (2, 3, 4)), raised=True)] * 1
            + [SKIPPED[1]],
            "a wrong mean in attempt 2, of batches [2, 2]",
            id="a wrong mean",
        ),
        pytest.param(
            FAULT,
            [SKIPPED[0], skipping(failed(1), weights=1)],
            "the weights of the ranks differ at the end",
            id="weights",
        ),
        pytest.param(
            FAULT,
            [SKIPPED[0], told(failed(1), *(replace(good(each), before=WEIGHTS[:-1]) for each in (2, 3, 4)))],
            "other weights in attempt 2, of batches [2, 2]",
            id="weights before a step",
        ),
        pytest.param(
            MEMORY,
            [OUT, skipping(failed(1))],
            "rank 1 raised DPFuseError, which is no OutOfMemoryError",
            id="a peer that does not skip",
        ),
        pytest.param(
            FAULT,
            [SKIPPED[0], skipping(failed(1, memory=True))],
            "rank 1 raised DPFuseError, which is an OutOfMemoryError",
            id="a peer that skips alone",
        ),
        pytest.param(
            MEMORY,
            [
                told(planted(1, OUT_OF_MEMORY), failed(2, LOST.format(rank=0)), end=APART, raised=True),
                told(good(1), failed(2, LOST.format(rank=1), memory=True), end=APART),
            ],
            "rank 1 raised DPFuseError, which is an OutOfMemoryError",
            id="weights apart, and skipped",
        ),
        pytest.param(
            replace(FAULT, error="KeyboardInterrupt"), SKIPPED, "rank 0 raised RuntimeError in place of", id="its class"
        ),
    ],
)
def test_what_counts_as_a_bad_end(fault, ranks, breach):
    judgement = judged(fault, ranks)
    assert judgement.ending == BAD
    assert any(breach in each for each in judgement.breaches), judgement.breaches


def test_two_failures_of_three_ranks_are_one_error_of_the_third():
    both = replace(FAULT, also=Fault("views", rank=1))
    three = tuple(good(each, of=(each,) * 3) for each in (2, 3, 4))
    silent = [told(planted(1), *three, raised=True) for _ in range(2)]
    for text, ending in (
        ("on rank 0, 1 of 3", "one error each"),
        ("on several ranks of 3", "one error each"),
        ("", BAD),
    ):
        assert judged(both, [*silent, told(failed(1, text), *three)]).ending == ending


def test_the_command_counts_and_writes_a_record(tmp_path, capsys):
    record = tmp_path / "record.txt"
    arguments = ["views", "--ranks", "2", "--policy", "DUMMY", "--step", "1", "--stop", "0", "--record", str(record)]
    assert command.main(arguments) == 0
    text = record.read_text()
    assert text.startswith("python -m tests.distributed.failures.opening views")
    assert [line.split() for line in text.splitlines() if line.startswith("views ")] == [
        ["views", "2", "2", *(str(2 * (name == "silent")) for name in ENDINGS), "0"]
    ]
    assert '"commit"' in text
    assert "views" in capsys.readouterr().out
