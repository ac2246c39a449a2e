"""A record holds what a reader needs, and the whole run from pytest to picture works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import _progress
from bench.machine import describe, machine_name
from bench.plot import main
from bench.record import entries_of, make_record, outcomes_of, seconds_before, write_record
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


def test_a_record_says_with_what_it_was_measured(record):
    assert set(record) == {
        "format", "name", "date", "quick", "command", "machine", "suites", "goals", "ratios", "measurements",
    }  # fmt: skip
    assert record["machine"].keys() >= {
        "cpu", "cores", "gpu", "torch", "triton", "nccl", "python", "commit", "uncommitted_changes",
    }  # fmt: skip
    assert record["machine"]["gpu"] is None
    assert machine_name(gpu=False) == f"cpu{record['machine']['cores']}"


def test_a_record_keeps_statistics_but_no_single_rounds(record):
    assert set(record["measurements"][0]) == {"suite", "case", "variant", "median", "min", "iqr", "rounds", "info"}


def test_a_missed_goal_is_recorded_as_missed(record):
    assert record["goals"] == {"met": 2, "missed": 2}
    assert [row["met"] for row in record["ratios"]] == [False, False, True, True]


def test_what_is_written_reads_back_with_four_digits(record, tmp_path):
    path = tmp_path / "new" / "record.json"
    write_record(record, path)
    read = json.loads(path.read_text())
    assert read["measurements"][-1]["median"] == 1.346
    assert [outcome.met for outcome in outcomes_of(read)] == [False, False, True, True]


def test_the_time_to_go_is_that_of_the_last_records_of_such_a_machine(record, tmp_path):
    def written(name, date, quick, **suites):
        facts = {suite: {"seconds": seconds, "passed": seconds > 0} for suite, seconds in suites.items()}
        write_record(record | {"date": date, "quick": quick, "suites": facts}, tmp_path / f"{name}.json")

    written("cpu2-2", "2026-01-02", False, step=60.0, clip=-1.0)
    written("cpu2-1", "2026-01-01", False, step=50.0, clip=20.0)
    written("cpu2-3", "2026-01-03", True, step=1.0)
    written("cpu20-4", "2026-01-04", False, step=2.0)
    before = seconds_before(tmp_path, "cpu2", quick=False)
    assert before == {"step": 60.0, "clip": 20.0}
    assert _progress(["step", "clip"], 0, before) == "suite 1 of 2: step, about 80 s to go"
    assert _progress(["step", "clip"], 1, before) == "suite 2 of 2: clip, about 20 s to go"
    assert _progress(["step", "wire"], 0, before) == "suite 1 of 2: step"


def test_a_record_that_was_written_is_drawn_again(record, tmp_path):
    write_record(record, tmp_path / "record.json")
    main([str(tmp_path / "record.json"), str(tmp_path / "new" / "picture.png"), "--only", "step"])
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


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
