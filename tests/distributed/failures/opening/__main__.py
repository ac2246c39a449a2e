"""Let a backward raise at every line of the library, and print where that ends badly."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from time import monotonic

from tests.distributed.failures.opening.programs import PROGRAMS
from tests.distributed.failures.opening.survey import STEPS, Survey, row


def main() -> int:
    """Exit code 0 if every failure ended well."""
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.failures.opening", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; by default all")
    parser.add_argument("--step", type=int, choices=STEPS, help="only in this step; 1 is the recorded one")
    parser.add_argument("--last", action="store_true", help="up to the last collective of a backward, not the first")
    parser.add_argument("--every", action="store_true", help="each time that a line runs, in each program")
    parser.add_argument("--stride", type=int, default=1, help="take one of so many lines (default: every one)")
    parser.add_argument("--stop", type=int, default=10, help="end a program after so many (default: %(default)s)")
    options = parser.parse_args()
    survey, total = Survey(), 0
    for name in options.programs or PROGRAMS:
        for step in STEPS if options.step is None else (options.step,):
            began, bad, count = monotonic(), 0, 0
            faults = survey.faults(name, step, last=options.last, every=options.every)
            for fault in islice(faults, 0, None, options.stride):
                verdict = survey.run(fault)
                count += 1
                if verdict.breaches:
                    bad += 1
                    print(row(verdict), flush=True)
                if bad == options.stop:
                    break
            print(f"{name} step {step}: {bad} of {count} bad, {monotonic() - began:.0f} s", flush=True)
            total += bad
    survey.close()
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
