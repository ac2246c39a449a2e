"""Applies deliberate defects to copies of the checkout, and says which of them the tests find.

`python -m tests.mutations [PART ...] [--out FILE]`. PART is a part of a name or of a file; without one, all run. Each
defect has a copy of its own of the files that git knows, as they are now. Its tests run there until the first one
fails. A test that fails without the defect has found nothing: so all tests that failed, or took too long, run once
more in a copy without a defect.

The exit code is 1 if a defect was not found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, strftime

from bench.machine import describe
from tests.mutations.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
PYTEST = ("-q", "--timeout", "120", "-n", "1", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
LIMIT = 240  # seconds for the tests of one defect; a right program needs less, so a longer run is a defect that hangs
TIME_OUT = f"found: time-out of {LIMIT} s"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?::.+?)(?: - .*)?$", re.MULTILINE)
TESTS_FAILED = (1, 2)  # pytest's exit codes: after the last test, and where it has stopped after the first failure


@dataclass(frozen=True)
class Run:
    """What a run of pytest has said.

    Args:
        code: the exit code; None after the time limit.
        failed: names of the tests that failed.
        text: what it has printed.
    """

    code: int | None
    failed: tuple[str, ...]
    text: str


@dataclass
class Result:
    """What became of one defect.

    Args:
        mutation: the defect.
        seconds: that its tests took.
        test: the test that failed; empty if none did.
        how: "found", "found: time-out", "not found", or what else has happened.
    """

    mutation: Mutation
    seconds: float
    test: str
    how: str

    @property
    def found(self) -> bool:
        """Whether its tests have found it."""
        return self.how.startswith("found")

    @property
    def line(self) -> str:
        """A line of the record."""
        by = f" by {self.test}" if self.test else ""
        return f"{self.how}{by} ({self.seconds:.0f} s): {self.mutation.name} [{self.mutation.file}]"


@contextmanager
def copy_of_checkout() -> Iterator[Path]:
    """Copy the files that git knows to a folder that is removed at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    with TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # one may be deleted, and not committed
                target = Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(folder)


def run_tests(copy: Path, tests: Sequence[str], *options: str, limit: float = LIMIT) -> Run:
    """Run tests in a copy, with the modules of that copy."""
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'kernels'}"}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *PYTEST, *options, *tests],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too: they have its session
            text, code = process.communicate()[0], None
    return Run(code, tuple(FAILED.findall(text)), text)


def try_out(mutation: Mutation) -> Result:
    """Apply a defect to a copy, and run its tests there."""
    with copy_of_checkout() as copy:
        file = copy / mutation.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutation.before) != 1:
            return Result(mutation, 0, "", f"not applied: the text is there {text.count(mutation.before)} times")
        file.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
        began = monotonic()
        run = run_tests(copy, mutation.tests, "-x")
        seconds = monotonic() - began
    if run.code is None:
        return Result(mutation, seconds, "", TIME_OUT)
    if run.code == 0:
        return Result(mutation, seconds, "", "not found")
    if run.code in TESTS_FAILED and run.failed:
        return Result(mutation, seconds, run.failed[0], "found")
    print(run.text[-2000:], file=sys.stderr)
    return Result(mutation, seconds, "", f"not tested: pytest ended with code {run.code}")


def confirm(results: Sequence[Result]) -> None:
    """Run the tests that failed in a copy without a defect. What fails there, too, has found nothing.

    The same holds for tests that took too long.
    """
    tests = sorted({result.test for result in results if result.test})
    with copy_of_checkout() as copy:
        for result in results:
            if result.how == TIME_OUT and run_tests(copy, result.mutation.tests, "-x").code is None:
                result.how = f"not tested: its tests take more than {LIMIT} s without the defect, too,"
        if not tests:
            return
        run = run_tests(copy, tests, limit=LIMIT + 30 * len(tests))
    if run.code not in (0, *TESTS_FAILED):
        print(run.text[-2000:], file=sys.stderr)
        run = Run(run.code, tuple(tests), run.text)  # nothing is confirmed
    for result in results:
        if result.test in run.failed:
            result.how = "not found: the test fails without the defect, too,"


def record_of(results: Sequence[Result]) -> str:
    """Return the text of a record."""
    known = describe(gpu=False)
    facts = {"commit": known["commit"], "uncommitted_changes": known["uncommitted_changes"], **known}
    found = sum(result.found for result in results)
    lines = [
        "python -m tests.mutations",
        strftime("%Y-%m-%d"),
        json.dumps(facts, indent=1),
        "",
        *(result.line for result in results),
        "",
        f"{found} of {len(results)} defects were found, in {sum(result.seconds for result in results):.0f} s of tests",
    ]
    text = "\n".join(lines)
    for folder, name in ((sys.prefix, "<environment>"), (str(ROOT), "."), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    return text + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try out the chosen defects, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="part of a name or of a file; all by default")
    parser.add_argument("--out", type=Path, help="file to which a record is written")
    asked = parser.parse_args(arguments)
    chosen = [
        each
        for each in MUTATIONS
        if not asked.parts or any(part in each.name or part in each.file for part in asked.parts)
    ]
    if not chosen:
        parser.error(f"no defect has one of {asked.parts} in its name or file")
    results = []
    for mutation in chosen:
        results.append(try_out(mutation))
        print(results[-1].line, flush=True)
    confirm(results)
    text = record_of(results)
    print(text.splitlines()[-1])
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    return int(not all(result.found for result in results))


if __name__ == "__main__":
    sys.exit(main())
