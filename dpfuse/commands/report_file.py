"""The folder of a command's results: a JSON report, and pictures if matplotlib is installed. Measures nothing."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dpfuse.comm.abilities import backend_of
from dpfuse.comm.collective import group_device
from dpfuse.commands.machine import machine_facts, software_versions
from dpfuse.engine.plan import BucketPlan

__all__ = ["SavedRun", "buckets_of", "here", "save_picture", "size_of", "write_report"]


@dataclass(frozen=True)
class SavedRun:
    """Where and when something was measured."""

    date: str  # ISO 8601, UTC
    ranks: int
    backend: str
    machine: dict[str, Any]  # of rank 0
    versions: dict[str, Any]


def here() -> SavedRun:
    """Return the facts about this run, as seen from this rank."""
    group = dist.group.WORLD
    assert group is not None
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return SavedRun(now, group.size(), backend_of(group), machine_facts(group_device(group)), software_versions())


def write_report(
    path: Path, command: str, arguments: list[str], place: str, run: SavedRun, facts: dict[str, Any]
) -> None:
    """Write the report as JSON.

    Args:
        path: of the file.
        command: such as `tune`.
        arguments: of the command line, so that it can be repeated.
        place: `module:factory`.
        run: where it was measured.
        facts: the results.
    """
    head = {
        "format": f"dpfuse {command} 1",
        "command": shlex.join(["dpfuse", *arguments]),
        "model": place,
        **asdict(run),
    }
    path.write_text(json.dumps(head | facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def save_picture(save: Callable[[Path], None], path: Path) -> str:
    """Save a picture. Return its path, or why there is none."""
    try:
        save(path)
    except ImportError:
        return f"no {path.name}: it needs matplotlib, which is not installed: pip install 'dpfuse[bench]'"
    return str(path)


def buckets_of(plan: BucketPlan) -> list[dict[str, Any]]:
    """Return the buckets as JSON values, in the order of sending, with the names of their parameters."""
    return [
        {
            "params": [plan.specs[index].name for index in bucket.params],
            "bytes": bucket.nbytes,
            "dtype": bucket.dtype,
        }
        for bucket in plan.buckets
    ]


def size_of(megabytes: float) -> float | str:
    """Return a buffer size as a JSON value: JSON has no infinity."""
    return megabytes if math.isfinite(megabytes) else "inf"
