"""Step time over comm_buffer_size and last_comm_buffer_size, for the built-in model or your own.

On the CPU there are two gloo ranks. On CUDA there is one NCCL rank per GPU; with a single GPU nothing is sent, so only
the cost of the buckets themselves is measured. For your own model:
`python -m bench --only bucket_size --model package.module:function`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bench.baselines import BARE, Wrap, wrappers
from bench.models import Workload, layers, load_model
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, time_steps

PEER = "DDP view"

# (comm_buffer_size, last_comm_buffer_size) in MB
Sizes = tuple[tuple[float, ...], tuple[float, ...]]
CPU_SIZES: Sizes = ((0.5, 2, 8, 25), (0.1, 1, 4))
QUICK_SIZES: Sizes = ((2, 25), (1,))
CUDA_SIZES: Sizes = ((1, 5, 25, 100, 400), (0.1, 1, 25))


def _build(model: str | None, device: str) -> Workload:
    if model is not None:
        return load_model(model)
    return layers(100, 1024) if device == "cuda" else layers(16, 512)


def _grid(sizes: Sizes) -> list[tuple[float, float]]:
    return [(comm, last) for comm in sizes[0] for last in sizes[1]]


def _label(comm: float, last: float) -> str:
    return f"{comm:g} / {last:g} MB"


def _rank(model: str | None, device: str, sizes: Sizes, effort: Effort) -> Any:
    known = wrappers()
    wraps: dict[str, Wrap] = {BARE: known[BARE], PEER: known[PEER]}
    for comm, last in _grid(sizes):
        wraps[_label(comm, last)] = wrappers(comm, last)["dpfuse views"]
    return time_steps(partial(_build, model, device), wraps, effort=effort, device=device)


@remembered
def _measured(model: str | None, device: str, sizes: Sizes, quick: bool) -> Any:
    effort = Effort(5, 1, 2) if quick else Effort(20, 2, 30)
    ranks = max(1, torch.cuda.device_count()) if device == "cuda" else 2
    return on_ranks(ranks, device, _rank, model, device, sizes, effort)


def _sizes(config: pytest.Config) -> Sizes:
    quick, gpu = config.getoption("--quick"), config.getoption("--gpu")
    default = QUICK_SIZES if quick else CUDA_SIZES if gpu else CPU_SIZES
    given = [config.getoption("--comm-buffer-sizes"), config.getoption("--last-comm-buffer-sizes")]
    comm, last = (
        tuple(map(float, text.split(","))) if text else known for text, known in zip(given, default, strict=True)
    )
    return comm, last


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    grid = [_label(comm, last) for comm, last in _grid(_sizes(metafunc.config))]
    metafunc.parametrize("variant", [BARE, PEER, *grid])


@played_back
def test_bucket_size(benchmark: Any, request: pytest.FixtureRequest, variant: str) -> None:
    config = request.config
    device = "cuda" if config.getoption("--gpu") else "cpu"
    model, sizes = config.getoption("--model"), _sizes(config)
    result = dict(_measured(model, device, sizes, config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    info = {"suite": "bucket_size", "case": model or "linear layers", "variant": variant, **result, **facts}
    for comm, last in _grid(sizes):
        if variant == _label(comm, last):
            info |= {"comm_buffer_size": comm, "last_comm_buffer_size": last}
    play_back(benchmark, seconds, info)
