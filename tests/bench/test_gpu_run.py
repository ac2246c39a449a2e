"""`make gpu` runs its steps in order of worth, stops in time, always leaves an archive, and goes on from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu_run, profile_pack
from bench.__main__ import GPU_SUITES, _parser
from bench.gpu_run import GRACE, PLAN, Run, Step
from bench.machine import describe
from tests.gpu.conftest import pytest_collection_modifyitems
from tests.patience import patience

ROOT = Path(__file__).parents[2]
STEPS = [step for group in PLAN for step in group]
SLEEPS = "import time, pathlib, sys; print('begun', flush=True); pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"


def python(name: str, code: str, *arguments: str, needs: float = 1.0) -> Step:
    return Step(name, ("python", "-c", code, *arguments), needs)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run(group, …)` runs these steps; returns the exit code, what became of each, and the logs, from the archive.

    `when_begun(run)` is called when a step has made the file `begun`.
    """

    def of(*groups, minutes=60.0, when_begun=None, commit="planned", changed=False, again=False):
        facts = describe(gpu=False) | {"commit": commit, "uncommitted_changes": changed}
        monkeypatch.setattr(gpu_run, "describe", lambda gpu: facts)
        planted = Run(groups, tmp_path, minutes, again=again)

        def watch():
            while not (tmp_path / "begun").exists():
                time.sleep(0.01)
            when_begun(planted)

        if when_begun:
            threading.Thread(target=watch, daemon=True).start()
        code = planted.run()
        with tarfile.open(planted.archive) as archive:
            read = {name: archive.extractfile(name).read() for name in archive.getnames() if Path(name).suffix}
        summary = json.loads(read["gpu/summary.json"])
        assert summary["machine"]["torch"] == torch.__version__
        outcomes = {name: re.sub(r" after [\d.]+ s", "", outcome) for name, outcome in summary["steps"].items()}
        logs = {Path(name).stem: text.decode() for name, text in read.items() if name.endswith(".log")}
        return SimpleNamespace(code=code, outcomes=outcomes, logs=logs, read=read)

    return of


def test_a_step_that_fails_hides_none_behind_it(run, capfd):
    done = run(
        [python("first", "print('one')")],
        [python("second", "raise SystemExit(3)")],
        [python("third", "print('three')")],
    )
    assert done.code == 1
    assert done.outcomes == {"first": "passed", "second": "failed: exit code 3", "third": "passed"}
    assert (done.logs["first"], done.logs["third"]) == ("one\n", "three\n")
    assert "[third] three" in capfd.readouterr().out


@pytest.mark.slow
def test_a_step_may_take_a_share_of_the_time_and_keeps_what_it_said(run, tmp_path, monkeypatch):
    def let_time_pass(planted):
        monkeypatch.setattr(gpu_run, "monotonic", lambda: time.monotonic() + 0.3 * 3600)

    waits = python("waits", SLEEPS, str(tmp_path / "begun"))
    done = run([waits], [python("after", "pass")], when_begun=let_time_pass)
    assert done.code == 1
    assert re.match(r"ended: its limit of 89\d s is over", done.outcomes["waits"])  # a quarter of an hour
    assert done.logs["waits"].startswith("begun\n")
    assert done.outcomes["after"] == "passed"


def test_a_step_that_would_not_fit_is_named_and_a_shorter_one_runs(run):
    done = run([python("long", "pass", needs=100.0)], [python("short", "pass")], minutes=(60 + GRACE) / 60)
    assert done.code == 1
    assert done.outcomes["short"] == "passed"
    assert re.fullmatch(r"not run: it needs 100 s, and \d+ s were left", done.outcomes["long"])


def test_a_run_goes_on_where_the_last_one_of_the_same_commit_stopped(run, tmp_path):
    def steps(needs):
        code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); sys.exit(sys.argv[2] == 'bad')"
        needed = {"good": 1.0, "bad": 1.0, "long": needs}
        return [[python(name, code, str(tmp_path / "began"), name, needs=needed[name])] for name in needed]

    def began():
        return (tmp_path / "began").read_text().split()

    first = run(*steps(needs=10_000))
    assert (first.outcomes["good"], first.outcomes["bad"]) == ("passed", "failed: exit code 1")
    second = run(*steps(needs=1))
    assert second.outcomes == {"good": "passed", "bad": "failed: exit code 1", "long": "passed"}
    assert second.logs.keys() == {"good", "bad", "long"}
    assert began() == ["good", "bad", "long", "bad"], "what failed is tried again at the end"
    run(*steps(needs=1), again=True)
    assert began()[4:] == ["good", "bad", "long"]
    run(*steps(needs=1), commit="another")
    assert began()[7:] == ["good", "bad", "long"]
    for _ in range(2):
        run(*steps(needs=1), changed=True)
    assert began()[10:] == 2 * ["good", "bad", "long"]
    assert len(list(tmp_path.glob("gpu-*.tar.gz"))) == 3


@pytest.mark.slow
def test_a_stopped_suite_leaves_a_record_of_its_finished_cases(run, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "GRACE", patience(40))
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)  # under them pytest-benchmark measures nothing
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "bench_tiny.py").write_text(
        "import pathlib, time\n"
        "def test_one(benchmark):\n"
        "    benchmark.extra_info.update(suite='tiny', case='one', variant='ours')\n"
        "    benchmark.pedantic(int, rounds=1)\n"
        "def test_two():\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(600)\n"
    )
    code = (
        # A shell that starts the tests in the background lets them ignore SIGINT, and they hand that on.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import pathlib, sys; from bench import __main__ as bench; bench.ROOT = pathlib.Path(sys.argv[1]);"
        f"bench.SUITES = {{'tiny': 600, 'other': 600}}; bench.REPORT_SECONDS = {patience(30)};"
        "sys.exit(bench.main(['--results', sys.argv[2], '--out', sys.argv[2]]))"
    )
    suite = python("suite", code, str(tmp_path), "{folder}/records")
    stop = partial(Run.stop, number=signal.SIGTERM)
    done = run([suite], [python("next", "pass")], when_begun=stop)
    assert done.code == 1
    assert done.outcomes == {"suite": "ended: it got SIGTERM", "next": "not run: it got SIGTERM"}
    [record] = [json.loads(text) for name, text in done.read.items() if re.match(r"gpu/records/.*json", name)]
    assert [entry["case"] for entry in record["measurements"]] == ["one"]


@pytest.mark.slow
def test_a_signal_stops_the_whole_program(tmp_path):
    code = (
        "import sys; from bench import gpu_run; gpu_run.ON_GPU = False;"
        f"gpu_run._without_gpu = lambda: [[gpu_run.Step('long', ('python', '-c', {SLEEPS!r}, {os.devnull!r}), 1.0)]];"
        "sys.exit(gpu_run.main(['--out', sys.argv[1]]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as program:
        for line in program.stdout:
            if line == "[long] begun\n":
                break
        program.send_signal(signal.SIGTERM)
        printed = program.stdout.read()
    assert program.returncode == 1
    assert re.search(r"long +ended after .* s: it got SIGTERM", printed)
    assert list(tmp_path.glob("gpu-*.tar.gz"))


def test_a_program_that_is_not_installed_is_a_reason(run):
    done = run([Step("checked", ("no-such-sanitizer", "python"), 1.0)])
    assert (done.code, done.outcomes) == (0, {"checked": "skipped: no-such-sanitizer is not installed"})


def test_the_steps_of_a_group_run_side_by_side(run, tmp_path):
    meet = (
        "import pathlib, sys, time; folder = pathlib.Path({!r}); (folder / {!r}).touch()\n"
        "while len(list(folder.glob('*.here'))) < 3: time.sleep(0.01)"
    )
    done = run([python(name, meet.format(str(tmp_path), f"{name}.here")) for name in "abc"])
    assert done.code == 0


def test_every_gpu_test_and_suite_is_in_the_plan():
    words = {word for step in STEPS for word in step.words}
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text()) and path != Path(__file__)
    }
    assert marked <= words
    assert {f"--only={name}" for name in GPU_SUITES} <= words
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_shards_are_all_tests_once():
    def shard(part):
        items = list(range(10))
        config = SimpleNamespace(
            getoption=lambda name, default: part, hook=SimpleNamespace(pytest_deselected=lambda items: None)
        )
        pytest_collection_modifyitems(config, items)
        return items

    assert [shard(f"{part}/3") for part in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@pytest.mark.slow
def test_the_command_of_each_step_is_valid(tmp_path):
    """One process collects the tests of all steps."""
    commands = [step.words[step.words.index("pytest") + 1 :] for step in STEPS if "pytest" in step.words]
    code = (
        "import json, pytest, sys\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    code = pytest.main([*command, '--collect-only', '-q'])\n"
        "    assert code == 0, (code, command)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands).replace("{folder}", str(tmp_path))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(200),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    suites = [_parser().parse_args(step.words[3:]) for step in STEPS if "bench" in step.words]
    assert {options.only for options in suites} == set(GPU_SUITES)
    assert len(commands) + len(suites) == len(STEPS) - 2, "profile-pack and dpfuse env have tests of their own"


def test_the_pack_is_profiled(tmp_path, capsys):
    assert profile_pack.main(str(tmp_path)) == 0
    assert "copied to the device: nothing" in capsys.readouterr().out
    assert json.loads((tmp_path / "pack-trace.json").read_text())["traceEvents"]
    assert "Self CPU" in (tmp_path / "pack-profile.txt").read_text()


def requirements(names, found):
    """Return these packages and all that they require, as far as they are installed here."""
    for name in names:
        if name not in found:
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:  # for another platform
                continue
            required = [text for text in found[name].requires or [] if "extra ==" not in text]
            requirements([re.match(r"[\w.-]+", text)[0] for text in required], found)
    return found


@pytest.fixture
def bare_python(tmp_path):
    """A Python that has torch, numpy, Triton, pytest and pytest-benchmark, and nothing else."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=patience(60))
    [packages] = environment.glob("lib/python*/site-packages")
    for package in requirements(["torch", "numpy", "triton", "pytest", "pytest-benchmark"], {}).values():
        for part in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(package.locate_file(part))
    assert not (packages / "hypothesis").exists()
    return environment / "bin" / "python"


@pytest.mark.slow
def test_a_machine_without_git_network_and_gpu_skips_tests_by_name_and_collects_suites(tmp_path, bare_python):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "_build", "out", "results")
    for part in ("dpfuse", "kernels", "tests", "bench", "docs"):
        shutil.copytree(ROOT / part, checkout / part, ignore=ignored)
    for part in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / part, checkout / part)
    done = subprocess.run(
        ["make", "gpu", "MINUTES=50", f"PYTHON={bare_python}", f"OUT={tmp_path}", "DPFUSE_COMMIT=planned"],
        cwd=checkout,
        env={name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ},
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " pip " not in done.stdout
    files = {word for step in STEPS for word in step.words if word.startswith("tests/gpu/")}
    assert files == set(re.findall(r"SKIPPED .*(tests/gpu/\S+\.py):.* needs a CUDA device", done.stdout))
    for name in GPU_SUITES:
        assert f"bench/bench_{name}.py::" in done.stdout
    [archive] = tmp_path.glob("gpu-*-planned.tar.gz")
    with tarfile.open(archive) as opened:
        assert {"gpu/logs/tests.log", "gpu/logs/suites.log", "gpu/junit/tests.xml"} <= set(opened.getnames())
        facts = json.load(opened.extractfile("gpu/summary.json"))
    assert facts["machine"]["commit"] == "planned"
