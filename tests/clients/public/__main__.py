"""Runs the programs with torch's class and with dpfuse's, in turns, and records the seconds of a step with both.

`python -m tests.clients.public FILE [NAME ...]`. A run has the seconds of its median step, and those that rank 0
computed in it. Other programs on the machine change the first ones more.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter, strftime

from bench.machine import describe
from tests.clients.public import PINNED, PUBLIC, PublicProgram, said_by_dpfuse
from tests.commands.side_by_side import assert_same

ROUNDS = 5
SECONDS = re.compile(r"^seconds of a step: (.+), computing (.+)$", re.M)


def measure(program: PublicProgram) -> dict[str, object]:
    """Run one program, and return its part of the record. All its runs must have printed the same."""
    began, times = perf_counter(), {"torch": [], "dpfuse": []}
    for number in range(ROUNDS):
        done = {}
        for wrapper in sorted(times, reverse=number % 2 == 0):
            with tempfile.TemporaryDirectory() as folder:
                done[wrapper] = program.run(wrapper, Path(folder) / "work", program.steps)
        assert_same(done["torch"], done["dpfuse"], program.first)
        assert said_by_dpfuse(done["dpfuse"].stderr) == []
        for wrapper, found in times.items():
            found += [tuple(map(float, pair)) for pair in SECONDS.findall(done[wrapper].stdout)]

    def over_torch(what: Callable[[Iterable[float]], float], part: int) -> float:
        ours, plain = (what(pair[part] for pair in times[wrapper]) for wrapper in ("dpfuse", "torch"))
        return round(ours / plain, 3)

    ratios = {"medians": over_torch(median, 0), "fastest": over_torch(min, 0), "computing": over_torch(median, 1)}
    seconds = round((perf_counter() - began) / ROUNDS / 2, 1)
    return {"steps": program.steps, "dpfuse / torch": ratios, "seconds of a run": seconds, "steps of each run": times}


def main(file: str, names: list[str]) -> None:
    """Write the record, after each program: a later one may fail."""
    record = {
        "what": "public programs on two ranks, with equal losses and weights in every run: seconds of the median step",
        "date": strftime("%Y-%m-%d"),
        "machine": describe(gpu=False),
        "packages": PINNED,
        "programs": {},
    }
    for name in names or PUBLIC:
        record["programs"][name] = found = measure(PUBLIC[name])
        print(name, found, flush=True)
        Path(file).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
