"""`dpfuse diff`: where two traced runs part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dpfuse.errors import DPFuseError
from dpfuse.trace.comparison import compare
from dpfuse.trace_file import RankTrace, read_folder

__all__ = ["diff"]

TROUBLE = 2  # as the command `diff` of Unix


def diff(one: Path, other: Path, *, as_json: bool) -> int:
    """Print the first difference of two runs, from the folders that DPFUSE_TRACE has named.

    Returns:
        0 if the runs are equal as far as both go, 1 if they differ, 2 if a folder cannot be read.
    """
    try:
        runs = read_folder(one), read_folder(other)
    except DPFuseError as error:
        print(f"dpfuse diff: {error}", file=sys.stderr)
        return TROUBLE
    found = compare(*runs)
    steps = [min(len(trace.steps) for trace in run.values()) for run in runs]
    if as_json:
        facts = {"format": "dpfuse diff 1", "equal": found is None, "steps": steps}
        print(json.dumps({**facts, "difference": None if found is None else found.to_json()}, indent=1))
    else:
        for path, run, count in zip((one, other), runs, steps, strict=True):
            print(f"{path}: {_in_words(run)}, {count} steps")
        print(f"\n{_equal(min(steps), steps) if found is None else found.explain()}")
    return 0 if found is None else 1


def _in_words(run: dict[int, RankTrace]) -> str:
    models = ", ".join(f"{model['class']} ({model['wrapper']})" for model in run[0].models)
    return f"{len(run)} rank{'s' * (len(run) > 1)}, {models or 'no model'}"


def _equal(compared: int, steps: list[int]) -> str:
    text = f"no difference in {compared} steps: losses, gradients and weights have the same bits on every rank"
    if steps[0] != steps[1]:
        text += f"; one run has {abs(steps[0] - steps[1])} steps more, which were not compared"
    return text if compared else "no step was compared: a run has ended before its first optimizer step"
