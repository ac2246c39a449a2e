"""Times the host's part of a pack without a GPU: `python -m bench.pack_host` prints one JSON object.

The kernel is compiled for sm_90. A driver that only takes down its calls stands where the GPU's would, so everything up
to the launch is timed: checks, addresses, arguments. The launch itself is not; on a GPU it takes some microseconds.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import cycle
from statistics import median

import torch

from bench.interleave import host_clock, one_thread

__all__ = ["COUNTS", "main", "time_packs"]

COUNTS = (1, 100, 1000, 2000)
ROUNDS = 200


@one_thread()
def time_packs(count: int, rounds: int, *, sets: int) -> float:
    """Return the median of the seconds of a pack of `count` tensors, which alternate between `sets` lists."""
    from dpfuse_kernels import PointerTable, Slot, flatten

    slots = [Slot(f"p{index}", 64 * index, (16, 4), (4, 1)) for index in range(count)]
    table = PointerTable(torch.zeros(64 * count), slots, torch.float32)
    lists = [[torch.ones(16, 4) for _ in range(count)] for _ in range(sets)]
    turns = cycle(lists)
    for _ in range(2 * sets):
        flatten(next(turns), table, scale=0.5, matched=True)
    return median(host_clock(lambda: flatten(next(turns), table, scale=0.5, matched=True))[1] for _ in range(rounds))


def main() -> int:
    """Time packs of several numbers of tensors, and print microseconds."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["DPFUSE_KERNELS"] = "triton"
    from dpfuse_kernels import launcher
    from tests.kernels.record_launches import use_recorder

    use_recorder()
    launcher.interpreting = lambda compiled: True  # the tensors are on the CPU, and nothing follows their addresses
    found = {
        what: {str(count): round(1e6 * time_packs(count, ROUNDS, sets=sets), 1) for count in COUNTS}
        for what, sets in (("known addresses", 1), ("two alternating lists", 2))
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
