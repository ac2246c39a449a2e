"""Whole training steps whose optimizer each rank has whole or in part: forward, backward, update.

Wall time on two gloo ranks, with AdamW, with Muon, and with float32 copies of 16-bit parameters. "network …" is one
rank in a simulated network, as in the suite "overlap": there the rank updates all parameters, so only the overlap
differs. "cuda …" is the time between events, with one NCCL rank per GPU. Before the timing, each contender's weights
after three steps are compared with those of DDP. Several steps are one measurement, since parameters may still travel
when a step ends. The measurement ends when they have arrived.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import optim

from bench import training
from bench.interleave import Clock, cuda_clock, interleave, one_thread, wall_clock
from bench.models import CUDA_MODELS, PAIR_MODELS, Workload, layers
from bench.network import simulated_network
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, affordable
from bench.training import Train, Trained, Update
from dpfuse.tune import CostTable

__all__ = ["CUDA", "IN_NETWORKS", "NETWORKS", "PAIRS"]

SETTINGS = {"lr": 1e-4, "weight_decay": 0.1}
ADAMW = Update(optim.AdamW, SETTINGS)
FOREACH = Update(optim.AdamW, {**SETTINGS, "foreach": True})
FUSED = Update(optim.AdamW, {**SETTINGS, "fused": True})
MUON = Update(optim.Muon, {"lr": 1e-3, "weight_decay": 0.1})

CLOSE = partial(training.prove_elements, rtol=1e-5, atol=1e-5)
# Muon computes in bfloat16. So each of three updates, of at most 1.3e-4, may differ by a rounding of 2**-8 of it.
CLOSE_MUON = partial(training.prove_elements, rtol=1e-6, atol=2e-6)
# Two float32 numbers that are nearly equal may round to neighbours in bfloat16.
CLOSE_BFLOAT16 = partial(training.prove_elements, rtol=2**-7, atol=1e-6)
# Kernels of a GPU may add in another order each time. A missing or a wrong one of three steps is a third of the way.
CLOSE_CUDA = partial(training.prove_way, part=0.2)

LATENCIES = (20e-6, 100e-6, 500e-6, 2e-3)
LOADS = (0.25, 0.5, 1, 2)  # time to send all gradients in backwards, without the latencies
QUICK_CELLS = ("network 100 us, 1 backward",)
SEVERAL = {"cpu": 4, "cuda": 2}  # steps of a measurement
WARMUP = 1  # the proof has made steps, too
NAME_16 = "{} in bfloat16"


class Case(NamedTuple):
    """A model, what trains it, how their weights are compared, and how long they are timed."""

    build: Callable[[], Workload]
    contenders: dict[str, Train]
    prove: Callable[[Mapping[str, Trained]], None]
    effort: Effort


def _in_bfloat16(build: Callable[[], Workload]) -> Workload:
    workload = build()
    return Workload(workload.module.bfloat16(), workload.loss)


def _matrices() -> Workload:
    """Return 8 matrices of 512 x 512, whose gradients have the rank 32."""
    return layers(8, 512, rows=32)


EFFORT, CUDA_EFFORT, QUICK = Effort(25, 3, 45), Effort(15, 1, 5), Effort(5, 1, 2)
PAIRS: dict[str, Case] = {
    **{name: Case(build, training.all_contenders(ADAMW), CLOSE, EFFORT) for name, build in PAIR_MODELS.items()},
    "Muon": Case(_matrices, training.muon_contenders(MUON), CLOSE_MUON, Effort(15, 1, 45)),
    NAME_16.format("transformer"): Case(
        partial(_in_bfloat16, PAIR_MODELS["transformer"]), training.with_copies(FOREACH), CLOSE_BFLOAT16, EFFORT
    ),
}
CUDA: dict[str, Case] = {
    **{
        f"cuda {name}": Case(build, training.all_contenders(FUSED), CLOSE_CUDA, CUDA_EFFORT)
        for name, build in CUDA_MODELS.items()
    },
    NAME_16.format("cuda BERT-large b8"): Case(
        partial(_in_bfloat16, CUDA_MODELS["BERT-large b8"]), training.with_copies(FUSED), CLOSE_CUDA, CUDA_EFFORT
    ),
}
# What one rank can have: ZeroRedundancyOptimizer and FSDP2 need a group that torch knows well.
IN_NETWORKS = training.plain_contenders(ADAMW)
NETWORKS = {
    f"network {latency * 1e6:g} us, {load:g} backward": (latency, load) for latency, load in product(LATENCIES, LOADS)
}


def _time(name: str, effort: Effort, several: int, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Prove and time a case, with `several` steps for each measurement. Call it on every rank."""
    case, cuda = (PAIRS | CUDA)[name], device == "cuda"
    torch.manual_seed(dist.get_rank())  # every rank has its own data
    with torch.device(device):
        workload = case.build()
    for param in workload.module.parameters():
        dist.broadcast(param.data, 0)
    size = sum(param.nbytes for param in workload.module.parameters())
    facts: dict[str, dict[str, int]] = {
        each: {"bytes": size, "ranks": dist.get_world_size()} for each in case.contenders
    }
    seconds: dict[str, list[float]] = {each: [] for each in case.contenders}
    for rebuild in range(effort.rebuilds):
        trained = {each: train(copy.deepcopy(workload)) for each, train in case.contenders.items()}
        if rebuild == 0:
            case.prove(trained)
            for each, one in trained.items():
                # On a GPU, dpfuse's kernel may update the states in place of an optimizer.
                facts[each] |= {} if cuda else training.memory_of(one)
        times = _in_turns(trained, effort, several, cuda_clock if cuda else wall_clock, device, seed=rebuild)
        for each, found in times.items():
            seconds[each] += found
        del trained
        gc.collect()  # models and their hooks refer to each other, and a GPU must hold the next ones
    return _results(seconds, facts)


def _time_network(latency: float, load: float, effort: Effort, several: int) -> dict[str, dict[str, Any]]:
    """Time the contenders that one rank can have, where all bytes travel for `load` backwards."""
    with one_thread(), simulated_network() as network:
        torch.manual_seed(0)
        workload = layers(16, 768, rows=48)
        backward = _backward_seconds(workload)
        nbytes = sum(param.nbytes for param in workload.module.parameters())
        trained = {each: train(copy.deepcopy(workload)) for each, train in IN_NETWORKS.items()}
        CLOSE(trained)
        network.cost = CostTable.affine(latency, nbytes / (load * backward))
        seconds = _in_turns(trained, effort, several, _clock)
    facts = {"bytes": nbytes, "latency": latency, "backward": backward}
    return _results(seconds, dict.fromkeys(IN_NETWORKS, facts))


def _in_turns(
    trained: Mapping[str, Trained],
    effort: Effort,
    several: int,
    clock: Clock,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, list[float]]:
    """Return the seconds of a step by contender."""
    steps = {each: partial(_several, one, several) for each, one in trained.items()}
    rounds = affordable(steps, effort, device)
    times = interleave(steps, clock, rounds=rounds, warmup=WARMUP, seed=seed)
    return {each: [seconds / several for seconds, _ in pairs] for each, pairs in times.items()}


def _several(trained: Trained, count: int) -> None:
    for _ in range(count):
        trained.step()


def _results(seconds: Mapping[str, list[float]], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each: {"seconds": found, "wall": median(found), "facts": facts[each]} for each, found in seconds.items()}


def _clock(step: Callable[[], object]) -> tuple[float, float]:
    begin = perf_counter()
    step()
    return (seconds := perf_counter() - begin), seconds


def _backward_seconds(workload: Workload) -> float:
    """The time of a backward of the bare module."""
    found = []
    for _ in range(9):
        loss = workload.loss(workload.module)
        found.append(_clock(loss.backward)[0])
    return median(found)


@remembered
def _measured(case: str, quick: bool) -> Any:
    device = "cuda" if case in CUDA else "cpu"
    several = 1 if quick else SEVERAL[device]
    if case in NETWORKS:
        return _time_network(*NETWORKS[case], Effort(2, 1, 2) if quick else Effort(7, 1, 25), several)
    ranks = max(1, torch.cuda.device_count()) if case in CUDA else 2
    return on_ranks(ranks, device, _time, case, QUICK if quick else (PAIRS | CUDA)[case].effort, several, device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    gpu, quick = (metafunc.config.getoption(option) for option in ("--gpu", "--quick"))
    pairs = [(name, variant) for name, case in (CUDA if gpu else PAIRS).items() for variant in case.contenders]
    cells = () if gpu else QUICK_CELLS if quick else NETWORKS
    metafunc.parametrize(("case", "variant"), pairs + [(cell, variant) for cell in cells for variant in IN_NETWORKS])


@played_back
def test_sharded(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "sharded", "case": case, "variant": variant, **result, **facts})
