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
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from bench.machine import describe
from bench.rank_group import on_ranks
from bench.rank_machines import CARD, limit_sending, namespaces
from dpfuse.comm.waiting import board_of

__all__ = ["DELAYED", "Case", "found", "play"]

LINK = "link"
DELAYED = ("loader", "forward", "backward", "optimizer", "garbage collection")
TIMES = {"loader": 0.008, "forward": 0.014, "backward": 0.022, "optimizer": 0.006}  # seconds
JITTER = 0.03  # of each, a standard deviation
DELAY = 0.2  # of a step, where a case says nothing else
BEFORE, STEPS, AFTER = 25, 50, 10  # healthy steps; steps with the delay, in which it is to be found; further ones
BEFORE_LINK = 70  # since what is usual must be known
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
        delay: in parts of a step.
    """

    phase: str = ""
    rank: int = -1
    computes: bool = False
    seed: int = 0
    healthy_steps: int = 120
    delay: float = DELAY


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
    delay = case.delay * base
    garbage = _garbage(delay) if case.phase == "garbage collection" and mine else []

    def spend(phase: str) -> None:
        if not case.computes:
            sleep(max(0.0, TIMES[phase] * jitter.gauss(1.0, JITTER)))
        if late and phase == case.phase:
            sleep(delay)

    width = 512 if case.phase == LINK else 256 if case.computes else 64
    sent = 2 * (size - 1) / size * 4 * 2 * width**2  # bytes of a rank in a step, about
    layers = [nn.Linear(width, width) for _ in range(12 if case.computes else 2)]
    net = nn.Sequential(*layers, _Layer(spend))
    with _heard() as heard:
        model = dpfuse.DistributedDataParallel(net, process_group=group)
        optimizer = _SGD(model.parameters(), lr=1e-3)
        optimizer.spend = spend
        inputs = torch.randn(256 if case.computes else 8, width)
        before = BEFORE_LINK if case.phase == LINK else BEFORE
        began = deadline = perf_counter()
        for step in range(before + STEPS + AFTER if case.phase else case.healthy_steps):
            if step == before:
                began, late = perf_counter(), mine
                if late and case.phase == LINK:
                    limit_sending(sent / delay)
            if step == before + STEPS:
                deadline = perf_counter()
            if late and case.phase == "garbage collection":
                gc.collect()
            spend("loader")
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        numbers = dict(board.late) if (board := board_of(group)) is not None else {}
        step_seconds = (perf_counter() - began) / (STEPS + AFTER if case.phase else case.healthy_steps - BEFORE)
    if mine and case.phase == LINK:
        limit_sending(None)
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
            began = thread_time()  # others use this machine, too
            gc.collect()
            times.append(thread_time() - began)
        if min(times) >= seconds:
            return some


def found(result: dict[str, Any]) -> bool:
    """Whether the delay was attributed to the rank and the phase in time, and nothing else was said."""
    said = [text for when, text in result["heard"] if when <= result["within"] and not text.startswith("in ")]
    if result["phase"] == LINK:
        right = "every rank waits ", f"it is the link of rank {result['rank']},"
    else:
        right = f"rank {result['rank']} is ", f"late in {result['phase']} since"
    return len(said) == 1 and said[0].startswith(right[0]) and right[1] in said[0]


def play_apart(size: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Play these cases on ranks that have a network namespace each.

    Raises:
        OSError: this machine makes none.
    """
    with ExitStack() as cleanup, TemporaryDirectory(prefix="dpfuse-bench-") as folder:
        Path(folder, "cases.json").write_text(json.dumps(cases))
        started = [
            subprocess.Popen([*entry, sys.executable, "-m", __spec__.name, "--rank", f"{rank}", f"{size}", folder])
            for rank, entry in enumerate(namespaces(size, cleanup))
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise OSError("a rank has failed")
        results: list[dict[str, Any]] = json.loads(Path(folder, "results.json").read_text())
        return results


def _play_one(rank: int, size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    results = play(json.loads(Path(folder, "cases.json").read_text()))
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Play all cases, print and write what came out."""
    parser = argparse.ArgumentParser(prog="python -m bench.slow_ranks", description=__doc__)
    parser.add_argument("--out", type=Path, help="write a record")
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4], help="numbers of ranks")
    parser.add_argument("--healthy", type=int, default=30, help="healthy runs")
    parser.add_argument("--repeats", type=int, default=4, help="delays in each phase for each number of ranks")
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "SIZE", "FOLDER"), help="be one rank, in its namespace")
    parser.add_argument("--links", type=int, default=3, help="delays of a link for each number of ranks")
    options = parser.parse_args()
    if options.rank:
        _play_one(int(options.rank[0]), int(options.rank[1]), options.rank[2])
        return
    machine = describe(gpu=False)
    results: list[dict[str, Any]] = []
    for size in options.sizes:
        repeats = 1 if options.quick else options.repeats
        cases = [Case(phase, seed % size, seed=seed) for seed in range(repeats) for phase in DELAYED]
        count = 2 if options.quick else options.healthy // len(options.sizes)
        cases += [Case(computes=size == 2 and seed % 2 == 1, seed=seed) for seed in range(count)]
        results += on_ranks(size, "cpu", play, [asdict(case) for case in cases])
        links = [asdict(Case(LINK, seed % size, seed=seed)) for seed in range(1 if options.quick else options.links)]
        results += play_apart(size, links)
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
