"""Runs all trials, or those whose numbers are given, and writes a record: `python -m tests.stopping.survey FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter, strftime

from bench.machine import describe
from tests.stopping.survey.judge import faults_of
from tests.stopping.survey.trials import TRIALS


def main(file: str, numbers: list[int]) -> int:
    """Return whether a trial has faults."""
    began, found = perf_counter(), {}
    chosen = numbers or range(len(TRIALS))
    for number in chosen:
        found[f"{number}: {TRIALS[number]}"] = faults = faults_of(TRIALS[number])
        print(number, TRIALS[number], faults or "well", flush=True)
    wrong = sum(map(bool, found.values()))
    record = {
        "what": "trainings that get a signal, and go on: what was wrong with each",
        "date": strftime("%Y-%m-%d"),
        "machine": describe(gpu=False),
        "well": f"{len(found) - wrong} of {len(found)}",
        "seconds": round(perf_counter() - began),
        "faults": found,
    }
    Path(file).write_text(json.dumps(record, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], list(map(int, sys.argv[2:]))))
