"""Packing and unpacking compared with torch's own operations, for the parameter sizes of real networks.

On the CPU 8 MiB of each list; on CUDA 1 to 400 MiB, cold and hot in the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from bench.pack_time import CONTENDERS, time_packs
from bench.playback import play_back, played_back, remembered
from bench.size_list import SIZE_LISTS, bucket_shapes

MB = 1 << 20
ITEM = 4  # bytes of a float32
TINY_BYTES = 2000 * 4096


class _Case(NamedTuple):
    sizes: str
    nbytes: int
    hot: bool = False

    def __str__(self) -> str:
        return f"{self.sizes} {self.nbytes / MB:.3g} MiB{' hot' if self.hot else ''}"


def _cpu_cases(quick: bool) -> list[_Case]:
    if quick:
        return [_Case("resnet50", MB), _Case("tiny_2000", MB)]
    return [_Case(sizes, TINY_BYTES if sizes == "tiny_2000" else 8 * MB) for sizes in SIZE_LISTS]


def _cuda_cases(quick: bool) -> list[_Case]:
    networks = [sizes for sizes in SIZE_LISTS if sizes != "tiny_2000"]
    megabytes = (1, 25) if quick else (1, 25, 100, 400)
    # Data larger than the cache is never hot.
    cases = [
        _Case(sizes, size * MB, hot)
        for sizes in networks
        for size in megabytes
        for hot in (False, True)
        if not hot or size <= 25
    ]
    return [*cases, _Case("tiny_2000", TINY_BYTES), _Case("tiny_2000", TINY_BYTES, True)]


@remembered
def _measured(case: _Case, gpu: bool, quick: bool) -> dict[str, dict[str, Any]]:
    shapes = bucket_shapes(case.sizes, case.nbytes // ITEM)
    # Count launches only for few sizes: they hardly depend on the bytes, and the profiler is slow.
    counted = not gpu or (not case.hot and case.nbytes in (25 * MB, TINY_BYTES))
    device = torch.device("cuda" if gpu else "cpu")
    return time_packs(shapes, device, rounds=7 if quick else 31, hot=case.hot, counted=counted)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    quick = metafunc.config.getoption("--quick")
    cases = _cuda_cases(quick) if metafunc.config.getoption("--gpu") else _cpu_cases(quick)
    metafunc.parametrize(("case", "variant"), [(c, v) for c in cases for v in CONTENDERS], ids=str)


@played_back
def test_flatten(benchmark: Any, request: pytest.FixtureRequest, case: _Case, variant: str) -> None:
    measured = _measured(case, request.config.getoption("--gpu"), request.config.getoption("--quick"))
    result = dict(measured[variant])
    seconds = result.pop("seconds")
    info = {
        "suite": "flatten",
        "case": str(case),
        "variant": variant,
        "cuda": request.config.getoption("--gpu"),
        "hot": case.hot,
        "network": case.sizes != "tiny_2000",
        **result,
    }
    play_back(benchmark, seconds, info)
