"""Runs the GPU tests and suites in order of worth, and stops in time: `python -m bench.gpu_run --minutes 9`.

Every line is printed as it comes. One archive is written again after each step, so that a run that ends early leaves
what it found. The next run of the same commit on the same kind of GPU goes on from there. Without a GPU, tests are
skipped by name, and suites are only collected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from types import FrameType
from typing import NamedTuple, TypeAlias

import torch

from bench.__main__ import GPU_SUITES, REPORT_SECONDS
from bench.machine import ROOT, describe, machine_name

__all__ = ["PLAN", "Run", "Step", "main"]

GRACE = REPORT_SECONDS + 5.0  # seconds that a step gets to report after its limit
SHARE = 0.25  # of the time that is left: the limit of a step, unless it needs more
SIDE_BY_SIDE = 8  # processes at a time
START = 15.0  # seconds in which a suite imports, and its record is written
ON_GPU = torch.cuda.is_available()
Plan: TypeAlias = Sequence[Sequence["Step"]]


class Step(NamedTuple):
    """One process."""

    name: str
    words: tuple[str, ...]  # the command; {folder} is the folder of the archive
    needs: float  # seconds; it does not begin when less time is left


def _tests(name: str, needs: float, *words: str) -> Step:
    report = f"--junitxml={{folder}}/junit/{name}.xml"
    pytest = ("python", "-W", "default", "-m", "pytest", "-W", "default", "-m", "gpu", "--durations=8", report)
    return Step(name, (*pytest, *(words or [f"tests/gpu/test_{name}.py"])), needs)


def _shards(name: str, needs: float, parts: int) -> list[Step]:
    file = f"tests/gpu/test_{name}.py"
    return [_tests(f"{name}-{part}", needs, file, f"--shard={part}/{parts}") for part in range(parts)]


def _suite(name: str) -> Step:
    words = ("python", "-m", "bench", "--gpu", f"--only={name}", "--results={folder}/records", "--out={folder}/plots")
    return Step(f"bench-{name}", words, GPU_SUITES[name] + START)


FIRST = ("streams_gpu", "cuda_graph", "data_parallel_gpu", "accumulation_gpu", "wire_gpu")
SANITIZED = ("tests/gpu/test_kernels_gpu.py", "-k=there_and_back or none_own or parts_are")
# What tells most comes first. The steps of a list run side by side; the next list begins when all have ended.
PLAN: Plan = (
    [_tests("first_minute", 60), Step("env", ("python", "-m", "dpfuse", "env"), 5)],
    *([_tests(name, 40)] for name in FIRST),
    [
        *_shards("kernels_gpu", 150, parts=4),
        *_shards("narrow_kernels_gpu", 150, parts=2),
        *(_tests(name, 100) for name in ("health_gpu", "bound_kernel_gpu", "sharded_gpu", "bit_hash_gpu")),
    ],
    *([_suite(name)] for name in ("kernels", "flatten", "step", "overlap")),
    [_tests("two_ranks_one_gpu", 70)],
    [Step("profile-pack", ("python", "-m", "bench.profile_pack", "{folder}"), 20)],
    [Step("sanitizer", ("compute-sanitizer", *_tests("sanitizer", 70, *SANITIZED).words), 70)],
    *([_suite(name)] for name in ("wire", "bucket_size", "accumulate")),
    *(
        [_tests(name, 30)]
        for name in ("launch_gpu", "model_gpu", "parallel_executor_gpu", "network_gpu", "autotune_gpu")
    ),
    [_tests("size_list", 30, "tests/bench/test_size_list.py")],
    *([_suite(name)] for name in ("health", "clip", "forward", "sharded")),
)


def _without_gpu() -> Plan:
    """Return steps that show that each file of the plan can be collected."""
    files = {word: None for group in PLAN for step in group for word in step.words if word.startswith("tests/")}
    suites = [f"bench/bench_{name}.py" for name in GPU_SUITES]
    collect = ("python", "-m", "pytest", "-W", "default", "--gpu", "--collect-only", "-q", *suites)
    return ([_tests("tests", 60, *files)], [Step("suites", collect, 60)])


class Run:
    """Runs steps until the time is over.

    Args:
        plan: groups of steps. What is in a group runs side by side.
        out: folder of the archive.
        minutes: for all steps.
        again: whether steps run that passed in an earlier run.
    """

    def __init__(self, plan: Plan, out: Path, minutes: float, *, again: bool = False) -> None:
        self.outcomes = {step.name: "not run" for group in plan for step in group}
        self._plan, self._again = plan, again
        self._ends = monotonic() + minutes * 60 - GRACE
        self._machine = describe(gpu=ON_GPU)
        # Code with changes has no name, so no later run goes on from its archive.
        self._commit = "" if self._machine["uncommitted_changes"] else self._machine["commit"] or ""
        name = "-".join(filter(None, ["gpu", machine_name(gpu=ON_GPU), self._commit[:12]]))
        self.archive = out / f"{name}.tar.gz"
        self._lock = Lock()
        self._stopped = ""

    def run(self) -> int:
        """Run the steps. Return 0 if each has passed, now or earlier, or was skipped with a reason."""
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="dpfuse-gpu-") as folder:
            self._folder = Path(folder, "gpu")
            for part in ("junit", "logs", "records", "plots"):
                (self._folder / part).mkdir(parents=True)
            if self._commit and self.archive.exists() and not self._again:
                with tarfile.open(self.archive) as archive:
                    # Our own files; Python before 3.11.4 and 3.10.12 has no filter.
                    archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
                self.outcomes |= json.loads((self._folder / "summary.json").read_text())["steps"]
            for group in self._to_do():
                with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
                    list(pool.map(self._step, group))
            self._write_archive()
        print("\n".join(f"{name:24} {outcome}" for name, outcome in self.outcomes.items()))
        print(f"archive: {self.archive}", flush=True)
        return 0 if all(outcome.startswith(("passed", "skipped")) for outcome in self.outcomes.values()) else 1

    def stop(self, number: int, _frame: FrameType | None = None) -> None:
        """End the steps that run, and begin no other. This is a handler of signals."""
        self._stopped = f"it got {signal.Signals(number).name}"

    def _to_do(self) -> list[list[Step]]:
        """Return the groups without what has passed. A group that only tries again comes last."""
        groups = [[step for step in group if not self.outcomes[step.name].startswith("passed")] for group in self._plan]
        return sorted(filter(None, groups), key=lambda group: all(map(self._has_run, group)))

    def _has_run(self, step: Step) -> bool:
        return not self.outcomes[step.name].startswith("not run")

    def _step(self, step: Step) -> None:
        left = self._ends - monotonic()
        if self._stopped or left < step.needs:
            if not self._has_run(step):
                why = self._stopped or f"it needs {step.needs:.0f} s, and {max(left, 0):.0f} s were left"
                self.outcomes[step.name] = f"not run: {why}"
            return
        known = {"python": sys.executable}
        command = [known.get(word, word).replace("{folder}", str(self._folder)) for word in step.words]
        if not shutil.which(command[0]):
            self.outcomes[step.name] = f"skipped: {command[0]} is not installed"
            return
        began, limit = monotonic(), max(step.needs, SHARE * left)
        print(f"[{step.name}] begins, at most {limit:.0f} s: {' '.join(step.words)}", flush=True)
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that its processes end with it
        ) as process:
            reader = Thread(target=self._read_output, args=(process, step.name))
            reader.start()
            code = self._wait(process, limit)
            self._signal(process, signal.SIGKILL)
            reader.join()
        after = f"after {monotonic() - began:.1f} s"
        if code is None:
            outcome = f"ended {after}: {self._stopped or f'its limit of {limit:.0f} s is over'}"
        else:
            outcome = f"failed {after}: exit code {code}" if code else f"passed {after}"
        self.outcomes[step.name] = outcome
        print(f"[{step.name}] {outcome}", flush=True)
        self._write_archive()

    def _wait(self, process: subprocess.Popen[str], limit: float) -> int | None:
        """Return the exit code; None after the limit, or when the run was stopped."""
        ends = monotonic() + limit
        while monotonic() < ends and not self._stopped:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.2)
        self._signal(process, signal.SIGINT)  # pytest then reports the finished cases
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None

    @staticmethod
    def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of its processes have ended
            os.killpg(process.pid, number)

    def _read_output(self, process: subprocess.Popen[str], name: str) -> None:
        assert process.stdout is not None
        with (self._folder / "logs" / f"{name}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                print(f"[{name}] {line}", end="", flush=True)

    def _write_archive(self) -> None:
        with self._lock:
            facts = {"machine": self._machine, "steps": self.outcomes}
            (self._folder / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")
            part = self.archive.with_suffix(".part")
            with tarfile.open(part, "w:gz") as archive:
                archive.add(self._folder, "gpu")
            part.replace(self.archive)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the plan has, in the time that the command line gives."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all steps (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out", help="folder of the archive")
    parser.add_argument("--again", action="store_true", help="also run steps that passed in an earlier run")
    options = parser.parse_args(arguments)
    run = Run(PLAN if ON_GPU else _without_gpu(), options.out, options.minutes, again=options.again)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.stop)
    return run.run()


if __name__ == "__main__":
    sys.exit(main())
