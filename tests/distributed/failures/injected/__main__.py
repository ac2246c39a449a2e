"""Let a rank fail at every point of the library in a backward, and print where that ends badly."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from time import monotonic

from tests.distributed.failures.injected.cases import CASES
from tests.distributed.failures.injected.faults import ERRORS, KINDS
from tests.distributed.failures.injected.judge import outcome
from tests.distributed.failures.injected.survey import PATIENCE, Survey, Verdict
from tests.distributed.failures.injected.trial import Fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every failure ended well."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.failures.injected", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument(
        "--all", action="store_true", help="each time that a line is passed in each case, not only the first and last"
    )
    parser.add_argument("--verbose", action="store_true", help="print every trial, not only those that end badly")
    parser.add_argument("--size", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--step", type=int, help="only in this synchronised backward; 1 is the recorded one")
    parser.add_argument("--kind", choices=KINDS, help="only at lines of the library, or at calls of torch from it")
    parser.add_argument("--stride", type=int, default=1, help="take one of so many points (default: every one)")
    parser.add_argument("--at", type=int, help="only at this point; needs one CASE, --step and --kind")
    parser.add_argument("--rank", type=int, default=0, help="with --at: the rank that fails (default: %(default)s)")
    parser.add_argument("--error", choices=ERRORS, default="RuntimeError", help="with --at (default: %(default)s)")
    parser.add_argument(
        "--stop", type=int, default=20, help="end a case after so many (default: %(default)s; 0: never)"
    )
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for a trial (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = {*options.cases}.difference(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    survey = Survey(options.size, options.patience)
    bad, tried = Counter[str](), Counter[str]()
    try:
        for name, faults in _groups(options, survey):
            began = monotonic()
            for fault in faults:
                verdict = survey.run(fault)
                tried[name] += 1
                bad[name] += bool(verdict.breaches)
                if verdict.breaches or options.verbose or options.at:
                    print(row(verdict), flush=True)
                if options.stop and bad[name] >= options.stop:
                    print(f"{name}: ended after {options.stop}; --stop 0 goes on", flush=True)
                    break
            print(f"{name}: {bad[name]} of {tried[name]} bad, {monotonic() - began:.0f} s", flush=True)
    finally:
        survey.close()
    return int(sum(bad.values()) > 0)


def row(verdict: Verdict) -> str:
    """One trial: the point, then how each step ended on each rank, then what does not hold."""
    fault, point = verdict.fault, verdict.point
    marks = [mark for mark, holds in (("between", point and point.between), ("last", verdict.last)) if holds]
    lines = [
        f"{fault.case} step {fault.step} rank {fault.rank} {fault.kind} {fault.at} {fault.error} "
        f"{point.place if point else '(not reached)'} {' '.join(marks)}".rstrip()
    ]
    for rank, steps in enumerate(verdict.attempts):
        lines.append(f"    rank {rank}: {' | '.join(outcome(step)[:160] for step in steps)}")
    return "\n".join([*lines, *(f"  ! {text}" for text in verdict.breaches)])


def _groups(options: argparse.Namespace, survey: Survey) -> Iterator[tuple[str, Iterator[Fault]]]:
    for case in options.cases or CASES:
        for step in CASES[case].steps:
            for kind in KINDS:
                if options.step not in (None, step) or options.kind not in (None, kind):
                    continue
                name = f"{case} step {step} {kind}s"
                if options.at:
                    yield name, iter([Fault(case, step, options.rank, kind, options.at, options.error)])
                else:
                    faults = survey.all_faults(case, step, kind, every=options.all)
                    yield name, islice(faults, 0, None, options.stride)


if __name__ == "__main__":
    sys.exit(main())
