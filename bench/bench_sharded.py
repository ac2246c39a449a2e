"""Whole training steps with AdamW, whose states each rank has whole or in part: forward, backward, update.

Wall time on two gloo ranks. Before the timing, each contender's weights after three steps are compared with those of
DDP and the plain optimizer. "network …" is one rank in a simulated network, as in the suite "overlap": there the rank
updates all parameters, so only the overlap differs. Several steps are one measurement, since parameters may still
travel when a step ends.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from bench.interleave import interleave, one_thread, wall_clock
from bench.models import PAIR_MODELS, Workload, layers
from bench.network import simulated_network
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, affordable
from dpfuse.tune import CostTable

__all__ = ["CONTENDERS"]

SETTINGS = {"lr": 1e-4, "weight_decay": 0.1}
STEPS = 3  # before the weights are compared
CLOSE = 1e-5
LATENCIES = (20e-6, 100e-6, 500e-6, 2e-3)
LOADS = (0.25, 0.5, 1, 2)  # time to send all gradients in backwards, without the latencies
QUICK_CELLS = ("network 100 us, 1 backward",)
REFERENCE = "DDP default"


class Trained(NamedTuple):
    """A model that is trained in one way."""

    step: Callable[[], None]
    weights: Callable[[], list[Tensor]]  # whole ones; to be called on all ranks


Train = Callable[[Workload], Trained]


def _stepped(module: nn.Module, wrapped: nn.Module, optimizer: optim.Optimizer, workload: Workload) -> Trained:
    def step() -> None:
        workload.loss(wrapped).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trained(step, lambda: [param.detach() for param in module.parameters()])


def _ddp(workload: Workload, **options: bool) -> Trained:
    wrapped = DistributedDataParallel(workload.module, **options)  # type: ignore[arg-type]
    return _stepped(workload.module, wrapped, optim.AdamW(wrapped.parameters(), **SETTINGS), workload)


def _zero(workload: Workload) -> Trained:
    wrapped = DistributedDataParallel(workload.module, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optim.AdamW, parameters_as_bucket_view=True, **SETTINGS)
    return _stepped(workload.module, wrapped, optimizer, workload)


def _dpfuse(workload: Workload) -> Trained:
    wrapped = dpfuse.DataParallel(workload.module)
    return _stepped(workload.module, wrapped, optim.AdamW(wrapped.parameters(), **SETTINGS), workload)


def _sharded(workload: Workload, gather: Literal["step", "forward"] = "step") -> Trained:
    wrapped = dpfuse.DataParallel(workload.module)
    optimizer = dpfuse.ShardedOptimizer(wrapped, optim.AdamW, gather=gather, **SETTINGS)
    return _stepped(workload.module, wrapped, optimizer, workload)


def _fsdp2(workload: Workload) -> Trained:
    module = workload.module
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, reshard_after_forward=False)
    fully_shard(module, reshard_after_forward=False)
    for part in module.modules():
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    trained = _stepped(module, module, optim.AdamW(module.parameters(), **SETTINGS), workload)

    def weights() -> list[Tensor]:
        return [param.full_tensor().detach() for param in module.parameters()]  # type: ignore[attr-defined]

    return Trained(trained.step, weights)


def _deepspeed(workload: Workload) -> Trained:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= ranks
    import deepspeed

    params = list(workload.module.parameters())
    engine, *_ = deepspeed.initialize(
        model=workload.module,
        model_parameters=params,
        optimizer=optim.AdamW(params, **SETTINGS),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> None:
        engine.backward(workload.loss(engine))
        engine.step()

    return Trained(step, lambda: [param.detach() for param in workload.module.parameters()])


CONTENDERS: dict[str, Train] = {
    REFERENCE: _ddp,
    "DDP views": partial(_ddp, gradient_as_bucket_view=True),
    "DDP with ZeroRedundancyOptimizer": _zero,
    "FSDP2 sharded, gathered once": _fsdp2,
    "dpfuse": _dpfuse,
    "dpfuse sharded": _sharded,
    "dpfuse sharded, gathered in forward": partial(_sharded, gather="forward"),
}
# What one rank can have: ZeroRedundancyOptimizer and FSDP2 need a group that torch knows well.
IN_NETWORKS = (REFERENCE, "DDP views", "dpfuse", "dpfuse sharded", "dpfuse sharded, gathered in forward")
NETWORKS = {
    f"network {latency * 1e6:g} us, {load:g} backward": (latency, load) for latency, load in product(LATENCIES, LOADS)
}
SEVERAL = 4
if importlib.util.find_spec("deepspeed") is not None:
    CONTENDERS["DeepSpeed stage 1"] = _deepspeed


def _time(name: str, effort: Effort) -> dict[str, dict[str, Any]]:
    torch.manual_seed(dist.get_rank())  # every rank has its own data
    workload = PAIR_MODELS[name]()
    for param in workload.module.parameters():
        dist.broadcast(param.data, 0)
    seconds: dict[str, list[float]] = {each: [] for each in CONTENDERS}
    for rebuild in range(effort.rebuilds):
        trained = {each: train(copy.deepcopy(workload)) for each, train in CONTENDERS.items()}
        if rebuild == 0:
            _prove(trained)
        steps = {each: one.step for each, one in trained.items()}
        times = interleave(steps, wall_clock, rounds=affordable(steps, effort, "cpu"), seed=rebuild)
        for each, pairs in times.items():
            seconds[each] += [wall for _, wall in pairs]
    size = sum(param.nbytes for param in workload.module.parameters())
    return {
        each: {"seconds": found, "wall": median(found), "facts": {"bytes": size}} for each, found in seconds.items()
    }


def _prove(trained: dict[str, Trained]) -> None:
    for one in trained.values():
        for _ in range(STEPS):
            one.step()
    expected = trained[REFERENCE].weights()
    for name, one in trained.items():
        for found, weight in zip(one.weights(), expected, strict=True):
            assert torch.allclose(found, weight, rtol=CLOSE, atol=CLOSE), f"{name}: the weights differ from DDP's"


def _time_network(latency: float, load: float, effort: Effort) -> dict[str, dict[str, Any]]:
    """Time the contenders that one rank can have, where all bytes travel for `load` backwards."""
    with one_thread(), simulated_network() as network:
        torch.manual_seed(0)
        workload = layers(16, 768, rows=48)
        backward = _backward_seconds(workload)
        nbytes = sum(param.nbytes for param in workload.module.parameters())
        trained = {each: CONTENDERS[each](copy.deepcopy(workload)) for each in IN_NETWORKS}
        _prove(trained)
        network.cost = CostTable.affine(latency, nbytes / (load * backward))
        steps = {each: partial(_several, one) for each, one in trained.items()}
        times = interleave(steps, _clock, rounds=affordable(steps, effort, "cpu"), warmup=1)
    seconds = {each: [wall / SEVERAL for wall, _ in pairs] for each, pairs in times.items()}
    facts = {"bytes": nbytes, "latency": latency, "backward": backward}
    return {each: {"seconds": found, "wall": median(found), "facts": facts} for each, found in seconds.items()}


def _several(trained: Trained) -> None:
    for _ in range(SEVERAL):
        trained.step()
    trained.weights()  # waits for those that are on their way


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
    if case in NETWORKS:
        return _time_network(*NETWORKS[case], Effort(2, 1, 2) if quick else Effort(7, 1, 25))
    return on_ranks(2, "cpu", _time, case, Effort(5, 1, 2) if quick else Effort(25, 3, 45))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = QUICK_CELLS if metafunc.config.getoption("--quick") else NETWORKS
    pairs = [(case, variant) for case in PAIR_MODELS for variant in CONTENDERS]
    metafunc.parametrize(("case", "variant"), pairs + [(case, variant) for case in cells for variant in IN_NETWORKS])


@played_back
def test_sharded(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "sharded", "case": case, "variant": variant, **result, **facts})
