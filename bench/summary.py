"""`python -m bench.summary RECORD …`: what a step costs with default arguments, as the README's table and chart.

Each ratio is of medians in one run. If several records are given, a cell shows the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt

from bench.goals import PEERS

__all__ = ["Row", "draw", "main", "rows", "table"]

OURS, DEFAULT, REPLICATE = "dpfuse private", "DDP default", "FSDP2 replicate"
FASTEST = "the fastest mode of DDP"
NUMBER: dict[str, Any] = {"va": "center", "fontsize": 8, "bbox": {"color": "white", "alpha": 0.8, "pad": 0.5}}
LONGEST = 1.7  # of a bar in the chart; a longer one is cut, and keeps its number
CASES = {  # by the text of the row: the suite, and the case or None for the mean over all
    "16 simulated networks, 38 MB, the mean": ("overlap", None),
    "two ranks, a transformer of 13 MB": ("step", "pair transformer"),
    "two ranks, a CNN of 4 MB": ("step", "pair CNN"),
    "two ranks, 1000 parameters of 16 elements": ("step", "pair 1000 tiny"),
    "two ranks, 100 MB in 25 layers, one row of data": ("step", "pair 100 MB large"),
}
Step = Mapping[str, float]  # seconds by contender


class Row(NamedTuple):
    """One line of the table: a ratio per record, and for the chart the time over DDP's default by contender."""

    text: str
    over_default: list[float]
    over_best: list[float]
    relative: dict[str, float]


def rows(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows that all `records` have measured."""
    found = []
    for text, (suite, case) in CASES.items():
        runs = [steps for record in records if (steps := _steps(record, suite, case))]
        if len(runs) == len(records):
            over_default = [mean(step[OURS] / step[DEFAULT] for step in run) for run in runs]
            over_best = [mean(step[OURS] / min(_others(step).values()) for step in run) for run in runs]
            every = [step for run in runs for step in run]
            relative = {
                "dpfuse": mean(step[OURS] / step[DEFAULT] for step in every),
                FASTEST: mean(min(_others(step, "DDP").values()) / step[DEFAULT] for step in every),
                REPLICATE: mean(step[REPLICATE] / step[DEFAULT] for step in every),
            }
            found.append(Row(text, over_default, over_best, relative))
    return found


def _steps(record: Mapping[str, Any], suite: str, case: str | None) -> list[dict[str, float]]:
    cases: dict[str, dict[str, float]] = {}
    for row in record["measurements"]:
        if row["suite"] == suite and case in (None, row["case"]):
            cases.setdefault(row["case"], {})[row["variant"]] = row["median"]
    return list(cases.values())


def _others(step: Step, *prefixes: str) -> dict[str, float]:
    return {name: seconds for name, seconds in step.items() if name.startswith(prefixes or PEERS)}


def table(found: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| whole step with default arguments, less than 1 is better | dpfuse / DDP | dpfuse / the fastest peer |"]
    lines += ["|---|---|---|"]
    lines += [f"| {row.text} | {_span(row.over_default)} | {_span(row.over_best)} |" for row in found]
    return "\n".join(lines)


def _span(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least}–{most}"


def draw(found: Sequence[Row], path: Path) -> None:
    """Draw the rows as a PNG file: time of a step over that of DDP with default arguments."""
    colours = {"dpfuse": "tab:green", FASTEST: "tab:orange", REPLICATE: "tab:brown"}
    figure, axis = plt.subplots(figsize=(10, 0.9 * len(found) + 1.2), layout="constrained")
    height = 0.8 / len(colours)
    for number, (name, colour) in enumerate(colours.items()):
        tops = [row + height * (number - 1) for row in range(len(found))]
        values = [row.relative[name] for row in found]
        axis.barh(tops, values, height, color=colour, label=name)
        for top, value in zip(tops, values, strict=True):
            end, shift, side = (value, 3, "left") if value < LONGEST else (LONGEST, -3, "right")
            axis.annotate(f"{value:.2f}", (end, top), (shift, 0), textcoords="offset points", ha=side, **NUMBER)
    axis.axvline(1, color="black", linewidth=1, label="DDP with default arguments = 1")
    axis.set_yticks(range(len(found)), [row.text for row in found])
    axis.invert_yaxis()
    axis.set_xlim(0, LONGEST)
    axis.set_xlabel("time of a step, forward and backward (shorter is better)")
    figure.legend(loc="outside upper center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Print the table and draw the chart."""
    parser = argparse.ArgumentParser(prog="python -m bench.summary", description=main.__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, help="the chart, a PNG file")
    options = parser.parse_args(arguments)
    found = rows([json.loads(path.read_text()) for path in options.records])
    print(table(found))
    if options.picture:
        draw(found, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
