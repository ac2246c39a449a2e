"""Play the faults with dpfuse and with torch's wrapper, print the table, keep a record; see the package."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic

from bench.goals import Entry
from bench.machine import ROOT, describe, machine_name
from bench.record import make_record, write_record
from tests.faults.fault import Fault, Verdict
from tests.faults.job import DDP, TORCH
from tests.faults.jobs import JobFault
from tests.faults.player import playing
from tests.faults.report import ALL, OURS, RESULTS, SUFFIX, entry, into_page, newest_record, table

PAGE = ROOT / "docs" / "wrong" / "diagnosis.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if dpfuse did what it owes in all that were played."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAULT", help="only these, and no record")
    parser.add_argument("--faces", nargs="+", default=[OURS, *TORCH], choices=[OURS, *TORCH], help="with these only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record (default: %(default)s)")
    parser.add_argument("--docs", action="store_true", help="only write the table of the newest record to the page")
    options = parser.parse_args(arguments)
    if options.docs:
        newest = newest_record()
        if newest is None:
            parser.error(f"there is no record in {RESULTS}; run it without --docs first")
        measurements = json.loads(newest.read_text())["measurements"]
        PAGE.write_text(into_page(PAGE.read_text(), table(measurements)))
        return 0
    began, start = datetime.now().astimezone(), monotonic()
    machine = describe(gpu=False)  # before the faults, which take minutes: the files may change meanwhile
    chosen = [fault for fault in ALL if fault.name in options.names or not options.names]
    entries = played(chosen, options.faces)
    record = make_record(
        entries,
        name=f"{machine_name(gpu=False)}-{began.date()}{SUFFIX.removesuffix('.json')}",
        date=began.isoformat(timespec="seconds"),
        quick=False,
        machine=machine,
        command=shlex.join(["python", "-m", "tests.faults", *(sys.argv[1:] if arguments is None else arguments)]),
        suites={"faults": {"seconds": round(monotonic() - start, 1), "passed": True}},
    )
    print(table(record["measurements"]))
    if not options.names:
        path = options.results / f"{record['name']}.json"
        write_record(record, path)
        print(f"record: {path}")
    return int(not all(one.info["as_expected"] for one in entries if one.variant == OURS))


def played(faults: Sequence[Fault | JobFault], faces: Sequence[str]) -> list[Entry]:
    """What came of each, with each wrapper."""
    entries = []

    def keep(fault: Fault | JobFault, face: str, verdict: Verdict) -> None:
        print(f"{face}: {fault.name}: {verdict.outcome.value}, {verdict.seconds} s", file=sys.stderr, flush=True)
        entries.append(entry(fault, face, verdict))

    plays = [(fault, face) for face in faces for fault in faults if isinstance(fault, Fault)]
    with playing(plays) as futures:
        for fault, face in plays:
            keep(fault, face, futures[fault.name, face].result())
    # One by one, when nothing else runs: they start processes of their own.
    for face in (OURS, DDP):
        for fault in faults:
            if isinstance(fault, JobFault) and face in faces:
                keep(fault, face, fault.play(face))
    return entries


if __name__ == "__main__":
    sys.exit(main())
