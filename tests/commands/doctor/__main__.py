"""Run the doctor on all planted and healthy programs, print what it said wrongly, and keep a record."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from bench.machine import ROOT, describe, machine_name
from tests.commands.doctor.cases import BUSY, HEALTHY, PLANTED, STEPS, Case, Diagnosis, examine


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if all was told right."""
    parser = argparse.ArgumentParser(prog="python -m tests.commands.doctor", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose name contains one of these, and no record")
    options = parser.parse_args(arguments)
    began, machine = datetime.now().astimezone(), describe(gpu=False)
    chosen = [
        case
        for case in (*PLANTED, *HEALTHY)
        if not options.words or any(word in case.name for word in options.words)
    ]  # fmt: skip
    found = [(case, _examined(case)) for case in chosen]
    counts = {}
    for kind in dict.fromkeys(case.kind for case in chosen):
        right = [not diagnosis.complaints and diagnosis.said != BUSY for case, diagnosis in found if case.kind == kind]
        counts[kind] = {"right": sum(right), "of": len(right)}
        print(f"{kind}: {sum(right)} of {len(right)} right")
    if not options.words:
        record = {
            "format": "dpfuse doctor planted 1",
            "date": began.isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "tests.commands.doctor"]),
            "machine": machine,
            "steps": STEPS,
            "processes": "forks of one that has imported torch, except for the order of a set",
            "counts": counts,
            "cases": [
                {
                    "name": case.name,
                    "ranks": case.ranks,
                    "right": not diagnosis.complaints,
                    "complaints": list(diagnosis.complaints),
                    "said": diagnosis.said,
                    "seconds of all runs": round(diagnosis.seconds, 1),
                }
                for case, diagnosis in found
            ],
        }
        path = ROOT / "bench" / "results" / f"{machine_name(gpu=False)}-{began.date()}-doctor.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"record: {path}")
    return int(any(diagnosis.complaints for _, diagnosis in found))


def _examined(case: Case) -> Diagnosis:
    with tempfile.TemporaryDirectory() as folder:
        diagnosis = examine(case, Path(folder))
    print(f"{'right' if not diagnosis.complaints else 'WRONG'}  {case.name}", *diagnosis.complaints, flush=True)
    if diagnosis.complaints:
        print(diagnosis.terminal, flush=True)
    return diagnosis


if __name__ == "__main__":
    sys.exit(main())
