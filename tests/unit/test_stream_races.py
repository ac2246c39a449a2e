"""The engine on several streams: in random schedules, no access to memory races with another one.

`tests/cuda_model.py` says what that proves. Every rule of the engine is broken once here, to show that the model sees
it.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import dpfuse
from dpfuse.comm.abilities import Abilities, answers_of
from dpfuse.comm.waiting import Board, put_board
from dpfuse.comm.work import StagedWork
from dpfuse.engine import assembly, report, sync
from dpfuse.engine.bucket import GradBucket
from dpfuse.engine.exchanges import in_place, ordered
from dpfuse.engine.feeds.eager import Eager
from dpfuse.engine.reducer import Reducer
from dpfuse.engine.spoiler import Spoiler
from dpfuse.engine.streams import SideStream, WritingStreams
from tests.cuda_model import Cuda, RaceError, StreamGroup

DEVICE = torch.device("cuda", 0)
LAYERS, NUMEL = 6, 64
SIZES = (0.0, 2 * NUMEL * 4 / 2**20, 25.0)  # MB of a bucket: one gradient, two, all


class _OnStream(torch.autograd.Function):
    """A vector times its weight, forward and backward on one stream, as autograd runs them on a GPU."""

    @staticmethod
    def forward(ctx, weight, x, cuda, stream):
        ctx.save_for_backward(x)
        ctx.on = cuda, stream
        stream.wait_stream(cuda.current)
        with cuda.stream(stream):
            y = weight * x
        cuda.current.wait_stream(stream)
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,), (cuda, stream) = ctx.saved_tensors, ctx.on
        # Autograd waits for the stream on which `grad` was made. The gradient of the weight is accumulated, and its
        # hooks run, on the stream of the forward.
        stream.wait_stream(cuda.main)
        cuda.record_stream(grad, stream)  # as autograd does
        cuda.current = stream
        return grad * x, None, None, None


class Loss(torch.autograd.Function):
    """The sum of a vector. Its backward begins on the main stream, which waits for all others when backward ends."""

    @staticmethod
    def forward(ctx, values, cuda, used):
        ctx.numel, ctx.cuda, ctx.used = values.numel(), cuda, used
        return values.sum()

    @staticmethod
    def backward(ctx, grad):
        cuda, used = ctx.cuda, ctx.used

        def end():
            cuda.current = cuda.main
            for stream in used:
                cuda.main.wait_stream(stream)

        torch.autograd.Variable._execution_engine.queue_callback(end)
        return grad.expand(ctx.numel).clone(), None, None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(NUMEL)) for _ in range(LAYERS))

    def forward(self, inputs, cuda, used) -> Tensor:
        total = torch.zeros(NUMEL)
        for weight, x, stream in zip(self.weights, inputs, used, strict=True):
            if stream is not None:
                total = total + _OnStream.apply(weight, x, cuda, stream)
        return total


@pytest.fixture
def cuda(monkeypatch):
    device = Cuda()
    device.install(monkeypatch)
    monkeypatch.setattr(assembly, "writers_on", lambda _: WritingStreams(DEVICE))
    monkeypatch.setattr(assembly, "LEAST", 0)
    monkeypatch.setattr(ordered, "new_stream", device.Stream)
    monkeypatch.setattr(Eager, "suits", staticmethod(lambda *_: False))
    monkeypatch.setattr(sync, "spoiler_of", lambda params, size: Spoiler(params))
    monkeypatch.setattr(report.Report, "is_on_cpu", property(lambda _: False, lambda _, value: None), raising=False)
    return device


def wrapped(cuda, kind, size, monkeypatch):
    if kind == "in place":
        monkeypatch.setattr(in_place, "LARGE", NUMEL)
    group = StreamGroup(cuda)
    answers_of(group)["cpu"] = Abilities(on_streams=True)
    put_board(group, Board(0, frozenset(), float("inf")))  # no heartbeat: the other rank has no process
    with cuda:
        return dpfuse.DataParallel(Layers(), None, size, size, group=group, **OPTIONS[kind])


def train(cuda, model, seed, steps=4, *, skips=False):
    """Train on streams drawn by chance; every gradient must be that of one rank, because both have the same."""
    draw = random.Random(seed)
    sides = [cuda.main, *(cuda.Stream(f"side {number}") for number in range(3))]
    weights = list(model.module.weights)
    with cuda:
        for step in range(steps):
            expected = [torch.zeros(NUMEL) for _ in weights]
            for last in (False, True) if draw.random() < 0.4 else (True,):
                used = [draw.choice(sides) for _ in weights]
                if skips:
                    used[draw.randrange(LAYERS)] = None
                inputs = [torch.full((NUMEL,), float(draw.randrange(1, 9))) for _ in weights]
                with nullcontext() if last else model.no_sync():
                    total = model(inputs, cuda, used)
                    Loss.apply(total, cuda, [stream for stream in used if stream is not None]).backward()
                for total_so_far, x, stream in zip(expected, inputs, used, strict=True):
                    total_so_far += x if stream is not None else 0
            norm = torch.stack(expected).square().sum().sqrt()
            if draw.random() < 0.5:
                assert torch.allclose(model.grad_norm(), norm, rtol=1e-5)
            for weight, value in zip(weights, expected, strict=True):
                if weight.grad is not None:
                    assert torch.equal(weight.grad, value), f"step {step}"
                    weight.data.add_(weight.grad, alpha=-0.01)
            model.zero_grad(set_to_none=draw.random() < 0.7)


OPTIONS = {
    "views": {},
    "private": {"gradient_as_bucket_view": False},
    "in place": {"gradient_as_bucket_view": False},
    "in the order of ranks": {"deterministic": True},
    "accumulated": {"accumulate_in_buckets": True},
    "bfloat16": {"wire_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 50), marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize(
    "size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.slow), pytest.param(SIZES[2], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", OPTIONS)
def test_no_schedule_races(kind, size, seeds, cuda, monkeypatch):
    for seed in seeds:
        train(cuda, wrapped(cuda, kind, size, monkeypatch), seed)
    assert cuda.compared > 1000


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.filterwarnings("ignore:.*got no gradient in this backward:UserWarning")
def test_no_schedule_races_where_parameters_are_left_out(kind, cuda, monkeypatch):
    for seed in range(2):
        train(cuda, wrapped(cuda, kind, SIZES[1], monkeypatch), seed, skips=True)


# --- Broken rules: what the model would see ---


def without_waiting_for_writers(monkeypatch):
    monkeypatch.setattr(WritingStreams, "precede", lambda self: bool(self._streams))


def without_noting_the_bucket_before_the_last(monkeypatch):
    monkeypatch.setattr(Reducer, "_is_packed_early", lambda reducer, order: order < len(reducer.buckets) - 2)


def without_noting_what_is_accumulated(monkeypatch):
    monkeypatch.setattr(Reducer, "_is_packed_early", lambda reducer, order: False)


def without_keeping_sources(monkeypatch):
    send = GradBucket.send

    def forgetful(bucket, *arguments, **options):
        send(bucket, *arguments, **options)
        bucket._sources = []

    monkeypatch.setattr(GradBucket, "send", forgetful)


def without_joining_the_side_stream(monkeypatch):
    monkeypatch.setattr(SideStream, "join", lambda self: None)


def without_waiting_for_the_collective(monkeypatch):
    monkeypatch.setattr("tests.cuda_model._StreamWork.wait", lambda self, timeout: True)


def without_ordering_the_sum_of_parts(monkeypatch):
    monkeypatch.setattr(StagedWork, "go_on_on", go_on_without_waiting)


def go_on_without_waiting(work, stream):
    with torch.cuda.stream(stream):
        work._start_next()


BROKEN = [
    (without_waiting_for_writers, "views"),
    (without_waiting_for_writers, "private"),
    (without_waiting_for_writers, "in place"),
    (without_noting_the_bucket_before_the_last, "views"),
    (without_noting_what_is_accumulated, "accumulated"),
    (without_keeping_sources, "views"),
    (without_joining_the_side_stream, "private"),
    (without_waiting_for_the_collective, "views"),
    (without_waiting_for_the_collective, "private"),
    (without_waiting_for_the_collective, "in place"),
    (without_waiting_for_the_collective, "bfloat16"),
    (without_ordering_the_sum_of_parts, "in the order of ranks"),
]


@pytest.mark.parametrize(("broken", "kind"), BROKEN)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_broken_rule_is_seen(broken, kind, cuda, monkeypatch):
    broken(monkeypatch)
    with pytest.raises((RaceError, dpfuse.DPFuseError), match="does not wait for it"):
        for seed in range(8):
            train(cuda, wrapped(cuda, kind, SIZES[1], monkeypatch), seed)
