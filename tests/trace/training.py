"""A small training, and the differences that can be planted into it, each with the step and cause to be found."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from dpfuse.trace.process_trace import start_tracer, stop_tracer
from tests.torch_ddp import torch_ddp

STEPS, MICRO = 5, 2


class Changed(torch.autograd.Function):
    """Adds to the gradient what is not in the forward: a kernel that computes something else."""

    @staticmethod
    def forward(context: Any, values: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return values.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * context.factor, None


class Net(nn.Module):
    """Has batch normalization, dropout, a layer that is used last, and switches for kernels that differ."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.dropout = nn.Dropout(0.2)
        self.other_forward = self.other_backward = self.infinite_backward = self.other_statistics = False

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.first(inputs)
        if self.other_backward or self.infinite_backward:
            x = Changed.apply(x, math.inf if self.infinite_backward else 1 + 1e-4)
        x = self.dropout(torch.relu(self.norm(x)))
        if self.other_statistics:
            self.norm.running_mean = self.norm.running_mean * 1.5
        outputs: Tensor = self.last(x)
        return outputs + 1e-6 if self.other_forward else outputs


def train(
    folder: Path,
    wrap: str,
    plant: Plant | None = None,
    *,
    sketch: bool = False,
    deep: int | None = None,
    buffers: bool = False,
    **options: Any,
) -> Any:
    """Train `STEPS` steps of `MICRO` batches, and let a plant change what it likes at the points that are named."""
    rank = dist.get_rank()
    run = SimpleNamespace(
        rank=rank, step=-1, micro=MICRO, width=16, seed=1, options={}, hook=None, context=nullcontext(), index=0
    )

    def at(point: str, value: Any = None) -> Any:
        return value if plant is None else plant(point, run, value)

    tracer = start_tracer(folder, deep, sketch=sketch, buffers=buffers)
    try:
        at("seed")
        torch.manual_seed(run.seed)
        random.seed(run.seed)
        np.random.seed(run.seed)
        run.net = Net(run.width)
        at("weights")
        torch.manual_seed(run.seed + 10 + rank)
        make = dpfuse.DistributedDataParallel if wrap == "dpfuse" else torch_ddp
        wrapped = make(run.net, **options)
        tracer.add(wrapped)
        at("wrapped", wrapped)
        run.optimizer = torch.optim.AdamW(run.net.parameters(), lr=0.01, weight_decay=0.01)
        data = torch.Generator().manual_seed(100 + rank)
        for run.step in range(STEPS):
            at("step begins")
            for micro in range(run.micro):
                run.index = micro
                inputs = at("inputs", torch.randn(4, 6, generator=data) + random.random() + np.random.rand())
                targets = at("targets", torch.randint(3, (4,), generator=data))
                with nullcontext() if micro == run.micro - 1 else wrapped.no_sync(), run.context:
                    loss = nn.functional.cross_entropy(wrapped(inputs), targets) / MICRO
                    at("loss", loss).backward()
            at("averaged")
            norm = nn.utils.clip_grad_norm_(run.net.parameters(), at("clip", 0.5))
            at("before step")
            if norm.isfinite():
                run.optimizer.step()
            run.optimizer.zero_grad()
            at("after step")
    finally:
        stop_tracer()
    return run.net


Plant = Callable[[str, Any, Any], Any]
PLANTS: dict[str, tuple[str, int, int, Plant]] = {}  # cause, step, rank, what is done
# Of some of them: which of the micro-batches differs first; None where it is no batch that differs.
BATCHES: dict[str, int | None] = {
    "numpy_is_seeded_on_rank_1": 0,
    "one_number_of_a_batch": 0,
    "one_number_of_the_second_batch": 1,
    "another_backward": 0,
    "a_hook_on_rank_1": 0,
    "a_hook_behind_accumulation_on_rank_1": 0,
    "wrong_once": 1,  # the first one is not averaged
    "weights_written_between_batches": 1,
    "weights_written_before_the_step": None,
    "another_clip": None,
    "another_seed": None,
}


def plants(cause: str, step: int, rank: int = 0) -> Callable[[Plant], Plant]:
    """Register a plant with what must be found: the cause, and the first step and rank. -1: before the first step."""

    def register(plant: Plant) -> Plant:
        PLANTS[plant.__name__] = (cause, step, rank, plant)
        return plant

    return register


@plants("random state", -1)
def another_seed(point, run, value):
    if point == "seed":
        run.seed = 2
    return value


@plants("random state", 2)
def one_more_draw(point, run, value):
    if point == "step begins" and run.step == 2:
        torch.rand(1)
    return value


@plants("random state", 3, rank=1)
def one_more_draw_on_rank_1(point, run, value):
    if point == "step begins" and run.step == 3 and run.rank == 1:
        torch.rand(1)
    return value


@plants("random state", 1)
def one_more_draw_of_python(point, run, value):
    if point == "step begins" and run.step == 1:
        random.random()
    return value


@plants("random state", 4, rank=1)
def numpy_is_seeded_on_rank_1(point, run, value):
    if point == "step begins" and run.step == 4 and run.rank == 1:
        np.random.seed(7)
    return value


@plants("data", -1)
def loaded_weights(point, run, value):
    if point == "weights":
        with torch.no_grad():
            run.net.last.bias.add_(1)
    return value


@plants("data", 0)
def weights_loaded_after_wrapping(point, run, value):
    if point == "wrapped":
        with torch.no_grad():
            run.net.first.weight.mul_(2)
    return value


@plants("data", 3, rank=1)
def one_number_of_a_batch(point, run, value):
    if point == "inputs" and run.step == 3 and run.rank == 1:
        value[2, 3] += 1e-6
    return value


@plants("data", 1)
def one_number_of_the_second_batch(point, run, value):
    if point == "inputs" and run.step == 1 and run.index == 1:
        value[0, 1] += 1e-6
    return value


@plants("data", 2)
def order_in_a_batch(point, run, value):
    return value.flip(0) if point == "inputs" and run.step == 2 else value


@plants("data", 1)
def one_sample_less(point, run, value):
    return value[:3] if point in ("inputs", "targets") and run.step == 1 else value


@plants("data", 0)
def inputs_of_another_dtype(point, run, value):
    return value.bfloat16().float() if point == "inputs" else value


@plants("data", 2, rank=1)
def one_label(point, run, value):
    return (value + 1) % 3 if point == "targets" and run.step == 2 and run.rank == 1 else value


@plants("data", 4)
def all_labels(point, run, value):
    return torch.zeros_like(value) if point == "targets" and run.step == 4 else value


@plants("data", 0)
def all_labels_from_the_start(point, run, value):
    return torch.zeros_like(value) if point == "targets" else value


def _switched(switch: str, at_step: int, ranks: tuple[int, ...]) -> Plant:
    def plant(point, run, value):
        if point == "step begins":
            setattr(run.net, switch, run.step == at_step and run.rank in ranks)
        return value

    return plant


for name, switch, step, ranks in (
    ("another_forward_on_rank_1", "other_forward", 1, (1,)),
    ("another_forward", "other_forward", 3, (0, 1)),
    ("another_backward", "other_backward", 2, (0, 1)),
    ("another_backward_on_rank_1", "other_backward", 4, (1,)),
    ("a_step_left_out_after_an_infinite_gradient_on_rank_1", "infinite_backward", 2, (1,)),
    ("other_statistics", "other_statistics", 1, (0, 1)),
):
    PLANTS[name] = ("kernel", step, ranks[0], _switched(switch, step, ranks))


def _hooked(change: Callable[[int, Any, Any], Tensor]) -> Plant:
    def plant(point, run, value):
        if point == "wrapped":

            def hook(state, bucket):
                flat = change(run.step, bucket, bucket.buffer() / dist.get_world_size())
                return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])

            value.register_comm_hook(None, hook)
        return value

    return plant


def _plain(step: int, bucket: Any, flat: Tensor) -> Tensor:
    return flat


def _narrow(step: int, bucket: Any, flat: Tensor) -> Tensor:
    return flat.bfloat16().float()


def _wrong_once(step: int, bucket: Any, flat: Tensor) -> Tensor:
    return flat * 2 if step == 2 else flat


def _one_number(step: int, bucket: Any, flat: Tensor) -> Tensor:
    if step == 3 and dist.get_rank() == 1:
        flat[5] += 1e-3
    return flat


def _not_sent(step: int, bucket: Any, flat: Tensor) -> Tensor:
    return flat * 0 if step == 1 and dist.get_rank() == 1 else flat


# These are compared with the same hook, which changes nothing.
for name, step, change in (
    ("narrow_wire", 0, _narrow),
    ("wrong_once", 2, _wrong_once),
    ("one_number_of_a_sum", 3, _one_number),
    ("a_rank_that_sends_zeros", 1, _not_sent),
):
    PLANTS[name] = ("communication", step, 0, _hooked(change))
PLAIN_HOOK = _hooked(_plain)


def _hook_of_rank_1(at_step: int, change: Callable[[Tensor], Any], put: str = "register_hook", when: str = "wrapped"):
    """A hook on one parameter, which acts in one step; it is put behind wrapping, or before ("weights")."""

    def plant(point, run, value):
        if point == when and run.rank == 1:
            getattr(run.net.last.weight, put)(lambda given: change(given) if run.step == at_step else None)
        return value

    return "program", at_step, 1, plant


def _double(grad: Tensor) -> None:
    grad.mul_(2)


def _halve_accumulated(param: Tensor) -> None:
    param.grad.mul_(0.5)


PLANTS["a_hook_on_rank_1"] = _hook_of_rank_1(3, lambda grad: grad.clamp(-1e-3, 1e-3))
PLANTS["an_earlier_hook_on_rank_1"] = _hook_of_rank_1(2, lambda grad: grad * 2, when="weights")
PLANTS["a_hook_that_writes_on_rank_1"] = _hook_of_rank_1(4, _double)
PLANTS["a_hook_behind_accumulation_on_rank_1"] = _hook_of_rank_1(
    1, _halve_accumulated, "register_post_accumulate_grad_hook"
)


@plants("optimizer", 2)
def another_clip(point, run, value):
    return 0.05 if point == "clip" and run.step == 2 else value


@plants("optimizer", 0)
def no_clip(point, run, value):
    return 1e9 if point == "clip" else value


@plants("optimizer", 3)
def a_gradient_changed_after_the_average(point, run, value):
    if point == "averaged" and run.step == 3:
        run.net.last.weight.grad.add_(1e-3)
    return value


@plants("optimizer", 4, rank=1)
def a_state_of_the_optimizer_on_rank_1(point, run, value):
    if point == "before step" and run.step == 4 and run.rank == 1:
        run.optimizer.state[run.net.first.weight]["exp_avg"].zero_()
    return value


@plants("written", 3)
def weights_changed_between_steps(point, run, value):
    if point == "after step" and run.step == 2:
        with torch.no_grad():
            run.net.last.weight.mul_(0.999)
    return value


@plants("written", 4, rank=1)
def weights_written_through_data_on_rank_1(point, run, value):
    if point == "step begins" and run.step == 4 and run.rank == 1:
        run.net.first.weight.data.view(-1)[3] += 1
    return value


@plants("written", 1)
def weights_written_between_batches(point, run, value):
    if point == "inputs" and run.step == 1 and run.index == 1:
        with torch.no_grad():
            run.net.first.bias.add_(1e-3)
    return value


@plants("written", 3)
def weights_written_before_the_step(point, run, value):
    if point == "before step" and run.step == 3:
        run.net.last.bias.data.zero_()
    return value


def _setting(name: str, found: Any, at_step: int) -> Plant:
    def plant(point, run, value):
        if point == "step begins" and run.step == at_step:
            run.optimizer.param_groups[0][name] = found
        return value

    return plant


PLANTS["another_lr"] = ("settings", 3, 0, _setting("lr", 0.02, 3))
PLANTS["another_weight_decay"] = ("settings", 0, 0, _setting("weight_decay", 0.0, 0))
PLANTS["another_beta"] = ("settings", 1, 0, _setting("betas", (0.8, 0.999), 1))


@plants("settings", 2)
def evaluation_mode(point, run, value):
    if point == "step begins":
        run.net.train(run.step != 2)
    return value


@plants("settings", -1)
def another_width(point, run, value):
    run.width = 24
    return value


@plants("settings", 3)
def one_more_batch_per_step(point, run, value):
    if point == "step begins":
        run.micro = MICRO + (run.step == 3)
    return value


@plants("settings", 1)
def autocast(point, run, value):
    if point == "step begins":
        run.context = torch.autocast("cpu", torch.bfloat16) if run.step == 1 else nullcontext()
    return value


@plants("settings", 0)
def less_precise_products(point, run, value):
    """The setting is there from the start, and the products differ."""
    if point == "wrapped":
        run.net.other_forward = True
    return value


@contextmanager
def settings_of(name: str) -> Iterator[None]:
    """Set what the process must have set for a plant."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if name == "less_precise_products" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
