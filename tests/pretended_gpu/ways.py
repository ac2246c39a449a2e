"""The ways of use of the guide, each as a function that makes a model and an optimizer, and one step of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import dpfuse

__all__ = [
    "OPTIONS", "SETTLED", "WAYS", "WIDTH", "Way", "Wrap", "accumulating",
    "chain", "clipping", "plain", "scaling", "weighing", "wrapped",
    "zeroing",
]  # fmt: skip

WIDTH = 64
SETTLED = 20  # steps after which launches, pinned memory and events are used again


@dataclass(frozen=True)
class Wrap:
    """How a module is wrapped.

    Args:
        options: of the wrapper.
        face: whether it is the class that stands in for torch's.
        after: is given the wrapper, and returns what the program trains.
    """

    options: dict[str, Any]
    face: bool = False
    after: Callable[[Any], Any] = lambda model: model

    def __call__(self, module: nn.Module, **more: Any) -> Any:
        device = next(module.parameters()).device
        if self.face:
            named = {"device_ids": [device.index]} if device.type == "cuda" else {}
            return self.after(dpfuse.DistributedDataParallel(module, **named, **self.options, **more))
        return self.after(dpfuse.DataParallel(module, **self.options, **more))


@dataclass(frozen=True)
class Way:
    """One way of use.

    Args:
        wrap: makes the wrapper.
        network: makes the module.
        captured: whether a step may be captured in a CUDA graph.
        make: makes the optimizer; None makes the one of `run`.
        step: does one step; None does a plain one.
        dtype: of the inputs.
    """

    wrap: Wrap
    network: Callable[[], nn.Module] = field(default_factory=lambda: chain)
    captured: bool = False
    make: Callable[[Any], Any] | None = None
    step: Callable[[Any, Any, Tensor], None] | None = None
    dtype: torch.dtype = torch.float32

    def run(self, *, capturable: bool = False, module: nn.Module | None = None) -> Callable[[], nn.Module]:
        """Return a function that does one step, and returns the module inside the wrapper: `module`, or a new one."""
        torch.manual_seed(0)
        module = module or self.network().to("cuda", self.dtype)
        model = self.wrap(module)
        optimizer = self.optimizer(model, capturable=capturable)
        x, do = torch.ones(8, WIDTH, device="cuda", dtype=self.dtype), self.step or plain

        def step() -> nn.Module:
            do(model, optimizer, x)
            return module

        return step

    def optimizer(self, model: Any, *, capturable: bool = False) -> Any:
        """Return the optimizer of a wrapped model."""
        if self.make is not None:
            return self.make(model)
        return torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)


def chain(layers: int = 4) -> nn.Module:
    """Return linear layers, one after the other."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def wide() -> nn.Module:
    """Return four layers whose weights have 4 MB each."""
    return nn.Sequential(*[layer for _ in range(2) for layer in (nn.Linear(WIDTH, 16384), nn.Linear(16384, WIDTH))])


def plain(model: Any, optimizer: Any, x: Tensor) -> None:
    """Zero the gradients, and do one step."""
    optimizer.zero_grad()
    model(x).float().sum().backward()
    optimizer.step()


def zeroing(model: Any, optimizer: Any, x: Tensor) -> None:
    """As `plain`, but keep the memory of the gradients, as a captured step must."""
    optimizer.zero_grad(set_to_none=False)
    model(x).float().sum().backward()
    optimizer.step()


def clipping(model: Any, optimizer: Any, x: Tensor) -> None:
    """Clip by the norm of all gradients."""
    optimizer.zero_grad()
    model(x).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()


def accumulating(model: Any, optimizer: Any, x: Tensor) -> None:
    """Accumulate two backwards inside no_sync(), then average."""
    optimizer.zero_grad()
    with model.no_sync():
        model(x).sum().backward()
        model(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()


def weighing(model: Any, optimizer: Any, x: Tensor, weight: float | Tensor = 1.0) -> None:
    """Give the gradients of this rank a weight: a number, or a tensor on the device."""
    optimizer.zero_grad()
    model.set_gradient_weight(weight)
    model(x).mean().backward()
    optimizer.step()


def scaling(model: Any, optimizer: Any, x: Tensor) -> None:
    """Scale the loss with torch's scaler, which the model keeps."""
    if not hasattr(model, "scaler"):
        model.scaler = torch.amp.GradScaler(x.device.type)
    optimizer.zero_grad()
    model.scaler.scale(model(x).sum()).backward()
    model.scaler.step(optimizer)
    model.scaler.update()


def in_micro_batches(model: Any, optimizer: Any, x: Tensor) -> None:
    """Run the micro-batches of a step, whose number is fixed."""
    optimizer.zero_grad()
    for _ in model.micro_batches():
        model(x).float().sum().backward()
    optimizer.step()


class Unused(nn.Module):
    """A module of which one layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


class Streams(nn.Module):
    """A module of which one layer runs on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        if not x.is_cuda:
            return self.first(x) + self.second(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            second = self.second(x)
        torch.cuda.current_stream().wait_stream(stream)
        return self.first(x) + second


class Checkpointed(nn.Module):
    """A module whose layers run once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)


class BatchNorm(nn.Module):
    """A module with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Elementwise(torch.optim.AdamW):
    """AdamW that says what it needs: a trial would read values, and kernels make none here."""

    needs_whole_tensors = False


def wrapped(**options: Any) -> Wrap:
    """Return what wraps with these options."""
    return Wrap(options)


def face(**options: Any) -> Wrap:
    """Return what wraps with the class that stands in for torch's."""
    return Wrap(options, face=True)


def hooked(model: Any) -> Any:
    """Register torch's communication hook for bfloat16."""
    model.register_comm_hook(model.process_group, default_hooks.bf16_compress_hook)
    return model


def timed(model: Any) -> Any:
    """Time the communication of a model as long as it lives."""
    model.times = dpfuse.time_communication(model)
    model.times.__enter__()
    return model


def sharded(**options: Any) -> Callable[[Any], Any]:
    """Return a function that makes a sharded AdamW."""
    return lambda model: dpfuse.ShardedOptimizer(model, Elementwise, lr=1e-3, **options)


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def compiled(model: Any) -> Any:
    """Compile the wrapper."""
    return torch.compile(model, backend="aot_eager")


# Each option of the wrapper, for the test of pairs.
OPTIONS: dict[str, dict[str, Any]] = {
    "private": {"gradient_as_bucket_view": False},
    "bfloat16 wire": {"wire_dtype": torch.bfloat16},
    "float8 wire": {"wire_dtype": torch.float8_e4m3fn},
    "deterministic": {"deterministic": True},
    "check_finite": {"check_finite": "warn"},
    "accumulate in buckets": {"accumulate_in_buckets": True},
    "unused parameters": {"find_unused_parameters": True},
    "metrics": {"metrics": 1},
    "factor": {"gradient_scale": 2.0},
}


def _ways() -> Iterator[tuple[str, Way]]:
    yield "views", Way(wrapped(), captured=True)
    for name, options in OPTIONS.items():
        yield name, Way(wrapped(**options), captured=name not in ("metrics", "unused parameters"))
    yield "face", Way(face(), captured=True)
    yield "private, large gradients", Way(wrapped(gradient_as_bucket_view=False, plan="greedy"), wide, captured=True)
    yield "face, static graph", Way(face(static_graph=True))
    yield "bfloat16 wire, float32 sum", Way(wrapped(wire_dtype=(torch.bfloat16, torch.float32)), captured=True)
    yield "error feedback", Way(wrapped(wire_dtype=torch.bfloat16, error_feedback=True), captured=True)
    yield "error feedback, float8", Way(wrapped(wire_dtype=torch.float8_e5m2, error_feedback=True), captured=True)
    yield "bfloat16 model", Way(wrapped(), captured=True, dtype=torch.bfloat16)
    yield "float64 model", Way(wrapped(), dtype=torch.float64)
    yield "check_finite raises", Way(wrapped(check_finite="raise"))
    yield "clip", Way(wrapped(), make=_sgd, step=clipping)  # AdamW would make more of the last bit of a norm
    yield "no_sync", Way(wrapped(), step=accumulating)
    yield "no_sync, in buckets", Way(wrapped(accumulate_in_buckets=True), step=accumulating)
    fixed = {"fixed_micro_batches": 3}
    yield "fixed micro-batches", Way(wrapped(**fixed), step=in_micro_batches)
    yield "fixed micro-batches, bfloat16", Way(wrapped(**fixed), step=in_micro_batches, dtype=torch.bfloat16)
    yield "sharded, fixed micro-batches", Way(wrapped(**fixed), make=sharded(), step=in_micro_batches)
    yield "weight", Way(wrapped(), step=weighing)
    yield "unused layer", Way(wrapped(find_unused_parameters=True), Unused)
    yield "two streams", Way(wrapped(), Streams)
    yield "two streams, private", Way(wrapped(gradient_as_bucket_view=False), Streams)
    yield "checkpointed", Way(wrapped(), Checkpointed)
    yield "buffers", Way(wrapped(broadcast_buffers=True), BatchNorm, captured=True)
    yield "comm hook", Way(Wrap({}, face=True, after=hooked))
    # Those who time the buckets look at works of several stages, whose end others use.
    staged = {"deterministic": {"deterministic": True}, "float8 wire": {"wire_dtype": torch.float8_e4m3fn}}
    for name, options in staged.items():
        yield f"{name}, metrics", Way(wrapped(**options, metrics=1))
        yield f"{name}, metrics, private", Way(wrapped(**options, metrics=1, gradient_as_bucket_view=False))
    yield "comm hook, metrics", Way(Wrap({"metrics": 1}, face=True, after=hooked))
    yield "sharded, deterministic, timed", Way(Wrap({"deterministic": True}, after=timed), make=sharded())
    yield "fixed micro-batches, timed", Way(Wrap({"fixed_micro_batches": 3}, after=timed), step=in_micro_batches)
    yield "compiled", Way(Wrap({}, after=compiled))
    yield "torch's scaler", Way(wrapped(), step=scaling)
    for name, options in {
        "sharded": {},
        "sharded, stepped in backward": {"step_in_backward": True},
    }.items():
        yield name, Way(wrapped(), make=sharded(**options))
    masters = {"master_dtype": torch.float32}
    yield "sharded, masters", Way(wrapped(), make=sharded(**masters), dtype=torch.bfloat16)


WAYS: dict[str, Way] = dict(_ways())
