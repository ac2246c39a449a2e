"""Time of averaging gradients by hand: `fused_allreduce_gradients` compared with what a user would write.

The peers are one `cat`, one all-reduce and one `_foreach_copy_` back, and an all-reduce of each gradient. Cases on the
CPU (gloo): "pair N x M" is the wall time on two ranks for N gradients of M elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from bench.interleave import interleave, wall_clock
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks

CASES = {
    "pair 10 x 16": (10, 16),
    "pair 100 x 16": (100, 16),
    "pair 1000 x 16": (1000, 16),
    "pair 40 x 262144": (40, 1 << 18),
}
VARIANTS = ("dpfuse", "cat, all-reduce, foreach copy", "an all-reduce each")
ROUNDS, REBUILDS = 40, 3


def _by_cat(params: list[nn.Parameter]) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.view(-1) for grad in grads])
    flat /= dist.get_world_size()
    dist.all_reduce(flat)
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def _each_alone(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad /= dist.get_world_size()
        dist.all_reduce(param.grad)


WAYS: dict[str, Callable[[list[nn.Parameter]], None]] = dict(
    zip(VARIANTS, (dpfuse.fused_allreduce_gradients, _by_cat, _each_alone), strict=True)
)


def time_averaging(count: int, numel: int, rounds: int, rebuilds: int) -> dict[str, list[float]]:
    """Prove that all ways give the same gradients, then time them in turns. Call it on every rank.

    Returns:
        Seconds by variant.
    """
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for rebuild in range(rebuilds):
        own = torch.Generator().manual_seed(dist.get_rank())
        params = [nn.Parameter(torch.zeros(numel)) for _ in range(count)]
        values = [torch.randn(numel, generator=own) for _ in params]
        results: list[list[Tensor]] = []
        for way in WAYS.values():
            for param, value in zip(params, values, strict=True):
                param.grad = value.clone()
            way(params)
            results.append([param.grad.clone() for param in params if param.grad is not None])
        for others in results[1:]:
            for ours, theirs in zip(results[0], others, strict=True):
                torch.testing.assert_close(ours, theirs)
        steps = {name: partial(way, params) for name, way in WAYS.items()}
        times = interleave(steps, wall_clock, rounds=rounds, seed=rebuild)
        for name in VARIANTS:
            seconds[name] += [first for first, _ in times[name]]
    return seconds


@remembered
def _measured(case: str, quick: bool) -> Any:
    return on_ranks(2, "cpu", time_averaging, *CASES[case], 5 if quick else ROUNDS, 1 if quick else REBUILDS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("case", "variant"), [(case, variant) for case in CASES for variant in VARIANTS])


@played_back
def test_manual(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    seconds = _measured(case, request.config.getoption("--quick"))[variant]
    count, numel = CASES[case]
    info = {"suite": "manual", "case": case, "variant": variant, "gradients": count, "bytes": 4 * count * numel}
    play_back(benchmark, seconds, info)
