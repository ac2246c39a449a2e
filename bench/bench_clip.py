"""The cost of clipping in a step: torch's on DDP's gradients, and dpfuse's.

Steps are forward, backward, and clipping to half the norm, so that every gradient is scaled. The cost of clipping is
the difference to a bare step, which has no clipping. Times on the CPU are wall times on two gloo ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from bench.baselines import Wrap
from bench.frozen_heap import frozen_heap
from bench.interleave import cuda_clock, interleave, paired_extra, wall_clock
from bench.models import Workload, chain, layers
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, StepTimes, affordable

__all__ = ["AGAIN", "BASES", "VARIANTS", "time_clips"]

WRAPS: dict[str, Wrap] = {
    "DDP default": DistributedDataParallel,
    "DDP view": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "dpfuse views": dpfuse.DataParallel,
    "dpfuse private": partial(dpfuse.DataParallel, gradient_as_bucket_view=False),
}
AGAIN = "dpfuse views bare again"  # its difference is noise
BASES = {name: f"{name} bare" for name in WRAPS}
BASES |= {f"{name} bare": f"{name} bare" for name in WRAPS} | {AGAIN: "dpfuse views bare"}
VARIANTS = tuple(BASES)
STEPS = 3  # dpfuse rebuilds its buckets after the first
FLOAT32_SUM = 1 << 16  # from this many elements on, torch's float32 sum of squares has an error above 1e-6


class _Clipped:
    """A wrapped copy of a model, and its steps.

    Args:
        workload: the model; the copy shares its weights.
        wrap: the wrapper of the copy.
    """

    def __init__(self, workload: Workload, wrap: Wrap) -> None:
        module = copy.deepcopy(workload.module)
        # Weights are never written here, so all contenders share them.
        for param, shared in zip(module.parameters(), workload.module.parameters(), strict=True):
            param.data = shared.data
        self.params = list(module.parameters())
        self.limit = 0.0
        self._wrapped = wrap(module)
        self._loss = workload.loss
        self._clip: Callable[[float], Tensor] = partial(nn.utils.clip_grad_norm_, self.params, foreach=True)
        if isinstance(self._wrapped, dpfuse.DataParallel):
            self._clip = self._wrapped.clip_grad_norm_

    def backward(self) -> None:
        self._loss(self._wrapped).backward()

    def clip(self) -> Tensor:
        return self._clip(self.limit)

    def drop(self) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        self.backward()
        self._clip(self.limit)
        self.drop()

    def bare_step(self) -> None:
        self.backward()
        self.drop()

    def gradients(self) -> Tensor:
        """Return a copy of all gradients, [elements]."""
        return torch.cat([cast("Tensor", param.grad).reshape(-1) for param in self.params])

    def facts(self) -> dict[str, int]:
        """Return the number and the bytes of the gradients, the number of buckets, and the bytes reduced in place."""
        facts = {"parameters": len(self.params), "bytes": sum(param.nbytes for param in self.params)}
        if isinstance(self._wrapped, dpfuse.DataParallel):
            assert self._wrapped.reducer is not None
            buckets = self._wrapped.reducer.buckets
            facts["buckets"] = len(buckets)
            facts["bytes_in_place"] = sum(bucket.parts.exchange.bytes_in_place for bucket in buckets)
        return facts


def _prove(contenders: dict[str, _Clipped]) -> dict[str, dict[str, int]]:
    """Assert that all contenders return the norm of DDP's gradients, and scale the gradients by one factor.

    The true norm is added up in float64. The contenders' limit is set to half the norm.

    Returns:
        The facts of each contender.

    Raises:
        AssertionError: A norm or a gradient differs.
    """
    peer = contenders["DDP default"]
    peer.backward()
    mean = peer.gradients()
    peer.drop()
    true_norm = float(mean.double().norm())
    limit = true_norm / 2
    expected = mean * (limit / (true_norm + 1e-6))
    sizes = expected.abs()
    summed_long = max(param.numel() for param in peer.params) >= FLOAT32_SUM
    facts = {}
    for name, contender in contenders.items():
        contender.limit = limit
        close = 1e-3 if name.startswith("DDP") and summed_long else 1e-6
        for _ in range(STEPS):
            contender.backward()
            facts[name] = contender.facts()
            norm = float(contender.clip())
            assert abs(norm - true_norm) <= close * true_norm, f"{name}: a norm of {norm}, expected {true_norm}"
            errors = contender.gradients().sub_(expected).abs_()
            assert bool((errors <= close * sizes).all()), f"{name}: a gradient is not the mean times the factor"
            contender.drop()
    return facts


def time_clips(build: Callable[[], Workload], effort: Effort, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Prove that all contenders clip equally, then time them in turns. Call it on every rank.

    Returns:
        The fields of `StepTimes` by contender; `extra` is relative to the contender's own bare step.
    """
    # Every rank has its own data. The first wrapper gives all ranks rank 0's weights.
    torch.manual_seed(dist.get_rank())
    with torch.device(device):
        workload = build()
    clock = cuda_clock if device == "cuda" else wall_clock
    results = {name: StepTimes() for name in VARIANTS}
    walls: dict[str, list[float]] = {name: [] for name in VARIANTS}
    extras: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    alive = []  # addresses affect the time, so each rebuild gets new memory
    for rebuild in range(effort.rebuilds):
        contenders = {name: _Clipped(workload, wrap) for name, wrap in WRAPS.items()}
        alive.append(contenders)
        facts = _prove(contenders)
        # A wrapper's bare step is run with the same objects, so that only clipping differs.
        steps = {name: contender.step for name, contender in contenders.items()}
        steps |= {f"{name} bare": contenders[name].bare_step for name in WRAPS}
        steps[AGAIN] = contenders["dpfuse views"].bare_step
        with frozen_heap():
            # With the clock: on a busy machine a common start of the ranks takes as long as a small step.
            rounds = affordable({name: partial(clock, step) for name, step in steps.items()}, effort, device)
            times = interleave(steps, clock, rounds=rounds, seed=rebuild)
        for name, pairs in times.items():
            base = times[BASES[name]]
            results[name].seconds += [seconds for seconds, _ in pairs]
            results[name].facts = facts.get(name, {})
            walls[name] += [wall for _, wall in pairs]
            extras[name].append((paired_extra(pairs, base), paired_extra(pairs, base, part=1)))
    for name, result in results.items():
        result.wall = median(walls[name])
        result.extra, result.extra_wall = (median(extra[part] for extra in extras[name]) for part in (0, 1))
        result.extra_lowest, result.extra_highest = min(extras[name])[0], max(extras[name])[0]
    return {name: asdict(result) for name, result in results.items()}


class _Case(NamedTuple):
    build: Callable[[], Workload]
    cpu: Effort | None  # None: on a GPU only
    cuda: Effort


CASES = {
    "100 tiny": _Case(partial(chain, 100), Effort(60, 5, 15), Effort(20, 1, 2)),
    "1000 tiny": _Case(partial(chain, 1000), Effort(20, 3, 15), Effort(20, 1, 4)),
    "20 x 1.25 MB": _Case(partial(layers, 20, 572), Effort(30, 1, 15), Effort(20, 1, 2)),
    "25 x 4 MB": _Case(partial(layers, 25, 1024), Effort(15, 1, 20), Effort(20, 1, 2)),
    # Of this size, no private gradient is reduced in place.
    "100 x 1 MB": _Case(partial(layers, 100, 512), None, Effort(20, 1, 2)),
}
QUICK = Effort(5, 1, 1)


@remembered
def _measured(name: str, device: str, quick: bool) -> Any:
    case = CASES[name]
    effort = QUICK if quick else case.cuda if device == "cuda" else case.cpu
    return on_ranks(1 if device == "cuda" else 2, device, time_clips, case.build, effort, device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = "cuda" if metafunc.config.getoption("--gpu") else "cpu"
    names = [name for name, case in CASES.items() if device == "cuda" or case.cpu is not None]
    metafunc.parametrize(("device", "name", "variant"), [(device, n, variant) for n in names for variant in VARIANTS])


@played_back
def test_clip(benchmark: Any, request: pytest.FixtureRequest, device: str, name: str, variant: str) -> None:
    result = dict(_measured(name, device, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    case = f"{'cuda' if device == 'cuda' else 'pair'} {name}"
    play_back(benchmark, seconds, {"suite": "clip", "case": case, "variant": variant, **result, **facts})
