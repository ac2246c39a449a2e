"""Steps and bytes by wire format, compared with torch's DDP and its compression hooks.

Each case is a network. `pair` is two gloo ranks on this machine. The other networks are simulated with one rank: each
collective takes the time that its bytes would take on a cluster. An all-reduce of all bytes takes a given number of
backwards. An all-to-all and an all-gather, the two parts of a sum in float32, take half of that each. Before any timing
each contender's gradients are compared with the exact mean; the error is recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import dpfuse
from bench.baselines import BARE, Wrap, wrappers
from bench.interleave import cuda_clock, interleave, one_thread, paired_extra, wall_clock
from bench.models import Workload, layers
from bench.network import Network, simulated_network
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort, StepTimes
from dpfuse.tune import CostTable

STEPS = 4  # then buckets have been rebuilt, and PowerSGD has begun
LATENCY = 100e-6  # seconds of an empty all-reduce
LOADS = {"network, 0.5 backward": 0.5, "network, 2 backwards": 2.0}  # time to send all bytes as float32
PAIR = "pair"
# Relative error of all gradients as one vector: half a last digit of the format, or twice that if rounded twice.
ERRORS = {"float32": 1e-6, "fp16": 2**-10, "bf16": 2**-7, "e4m3": 2**-3, "e5m2": 2**-2}


def _hooked(hook: Callable[..., Any], state: Callable[[], Any]) -> Wrap:
    def build(module: nn.Module) -> nn.Module:
        wrapped: Any = wrappers()["DDP view"](module)
        wrapped.register_comm_hook(state(), hook)
        return wrapped

    return build


def _ours(**options: Any) -> Wrap:
    return lambda module: dpfuse.DataParallel(module, **options)


def _power_state() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


POWER = "DDP PowerSGD"
E4M3 = torch.float8_e4m3fn
WRAPS: dict[str, Wrap] = {
    BARE: wrappers()[BARE],
    "DDP view": wrappers()["DDP view"],
    # DDP rejects this hook on a CPU if it recognises it, although it works. So it is wrapped.
    "DDP bf16 hook": _hooked(lambda state, bucket: bf16_compress_hook(state, bucket), lambda: None),
    "DDP fp16 hook": _hooked(fp16_compress_hook, lambda: None),
    POWER: _hooked(powerSGD_hook, _power_state),
    "dpfuse float32": _ours(),
    "dpfuse bf16": _ours(wire_dtype=torch.bfloat16),
    "dpfuse bf16, fp32 sum": _ours(wire_dtype=(torch.bfloat16, torch.float32)),
    "dpfuse bf16 + feedback": _ours(wire_dtype=torch.bfloat16, error_feedback=True),
    "dpfuse e4m3": _ours(wire_dtype=E4M3),
    "dpfuse e4m3 + feedback": _ours(wire_dtype=E4M3, error_feedback=True),
    "dpfuse e5m2": _ours(wire_dtype=torch.float8_e5m2),
}


class _Contender:
    """One wrapped model. All contenders share the weights."""

    def __init__(self, workload: Workload, wrap: Wrap) -> None:
        self.module = copy.deepcopy(workload.module)
        for param, shared in zip(self.module.parameters(), workload.module.parameters(), strict=True):
            param.data = shared.data
        self.wrapped = wrap(self.module)
        self._loss = workload.loss

    def backward(self) -> None:
        self._loss(self.wrapped).backward()

    def step(self) -> None:
        self.backward()
        for param in self.module.parameters():
            param.grad = None

    def error(self) -> float:
        """Return the gradients' error relative to the norm of the exact mean, after buckets were rebuilt."""
        for _ in range(STEPS):
            self.step()
        local: dict[int, Tensor] = {}
        params = list(self.module.parameters())
        handles = [param.register_hook(partial(local.__setitem__, index)) for index, param in enumerate(params)]
        self.backward()
        for handle in handles:
            handle.remove()
        exact = torch.cat([local[index].double().reshape(-1) for index in range(len(params))])
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        got = torch.cat([param.grad.double().reshape(-1) for param in params if param.grad is not None])
        for param in params:
            param.grad = None
        return float((got - exact).norm() / exact.norm())


def _wraps(case: str) -> dict[str, Wrap]:
    # PowerSGD waits for collectives in the thread of the simulated link, which would then wait for itself.
    return {name: wrap for name, wrap in WRAPS.items() if case == PAIR or name != POWER}


def _workload(count: int, features: int, rows: int) -> Workload:
    """Return square layers with gradients of full rank. With a plain sum of the outputs they would have rank 1."""
    inputs = torch.randn(rows, features)
    return Workload(layers(count, features).module, lambda model: model(inputs).square().sum())


def _built(case: str, workload: Workload) -> tuple[dict[str, _Contender], dict[str, float]]:
    contenders = {name: _Contender(workload, wrap) for name, wrap in _wraps(case).items()}
    errors = {name: contender.error() for name, contender in contenders.items() if name != BARE}
    for name, error in errors.items():
        allowed = next((most for kind, most in ERRORS.items() if kind in name), None)
        assert allowed is None or error <= allowed, f"{name}: gradients are off by {error:.3g}, more than {allowed:.3g}"
    return contenders, {BARE: 0.0, **errors}


def _timed(contenders: dict[str, _Contender], effort: Effort, clock: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    steps: dict[str, Callable[[], object]] = {name: contender.step for name, contender in contenders.items()}
    times = interleave(steps, clock, rounds=effort.rounds)
    return {
        name: asdict(
            StepTimes(
                [seconds for seconds, _ in times[name]],
                wall=median(wall for _, wall in times[name]),
                extra=paired_extra(times[name], times[BARE]),
            )
        )
        for name in contenders
    }


def time_pair(effort: Effort) -> dict[str, dict[str, dict[str, Any]]]:
    """Time whole steps with 28 MB of gradients on the ranks of this group."""
    torch.manual_seed(dist.get_rank())
    contenders, errors = _built(PAIR, _workload(12, 768, rows=16))
    results = _timed(contenders, effort, wall_clock)
    return {PAIR: {name: result | {"error": errors[name]} for name, result in results.items()}}


@one_thread()
def time_networks(effort: Effort, device: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Time the same in simulated networks, and count the bytes sent. Return both by case and contender."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    clock = cuda_clock if device == "cuda" else wall_clock
    with simulated_network(device=device) as network, torch.device(device):
        torch.manual_seed(0)
        workload = _workload(25, 1024, rows=8192) if device == "cuda" else _workload(12, 768, rows=48)
        contenders, errors = _built("network", workload)
        nbytes = {name: _bytes(network, contender) for name, contender in contenders.items()}
        network.cost = None
        backward = median(clock(contenders[BARE].step)[0] for _ in range(9)) * 2 / 3
        full = sum(param.nbytes for param in workload.module.parameters())
        for case, load in LOADS.items():
            network.calibrate()
            network.cost = CostTable.affine(LATENCY, full / (load * backward))
            results[case] = {
                name: result | {"error": errors[name], "bytes": nbytes[name], "gradient_bytes": full}
                for name, result in _timed(contenders, effort, clock).items()
            }
            network.cost = None
    return results


def _bytes(network: Network, contender: _Contender) -> float:
    """Return the bytes that one step sends, counted as all-reduces. Some collectives are half an all-reduce."""
    before = network.sent
    contender.step()
    return network.sent - before


EFFORT = Effort(9, 1, 0)
QUICK = Effort(2, 1, 0)


@remembered
def _measured(quick: bool, device: str) -> dict[str, dict[str, dict[str, Any]]]:
    effort = QUICK if quick else EFFORT
    networks = time_networks(effort, device)
    return networks | (on_ranks(2, "cpu", time_pair, effort) if device == "cpu" else {})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [*LOADS] if metafunc.config.getoption("--gpu") else [*LOADS, PAIR]
    metafunc.parametrize(("case", "variant"), [(case, name) for case in cases for name in _wraps(case)])


@played_back
def test_wire(benchmark: Any, request: pytest.FixtureRequest, case: str, variant: str) -> None:
    device = "cuda" if request.config.getoption("--gpu") else "cpu"
    result = dict(_measured(request.config.getoption("--quick"), device)[case][variant])
    seconds, _ = result.pop("seconds"), result.pop("facts")
    play_back(benchmark, seconds, {"suite": "wire", "case": case, "variant": variant, **result})
