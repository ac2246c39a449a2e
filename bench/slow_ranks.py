"""Delays on real ranks, and healthy runs: which does the heartbeat find? `python -m bench.slow_ranks --out FILE`.

A step takes 50 ms or more. Most of it sleeps, since the ranks share the cores of this machine: a loader, layers that
sleep in forward and in backward, and an optimizer. Each has a jitter. Healthy runs of another kind compute instead.
A case is a process group of its own, with its own heartbeat. Healthy steps come first, then the delay: 20 % of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from bench.machine import describe
from bench.rank_group import on_ranks
from dpfuse.comm.waiting import board_of

__all__ = ["DELAYED", "Case", "found", "play"]

DELAYED = ("loader", "forward", "backward", "optimizer", "garbage collection")
TIMES = {"loader": 0.008, "forward": 0.014, "backward": 0.022, "optimizer": 0.006}  # seconds
JITTER = 0.03  # of each, a standard deviation
DELAY = 0.2  # of a step
BEFORE, STEPS, AFTER = 25, 50, 10  # healthy steps; steps with the delay, in which it is to be found; further ones
WITHIN = 3.0  # seconds, in which it is to be found where this is longer


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        phase: in which a rank is delayed; empty for a healthy run.
        rank: that is delayed.
        computes: whether steps compute in place of sleeping.
        seed: of the jitter.
        healthy_steps: of a healthy run.
    """

    phase: str = ""
    rank: int = -1
    computes: bool = False
    seed: int = 0
    healthy_steps: int = 120


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, layer: _Layer) -> Tensor:
        ctx.layer = layer
        layer.spend("forward")
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spend("backward")
        return grad, None


class _Layer(nn.Module):
    def __init__(self, spend: Callable[[str], None]) -> None:
        super().__init__()
        self.spend = spend

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(values, self)  # type: ignore[no-untyped-call]
        return out


class _SGD(torch.optim.SGD):
    spend: Callable[[str], None]

    def step(self, closure: Any = None) -> Any:
        self.spend("optimizer")
        return super().step(closure)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((perf_counter(), record.getMessage()))


@contextmanager
def _heard() -> Iterator[_Heard]:
    handler, log = _Heard(), logging.getLogger("dpfuse.slow")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def play(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Play these cases on the ranks of this group, one after the other; what rank 0 has heard of each."""
    return [_play(Case(**case)) for case in cases]


def _play(case: Case) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    jitter = random.Random(1000 * case.seed + rank)
    mine, late = case.rank == rank, False
    base = sum(TIMES.values())
    garbage = _garbage(DELAY * base) if case.phase == "garbage collection" and mine else []

    def spend(phase: str) -> None:
        if not case.computes:
            sleep(max(0.0, TIMES[phase] * jitter.gauss(1.0, JITTER)))
        if late and phase == case.phase:
            sleep(DELAY * base)

    width = 256 if case.computes else 64
    layers = [nn.Linear(width, width) for _ in range(12 if case.computes else 2)]
    net = nn.Sequential(*layers, _Layer(spend))
    with _heard() as heard:
        model = dpfuse.DistributedDataParallel(net, process_group=group)
        optimizer = _SGD(model.parameters(), lr=1e-3)
        optimizer.spend = spend
        inputs = torch.randn(256 if case.computes else 8, width)
        began = deadline = perf_counter()
        for step in range(BEFORE + STEPS + AFTER if case.phase else case.healthy_steps):
            if step == BEFORE:
                began, late = perf_counter(), mine
            if step == BEFORE + STEPS:
                deadline = perf_counter()
            if late and case.phase == "garbage collection":
                gc.collect()
            spend("loader")
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        numbers = dict(board.late) if (board := board_of(group)) is not None else {}
        step_seconds = (perf_counter() - began) / (STEPS + AFTER if case.phase else case.healthy_steps - BEFORE)
    del garbage, model, optimizer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group(group)
    return {
        **asdict(case),
        "size": size,
        "step_ms": round(1e3 * step_seconds, 1),
        "within": round(max(WITHIN, deadline - began), 2),
        "heard": [(round(when - began, 2), text) for when, text in heard.lines],
        "numbers": {name: round(value, 4) for name, value in numbers.items()},
    }


def _garbage(seconds: float) -> list[Any]:
    """Return so many objects that a collection takes about as long."""
    gc.collect()
    gc.freeze()  # what is there already, which takes longer
    some: list[Any] = []
    while True:
        some += [[None] for _ in range(20_000)]
        times = []
        for _ in range(3):
            began = perf_counter()
            gc.collect()
            times.append(perf_counter() - began)
        if min(times) >= seconds:
            return some


def found(result: dict[str, Any]) -> bool:
    """Whether the delay was attributed to the rank and the phase in time, and nothing else was said."""
    said = [text for when, text in result["heard"] if when <= result["within"]]
    right = f"rank {result['rank']} is", f"late in {result['phase']} since"
    return len(said) == 1 and said[0].startswith(right[0]) and right[1] in said[0]


def main() -> None:
    """Play all cases, print and write what came out."""
    parser = argparse.ArgumentParser(prog="python -m bench.slow_ranks", description=__doc__)
    parser.add_argument("--out", type=Path, help="write a record")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks")
    parser.add_argument("--healthy", type=int, default=30, help="healthy runs")
    options = parser.parse_args()
    machine = describe(gpu=False)
    results: list[dict[str, Any]] = []
    for size in options.sizes:
        repeats = 1 if options.quick else 4
        cases = [Case(phase, seed % size, seed=seed) for seed in range(repeats) for phase in DELAYED]
        count = 2 if options.quick else options.healthy // len(options.sizes)
        cases += [Case(computes=size == 2 and seed % 2 == 1, seed=seed) for seed in range(count)]
        results += on_ranks(size, "cpu", play, [asdict(case) for case in cases])
    delayed = [result for result in results if result["phase"]]
    healthy = [result for result in results if not result["phase"]]
    counts = {
        "delays": len(delayed),
        "attributed": sum(map(found, delayed)),
        "healthy runs": len(healthy),
        "healthy runs with a message": sum(1 for result in healthy if result["heard"]),
    }
    for result in results:
        print(result)
    print(counts)
    if options.out:
        command = shlex.join(["python", "-m", "bench.slow_ranks", *sys.argv[1:]])
        record = {"command": command, "machine": machine, "counts": counts, "results": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
