"""Programs that are run twice, with torch's class and with dpfuse's, and what both have printed."""

from __future__ import annotations

import re
from functools import partial
from subprocess import CompletedProcess

from tests.commands.programs import PROGRAMS
from tests.distributed.processes import run

__all__ = ["REPLACED", "assert_same", "lines_of", "python"]

REPLACED = re.compile(
    r"^dpfuse run: ([\w, ]+) (?:is|are) wrapped by dpfuse's DistributedDataParallel instead of torch's", re.M
)

python = partial(run, folder=PROGRAMS, warm=False)


def lines_of(done: CompletedProcess[str]) -> list[str]:
    """The lines that two ranks have printed, in the order of the ranks: on each its weights, and perhaps others."""
    assert done.returncode == 0, done.stderr
    # A print writes its end of line apart, so the other rank may come between.
    printed = re.sub(r"(?=rank \d (?:losses|weights) )", "\n", done.stdout)
    lines = sorted(line for line in printed.splitlines() if line.startswith("rank "))
    assert [line[:14] for line in lines if " weights " in line] == ["rank 0 weights", "rank 1 weights"], done.stdout
    return [re.sub(r"'\d{4,5}'", "PORT", line) for line in lines]


def assert_same(plain: CompletedProcess[str], ours: CompletedProcess[str], name: str) -> None:
    """Fail unless both have printed the same, and only the second one has replaced the wrappers around `name`."""
    assert lines_of(ours) == lines_of(plain), f"{ours.stdout}\n{plain.stdout}"
    assert REPLACED.findall(plain.stderr) == []
    assert REPLACED.findall(ours.stderr) == [name]
