"""The pieces of the work on a GPU: they fit into nine minutes, stop by themselves, and always leave an archive."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
import torch

from bench import pieces, profile_pack
from bench.__main__ import GPU_SUITES
from bench.pieces import LIMIT, PIECES, Phase, Piece, Step, plan_of
from tests.patience import patience

ROOT = Path(__file__).parents[2]
GPU_MARK = re.compile(r"mark\.gpu\b")


def python(name: str, code: str, seconds: float = 20.0, **options) -> Step:
    return Step(name, ("-c", code), seconds, **options)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run(steps, …)` runs a piece of these steps; returns its exit code, its summary and the names in its archive."""

    def of(*steps, limit=60.0, side_by_side=1, during=lambda piece: None):
        monkeypatch.setitem(PIECES, "planted", (Phase(steps, side_by_side),))
        piece = Piece("planted", tmp_path, limit)
        threading.Thread(target=during, args=(piece,)).start()
        code = piece.run()
        with tarfile.open(piece.archive) as archive:
            summary = json.load(archive.extractfile("gpu-planted/summary.json"))
            logs = {
                Path(name).stem: archive.extractfile(name).read().decode()
                for name in archive.getnames()
                if name.endswith(".log")
            }
        return code, {step["name"]: step["outcome"] for step in summary["steps"]}, logs, summary

    return of


def test_a_step_that_fails_hides_none_behind_it(run, capfd):
    code, outcomes, logs, summary = run(
        python("first", "print('one')"), python("second", "raise SystemExit(3)"), python("third", "print('three')")
    )
    assert code == 1
    assert outcomes == {"first": "passed", "second": "failed: exit code 3", "third": "passed"}
    assert (logs["first"], logs["third"]) == ("one\n", "three\n")
    assert "[third] three" in capfd.readouterr().out
    assert summary["machine"]["torch"] == torch.__version__


@pytest.mark.slow
def test_a_step_ends_by_its_limit_and_keeps_what_it_said(run):
    code, outcomes, logs, _ = run(
        python("endless", "import time; print('begun', flush=True); time.sleep(60)", 2.0), python("after", "pass")
    )
    assert code == 1
    assert outcomes["endless"].startswith("ended by its limit of 2 s")
    assert logs["endless"].startswith("begun\n")
    assert outcomes["after"] == "passed"


@pytest.mark.slow
def test_steps_for_which_no_time_is_left_are_named(run):
    code, outcomes, _, _ = run(python("slow", "import time; time.sleep(60)"), python("late", "pass"), limit=15.0)
    assert code == 1
    assert outcomes["slow"].startswith("ended by its limit of 7 s")
    assert outcomes["late"] == "not run because no time was left"


def test_an_interrupted_piece_leaves_its_archive(run):
    def interrupt(piece):
        log = piece._folder / "logs" / "running.log"
        while not (log.exists() and log.read_text()):
            time.sleep(0.01)
        piece.stop("because the piece got SIGTERM")

    code, outcomes, _, _ = run(
        python("running", "import time; print(1, flush=True); time.sleep(60)"), python("next", "pass"), during=interrupt
    )
    assert code == 1
    assert outcomes["running"] == "ended because the piece got SIGTERM; what it had finished is kept"
    assert outcomes["next"] == "not run because the piece got SIGTERM"


def test_a_program_that_is_not_installed_is_a_reason(run):
    code, outcomes, _, _ = run(python("checked", "pass", program="no-such-sanitizer"))
    assert (code, outcomes) == (0, {"checked": "skipped: no-such-sanitizer is not installed"})


def test_steps_run_side_by_side(run):
    wait = "import time; begun = time.time(); time.sleep(1); print(begun, time.time())"
    _, _, logs, _ = run(*(python(name, wait) for name in "abc"), side_by_side=3)
    times = [tuple(map(float, log.split())) for log in logs.values()]
    assert max(begun for begun, _ in times) < min(ended for _, ended in times)


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_fits_into_its_limit(name):
    assert LIMIT <= 540
    steps = [step for phase in PIECES[name] for step in phase.steps]
    assert len({step.name for step in steps}) == len(steps)
    longest = sum(
        max(max(step.seconds for step in phase.steps), sum(step.seconds for step in phase.steps) / phase.side_by_side)
        for phase in PIECES[name]
    )
    assert longest <= 1.35 * LIMIT, "limits are for what hangs; most steps end long before"
    assert plan_of(name)[0] == f"{name}: at most {LIMIT:.0f} s"


def test_every_gpu_test_and_suite_is_in_a_piece():
    words = [word for phases in PIECES.values() for phase in phases for step in phase.steps for word in step.arguments]
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if GPU_MARK.search(path.read_text()) and path != Path(__file__)
    }
    assert marked - set(words) == set()
    named = re.findall(r"bench_(\w+)\.py|--only=(\w+)", " ".join(words))
    assert {one or other for one, other in named} == set(GPU_SUITES)


@pytest.mark.slow
def test_shards_are_all_tests_once():
    found = []
    for part in range(3):
        environment = os.environ | {"DPFUSE_TEST_SHARD": f"{part}/3"}
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests/gpu/test_bound_gpu.py"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(120), check=False
        )
        found += re.findall(r"^tests/\S+::.*$", done.stdout, re.MULTILINE)
    whole = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120), check=False)
    assert sorted(found) == sorted(re.findall(r"^tests/\S+::.*$", whole.stdout, re.MULTILINE))
    assert len(set(found)) == len(found) > 0


def test_the_pack_is_profiled(tmp_path, capsys):
    assert profile_pack.main(str(tmp_path)) == 0
    assert "copied to the device: nothing" in capsys.readouterr().out
    assert json.loads((tmp_path / "pack-trace.json").read_text())["traceEvents"]
    assert "Self CPU" in (tmp_path / "pack-profile.txt").read_text()


@pytest.mark.slow
def test_a_signal_stops_a_piece_by_name(tmp_path):
    """As a borrowed machine ends a command: the whole program, with a step that would take long."""
    code = (
        "import sys; from bench import pieces; from bench.pieces import Phase, Step;"
        "pieces.PIECES['rest'] = (Phase((Step('long', ('-c', 'import time; time.sleep(60)'), 50.0),)),);"
        "sys.exit(pieces.main(['rest', '--out', sys.argv[1]]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        for line in run.stdout:
            if line.startswith("[long] begins"):
                break
        run.send_signal(signal.SIGTERM)
        printed = run.stdout.read()
        assert run.wait(30) == 1
    assert "ended because the piece got SIGTERM" in printed
    assert (tmp_path / "gpu-rest.tar.gz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_without_a_gpu_a_piece_skips_by_name_and_collects_its_suites(name, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "bench.pieces", name, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(600),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "\n".join(plan_of(name)) in done.stdout
    with tarfile.open(tmp_path / f"gpu-{name}.tar.gz") as archive:
        names = archive.getnames()
    steps = [step for phase in PIECES[name] for step in phase.steps if not step.program]
    assert {f"gpu-{name}/logs/{step.name}.log" for step in steps} <= set(names)
    if any("tests/gpu" in word for step in steps for word in step.arguments):
        assert "needs a CUDA device" in done.stdout


def test_the_pieces_name_their_program():
    assert pieces.main(["numbers", "--plan"]) == 0
