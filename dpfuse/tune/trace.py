"""Writes a schedule for the trace viewers of Chrome and Perfetto. Knows no plan and no link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpfuse.engine.plan import MB
from dpfuse.tune.simulation import Schedule

__all__ = ["save_trace", "trace_events"]

BACKWARD, WAITING, LINK = 0, 1, 2  # rows


def trace_events(schedule: Schedule) -> list[dict[str, Any]]:
    """Return the events of a trace: backward, buckets that wait, all-reduces, and the exposed communication."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        for row, name in ((BACKWARD, "backward"), (WAITING, "buckets ready, not sent"), (LINK, "all-reduces"))
    ]
    events.append(_span("backward", BACKWARD, 0.0, schedule.backward_end))
    if schedule.exposed:
        events.append(_span("exposed communication", BACKWARD, schedule.backward_end, schedule.end, colour="terrible"))
    for bucket in schedule.buckets:
        name = f"bucket {bucket.order} ({bucket.nbytes / MB:.3g} MB)"
        facts = {
            "parameters": bucket.params,
            "bytes": bucket.nbytes,
            "closed by": bucket.closed_by,
            "late ms": bucket.late * 1e3,
            "exposed ms": bucket.exposed * 1e3,
        }
        ready = {"ph": "i", "s": "t", "pid": 0, "tid": BACKWARD, "ts": bucket.ready * 1e6}
        events.append(ready | {"name": f"bucket {bucket.order} ready: {bucket.closed_by}"})
        if bucket.sent > bucket.ready:
            events.append(_span(f"{name} waits", WAITING, bucket.ready, bucket.sent, colour="yellow"))
        exposed = "terrible" if bucket.exposed else "good"
        events.append(_span(name, LINK, bucket.sent, bucket.landed, colour=exposed) | {"args": facts})
    return events


def save_trace(schedule: Schedule, path: str | Path) -> None:
    """Write a JSON file for `chrome://tracing` or ui.perfetto.dev.

    Example:
        >>> import json, pathlib, tempfile, dpfuse
        >>> from dpfuse.tune import CostTable, Timeline, optimal_plan, save_trace, simulate
        >>> timeline = Timeline.synthetic([dpfuse.ParamSpec("a", (10**6,), "float32")], 0.004)
        >>> cost = CostTable.affine(1e-4, 4e9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "trace.json")
        ...     save_trace(simulate(timeline, optimal_plan(timeline, cost), cost), path)
        ...     [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        ['backward', 'exposed communication', 'bucket 0 (3.81 MB)']
    """
    data = {"traceEvents": trace_events(schedule), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _span(name: str, row: int, begin: float, end: float, *, colour: str | None = None) -> dict[str, Any]:
    span = {"ph": "X", "pid": 0, "tid": row, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return span if colour is None else span | {"cname": colour}
