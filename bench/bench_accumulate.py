"""Four micro-batches and one average: peak memory of gradients and buffers, and time.

The peers are torch's class, with private gradients and with views of its buckets. For 16-bit parameters there is also a
flat float32 buffer, to which a hook adds every gradient, as in Megatron-LM. Bytes are the peak of torch's allocator in
a steady window, minus its bytes before the module was wrapped. They include the activations of a few rows. Times are
those of a whole window, on two gloo ranks.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from bench.interleave import cuda_clock, interleave, wall_clock
from bench.models import Workload, layers
from bench.playback import play_back, played_back, remembered
from bench.rank_group import on_ranks
from bench.step_time import Effort

__all__ = ["CONTENDERS", "measure_windows"]

MICRO_BATCHES = 4
STEADY = 3  # windows after which buckets are rebuilt and gradients keep their addresses


class MainGrad(nn.Module):
    """A separate float32 buffer, to which a hook adds each gradient, and one all-reduce at the end."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.syncs = True
        self._params = list(module.parameters())
        self._flat = torch.zeros(sum(p.numel() for p in self._params), device=self._params[0].device)
        pieces = self._flat.split([p.numel() for p in self._params])
        for param, piece in zip(self._params, pieces, strict=True):
            param.main_grad = piece.view_as(param)
            param.register_post_accumulate_grad_hook(_add_to_main_grad)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the module."""
        result: Tensor = self.module(*inputs)
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: this class averages only in `finish`."""
        yield

    def finish(self) -> None:
        """Average."""
        self._flat.mul_(1 / dist.get_world_size())
        dist.all_reduce(self._flat)

    def begin(self) -> None:
        """Zero the gradients of the window before."""
        self._flat.zero_()


def _add_to_main_grad(param: Any) -> None:
    param.main_grad.add_(param.grad)
    param.grad = None


def _accumulating(module: nn.Module, *, views: bool = True) -> nn.Module:
    return dpfuse.DataParallel(module, accumulate_in_buckets=True, gradient_as_bucket_view=views)


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP default": DistributedDataParallel,
    "DDP view": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "main_grad": MainGrad,
    "dpfuse views": dpfuse.DataParallel,
    "dpfuse accumulating views": _accumulating,
    "dpfuse private": partial(dpfuse.DataParallel, gradient_as_bucket_view=False),
    "dpfuse accumulating private": partial(_accumulating, views=False),
}


class _Contender(NamedTuple):
    module: nn.Module
    window: Callable[[], None]  # leaves the means in `.grad`
    drop: Callable[[], None]  # called before the next window


def _contender(workload: Workload, wrap: Callable[[nn.Module], nn.Module]) -> _Contender:
    module = copy.deepcopy(workload.module)
    # Weights are never written here, so all contenders share them.
    for param, shared in zip(module.parameters(), workload.module.parameters(), strict=True):
        param.data = shared.data
    wrapped: Any = wrap(module)
    params, plain = list(module.parameters()), isinstance(wrapped, MainGrad)

    def window() -> None:
        if plain:
            wrapped.begin()
        for micro in range(MICRO_BATCHES):
            with wrapped.no_sync() if micro < MICRO_BATCHES - 1 else nullcontext():
                workload.loss(wrapped).backward()
        if plain:
            wrapped.finish()

    def drop() -> None:
        for param in params:
            param.grad = None

    return _Contender(module, window, drop)


def _prove(name: str, contender: _Contender) -> None:
    """Assert that a window gives the mean over the ranks of the gradients' sum, added up in float32."""
    params = list(contender.module.parameters())
    for _ in range(STEADY):
        sums = [torch.zeros_like(param, dtype=torch.float32) for param in params]
        handles = [p.register_hook(partial(_add, total)) for p, total in zip(params, sums, strict=True)]
        contender.window()
        for handle in handles:
            handle.remove()
        expected = torch.cat([total.view(-1) for total in sums]) / dist.get_world_size()
        dist.all_reduce(expected)
        got = torch.cat([getattr(param, "main_grad", param.grad).reshape(-1).float() for param in params])
        worst = float((got - expected).abs().max() / expected.abs().max())
        # 16-bit sums have a precision of eight bits, and are rounded after each addition.
        limit = 1e-6 if params[0].dtype == torch.float32 else 3e-2
        assert worst <= limit, f"{name}: {worst} from the mean over the ranks"
        contender.drop()


def _add(total: Tensor, grad: Tensor) -> None:
    total += grad


def _peak(build: Callable[[], _Contender], device: str) -> int:
    """Return the peak bytes of a steady window, minus the bytes before the module was wrapped."""
    gc.collect()  # else reference cycles with another contender's memory would be freed during the measurement
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        contender = build()
        _settle(contender)
        torch.cuda.reset_peak_memory_stats()
        contender.window()
        return torch.cuda.max_memory_allocated() - before
    # The profiler knows only memory that is allocated while it runs. So it runs from the beginning.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        contender = build()
        _settle(contender)
        with torch.profiler.record_function(_peak.__name__):
            contender.window()
    assert profile.profiler is not None
    events = sorted(_nested(profile.profiler.kineto_results.experimental_event_tree()), key=lambda e: e.start_time_ns)
    begin = next(event.start_time_ns for event in events if event.name == _peak.__name__)
    memory = [(e.start_time_ns, e.extra_fields) for e in events if e.name == "[memory]"]
    before = memory[0][1].total_allocated - memory[0][1].alloc_size
    return int(max(fields.total_allocated for start, fields in memory if start >= begin) - before)


def _nested(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _nested(event.children)


def _settle(contender: _Contender) -> None:
    for _ in range(STEADY):
        contender.window()
        contender.drop()


def measure_windows(build: Callable[[], Workload], effort: Effort, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Prove all contenders, and measure their memory and time. Call it on every rank.

    Returns:
        By contender `seconds` per window, `wall`, `peak_bytes`, and `peak`, bytes per parameter element.
    """
    torch.manual_seed(dist.get_rank())
    with torch.device(device):
        workload = build()
    numel = sum(param.numel() for param in workload.module.parameters())
    results: dict[str, dict[str, Any]] = {}
    steps = {}
    for name, wrap in CONTENDERS.items():
        # The profiler does not see memory that a thread of the back end frees. That can only increase the peak.
        nbytes = min(_peak(partial(_contender, workload, wrap), device) for _ in range(effort.rebuilds))
        results[name] = {"seconds": [], "peak_bytes": nbytes, "peak": nbytes / numel, "elements": numel}
    for name, wrap in CONTENDERS.items():
        contender = _contender(workload, wrap)
        _prove(name, contender)
        steps[name] = partial(_window_and_drop, contender)
    times = interleave(steps, cuda_clock if device == "cuda" else wall_clock, rounds=effort.rounds)
    for name, pairs in times.items():
        results[name]["seconds"] = [seconds for seconds, _ in pairs]
        results[name]["wall"] = median(wall for _, wall in pairs)
    return results


def _window_and_drop(contender: _Contender) -> None:
    contender.window()
    contender.drop()


def _linears(count: int, features: int, dtype: torch.dtype) -> Workload:
    workload = layers(count, features, rows=8)
    workload.module.to(dtype)
    x = torch.randn(8, features).to(dtype)
    return Workload(workload.module, lambda model: model(x).sum())


MODELS = {"cpu": (25, 1024), "cuda": (48, 2048)}
CASES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EFFORT, QUICK = Effort(10, 3, 0), Effort(3, 1, 0)


@remembered
def _measured(dtype: str, device: str, quick: bool) -> Any:
    build = partial(_linears, *MODELS[device], CASES[dtype])
    return on_ranks(1 if device == "cuda" else 2, device, measure_windows, build, QUICK if quick else EFFORT, device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = "cuda" if metafunc.config.getoption("--gpu") else "cpu"
    cases = [(device, dtype, variant) for dtype in CASES for variant in CONTENDERS]
    metafunc.parametrize(("device", "dtype", "variant"), cases)


@played_back
def test_accumulate(benchmark: Any, request: pytest.FixtureRequest, device: str, dtype: str, variant: str) -> None:
    result = dict(_measured(dtype, device, request.config.getoption("--quick"))[variant])
    seconds, case = result.pop("seconds"), f"{'cuda' if device == 'cuda' else 'pair'} {dtype}"
    play_back(benchmark, seconds, {"suite": "accumulate", "case": case, "variant": variant, **result})
