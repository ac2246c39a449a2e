"""The file of one rank's trace: JSON lines. Writes and reads them, and knows what each field means.

The first line holds the settings of the process. A line `model` comes when a model is wrapped, and a line `optimizer`
before the first step of an optimizer. It is written again when the number of its parameters has changed, and
the last one counts. A line `step` comes after each step of an optimizer:

- `forwards`: of each forward `model`, `training`, `context` (autocast), `random`, `inputs`, `outputs`, `buffers`, and
  `weights`, unless it runs inside the step of an optimizer
- `backwards`: of each backward `loss` (hash), `value`, `local` and `averaged` (by model, eight characters a parameter)
- `hooked` (by model, eight characters a parameter): the gradients of this rank after hooks of the program; minus signs
  for those without such hooks; a model without them is left out. An older trace has no such field
- `optimizer`, `settings` (of its groups: learning rate and so on), `stepped` (the gradients that it used),
  `before step` (the parameters when it begins), `parameters` (when it has ended)
- `held` (by model): whether a few small gradients hold anything but zeros when a backward begins, 1 or 0 for each.
  `left`: the same when a backward ends that is not averaged
- `rescaled` (by model): the places of parameters whose `.grad` was scaled or cut since the backward before, if there
  are any. No comparison of runs reads these three
- `not finite`, where it is asked for and something is: of a backward, by model, the places of parameters whose gradient
  of this rank was NaN or infinite. Of a step, the places in its optimizer of such gradients (`stepped`) and of such
  weights (`parameters`), and whether a GradScaler had it left out (`skipped`). No comparison reads it
- `module buffers`: of a backward, where they are asked for (by model, eight characters a buffer)
- `all_averaged` (by model) and `all_parameters`: one hash for those of each, in steps that are not hashed in full
- `plan`: for each model the names of the parameters of each bucket; written when it changes
- `calls`, where they are asked for: what the program called since the step before, in order. Of each call `what` it
  does (see `Call`), `at` (the line of the program), and the optimizers of which it is about some (`of`) or all
  (`whole`) parameters. Only optimizers that have stepped before are there. No comparison reads it
- `gradient sketch`: where it is asked for, a sum of each gradient with fixed random signs
- `times`: seconds by phase, which no comparison reads
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from dpfuse.errors import DPFuseError

__all__ = [
    "ABSENT",
    "AVERAGED",
    "BEFORE_STEP",
    "CALLS",
    "FORMAT",
    "HELD",
    "HOOKED",
    "LEFT",
    "MICRO_BATCHES",
    "MODULE_BUFFERS",
    "NOT_FINITE",
    "RANKS",
    "RESCALED",
    "SKIPPED",
    "STEPPED",
    "VARIABLE",
    "WEIGHTS",
    "Call",
    "RankTrace",
    "Writer",
    "behind_hooks",
    "hashes_in",
    "read_folder",
]

VARIABLE = "DPFUSE_TRACE"  # asks for a trace, and names its folder
FORMAT = "dpfuse trace 1"
HELD, LEFT, RESCALED, MODULE_BUFFERS = "held", "left", "rescaled", "module buffers"  # fields of a backward
HOOKED = "hooked"  # another one
MICRO_BATCHES = "micro_batches"  # a field of a model: how many a step has, on any number of ranks
RANKS = "ranks"  # another one: over how many gradients are averaged
AVERAGED = ("averaged", "all_averaged")  # two more: by model each parameter's hash, or one hash for all
BEFORE_STEP, CALLS = "before step", "calls"  # fields of a step
NOT_FINITE, STEPPED, WEIGHTS, SKIPPED = "not finite", "stepped", "parameters", "skipped"  # a field, and its own
ABSENT = "-" * 8  # in the place of a hash: there is no tensor
NAME = re.compile(r"rank(\d+)\.jsonl")


class Call(str, Enum):
    """What a call of the program does."""

    BACKWARD = "backward"
    STEP = "step"  # of an optimizer; what follows in the same line ran in its closure
    ZERO = "zero"  # of an optimizer or a module
    BY_HAND = "by hand"  # gradients were written or replaced since the call before, and by none of these
    SCALE = "scale"  # a loss, by a scaler whose gradients stay scaled after the backward
    GET_SCALE = "get scale"
    UNSCALE = "unscale"  # by itself, or in the step of a scaler, which may skip that of the optimizer
    CLIP = "clip"  # to a finite number
    MEAN = "mean"  # or sum, over all ranks, by the program, of gradients that were equal on them
    SCHEDULE = "schedule"  # a step of a schedule, which may step others


class Writer:
    """Writes the trace of one rank.

    Args:
        folder: made if it is not there. A trace of this rank in it is replaced.
        rank: of the process.

    Raises:
        DPFuseError: the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = open(folder / f"rank{rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise DPFuseError(
                f"DPFUSE_TRACE: rank {rank} cannot write into the folder {str(folder)!r}: {error.strerror}; expected a "
                "folder that it may write to. Name another"
            ) from error

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Write one line, so that it is in the file even if the process is killed afterwards."""
        self._file.write(json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; nothing can be written afterwards."""
        self._file.close()


@dataclass
class RankTrace:
    """What one rank has written."""

    settings: dict[str, Any] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


def read_folder(folder: Path) -> dict[int, RankTrace]:
    """Return the traces of a folder by rank.

    Raises:
        DPFuseError: there is none, or one cannot be read.
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    named = [(match, path) for path in files if (match := NAME.fullmatch(path.name))]
    if not named:
        raise DPFuseError(
            f"{str(folder)!r} holds no trace; expected files such as rank0.jsonl. Run the program with "
            f"DPFUSE_TRACE={folder} in its environment"
        )
    traces = {int(match[1]): _read(path) for match, path in named}
    count = traces[min(traces)].settings.get("ranks", len(traces))
    missing = sorted(set(range(count)) - traces.keys())
    if missing:
        raise DPFuseError(f"{str(folder)!r} holds no trace of rank {missing[0]}; the run had {count} ranks")
    return {rank: traces[rank] for rank in range(count)}


def hashes_in(text: str) -> list[str]:
    """Return the hashes of which a text consists, eight characters each."""
    return [text[place : place + 8] for place in range(0, len(text), 8)]


def behind_hooks(backward: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of a rank's gradients after hooks of the program, by model: as computed where it has none."""
    found = dict(backward.get("local", {}))
    for model, hooked in backward.get(HOOKED, {}).items():
        pairs = zip(hashes_in(found[model]), hashes_in(hooked), strict=True)
        found[model] = "".join(computed if behind == ABSENT else behind for computed, behind in pairs)
    return found


def _read(path: Path) -> RankTrace:
    found = RankTrace()
    try:
        lines = list(_lines(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DPFuseError(
            f"{path} cannot be read as a trace: {error}; expected a file that DPFUSE_TRACE made"
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            kind = values.pop("kind")
            if kind == "settings":
                if values.get("format") != FORMAT:
                    raise DPFuseError(f"{path} has the format {values.get('format')!r}, expected {FORMAT!r}")
                found.settings = values
            else:
                known = {"model": found.models, "optimizer": found.optimizers, "step": found.steps}[kind]
                if kind == "optimizer" and values["number"] < len(known):
                    known[values["number"]] = values
                else:
                    known.append(values)
        except (ValueError, KeyError, AttributeError) as error:
            raise DPFuseError(f"{path}, line {number} is no line of a trace; was the file changed?") from error
    if not found.settings:
        raise DPFuseError(f"{path} is empty; the run has ended before its first line was written")
    return found


def _lines(path: Path) -> Iterator[str]:
    """Yield whole lines: a process that was killed may have left the beginning of one."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line
