"""What the tests give the engine: the rank of a group, what buckets share, and a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dpfuse.engine.bucket import Surroundings
from dpfuse.engine.events import Events
from dpfuse.engine.report import Report
from dpfuse.engine.report_layout import Field, ReportLayout
from dpfuse.engine.sync_decision import Window

__all__ = ["RankOf", "make_report", "surroundings"]

CPU = torch.device("cpu")


class RankOf:
    """The rank and the size of a process group, which is all that a report asks for."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.rank = lambda: rank
        self.size = lambda: size


def surroundings(events: Events | None = None, leave: Callable[[BaseException], None] | None = None) -> Surroundings:
    """What buckets share in a group without a heartbeat."""
    return Surroundings(None, events or Events(), leave or (lambda error: None))


def make_report(
    param_count: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    *,
    rank: int = 0,
    size: int = 2,
    fields: Sequence[Field] = (),
    window: Window | None = None,
    layout: ReportLayout | None = None,
) -> Report:
    """The report of one rank among so many."""
    layout = layout or ReportLayout()
    layout.compare(*fields)
    return Report(RankOf(rank, size), param_count, layout, window or Window(), dtype, device)
