"""Shapes of the pack kernel on a GPU: elements per program and warps, by dtype and size, cold and hot in the cache.

The record has the best shape of each case; `dpfuse_kernels/launch_shape.py` has the shapes in use. The case "launch" is
the CPU time of a launch, without Triton's dispatcher and with it. The cases "adamw …" compare a step of AdamW in one
launch with torch's fused optimizer, which casts in launches of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from bench.kernel_time import LAUNCHES, SHAPES, label, time_launches, time_shapes
from bench.pack_time import CEILING
from bench.playback import play_back, played_back, remembered
from bench.size_list import bucket_shapes
from bench.update_time import UPDATES, time_updates

MB = 1 << 20
LAUNCH = "launch"
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]


class _Case(NamedTuple):
    dtype: torch.dtype
    wire: torch.dtype
    megabytes: int
    hot: bool
    sizes: str = "resnet50"  # list of tensors

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.wire)]
        small = f", {self.sizes}" * (self.sizes != "resnet50")
        return f"{' to '.join(names)}, {self.megabytes} MiB{small}{', hot' * self.hot}"


class _Update(NamedTuple):
    dtype: torch.dtype  # of the parameter
    wire: torch.dtype

    def __str__(self) -> str:
        param, grad = (str(dtype).removeprefix("torch.") for dtype in self)
        return f"adamw {param}, gradient {grad}"


# Data larger than the cache is never hot.
CASES = [
    _Case(dtype, wire, size, hot)
    for dtype, wire in PAIRS
    for size in (1, 25, 100)
    for hot in (False, True)
    if not (hot and size > 25)
] + [_Case(dtype, wire, 8, hot=False, sizes="tiny_2000") for dtype, wire in PAIRS]


PART = 25 * MB // 4  # elements of a bucket's part


@remembered
def _measured(case: _Case | _Update | str, quick: bool) -> dict[str, dict[str, Any]]:
    rounds = 5 if quick else 25
    if case == LAUNCH:
        return time_launches("cuda", rounds=rounds)
    if isinstance(case, _Update):
        return time_updates(PART, case.dtype, case.wire, "cuda", rounds=rounds)
    assert isinstance(case, _Case)
    shapes = bucket_shapes(case.sizes, case.megabytes * MB // case.dtype.itemsize)
    return time_shapes(shapes, case.dtype, case.wire, "cuda", rounds=rounds, hot=case.hot)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases: list[tuple[_Case | _Update | str, str]] = [(LAUNCH, name) for name in LAUNCHES]
    cases += [(_Update(*pair), name) for pair in PAIRS for name in UPDATES]
    cases += [(case, name) for case in CASES for name in (CEILING, *map(label, SHAPES))]
    metafunc.parametrize(("case", "variant"), cases if metafunc.config.getoption("--gpu") else [], ids=str)


@played_back
def test_kernels(benchmark: Any, request: pytest.FixtureRequest, case: _Case | _Update | str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    seconds = result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "kernels", "case": str(case), "variant": variant, **result})
