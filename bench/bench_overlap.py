"""Overlap without a cluster: steps over a simulated network, compared with torch's DDP and with the prediction.

A case is a network: the start-up time of an all-reduce in seconds, and the time to send all bytes as a fraction of
backward. dpfuse runs with its default sizes, and with the planner's best plan for the network. It also sends the
buckets of the peers' published rules. The planner and the rules use a backward that was recorded without a network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dpfuse
from bench.baselines import BARE, Wrap, wrappers
from bench.equality import prove_contender
from bench.interleave import Clock, Rounds, cuda_clock, interleave, one_thread, paired_extra
from bench.models import Workload, layers
from bench.network import Cost, Network, simulated_network
from bench.peer_rules import PEER_RULES
from bench.peers import backward_of, peers
from bench.playback import play_back, played_back, remembered
from bench.send_recorder import SendRecorder
from bench.simulation import simulate
from bench.step_time import Effort, StepTimes
from dpfuse.engine.plan import BucketPlan
from dpfuse.tune import CostTable, Timeline, optimal_plan
from dpfuse.tune.recorder import timeline_of

PLANNED = "dpfuse planned"
UNSENT = "dpfuse planned, nothing sent"
CONTENDERS = (BARE, "bare again", "dpfuse views", "dpfuse private", "DDP default", "DDP view", "DDP view + batched")
WRAPS: dict[str, Wrap] = {
    **{name: wrap for name, wrap in wrappers().items() if name in CONTENDERS},
    PLANNED: dpfuse.DataParallel,
    UNSENT: dpfuse.DataParallel,
    **dict.fromkeys(PEER_RULES, dpfuse.DataParallel),
    **peers(1),
}

LATENCIES = (20e-6, 100e-6, 500e-6, 2e-3)
LOADS = (0.25, 0.5, 1, 2)  # time to send all bytes in backwards, without the latencies
CELLS = {f"{latency * 1e6:g} us, {load:g} backward": (latency, load) for latency, load in product(LATENCIES, LOADS)}
QUICK_CELLS = ("20 us, 0.25 backward", "2000 us, 2 backward")
RECORDED = 9  # backwards that are recorded for the plan
FEWEST_ROUNDS = 3
EFFORT = {"cpu": Effort(8, 2, 8), "cuda": Effort(8, 1, 1.5)}  # for each cell
QUICK = Effort(2, 1, 2)


class _Contender:
    """One wrapped model, to be timed in several networks.

    Args:
        workload: the model and its loss.
        wrap: the contender's wrapper.
    """

    def __init__(self, workload: Workload, wrap: Wrap) -> None:
        self.module = copy.deepcopy(workload.module)
        # Weights are never written. All contenders share them, because their addresses affect the time.
        for param, shared in zip(self.module.parameters(), workload.module.parameters(), strict=True):
            param.data = shared.data
        self.wrapped: Any = wrap(self.module)
        self._workload = workload
        self._start = backward_of(self.wrapped)

    def backward(self) -> None:
        self._start(self._workload.loss(self.wrapped))

    def step(self, network: Network, cost: Cost | None) -> None:
        network.cost = cost
        self.backward()
        for param in self.module.parameters():
            param.grad = None

    def prove(self, name: str) -> None:
        averaged = self.wrapped is not self.module
        prove_contender(name, self.module, self.wrapped, self._workload, averaged=averaged, backward=self.backward)


class _Grid:
    """All contenders, after their proofs, and a backward that was recorded while nothing was sent.

    Args:
        network: the network in which they were built.
        device: `"cpu"` or `"cuda"`.
    """

    def __init__(self, network: Network, device: str) -> None:
        self._network = network
        self.device = device
        self._clock: Clock = cuda_clock if device == "cuda" else _clock
        with torch.device(device):
            # Each gradient takes a few ms on one core, and about 0.8 ms on a large GPU.
            workload = layers(25, 1024, rows=8192) if device == "cuda" else layers(16, 768, rows=48)
        self._contenders = {name: _Contender(workload, wrap) for name, wrap in WRAPS.items()}
        network.cost = CostTable.affine(1e-3, 1e9)
        for name, contender in self._contenders.items():
            contender.prove(name)
        unsent = self._contenders[UNSENT]
        sync = unsent.wrapped._sync
        self._recorder = SendRecorder(len(sync.grads.plan.specs), device=sync.grads.params[0].device)
        sync.grads.record(self._recorder)
        for _ in range(RECORDED):
            unsent.step(network, None)
        self._timeline = timeline_of(self._recorder.gather(self._network), sync.grads.plan)

    def time(self, latency: float, load: float, effort: Effort) -> dict[str, dict[str, Any]]:
        """Plan for this network, and time all contenders in it.

        Args:
            latency: seconds of an empty all-reduce.
            load: time to send all bytes, in backwards.
            effort: how long to measure.

        Returns:
            The record of each contender.
        """
        nbytes = sum(self._timeline.nbytes)
        bandwidth = nbytes / (load * self._timeline.backward_end)
        cost = CostTable.affine(latency, bandwidth)
        plan = optimal_plan(self._timeline, cost)
        for name in (PLANNED, UNSENT):
            self._contenders[name].wrapped._sync.grads.use_plan(plan)
        for name, rule in PEER_RULES.items():
            self._contenders[name].wrapped._sync.grads.use_plan(rule(self._timeline, cost))
        self._network.calibrate()
        self._network.cost = cost
        self._contenders[PLANNED].prove(PLANNED)
        steps = {
            name: partial(contender.step, self._network, None if name == UNSENT else cost)
            for name, contender in self._contenders.items()
        }
        rounds = _affordable(steps, effort)
        self._recorder.restart(len(plan.specs))
        times = [interleave(steps, self._clock, rounds=rounds, warmup=1, seed=seed) for seed in range(effort.rebuilds)]
        # Recorded in the same rounds, these backwards have the same load of the machine, but no network.
        recorded = timeline_of(self._recorder.gather(self._network), plan)
        packed = _packed(recorded, plan, self._recorder.sent())
        results = {name: _summary(name, times) for name in steps}
        results[PLANNED] |= {
            "buckets": len(plan.buckets),
            "exposed": median(paired_extra(part[PLANNED], part[UNSENT]) for part in times),
            "predicted": simulate(recorded, plan, cost).exposed,
            "predicted_packed": simulate(packed, plan, cost).exposed,
        }
        facts = {"device": self.device, "bytes": nbytes, "latency": latency, "bandwidth": bandwidth}
        facts["late"] = self._lateness(cost)
        return {name: result | facts for name, result in results.items()}

    def _lateness(self, cost: Cost) -> float:
        """Return the seconds by which the smallest all-reduce takes longer than its cost."""
        self._network.cost = cost
        send = partial(dist.all_reduce, torch.zeros(1, device=self.device))
        return median(self._clock(send)[0] for _ in range(20)) - cost(4)


@one_thread()
def time_cells(cells: Iterable[str], effort: Effort, device: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the records by network and contender.

    Args:
        cells: names in `CELLS`.
        effort: for each network.
        device: `"cpu"` or `"cuda"`.
    """
    with simulated_network(device=device) as network:
        grid = _Grid(network, device)
        return {cell: grid.time(*CELLS[cell], effort) for cell in cells}


def _packed(timeline: Timeline, plan: BucketPlan, sent: Sequence[float]) -> Timeline:
    """Return the same backward with the time for packing: gradients are ready when their bucket is sent."""
    ready = [0.0] * len(plan.specs)
    for bucket, second in zip(plan.buckets, sent, strict=True):
        for index in bucket.params:
            ready[index] = second
    return Timeline(timeline.specs, tuple(ready), max(ready))


def _clock(step: Callable[[], object]) -> tuple[float, float]:
    begin = perf_counter()
    step()
    seconds = perf_counter() - begin
    return seconds, seconds


def _summary(name: str, times: list[Rounds]) -> dict[str, Any]:
    pairs = [pair for part in times for pair in part[name]]
    extras = [paired_extra(part[name], part[BARE]) for part in times]
    return asdict(
        StepTimes(
            seconds=[seconds for seconds, _ in pairs],
            wall=median(wall for _, wall in pairs),
            extra=median(extras),
            extra_wall=median(paired_extra(part[name], part[BARE], 1) for part in times),
            extra_lowest=min(extras),
            extra_highest=max(extras),
        )
    )


def _affordable(steps: Mapping[str, Callable[[], None]], effort: Effort) -> int:
    begin = perf_counter()
    for step in steps.values():
        step()
    seconds = perf_counter() - begin
    return max(FEWEST_ROUNDS, min(effort.rounds, int(effort.seconds / effort.rebuilds / seconds)))


@pytest.fixture(scope="session")
def grid(request: pytest.FixtureRequest) -> Iterator[_Grid]:
    """All contenders, for all networks: a run that is cut off keeps the networks that it has measured."""
    device = "cuda" if request.config.getoption("--gpu") else "cpu"
    with one_thread(), simulated_network(device=device) as network:
        yield _Grid(network, device)


@remembered
def _measured(grid: _Grid, case: str, quick: bool) -> dict[str, dict[str, Any]]:
    return grid.time(*CELLS[case], QUICK if quick else EFFORT[grid.device])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = QUICK_CELLS if metafunc.config.getoption("--quick") else CELLS
    metafunc.parametrize(("case", "variant"), list(product(cases, WRAPS)))


@played_back
def test_overlap(benchmark: Any, request: pytest.FixtureRequest, grid: _Grid, case: str, variant: str) -> None:
    result = dict(_measured(grid, case, request.config.getoption("--quick"))[variant])
    seconds, _ = result.pop("seconds"), result.pop("facts")
    play_back(benchmark, seconds, {"suite": "overlap", "case": case, "variant": variant, **result})
