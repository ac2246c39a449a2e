"""What is written into a record reads back, and the whole run from pytest to picture works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.machine import describe
from bench.record import entries_of, make_record, outcomes_of, write_record
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


def report(variant: str, seconds: float, extra: float) -> dict[str, object]:
    stats = {"median": seconds, "min": seconds, "iqr": 0.0, "rounds": 3, "data": [seconds] * 3, "mean": seconds}
    return {
        "stats": stats,
        "extra_info": {"suite": "step", "case": "host fan 10", "variant": variant, "extra": extra},
    }


@pytest.fixture
def record():
    benchmarks = [report("bare", 1.0, 0.0), report("dpfuse views", 1.4, 0.4), report("dpfuse private", 1.3, 0.3)]
    entries = entries_of({"benchmarks": [*benchmarks, report("DDP default", 1.3456789, 0.3)]})
    return make_record(
        entries,
        name="cpu2-2026-01-01",
        date="2026-01-01T00:00:00+00:00",
        quick=False,
        machine=describe(gpu=False),
        command="python -m bench",
        suites={"step": {"command": "python -m pytest", "seconds": 1.0, "passed": True}},
    )


def test_what_is_written_reads_back_with_four_digits(record, tmp_path):
    path = tmp_path / "new" / "record.json"
    write_record(record, path)
    read = json.loads(path.read_text())
    assert read["measurements"][-1]["median"] == 1.346
    assert [outcome.met for outcome in outcomes_of(read)] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_quick_run_writes_a_record_and_a_picture(tmp_path):
    command = [sys.executable, "-m", "bench", "--quick", "--only", "flatten", "--results", tmp_path, "--out", tmp_path]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    # pytest-benchmark measures nothing in a worker of pytest-xdist, and asks the environment whether it runs in one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        command, cwd=ROOT, env=kept | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=patience(180)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-flatten-quick.json")
    written = json.loads(path.read_text())
    assert written["suites"]["flatten"]["passed"]
    assert {row["variant"] for row in written["measurements"]} >= {"dpfuse", "_foreach_copy_ + mul_"}
    assert "ratios and goals" in done.stdout
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
