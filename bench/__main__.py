"""`python -m bench`: runs the suites, and writes, prints and plots one record."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import Any

from bench.goals import Entry
from bench.machine import ROOT, describe, machine_name
from bench.record import entries_of, make_record, seconds_before, write_record

__all__ = ["main"]

# Time limits in seconds.
SUITES = {
    "step": 900,
    "forward": 120,
    "checks": 240,
    "training": 900,
    "accumulate": 300,
    "health": 120,
    "clip": 150,
    "flatten": 300,
    "bucket_size": 300,
    "overlap": 300,
    "planner": 120,
    "wire": 240,
    "manual": 300,
    "sharded": 1200,
    "same_bits": 600,
}
LIMIT_ON_GPU = 900.0
# Seconds that a suite is expected to need on a GPU.
GPU_SUITES = {
    "step": 160,
    "forward": 20,
    "health": 25,
    "clip": 20,
    "accumulate": 30,
    "flatten": 45,
    "kernels": 50,
    "bucket_size": 35,
    "overlap": 110,
    "wire": 30,
    "sharded": 50,
}
REPORT_SECONDS = 10  # seconds for the report of a suite after its time limit
PASSED_ON = ("model", "comm_buffer_sizes", "last_comm_buffer_sizes")


def main(arguments: list[str] | None = None) -> int:
    """Run the suites. Return 0 if every suite ran; a missed goal is shown, but is no failure."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = datetime.now(timezone.utc)
    machine = describe(gpu=options.gpu)
    limits = dict.fromkeys(GPU_SUITES, LIMIT_ON_GPU) if options.gpu else SUITES
    if options.only and options.only not in limits:
        parser.error(f"the suite {options.only} runs {'without' if options.gpu else 'with'} --gpu only")
    entries: list[Entry] = []
    suites: dict[str, dict[str, Any]] = {}
    # A record of one suite, or of a quick run, does not overwrite the day's full record.
    parts = [machine_name(gpu=options.gpu), f"{began:%Y-%m-%d}", options.only, "quick" if options.quick else None]
    name = "-".join(filter(None, parts))
    command = shlex.join(["python", "-m", "bench", *(sys.argv[1:] if arguments is None else arguments)])
    path, picture = options.results / f"{name}.json", options.out / f"{name}.png"
    record: dict[str, Any] = {}
    planned = [options.only] if options.only else list(limits)
    before = seconds_before(options.results, machine_name(gpu=options.gpu), quick=options.quick)
    for number, suite in enumerate(planned):
        print(_progress(planned, number, before), file=sys.stderr, flush=True)
        found, suites[suite], interrupted = _run(suite, options, limits[suite])
        entries += found
        record = make_record(
            entries,
            name=name,
            date=began.isoformat(timespec="seconds"),
            quick=options.quick,
            machine=machine,
            command=command,
            suites=suites,
        )
        write_record(record, path)  # after each suite: the machine may be lost before the last one
        if interrupted:
            break
    print(f"record: {path}")
    _show(record, picture)
    return 0 if all(facts["passed"] for facts in suites.values()) else 1


def _progress(planned: Sequence[str], number: int, before: Mapping[str, float]) -> str:
    """Return the line before suite `number`, with the time to go if all suites to come were measured before."""
    text = f"suite {number + 1} of {len(planned)}: {planned[number]}"
    to_come = [before.get(suite) for suite in planned[number:]]
    left = None if None in to_come else sum(filter(None, to_come))
    return text if left is None else f"{text}, about {left:.0f} s to go"


def _show(record: dict[str, Any], picture: Path) -> None:
    """Plot and print the record, if matplotlib and rich are installed: a GPU machine may lack them."""
    try:
        from bench.plot import plot_record
        from bench.table import print_record
    except ModuleNotFoundError as error:
        print(f"no plot and no table: {error.name} is not installed; goals: {record['goals']}")
        return
    plot_record(record, picture)
    print_record(record)
    print(f"plot: {picture}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="on CUDA devices instead of the CPU")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that everything runs")
    parser.add_argument("--only", choices=list(SUITES | GPU_SUITES), help="one suite instead of all")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "bench" / "results", help="folder of the record (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "out", help="folder of the plot (default: %(default)s)"
    )
    group = parser.add_argument_group("bucket_size")
    group.add_argument("--model", help="package.module:function that returns (module, loss): size the buckets for it")
    group.add_argument("--comm-buffer-sizes", help="MB, separated by commas")
    group.add_argument("--last-comm-buffer-sizes", help="MB, separated by commas")
    return parser


def _run(suite: str, options: argparse.Namespace, limit: float) -> tuple[list[Entry], dict[str, Any], bool]:
    """Run one suite in a separate process, so that no suite inherits the heap of another.

    Returns:
        What was measured, facts on the run, and whether Ctrl-C ended it.
    """
    flags = [f"--{flag}" for flag in ("gpu", "quick") if getattr(options, flag)]
    for option in PASSED_ON if suite == "bucket_size" else ():
        if (value := getattr(options, option)) is not None:
            flags.append(f"--{option.replace('_', '-')}={value}")
    shown = ["-m", "pytest", f"bench/bench_{suite}.py", "-W", "default", "--benchmark-quiet", *flags]
    roots = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    start = monotonic()
    with tempfile.TemporaryDirectory(prefix="dpfuse-bench-") as folder:
        report = Path(folder, "report.json")
        with subprocess.Popen(
            [sys.executable, *shown, f"--benchmark-json={report}"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)},
        ) as suite_process:
            passed = interrupted = False
            try:
                passed = suite_process.wait(limit) == 0
            except subprocess.TimeoutExpired:
                suite_process.send_signal(signal.SIGINT)
            except KeyboardInterrupt:  # the suite got SIGINT as well
                interrupted = True
            try:  # after SIGINT, pytest-benchmark still reports the finished cases
                suite_process.wait(REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                suite_process.kill()
        # If nothing was measured, the report is missing or empty.
        text = report.read_text() if report.exists() else ""
        entries = entries_of(json.loads(text)) if text else []
    facts = {
        "command": shlex.join(["python", *shown]),
        "seconds": round(monotonic() - start, 1),
        "passed": passed and bool(entries),
    }
    return entries, facts, interrupted


if __name__ == "__main__":
    sys.exit(main())
