"""The cost of norm, clipping and the check for non-finite gradients, compared with torch's clipping and unscaling.

A step packs new gradients. Then every `.grad` is a view of a buffer, as after a backward with one rank. The bare step
does nothing else. torch's step then calls `_amp_foreach_non_finite_check_and_unscale_`, as `GradScaler.unscale_` does,
and `clip_grad_norm_(foreach=True)`. dpfuse's step counts while it packs, and clips the whole buffer. The step of
`dpfuse.GradScaler` counts for all buckets together, and also multiplies by a factor on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dpfuse
from bench.baselines import BARE, SCALE
from bench.interleave import Clock, cuda_clock, host_clock, interleave, paired_extra
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.size_list import load
from bench.step_time import Effort, StepTimes
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.protocols import PackArguments, PackStep
from dpfuse.gradients.finite import FiniteCheck
from dpfuse_kernels import PointerTable, flatten

OURS, UNCLIPPED, SCALER, PEER = "dpfuse", "dpfuse, below the limit", "dpfuse scaler", "torch clip + unscale"
VARIANTS = (BARE, "bare again", OURS, UNCLIPPED, SCALER, PEER)
STEPS = 3  # then the buckets have been rebuilt in the ready order


class _Weights(nn.Module):
    """Parameters of given shapes. Each element has a different gradient."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.empty(shape, device=device).normal_() for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([(param * param.detach()).sum() for param in self.all]).sum()


class _Part(NamedTuple):
    """One bucket, and the gradients that are packed into it."""

    table: PointerTable
    gradients: list[Tensor]
    counting: PackStep


class _Health:
    """A wrapped model. Its gradients are packed many times."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        self.model = dpfuse.DataParallel(_Weights(shapes, device))
        for _ in range(STEPS):
            self.model.zero_grad()
            self.model().backward()
        self.told: str | None = None  # the report of our last step on non-finite gradients
        self._check = FiniteCheck(raises=False, late=device == "cuda")
        self._steps = SimpleNamespace(completed=-1)  # counted from 0
        self._check.join(self._steps)
        assert self.model.reducer is not None
        self.parts = [self._part(order, bucket) for order, bucket in enumerate(self.model.reducer.buckets)]
        self.params = list(self.model.parameters())
        self.limit = float(self.model.grad_norm()) * SCALE / 2
        self._found = torch.zeros(1, device=device)
        self._unit = torch.ones(1, device=device)
        self._factor = torch.ones((), device=device)
        self._counts = torch.zeros(max(len(part.gradients) for part in self.parts), dtype=torch.int32, device=device)

    def _part(self, order: int, bucket: GradBucket) -> _Part:
        buffer = bucket.parts.buffer
        counting = self._check.step(order, bucket.plan, buffer, None)
        assert counting is not None
        gradients = [param.grad.clone() for param in buffer.params if param.grad is not None]
        return _Part(buffer.gradients, gradients, counting)

    def pack(self) -> None:
        for part in self.parts:
            flatten(part.gradients, part.table, scale=SCALE, matched=True)

    def ours(self, limit: float | None = None) -> Tensor:
        self._steps.completed += 1
        for part in self.parts:
            arguments = PackArguments(part.table, (), SCALE)
            part.counting.before(arguments)
            flatten(part.gradients, part.table, scale=SCALE, counts=arguments.counts, matched=True)
            part.counting.after(arguments)
        self.told = self._check.text(self._steps.completed + 1)
        return self.model.clip_grad_norm_(self.limit if limit is None else limit)

    def scaler(self) -> Tensor:
        self._counts.zero_()
        for part in self.parts:
            counts = self._counts[: len(part.gradients)]
            flatten(part.gradients, part.table, scale=SCALE, counts=counts, factor=self._factor, matched=True)
        self.found = self._counts.any()
        return self.model.clip_grad_norm_(self.limit)

    def torchs(self) -> Tensor:
        self.pack()
        gradients = [param.grad for param in self.params]
        self._found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._unit)
        return nn.utils.clip_grad_norm_(self.params, self.limit, foreach=True)

    def prove(self) -> None:
        """Assert that both ways give the same norm and gradients, and that ours finds non-finite gradients."""
        results = []
        for step in (self.torchs, self.ours, self.scaler):
            norm = step()
            results.append((float(norm), [param.grad.clone() for param in self.params if param.grad is not None]))
        their_norm, theirs = results[0]
        # torch adds up millions of squares in float32, which has a rounding error.
        close = 1e-6 if max(param.numel() for param in self.params) < 1 << 16 else 1e-3
        for our_norm, ours in results[1:]:
            assert math.isclose(their_norm, our_norm, rel_tol=close), "the norms differ"
            for one, other in zip(theirs, ours, strict=True):
                torch.testing.assert_close(one, other, rtol=close, atol=0)
        whole = self.parts[0].gradients[0]
        broken = whole.clone()
        broken.view(-1)[-1] = math.nan
        told = []
        for gradient in (broken, whole, whole):
            self.parts[0].gradients[0] = gradient
            self.scaler()
            assert bool(self.found) == (gradient is broken), "the scaler did not see a NaN, or one too many"
            self.ours()
            told.append(self.told)
        assert sum(text is not None for text in told) == 1, "a NaN was not seen, or more than once"
        assert (told[0] is None) == self._check.late, "a GPU tells a step later"


def time_health(shapes: list[tuple[int, ...]], effort: Effort, device: str) -> dict[str, dict[str, Any]]:
    """Prove that both ways give the same, then time them in turns, with one rank.

    Returns:
        The fields of `StepTimes` by contender.
    """
    clock: Clock = cuda_clock if device == "cuda" else host_clock
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    extras: dict[str, list[float]] = {name: [] for name in VARIANTS}
    alive = []  # addresses affect the time, so each rebuild gets new memory
    for rebuild in range(effort.rebuilds):
        torch.manual_seed(rebuild)
        health = _Health(shapes, device)
        alive.append(health)
        health.prove()
        steps: dict[str, Callable[[], object]] = {
            BARE: health.pack,
            "bare again": health.pack,
            OURS: health.ours,
            UNCLIPPED: partial(health.ours, math.inf),
            SCALER: health.scaler,
            PEER: health.torchs,
        }
        times = interleave(steps, clock, rounds=effort.rounds, seed=rebuild)
        for name in VARIANTS:
            pairs[name] += times[name]
            extras[name].append(paired_extra(times[name], times[BARE]))
    facts = {
        "parameters": len(shapes),
        "bytes": 4 * sum(math.prod(shape) for shape in shapes),
        "buckets": len(alive[0].parts),
    }
    results = {}
    for name in VARIANTS:
        results[name] = StepTimes(
            [seconds for seconds, _ in pairs[name]],
            wall=median(wall for _, wall in pairs[name]),
            extra=median(extras[name]),
            extra_wall=paired_extra(pairs[name], pairs[BARE], part=1),
            extra_lowest=min(extras[name]),
            extra_highest=max(extras[name]),
            facts=facts,
        )
    return {name: asdict(result) for name, result in results.items()}


class _Case(NamedTuple):
    shapes: Callable[[], list[tuple[int, ...]]]
    device: str
    effort: Effort


def _listed(name: str) -> list[tuple[int, ...]]:
    return [tuple(shape) for _, shape in load(name)]


CPU_CASES = {f"host {count}": _Case(partial(list, [(16,)] * count), "cpu", Effort(100, 7, 0)) for count in (10, 100)}
CPU_CASES["host 1000"] = _Case(partial(list, [(16,)] * 1000), "cpu", Effort(40, 7, 0))
CUDA_CASES = {f"cuda {name}": _Case(partial(_listed, name), "cuda", Effort(30, 1, 0)) for name in (
    "resnet50", "bert_large", "tiny_2000",
)}  # fmt: skip
QUICK = Effort(5, 1, 0)


@remembered
def _measured(name: str, quick: bool) -> Any:
    case = (CPU_CASES | CUDA_CASES)[name]
    return on_ranks(1, case.device, time_health, case.shapes(), QUICK if quick else case.effort, case.device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = CUDA_CASES if metafunc.config.getoption("--gpu") else CPU_CASES
    metafunc.parametrize(("case", "variant"), [(case, variant) for case in cases for variant in VARIANTS])


@played_back
def test_health(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "health", "case": case, "variant": variant, **result, **facts})
