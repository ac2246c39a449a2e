"""Time of a step compared with the bare module and DDP's modes: host cost, two processes, GPU.

Cases on the CPU (gloo): "host KIND N" is the CPU time of one thread with one rank. "no_sync KIND N" is the same inside
`no_sync()`. "pair …" is the wall time on two ranks, also with `deterministic=True`. On CUDA (NCCL, one rank) it is the
time between events; "cuda wire …" sends gradients as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from bench.baselines import BARE, ORDERED, Wrap, wire_wrappers, wrappers
from bench.models import CUDA_MODELS, HOST_MODELS, PAIR_MODELS, Workload
from bench.peers import peers
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.sketch import Sketch
from bench.step_time import Effort, time_steps

SKETCH = {"sketch": Sketch}  # on the CPU, where host time is most of the time
LOCAL = (BARE, "bare again", "dpfuse views", "DDP default")  # contenders inside no_sync(), where modes have no effect

Build = Callable[[], Workload]


def _contenders() -> dict[str, Wrap]:
    return {**wrappers(), **SKETCH, **peers(1)}


def _host(kind: str, count: int, no_sync: bool, quick: bool) -> Any:
    effort = Effort(10, 1, 1) if quick else Effort(rounds=max(20, 20_000 // (count + 90)), rebuilds=7, seconds=16)
    wraps = {name: wrapper for name, wrapper in wrappers().items() if name in LOCAL} if no_sync else _contenders()
    build = partial(HOST_MODELS[kind], count)
    return on_ranks(1, "cpu", partial(time_steps, build, wraps, effort=effort, no_sync=no_sync))


def _pair_contenders() -> dict[str, Wrap]:
    return {**wrappers(), **SKETCH, **ORDERED, **peers(2)}


def _cuda_contenders() -> dict[str, Wrap]:
    return {**wrappers(), **peers(1)}


def _pair_rank(name: str, effort: Effort) -> Any:
    return time_steps(PAIR_MODELS[name], _pair_contenders(), effort=effort)


def _pair(name: str, quick: bool) -> Any:
    return on_ranks(2, "cpu", _pair_rank, name, Effort(5, 1, 2) if quick else Effort(25, 3, 45))


def _cuda(name: str, quick: bool) -> Any:
    effort = Effort(5, 1, 2) if quick else Effort(40, 2, 20)
    return on_ranks(1, "cuda", partial(time_steps, CUDA_MODELS[name], _cuda_contenders(), effort=effort, device="cuda"))


def _cuda_wire(name: str, quick: bool) -> Any:
    effort = Effort(5, 1, 2) if quick else Effort(40, 2, 12)
    steps = partial(time_steps, effort=effort, device="cuda", wire=torch.bfloat16)
    return on_ranks(1, "cuda", partial(steps, CUDA_MODELS[name], wire_wrappers()))


CPU_CASES: dict[str, Callable[[bool], Any]] = {
    **{f"host {kind} {count}": partial(_host, kind, count, False) for kind in HOST_MODELS for count in (10, 100, 1000)},
    "no_sync chain 1000": partial(_host, "chain", 1000, True),
    "no_sync linear 1000": partial(_host, "linear", 1000, True),
    **{f"pair {name}": partial(_pair, name) for name in PAIR_MODELS},
}
CUDA_CASES: dict[str, Callable[[bool], Any]] = {
    **{f"cuda {name}": partial(_cuda, name) for name in CUDA_MODELS},
    **{f"cuda wire {name}": partial(_cuda_wire, name) for name in ("ResNet-50 b64", "BERT-large b8")},
}


@remembered
def _measured(case: str, quick: bool) -> Any:
    return (CPU_CASES | CUDA_CASES)[case](quick)


def _names(case: str) -> Iterable[str]:
    if case.startswith("cuda"):
        return wire_wrappers() if case.startswith("cuda wire") else _cuda_contenders()
    if case.startswith("pair"):
        return _pair_contenders()
    return LOCAL if case.startswith("no_sync") else _contenders()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    gpu = metafunc.config.getoption("--gpu")
    cases: list[str] = list(CUDA_CASES if gpu else CPU_CASES)
    if metafunc.config.getoption("--quick"):
        cases = [case for case in cases if "fan" not in case and "linear" not in case]
    pairs = [(case, variant) for case in cases for variant in _names(case)]
    metafunc.parametrize(("case", "variant"), pairs)


@played_back
def test_step(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    result = dict(_measured(case, request.config.getoption("--quick"))[variant])
    facts, seconds = result.pop("facts"), result.pop("seconds")
    play_back(benchmark, seconds, {"suite": "step", "case": case, "variant": variant, **result, **facts})
