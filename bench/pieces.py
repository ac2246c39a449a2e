"""Runs one piece of the work on a GPU in at most nine minutes, and keeps one archive of what it has found.

`python -m bench.pieces correct --out FOLDER` runs the tests, `numbers` the suites with the most important goals, and
`rest` what remains. Every line is printed as it comes. The archive is written anew after each step, so that a machine
that is taken away leaves what was found. Without a GPU, tests are skipped by name, and suites are only collected.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from types import FrameType
from typing import NamedTuple

import torch

from bench.machine import ROOT, describe

__all__ = ["PIECES", "Piece", "Step", "main", "plan_of"]

LIMIT = 535.0  # seconds of a piece; a command on a borrowed machine may take ten minutes
GRACE = 8.0  # seconds that a step gets to report after its limit
ON_GPU = torch.cuda.is_available()


class Step(NamedTuple):
    """One process of a piece."""

    name: str
    arguments: tuple[str, ...]  # of Python; {folder} is the folder of the archive
    seconds: float  # limit
    variables: tuple[tuple[str, str], ...] = ()
    program: str = ""  # runs Python, if it is not run directly; the step is skipped where it is not installed


class Phase(NamedTuple):
    """Steps that may run side by side. The next phase begins when all have ended."""

    steps: tuple[Step, ...]
    side_by_side: int = 1


def _tests(file: str, seconds: float, *, shard: str = "", program: str = "", only: str = "") -> Step:
    name = "-".join(filter(None, [file.rpartition("/")[2].removeprefix("test_").removesuffix("_gpu"), shard, program]))
    name = name.replace("/", "of")
    report = f"--junitxml={{folder}}/junit/{name}.xml"
    words = ["-W", "default", "-m", "pytest", "-W", "default", "-m", "gpu", "--durations=8", report, f"tests/{file}.py"]
    variables = (("DPFUSE_TEST_SHARD", shard),) if shard else ()
    return Step(name, (*words, *(["-k", only] if only else [])), seconds, variables, program)


def _suite(name: str, seconds: float) -> Step:
    if not ON_GPU:
        words = ("-m", "pytest", f"bench/bench_{name}.py", "-W", "default", "--gpu", "--collect-only", "-q")
        return Step(f"bench-{name}", words, seconds)
    folders = ("--results={folder}/records", "--out={folder}/plots")
    return Step(f"bench-{name}", ("-m", "bench", "--gpu", f"--only={name}", *folders), seconds)


FIRST = ("streams_gpu", "cuda_graph", "data_parallel_gpu", "accumulation_gpu", "wire_gpu")
PIECES = {
    "correct": (
        Phase(tuple(_tests(f"gpu/test_{name}", 75) for name in FIRST)),
        Phase(
            (
                *(_tests("gpu/test_kernels_gpu", 240, shard=f"{part}/4") for part in range(4)),
                *(_tests("gpu/test_narrow_kernels_gpu", 240, shard=f"{part}/2") for part in range(2)),
                _tests("gpu/test_bound_gpu", 150),
                _tests("gpu/test_health_gpu", 200),
                _tests("gpu/test_sharded_gpu", 120),
            ),
            side_by_side=8,
        ),
    ),
    "numbers": (Phase((_suite("kernels", 110), _suite("flatten", 90), _suite("step", 210), _suite("overlap", 110))),),
    "rest": (
        Phase(
            (
                _tests("gpu/test_two_ranks_one_gpu", 100),
                Step("profile-pack", ("-m", "bench.profile_pack", "{folder}"), 40),
                _tests(
                    "gpu/test_kernels_gpu",
                    70,
                    program="compute-sanitizer",
                    only="there_and_back or none_own or parts_are",
                ),
                _suite("wire", 40),
                _suite("bucket_size", 45),
                _suite("accumulate", 40),
                _tests("gpu/test_launch_gpu", 50),
                _tests("gpu/test_model_gpu", 50),
                _tests("gpu/test_parallel_executor_gpu", 50),
                _tests("gpu/test_network_gpu", 30),
                _tests("commands/test_gpu", 40),
                _tests("bench/test_size_list", 30),
                _suite("health", 30),
                _suite("clip", 30),
                _suite("forward", 25),
                _suite("sharded", 50),
            )
        ),
    ),
}


@dataclass
class Result:
    """What became of a step."""

    name: str
    outcome: str = "not run"
    seconds: float = 0.0
    command: list[str] = field(default_factory=list)


class Piece:
    """Runs the steps of one piece.

    Args:
        name: of the piece.
        out: folder of the archive.
        limit: seconds for all steps.
    """

    def __init__(self, name: str, out: Path, limit: float = LIMIT) -> None:
        self.results = [Result(step.name) for phase in PIECES[name] for step in phase.steps]
        self.archive = out / f"gpu-{name}.tar.gz"
        self._name = name
        self._ends = monotonic() + limit
        self._folder = Path(tempfile.mkdtemp(prefix="dpfuse-gpu-"))
        self._lock = Lock()
        self._stopped = ""
        for part in ("junit", "logs", "records", "plots"):
            (self._folder / part).mkdir()
        out.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Run all steps. Return 0 if each has passed, or was skipped with a reason."""
        try:
            numbers = iter(range(len(self.results)))
            for phase in PIECES[self._name]:
                with ThreadPoolExecutor(phase.side_by_side) as pool:
                    list(pool.map(self._step, phase.steps, [next(numbers) for _ in phase.steps]))
        finally:
            self._write()
            shutil.rmtree(self._folder, ignore_errors=True)
        for result in self.results:
            print(f"{result.seconds:7.1f} s  {result.name:32} {result.outcome}")
        print(f"archive: {self.archive}", flush=True)
        return 0 if all(result.outcome.startswith(("passed", "skipped")) for result in self.results) else 1

    def stop(self, why: str) -> None:
        """End the steps that run, and begin no other."""
        self._stopped = why

    def _step(self, step: Step, number: int) -> None:
        result, left = self.results[number], self._ends - monotonic() - GRACE
        if self._stopped or left < 5:
            result.outcome = f"not run {self._stopped or 'because no time was left'}"
            return
        program = [] if not step.program else [shutil.which(step.program) or ""]
        if program == [""]:
            result.outcome = f"skipped: {step.program} is not installed"
            return
        words = [word.replace("{folder}", str(self._folder)) for word in step.arguments]
        result.command = [*filter(None, [step.program]), "python", *step.arguments]
        began, limit = monotonic(), min(step.seconds, left)
        print(f"[{step.name}] begins, at most {limit:.0f} s: {' '.join(result.command)}", flush=True)
        roots = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with subprocess.Popen(
            [*program, sys.executable, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(roots), "PYTHONUNBUFFERED": "1"} | dict(step.variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            reader = Thread(target=self._read, args=(process, step.name))
            reader.start()
            code = self._wait(process, limit)
            reader.join()
        result.seconds = monotonic() - began
        why = self._stopped or f"by its limit of {limit:.0f} s"
        late = f"ended {why}; what it had finished is kept"
        none = code == 5 and not ON_GPU  # pytest has found no test
        result.outcome = late if code is None else "passed" if code == 0 or none else f"failed: exit code {code}"
        print(f"[{step.name}] {result.outcome} after {result.seconds:.1f} s", flush=True)
        self._write()

    def _wait(self, process: subprocess.Popen[str], limit: float) -> int | None:
        """Return the exit code; None after the limit, or when the piece was stopped."""
        ends = monotonic() + limit
        while monotonic() < ends and not self._stopped:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.2)
        process.send_signal(signal.SIGINT)  # pytest-benchmark then reports the finished cases
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        return None

    def _read(self, process: subprocess.Popen[str], name: str) -> None:
        assert process.stdout is not None
        with (self._folder / "logs" / f"{name}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                print(f"[{name}] {line}", end="", flush=True)

    def _write(self) -> None:
        with self._lock:
            facts = {
                "piece": self._name,
                "commit": os.environ.get("DPFUSE_COMMIT"),  # where there is no .git
                "machine": describe(gpu=ON_GPU),
                "steps": [asdict(result) for result in self.results],
            }
            (self._folder / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")
            part = self.archive.with_suffix(".part")
            with tarfile.open(part, "w:gz") as archive:
                archive.add(self._folder, f"gpu-{self._name}")
            part.replace(self.archive)


def plan_of(name: str) -> list[str]:
    """Return the plan of a piece in lines: each step with its limit, and the most that all can take.

    Example:
        >>> plan_of("numbers")[0]
        'numbers: at most 535 s'
    """
    lines = [f"{name}: at most {LIMIT:.0f} s"]
    for phase in PIECES[name]:
        lines.append(f"  {phase.side_by_side} at a time:")
        lines += [f"    {step.seconds:5.0f} s  {step.name}" for step in phase.steps]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one piece, or show its plan."""
    parser = argparse.ArgumentParser(prog="python -m bench.pieces", description=__doc__)
    parser.add_argument("piece", choices=list(PIECES))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out", help="folder of the archive")
    parser.add_argument("--plan", action="store_true", help="show the steps and their limits, and run nothing")
    options = parser.parse_args(arguments)
    print("\n".join(plan_of(options.piece)), flush=True)
    if options.plan:
        return 0
    piece = Piece(options.piece, options.out)

    def stop(number: int, _frame: FrameType | None) -> None:
        piece.stop(f"because the piece got {signal.Signals(number).name}")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return piece.run()


if __name__ == "__main__":
    sys.exit(main())
