"""Let a backward fail at every line of the library and in its program, and print where that ends badly.

With `--record` it writes a record: the machine, the commit, and how the failures of each program have ended.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from time import monotonic

import torch

from bench.machine import describe
from tests.distributed.failures.opening.fault import ERRORS, POLICIES, REPEAT, SKIP, SKIP_OOM, Fault
from tests.distributed.failures.opening.judge import BAD, ENDINGS
from tests.distributed.failures.opening.programs import PROGRAMS
from tests.distributed.failures.opening.survey import STEPS, Survey, Verdict, row
from tests.recorded import record_of

TURNS = SKIP, REPEAT, SKIP_OOM
COLUMNS = (*ENDINGS, BAD)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every failure ended well."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.failures.opening", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; by default all")
    parser.add_argument("--ranks", type=int, choices=(2, 3), help="only on so many ranks")
    parser.add_argument("--policy", choices=POLICIES, help="only with programs that do this after an exception")
    parser.add_argument("--step", type=int, choices=STEPS, help="only in this step; 1 is the recorded one")
    parser.add_argument("--error", choices=ERRORS, help="raise only this (default: they take turns)")
    parser.add_argument("--after", type=int, default=5, help="steps after the failure (default: %(default)s)")
    parser.add_argument("--every", action="store_true", help="each time that a line runs, in each program")
    parser.add_argument("--stride", type=int, default=1, help="take one of so many failures (default: every one)")
    parser.add_argument("--turns", action="store_true", help="policies take turns: each failure is tried with one")
    parser.add_argument("--place", default="", help="only lines with this in their file, number and function")
    parser.add_argument("--stop", type=int, default=10, help="end a row after so many bad ones; 0: never (default: 10)")
    parser.add_argument("--record", metavar="FILE", help="write a record")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, counts = monotonic(), Counter[tuple[str, int, str]]()
    bad: list[str] = []
    print(_line("program", "ranks, step, policy", "failures", COLUMNS, "seconds"), flush=True)
    for ranks in (2, 3) if options.ranks is None else (options.ranks,):
        survey = Survey(ranks)
        for program, step, policy in product(options.programs or PROGRAMS, STEPS, POLICIES):
            if options.step in (None, step) and options.policy in (None, policy):
                begin, found = monotonic(), Counter[str]()
                for verdict in _verdicts(survey, program, step, policy, options):
                    found[verdict.judgement.ending] += 1
                    if verdict.judgement.ending == BAD:
                        bad.append(row(verdict))
                        print(bad[-1], flush=True)
                seconds = f"{monotonic() - begin:.0f}"
                numbers = [found[each] for each in COLUMNS]
                print(_line(program, f"{ranks} {step} {policy}", sum(numbers), numbers, seconds), flush=True)
                counts.update({(program, ranks, each): number for each, number in found.items()})
        survey.close()
    lines = [_line("program", "ranks", "failures", COLUMNS)]
    for program, ranks in dict.fromkeys((program, ranks) for program, ranks, _ in counts):
        numbers = [counts[program, ranks, each] for each in COLUMNS]
        lines.append(_line(program, ranks, sum(numbers), numbers))
    numbers = [sum(number for (*_, ending), number in counts.items() if ending == each) for each in COLUMNS]
    lines += [_line("all", "", sum(numbers), numbers), f"{(monotonic() - began) / 60:.1f} minutes", *bad]
    print("\n".join(lines[: len(lines) - len(bad)]))
    if options.record:
        command = " ".join(["python -m tests.distributed.failures.opening", *(arguments or sys.argv[1:])])
        Path(options.record).write_text(record_of(describe(gpu=False), command, lines))
    return int(bool(bad))


def _verdicts(survey: Survey, program: str, step: int, policy: str, options: argparse.Namespace) -> Iterator[Verdict]:
    """Run the failures that were asked for, until too many of them have ended badly."""
    faults = survey.faults(program, step, policy, every=options.every, after=options.after)
    asked = (
        fault
        for number, fault in enumerate(faults)
        if _is_at(fault, options.place) and (_has_turn(number, fault) or not options.turns)
    )
    bad = 0
    for fault in islice(asked, 0, None, options.stride):
        verdict = survey.run(fault if options.error is None else replace(fault, error=options.error))
        yield verdict
        bad += verdict.judgement.ending == BAD
        if options.stop and bad == options.stop:
            return


def _has_turn(number: int, fault: Fault) -> bool:
    """Whether this failure, by its number, is tried with its policy, and not with another one."""
    if fault.kind != "line" or fault.is_before_the_backward:
        return True
    # Three numbers have the three errors, and each step has another policy for a line.
    return TURNS[(number // len(ERRORS) + STEPS.index(fault.step)) % len(TURNS)] == fault.policy


def _is_at(fault: Fault, place: str) -> bool:
    return not place or (fault.line is not None and place in fault.line.place)


def _line(program: str, where: object, failures: object, counts: Sequence[object], seconds: str = "") -> str:
    cells = [f"{count:>{max(len(name), 5)}}" for name, count in zip(COLUMNS, counts, strict=True)]
    return f"{program:14} {where:>19} {failures:>8} " + "  ".join([*cells, seconds]).rstrip()


if __name__ == "__main__":
    sys.exit(main())
