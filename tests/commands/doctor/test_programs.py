"""`dpfuse doctor` on whole programs: what it says, what it writes, and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from inspect import signature
from statistics import median

import pytest
import torch

from dpfuse import DistributedDataParallel
from dpfuse.commands.doctor.run_request import RunRequest
from dpfuse.commands.doctor.runs import OBSERVER
from dpfuse.commands.doctor.summary import LINES
from dpfuse.startup import startup_variables
from tests.commands.programs import PROGRAMS
from tests.commands.test_run import python
from tests.distributed.processes import all_gone, clean_environment, family, start
from tests.patience import patience

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def doctor(tmp_path, *words, ranks=2, steps=16, options=(), program="toy.py"):
    out = tmp_path / "report"
    command = ["-m", "dpfuse", "doctor", "--ranks", ranks, "--steps", steps, "--out", out, *options, program, *words]
    done = python(*command, timeout=400)
    report = json.loads((out / "report.json").read_text())
    assert report["exit code"] == done.returncode, done.stderr
    assert len(done.stdout.splitlines()) <= LINES + 1
    page = (out / "doctor.html").read_text()
    assert "http" not in page
    assert "<script" not in page
    return done, report, page


def test_a_healthy_program_has_equal_numbers_and_nothing_is_named(tmp_path):
    done, report, page = doctor(tmp_path)
    assert report["numbers"]["result"] == "equal", done.stdout
    assert report["findings"] == []
    assert done.returncode == 0
    assert "yes, bit for bit" in page
    left = [int(text) for text in re.findall(r"exit code 0; about (\d+) s are left", done.stderr)]
    assert len(left) == 3
    assert left == sorted(left, reverse=True)
    seconds = {run["title"]: run["seconds"] for run in report["runs"]}
    assert sum(seconds.values()) <= 6 * max(value for title, value in seconds.items() if "torch DDP" in title)


@pytest.mark.parametrize(
    ("wrong", "code", "result", "text"),
    [
        (
            "fails",
            2,
            None,
            r"the program fails under torch DDP, in run 1, so dpfuse cannot be compared: rank \d raised ValueError: no "
            r"more data .*what is wrong\? not examined, since run 1 has failed: rank \d raised ValueError: no more",
        ),
        (
            "needs torch",
            1,
            None,
            r"runs under torch DDP and fails under dpfuse, in run 2: rank \d raised TypeError: only torch's own",
        ),
        (
            "no wrapper",
            2,
            None,
            "made no DistributedDataParallel under torch DDP before an optimizer had made 16",
        ),
        ("derived", 2, None, "Derived derives from torch's DistributedDataParallel, and dpfuse does not replace it"),
        ("unseeded", 0, "equal", "the same bits as under DDP"),
        ("unused", 1, "equal", r"unused parameters: never.weight, never.bias of model 0 \(Net\) got no gradient"),
    ],
)
def test_what_is_wrong_is_said(wrong, code, result, text, tmp_path):
    done, report, _ = doctor(tmp_path, "--wrong", wrong)
    assert re.search(re.sub(r"\s+", " ", text), re.sub(r"\s+", " ", done.stdout)), done.stdout
    assert done.returncode == code
    assert (report["numbers"] or {}).get("result") == result


def test_a_program_that_hangs_is_ended_and_its_output_is_kept(tmp_path):
    done, _, _ = doctor(tmp_path, "--wrong", "hangs", options=["--patience", "12"])
    assert done.returncode == 2
    assert "it made no step for too long" in re.sub(r"\s+", " ", done.stdout)
    assert (tmp_path / "report" / "run1.log").exists()


def test_a_run_that_resumes_voids_the_comparison_and_no_code_behind_the_loop_runs(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    done, report, _ = doctor(tmp_path, "--out", tmp_path / "link")
    assert report["numbers"]["result"] == "void"
    assert "checkpoint.pt" in report["numbers"]["text"]
    assert done.returncode == 2
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["checkpoint.pt"]
    assert all(len(paths) == 1 for paths in report["changed files"].values())


@pytest.mark.parametrize(
    ("latency", "rate", "width", "text"),
    [
        (1e-4, 20e6, 256, "the link is the limit"),
        (5e-2, 1e9, 32, "the link is the limit, by its latency"),
        (1e-5, 100e9, 256, "the link is not the limit"),
    ],
    ids=["little bandwidth", "long latency", "fast"],
)
def test_the_link_is_told(latency, rate, width, text, tmp_path):
    done, report, _ = doctor(tmp_path, latency, rate, width, ranks=1, steps=24, program="slow_link.py")
    assert re.sub(r"\s+", " ", done.stdout).partition("% of a step waits for it: ")[2].startswith(text)
    assert [finding["title"] for finding in report["findings"]] == ["a group of one rank"]
    advice = [one["what"] for one in report["speed"]["advice"]]
    assert ("average once in 2 batches, or double the batch" in advice) == ("not" not in text)
    tried = [run["title"].partition(", ")[2] for run in report["runs"][4:]]
    assert tried == (["dpfuse, 16 bits"] if text == "the link is the limit" else [])  # the tuner needs more steps
    if report["speed"]["noise"] < 0.1 or text != "the link is the limit":  # else what it saved may be chance
        assert ("send 16 bits" in advice) == (text == "the link is the limit")
    for one in report["speed"]["advice"]:
        if one["measured"]:
            assert one["after"] < one["before"]
            options = eval(f"dict({one['how'].partition(';')[0]})", {"torch": torch})
            assert options.keys() <= signature(DistributedDataParallel).parameters.keys()


@pytest.mark.parametrize(
    ("program", "word"), [("language_model.py", "settings.py"), ("means.py", "mean_of_losses_and_metrics")]
)
def test_beside_other_programs_nothing_is_said_of_the_speed(program, word, tmp_path):
    """Steps and links are slow then, and the program is not the reason."""
    settings = tmp_path / "settings.py"
    settings.write_text("steps, width = 1000, 64")
    count = max(6, 3 * (os.cpu_count() or 1))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        done, report, page = doctor(tmp_path, settings if word == settings.name else word, steps=32, program=program)
    finally:
        for other in others:
            other.kill()
            other.wait()
    said = re.sub(r"\s+", " ", done.stdout)
    assert re.search(r"how fast\? nothing is said of the speed: [\d.]+ tasks ran or waited for each core", said), said
    for words in ("steps/s", "faster", "slower", "the link", "is slow", "where it goes", "a step took", "less time"):
        assert words not in said
    assert (report["speed"]["link"], report["speed"]["advice"], report["speed"]["tried"]) == (None, [], "")
    assert "What would help" not in page
    assert [run["title"].partition(", ")[2] for run in report["runs"]] == ["torch DDP", "dpfuse"] * 2
    assert (report["findings"], report["numbers"]["result"]) == ([], "equal")


def test_averaging_every_second_batch_takes_less_time_for_the_same_samples_where_it_is_advised(tmp_path):
    steps = {}
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        words = (1e-4, 20e6, 256, count)
        _, report, _ = doctor(tmp_path / str(count), *words, ranks=1, steps=24, program="slow_link.py")
        (ours, *_) = [one["steps"] for one in report["speed"]["timings"] if one["wrapper"] == "dpfuse"]
        steps[count] = median(ours) / count
        assert any(f"average once in {2 * count} batches" in one["what"] for one in report["speed"]["advice"])
    assert steps[2] < steps[1]


def test_a_doctor_that_is_terminated_ends_its_run_and_removes_its_folder(tmp_path):
    words = ["-m", "dpfuse", "doctor", "--out", tmp_path / "report", PROGRAMS / "toy.py", "--wrong", "hangs"]
    process = start(*words, TMPDIR=str(tmp_path))
    (folder,) = waited(lambda: list(tmp_path.glob("dpfuse-doctor-*")))
    waited(lambda: list(folder.glob("run1/rank0.jsonl")))
    members = family(process.pid)
    assert len(members) >= 4  # the doctor, the launcher and its ranks
    process.terminate()
    process.communicate(timeout=patience(60))
    assert process.returncode == 128 + signal.SIGTERM
    assert all_gone(members, within=20)
    assert list(tmp_path.glob("dpfuse-doctor-*")) == []


def test_ctrl_c_ends_a_doctor_at_once_with_what_it_has_so_far(tmp_path):
    out = tmp_path / "report"
    words = ["-m", "dpfuse", "doctor", "--ranks", 2, "--steps", 16, "--out", out, PROGRAMS / "toy.py"]
    process = start(*words, "--wrong", "hangs under dpfuse", TMPDIR=str(tmp_path))
    (folder,) = waited(lambda: list(tmp_path.glob("dpfuse-doctor-*")))
    waited(lambda: list(folder.glob("run2/rank0.jsonl")))
    members = family(process.pid)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=patience(60))
    assert time.monotonic() - began < patience(2)
    assert process.returncode == 130
    assert told.splitlines()[-1] == (
        "dpfuse doctor: interrupted in run 2, dpfuse; the report has what was found before"
    )
    assert "Traceback" not in told
    assert "the doctor was interrupted in run 2, dpfuse" in re.sub(r"\s+", " ", said)
    report = json.loads((out / "report.json").read_text())
    assert [run["title"] for run in report["runs"]] == ["run 1, torch DDP"]
    assert report["exit code"] == 130
    assert all_gone(members, within=5)
    assert list(tmp_path.glob("dpfuse-doctor-*")) == []


def test_a_process_that_a_rank_starts_does_not_write_the_facts_of_the_rank(tmp_path):
    variables = startup_variables(OBSERVER, clean_environment()) | RunRequest(str(tmp_path), "torch", 5, 2).variables()
    assert python("-c", "import torch", RANK="0", **variables).returncode == 0
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"factsp\d+\.json", path.name)


def waited(found, seconds=90):
    until = time.monotonic() + patience(seconds)
    while not found() and time.monotonic() < until:
        time.sleep(0.1)
    assert found()
    return found()
