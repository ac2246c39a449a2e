"""Times packs and unpacks of one list of sizes, in turns, with several sets of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.baselines import PACKS, UNPACKS, PackSet
from bench.counts import count
from bench.equality import prove_packs
from bench.interleave import Clock, host_clock, interleave, one_thread

__all__ = ["CEILING", "COLD_BYTES", "CONTENDERS", "gpu_clock", "time_packs"]

CEILING = "copy_ of the same bytes"
COLD_BYTES = 256 << 20  # four times the 60 MB cache of an H200, eight times a usual CPU cache
FEWEST_SETS = 4
GPU_HERTZ = 2e9  # at least the clock of the GPUs: a sleep of so many cycles is at least as long as intended


def _ceiling(data: PackSet) -> None:
    data.dense.copy_(data.twin)


CONTENDERS: dict[str, Callable[[PackSet], object]] = {
    CEILING: _ceiling,
    **{name: pack for name, (pack, _) in PACKS.items()},
    **{name: unpack for name, (unpack, _) in UNPACKS.items()},
}


@one_thread()
def time_packs(
    shapes: Sequence[tuple[int, ...]], device: torch.device, *, rounds: int, hot: bool = False, counted: bool = False
) -> dict[str, dict[str, Any]]:
    """Prove equality on one set of tensors, then time every contender.

    Args:
        shapes: of the tensors.
        device: of the tensors.
        rounds: timed calls per contender.
        hot: True uses one set for all calls, which may be in the cache. False uses at least four sets in turns, and so
            many that a set has left the cache at its next turn.
        counted: whether to count operators and launches, too.

    Returns:
        By contender: `seconds` (a list; GPU time on CUDA, else CPU time of this thread), `host` (median wall seconds
        until the call returned), `bytes` of the tensors, `tensors`, their number, and the counts.
    """
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    first = PackSet(shapes, device)
    prove_packs(first)
    sets = max(FEWEST_SETS, -(-COLD_BYTES // (2 * first.nbytes)))
    data = [first] if hot else [first, *(PackSet(shapes, device) for _ in range(sets - 1))]
    for pack_set in data:
        # A set's first call builds tables and uploads addresses; later calls do not.
        for call in CONTENDERS.values():
            call(pack_set)
    counts = {name: count(partial(call, first), cuda=cuda) for name, call in CONTENDERS.items()} if counted else {}
    following = cycle(data)

    def turn(name: str) -> Callable[[], tuple[float, float]]:
        clock, call = gpu_clock() if cuda else host_clock, CONTENDERS[name]
        return lambda: clock(partial(call, next(following)))

    times = interleave({name: turn(name) for name in CONTENDERS}, _given, rounds=rounds)
    return {
        name: {
            "seconds": [seconds for seconds, _ in pairs],
            "host": median(wall for _, wall in pairs),
            "bytes": first.nbytes,
            "tensors": len(shapes),
            "bytes_per_second": 2 * first.nbytes / median(seconds for seconds, _ in pairs),
            **({"operators": counts[name].operators, "launches": counts[name].launches} if counted else {}),
        }
        for name, pairs in times.items()
    }


def _given(turn: Callable[[], Any]) -> tuple[float, float]:
    # Each contender has its own clock, which has measured the time.
    first, second = turn()
    return first, second


def gpu_clock() -> Clock:
    """Return a clock for (GPU seconds, host seconds) of a call, without the time in which the GPU waits for the host.

    The GPU is kept busy until the host has queued the whole call. The call before gives the time that this takes.
    """
    host = 1e-3

    def clock(step: Callable[[], object]) -> tuple[float, float]:
        nonlocal host
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int((1.5 * host + 50e-6) * GPU_HERTZ))
        start.record()
        begun = perf_counter()
        step()
        host = perf_counter() - begun
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3, host

    return clock
