"""Measures the time of a group's all-reduces; all ranks get the same table. Knows clocks and flat tensors, no plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from dpfuse.arguments import instance, integer
from dpfuse.comm import collective, votes
from dpfuse.comm.waiting import NO_LIMIT
from dpfuse.engine.time_marks import now, seconds_between
from dpfuse.errors import DPFuseError
from dpfuse.tune.cost import CostTable

__all__ = ["SIZES", "measure_all_reduce"]

WHAT = "measure_all_reduce"
SIZES = tuple(1 << power for power in range(10, 28))  # 1 KiB to 128 MiB


def measure_all_reduce(
    group: dist.ProcessGroup | None = None, sizes: Sequence[int] = SIZES, *, repetitions: int = 9
) -> CostTable:
    """Time all-reduces of this group. Call it on all its ranks, while nothing else runs.

    Each repetition times every size once, so that a disturbance affects all sizes. The fastest rank's time is used: the
    other ranks also waited for the last rank to arrive. The result is the median over the repetitions. All ranks return
    rank 0's table.

    Args:
        group: process group; None means the default group.
        sizes: bytes, at least one, each at least 4.
        repetitions: number of times that each size is timed, after one that does not count.

    Raises:
        DPFuseError: There is no process group, this rank is not in it, the ranks' arguments differ, or a rank has not
            enough memory.
        ValueError: There are no sizes, one is below 4 bytes, or there are no repetitions.

    Example:
        >>> import torch.distributed as dist
        >>> from dpfuse.tune import measure_all_reduce
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> measure_all_reduce(sizes=[1024, 65536], repetitions=3).sizes
        (1024.0, 65536.0)
        >>> dist.destroy_process_group()
    """
    group = collective.resolve_group(group)
    if group is None:
        raise DPFuseError("there is no process group to measure; call dpfuse.init_parallel_env() first, on every rank")
    try:
        instance("sizes", sizes, Iterable, "a list of bytes")
        sizes = sorted({integer("each of sizes", size, 4) for size in sizes})
        integer("the number of sizes", len(sizes), 1)
        integer("repetitions", repetitions, 1)
    except (TypeError, ValueError) as wrong:
        votes.report_failure(wrong, group, WHAT)
        raise
    votes.agree_on_text(f"{sizes} bytes, {repetitions} times", group, WHAT, "Pass the same arguments everywhere.")
    device = collective.group_device(group)
    flat = votes.agree_on_success(lambda: torch.zeros(-(-sizes[-1] // 4), device=device), group, WHAT)
    times = torch.zeros(repetitions + 1, len(sizes), dtype=torch.float64, device="cpu")
    for turn in range(repetitions + 1):
        for place, size in enumerate(sizes):
            times[turn, place] = _time(flat[: -(-size // 4)], group)
    fastest = -times.to(device)
    collective.all_reduce_max(fastest, group)
    median = (-fastest[1:]).median(dim=0).values
    collective.broadcast(median, group)
    # A coarse clock may have measured 0.
    return CostTable.measured(sizes, [max(second, math.ulp(1.0)) for second in median.tolist()])


def _time(flat: torch.Tensor, group: dist.ProcessGroup) -> float:
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    begin = now(flat.device)
    collective.all_reduce(flat, group).wait(NO_LIMIT)
    return seconds_between(begin, now(flat.device))
