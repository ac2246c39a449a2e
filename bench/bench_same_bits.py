"""Steps with `fixed_micro_batches`, beside the same micro-batches on each rank with `deterministic=True`.

Where there are as many micro-batches as ranks, both run one backward on each rank. With 8 micro-batches on 3 ranks, the
peer accumulates 3, 3 and 2 of them inside `no_sync()`, and gives their numbers as weights. So all contenders compute
the same gradients and average the same mean, which is proved before the timing. Times are wall times of whole steps
(forwards, backwards, dropping the gradients) on gloo ranks of this machine, which take turns in one run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from bench.interleave import interleave, wall_clock
from bench.models import Workload, layers, small_transformer
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort
from dpfuse.engine.micro_batches import MicroBatches

__all__ = ["CONTENDERS", "measure_steps"]

NEAR = 1e-5  # of the largest gradient: contenders add up in other orders
STEADY = 3  # steps after which buckets are rebuilt and gradients keep their addresses

Step = Callable[[], None]  # leaves the means in `.grad`


class _Contender(NamedTuple):
    params: list[nn.Parameter]
    step: Step

    def drop(self) -> None:
        for param in self.params:
            param.grad = None

    def step_and_drop(self) -> None:
        self.step()
        self.drop()


def _fixed(module: nn.Module, workload: Workload, deal: MicroBatches) -> Step:
    model = dpfuse.DataParallel(module, fixed_micro_batches=deal.count)

    def step() -> None:
        for _ in model.micro_batches():
            workload.loss(model).backward()

    return step


def _accumulating(module: nn.Module, workload: Workload, deal: MicroBatches, *, deterministic: bool) -> Step:
    model = dpfuse.DataParallel(module, deterministic=deterministic)
    own = len(deal.of(dist.get_rank()))
    differ = deal.count % deal.ranks > 0

    def step() -> None:
        if differ:
            model.set_gradient_weight(own)
        for left in reversed(range(own)):
            with model.no_sync() if left else nullcontext():
                (workload.loss(model) / own).backward()

    return step


CONTENDERS: dict[str, Callable[[nn.Module, Workload, MicroBatches], Step]] = {
    "fixed": _fixed,
    "deterministic": partial(_accumulating, deterministic=True),
    "default": partial(_accumulating, deterministic=False),
}


def _contender(workload: Workload, deal: MicroBatches, name: str) -> _Contender:
    module = copy.deepcopy(workload.module)
    # Weights are never written after wrapping, so all contenders share them.
    for param, shared in zip(module.parameters(), workload.module.parameters(), strict=True):
        param.data = shared.data
    return _Contender(list(module.parameters()), CONTENDERS[name](module, workload, deal))


def _mean(workload: Workload, deal: MicroBatches) -> Tensor:
    """Return the mean over all micro-batches of the gradients of a bare module, in float64."""
    total = torch.zeros(sum(param.numel() for param in workload.module.parameters()), dtype=torch.float64)
    for _ in deal.of(dist.get_rank()):
        grads = torch.autograd.grad(workload.loss(workload.module), list(workload.module.parameters()))
        total += torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(total)
    return total / deal.count


def _prove(name: str, contender: _Contender, mean: Tensor) -> None:
    for _ in range(STEADY):
        contender.step()
        got = torch.cat([param.grad.reshape(-1) for param in contender.params if param.grad is not None])
        worst = float((got - mean).abs().max() / mean.abs().max())
        assert worst <= NEAR, f"{name}: {worst} from the mean over the micro-batches"
        contender.drop()


def measure_steps(build: Callable[[], Workload], count: int, effort: Effort) -> dict[str, list[float]]:
    """Prove all contenders, and time their steps in turns. Call it on every rank.

    Args:
        build: makes the model and the batch of each micro-batch of this rank.
        count: the number of micro-batches.
        effort: how long to measure.

    Returns:
        By contender the seconds of each step.
    """
    torch.manual_seed(dist.get_rank())
    workload, deal = build(), MicroBatches(count, dist.get_world_size())
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    kept = []  # earlier builds stay alive, so that later ones get other addresses
    for rebuild in range(effort.rebuilds):
        contenders = {name: _contender(workload, deal, name) for name in CONTENDERS}
        kept.append(contenders)
        mean = _mean(workload, deal)  # once all have the weights of rank 0
        for name, contender in contenders.items():
            _prove(name, contender, mean)
        steps = {name: contender.step_and_drop for name, contender in contenders.items()}
        for name, pairs in interleave(steps, wall_clock, rounds=effort.rounds, seed=rebuild).items():
            seconds[name] += [wall for wall, _ in pairs]
    return seconds


MODELS: dict[str, Callable[[], Workload]] = {"transformer": small_transformer, "25 MB large": partial(layers, 25, 512)}
DEALS = ((2, 2), (4, 4), (8, 3))  # micro-batches, ranks
EFFORT, QUICK = Effort(12, 3, 0), Effort(2, 1, 0)


@remembered
def _measured(model: str, count: int, ranks: int, quick: bool) -> Any:
    return on_ranks(ranks, "cpu", measure_steps, MODELS[model], count, QUICK if quick else EFFORT)


@pytest.mark.parametrize("variant", CONTENDERS)
@pytest.mark.parametrize(("count", "ranks"), DEALS)
@pytest.mark.parametrize("model", MODELS)
@played_back
def test_same_bits(
    benchmark: Any, request: pytest.FixtureRequest, model: str, count: int, ranks: int, variant: str
) -> None:
    seconds = _measured(model, count, ranks, request.config.getoption("--quick"))[variant]
    case = f"{count} on {ranks} ranks, {model}"
    play_back(benchmark, seconds, {"suite": "same_bits", "case": case, "variant": variant})
