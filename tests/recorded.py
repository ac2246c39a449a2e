"""Runs pytest and keeps a record: `python -m tests.recorded FILE ARGUMENTS`. What is printed, it prints as it comes.

The record has the machine, the versions, the commit, the arguments, and what pytest says at the end: warnings, the
slowest tests, failures and the counts. It has no path of the machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import gettempdir
from time import strftime

from bench.machine import describe

ROOT = Path(__file__).parents[1]
PROGRESS = re.compile(r"[.sxXFE]+( +\[ *\d+%\])?$")  # a line of dots


def main(file: str, arguments: list[str]) -> int:
    """Run pytest with these arguments, write the record to `file`, and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        lines = list(_shown(process.stdout))
    Path(file).write_text(record_of(describe(gpu=False), f"pytest {' '.join(arguments)}", lines))
    return process.returncode


def record_of(facts: dict[str, object], command: str, lines: Iterable[str]) -> str:
    """Return the text of a record.

    Args:
        facts: of machine, software and commit.
        command: what was run.
        lines: what it has printed.
    """
    said = [line for line in lines if not PROGRESS.match(line) and "bringing up nodes" not in line]
    text = "\n".join([command, strftime("%Y-%m-%d"), json.dumps(facts, indent=1), "", *said])
    for folder, name in ((str(Path(sys.prefix)), "<environment>"), (str(ROOT), "."), (str(Path.home()), "~")):
        text = text.replace(folder, name)
    text = re.sub(rf"{re.escape(gettempdir())}/[\w./-]*", "<temporary>", text)
    return text.strip() + "\n"


def _shown(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        print(line, end="", flush=True)
        yield line.rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
