"""Play all trials, print the table, write a record: `python -m tests.stopping.peers [--times N] [WAY ...]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from time import strftime

from bench.machine import ROOT, describe, machine_name
from tests.stopping.peers.table import table
from tests.stopping.peers.trial import PATIENCE, TARGETS, WAYS, collectives_of, play


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if dpfuse has ended all ranks in the same step in each trial, with a checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m tests.stopping.peers", description=__doc__)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"only these of {', '.join(WAYS)}, and no record")
    parser.add_argument("--times", type=int, default=3, help="trials of each kind (default: %(default)s)")
    options = parser.parse_args(arguments)
    record = {
        "what": "two ranks over gloo, one of whose processes gets SIGTERM while they train",
        "hang": f"a job that has not ended {PATIENCE:.0f} s after the signal",
        "date": strftime("%Y-%m-%d"),
        "machine": describe(gpu=False),
        "packages": {name: version(name) for name in ("torch", "lightning", "accelerate")},
        "collectives of a step": {},
        "trials": [],
    }
    ways = options.ways or WAYS
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            quiet, asking = collectives_of(way, Path(folder))
        # Lightning always asks: what it averages with is torch's DDP, as in the first way.
        base = quiet if way != "lightning" else record["collectives of a step"].get("flag", {"base": 1.0})["base"]
        record["collectives of a step"][way] = {"base": base, "asking": asking}
        for target in TARGETS:
            for _ in range(options.times):
                with tempfile.TemporaryDirectory() as folder:
                    outcome = play(way, target, Path(folder))
                print(way, target, outcome, file=sys.stderr, flush=True)
                record["trials"].append({"way": way, "to": target, **asdict(outcome)})
    print("\n".join(table(record)))
    if not options.ways:
        path = ROOT / "bench/results" / f"stop-peers-{machine_name(gpu=False)}-{record['date']}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"record: {path}")
    ours = [trial for trial in record["trials"] if trial["way"] == "dpfuse"]
    return int(not all(trial["how"] == "same step" and trial["saved"] for trial in ours))


if __name__ == "__main__":
    sys.exit(main())
