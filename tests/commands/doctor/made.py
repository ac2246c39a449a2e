"""Runs as the doctor would have made them, from trainings in the ranks of the tests, and from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfuse.commands.doctor.runs import Run
from dpfuse.trace_file import RankTrace, read_folder


def run_of(folder: Path, number: int, wrapper: str, **facts: Any) -> Run:
    """The run whose trace lies in a folder."""
    return Run(number, wrapper, 0, 1.0, folder / "log.txt", read_folder(folder), {"0": plain_facts(**facts)})


def plain_facts(**facts: Any) -> dict[str, Any]:
    made = {"replaceable": 1, "derived": [], "unwrapped": 0, "own": False, "numeric": [], "evaluated": {}}
    return {
        "communication": [],
        "tunings": [],
        "findings": [],
        "samplers": [],
        "scaled": [],
        "read": [],
        "unused": {},
        "behind": 0,
        "lines": {},
        **made,
        **facts,
    }


def timed(
    number: int, wrapper: str, steps: int = 12, ranks: int = 2, busy: tuple[float, ...] = (), **parts: float
) -> Run:
    """A run of steps that take the given seconds; `busy` is added to the forward of each rank."""
    traces = {}
    for rank in range(ranks):
        times = {
            "loader": 0.0,
            "forward": 0.0,
            "backward": 0.0,
            "optimizer": 0.0,
            "device": 0.0,
            "outside": 0.0,
            "tracing": 9.0,
        }
        times |= parts
        times["forward"] += busy[rank] if busy else 0.0
        line = {"optimizer": 0, "forwards": [], "backwards": [], "times": times, "parameters": ""}
        settings = {"ranks": ranks}
        model = {"number": 0, "class": "Net", "names": []}
        traces[rank] = RankTrace(settings, [model], [{"names": []}], [dict(line) for _ in range(steps)])
    return Run(number, wrapper, 0, 1.0, Path("log.txt"), traces, {"0": plain_facts()})


NAMES = ["weight", "bias"]
CALLS = {
    "b": "backward", "B": "backward", "S": "step", "z": "zero", "h": "by hand", "s": "scale", "g": "get scale",
    "u": "unscale", "U": "unscale", "c": "clip", "C": "clip", "l": "schedule",
    "a": "mean",
}  # fmt: skip


def called(text, of=(0,), whole=(0,)):
    """Return the calls of a step: a letter each, which is its line, too.

    "B" is a backward at another line. "C" and "U" are about other parameters.
    """
    about, others = {"of": [*of], "whole": [*whole]}, {"of": [], "whole": []}
    return [{"what": CALLS[one], "at": f"train.py:{ord(one)}", **(others if one in "CU" else about)} for one in text]


def window(text, weights=("1", "1"), **fields):
    """Return one step of each rank. In its backwards "l" is local, "a" averaged, and "0" stands before one of zeros."""
    lines = []
    for each in weights:
        backwards: list[dict[str, Any]] = []
        empty = True
        for letter in text:
            if letter == "0":
                empty = True
                continue
            end = {"left": {"0": [1]}} if letter == "l" else {"all_averaged": {"0": "x" * 8}}
            backwards.append({"held": {"0": [0 if empty else 1]}, **end})
            empty = False
        lines.append({"optimizer": 0, "backwards": backwards, "forwards": [], "all_parameters": each, **fields})
    return lines


def traces_of(*windows):
    """The traces of two ranks. Each batch has inputs of its own."""
    traces = {}
    for rank, steps in enumerate(zip(*windows, strict=True)):
        count = 0
        for line in steps:
            line["forwards"] = [{"model": 0, "inputs": f"{rank} {count + n}"} for n in range(len(line["backwards"]))]
            count += len(line["backwards"])
        model = {"number": 0, "class": "Net", "names": NAMES, "ranks": 2}
        traces[rank] = RankTrace({"ranks": 2}, [model], [{"class": "SGD", "names": NAMES}], list(steps))
    return traces
