"""One rank of a job with a fixed number of micro-batches, in which rank 1 makes a mistake: the first argument.

Usage: micro_batch_faults.py <what>, with torch's variables. Prints `raised <time> <text>` where an error ends it, and
`planted <time>` before the mistake; times are in seconds since 1970.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dpfuse

STEPS = 4
WHEN = 2  # the step of the mistake, from 0
COUNT = 7

what = sys.argv[1]
rank = int(os.environ["RANK"])
faulty = rank == 1


def planted() -> None:
    print(f"planted {time.time()}", flush=True)


def backward(model: nn.Module, step: int, number: int) -> None:
    model(torch.full((2, 3), 1.0 + step + number)).sum().backward()


def run_loop(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, in which this rank makes its mistake at its first micro-batch, or at its last one."""
    wrong = faulty and step == WHEN
    if wrong:
        planted()
    if wrong and what == "threads later":
        torch.set_num_threads(2)
    if wrong and what == "outside":
        backward(model, step, 0)
    own = range(3, 5)  # of rank 1
    for number in model.micro_batches(step + 5 if wrong and what == "another step" else None):
        if wrong:
            first, last = number == own[0], number == own[-1]
            if (what == "skips the first" and first) or (what == "skips the last" and last):
                continue
            if (what == "first twice" and first) or (what == "last twice" and last):
                backward(model, step, number)
            if what == "raises":
                raise ValueError("planted")
            if what == "raises at the last" and last:
                raise ValueError("planted")
            if what == "dies":
                os._exit(7)
        backward(model, step, number)
        if wrong and what == "leaves and steps":
            break
        if wrong and what == "leaves and begins again":
            run_again(model, step)
    optimizer.step()
    if not (wrong and what == "forgets zero_grad"):
        optimizer.zero_grad()


def run_again(model: Any, step: int) -> None:
    for number in model.micro_batches():
        backward(model, step, number)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    if faulty and what == "threads":
        planted()
    model = dpfuse.DataParallel(net, fixed_micro_batches=COUNT)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        run_loop(model, optimizer, step)


try:
    main()
except Exception as error:
    print(f"raised {time.time()} {type(error).__name__}: {error}", flush=True)
    raise
print("well", flush=True)
