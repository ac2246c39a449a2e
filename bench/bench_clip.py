"""What clipping adds to a step: torch's over DDP's gradients, and dpfuse's with and without a norm from backward.

Steps are forward, backward, and clipping to half the norm, so that every gradient is scaled. What clipping adds is what
such a step takes longer than a bare one, which does not clip, of a wrapper with gradients of the same kind that
measures none in backward: so what measuring costs there is in it. Times on the CPU are wall times on two gloo ranks.
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
from bench.interleave import cuda_clock, interleave, paired_extra, wall_clock
from bench.models import Workload, chain, layers
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, StepTimes, affordable
from dpfuse.commands.sweep import frozen_heap

__all__ = ["AGAIN", "BASES", "VARIANTS", "time_clips"]

WRAPS: dict[str, Wrap] = {
    "DDP default": DistributedDataParallel,
    "DDP view": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "dpfuse views": dpfuse.DataParallel,
    "dpfuse private": partial(dpfuse.DataParallel, gradient_as_bucket_view=False),
    "dpfuse measured views": partial(dpfuse.DataParallel, grad_norm_in_backward=True),
    "dpfuse measured private": partial(dpfuse.DataParallel, grad_norm_in_backward=True, gradient_as_bucket_view=False),
}
BARE_WRAPS = [name for name in WRAPS if "measured" not in name]
AGAIN = "dpfuse views bare again"  # what it seems to add is noise
BASES = {name: f"{name.replace('measured ', '')} bare" for name in WRAPS}
BASES |= {f"{name} bare": f"{name} bare" for name in BARE_WRAPS} | {AGAIN: "dpfuse views bare"}
VARIANTS = tuple(BASES)
STEPS = 3  # dpfuse rebuilds its buckets after the first
FLOAT32_SUM = 1 << 16  # elements from which torch's float32 sum of squares is off by more than 1e-6


class _Clipped:
    """A wrapped copy of a model, and its steps.

    Args:
        workload: the model; its weights are used as they are.
        wrap: what wraps the copy.
    """

    def __init__(self, workload: Workload, wrap: Wrap) -> None:
        module = copy.deepcopy(workload.module)
        # Nobody writes weights here, so one set serves all.
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
        """A copy of all, [elements]."""
        return torch.cat([cast("Tensor", param.grad).reshape(-1) for param in self.params])

    def facts(self) -> dict[str, int]:
        """Of the gradients that are there now: bytes, and those that clipping need not read for their norm."""
        facts = {"parameters": len(self.params), "bytes": sum(param.nbytes for param in self.params)}
        if isinstance(self._wrapped, dpfuse.DataParallel):
            assert self._wrapped.reducer is not None
            buckets = self._wrapped.reducer.buckets
            facts["buckets"] = len(buckets)
            facts["bytes_in_place"] = sum(bucket.bytes_in_place for bucket in buckets)
            facts["bytes_measured"] = sum(
                sum(param.nbytes for param in bucket.fused_params)
                for bucket in buckets
                if bucket.squares is not None and bucket.squares.of([p.grad for p in bucket.fused_params]) is not None
            )
        return facts


def _prove(contenders: dict[str, _Clipped]) -> dict[str, dict[str, int]]:
    """All return the norm of DDP's gradients, added up in float64, and leave these times one factor.

    Sets their limit to half the norm.

    Returns:
        The facts of each.

    Raises:
        AssertionError: a norm or a gradient differs, or backward has measured other gradients than it should.
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
        if name.startswith("dpfuse"):
            # What is reduced where it lies passes no kernel, and is read again.
            measured = facts[name]["bytes"] - facts[name]["bytes_in_place"] if "measured" in name else 0
            assert facts[name]["bytes_measured"] == measured, f"{name}: measured other bytes than {measured}"
    return facts


def time_clips(build: Callable[[], Workload], effort: Effort, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Prove that all clip alike, then time them in turns; to be called on every rank.

    Returns:
        The fields of `StepTimes` by contender; what is extra is so over its own bare step.
    """
    # Every rank has data of its own; its weights become rank 0's when the first wrapper is built.
    torch.manual_seed(dist.get_rank())
    with torch.device(device):
        workload = build()
    clock = cuda_clock if device == "cuda" else wall_clock
    results = {name: StepTimes() for name in VARIANTS}
    walls: dict[str, list[float]] = {name: [] for name in VARIANTS}
    extras: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    alive = []  # where an object lies in the heap matters, so each rebuild gets memory of its own
    for rebuild in range(effort.rebuilds):
        contenders = {name: _Clipped(workload, wrap) for name, wrap in WRAPS.items()}
        alive.append(contenders)
        facts = _prove(contenders)
        # A wrapper's bare step is run with the same objects, so that only clipping differs.
        steps = {name: contender.step for name, contender in contenders.items()}
        steps |= {f"{name} bare": contenders[name].bare_step for name in BARE_WRAPS}
        steps[AGAIN] = contenders["dpfuse views"].bare_step
        with frozen_heap():
            # With the clock: on a busy machine ranks take as long to start together as a small step takes.
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
    # Private gradients as large as these all pass the kernel that measures them: none is reduced where it lies.
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
