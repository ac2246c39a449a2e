"""Records of real backwards, on the CPU: the times are those of a clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

import dpfuse
from dpfuse.engine.autograd import BackwardWatch, ReadyHooks
from dpfuse.engine.averaging import Wire
from dpfuse.errors import DPFuseError
from dpfuse.tune.recorder import BackwardRecorder, timeline_of

PAUSE = 0.02  # seconds


class Pause(torch.autograd.Function):
    """Backward takes a while."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(PAUSE)
        return grad


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (torch.nn.Parameter(torch.ones(8)) for _ in range(3))

    def forward(self, value):
        return Pause.apply(Pause.apply(Pause.apply(value) * self.first) * self.second)


class Listener:
    """Tells the recorder of a backward, as a reducer would."""

    def __init__(self, synchronises=True):
        self.calls = []
        self.synchronises = synchronises
        self.recorder = None

    def open(self, *, announced):
        self.calls.append(("open", announced))
        self.recorder.backward_begins(sync=self.synchronises, announced=announced)

    def close(self, reached_leaves):
        self.calls.append(("close", reached_leaves()))
        self.recorder.backward_ended()
        if self.synchronises:
            self.recorder.delivered()
        else:
            self.recorder.local_backward_ended(added=True)

    def abandon(self, *, opened):
        self.calls.append("abandon")

    def raised(self, error, *, opened, reached):
        pass

    def mark(self, name):
        def mark_ready(param):
            self.calls.append(name)

        return mark_ready


def recorded(synchronises=True, **options):
    model, listener = Layers(), Listener(synchronises)
    hooks = ReadyHooks(alone=False)
    watch = BackwardWatch(listener, hooks=hooks)
    recorder = listener.recorder = BackwardRecorder(3, device=torch.device("cpu"), **options)
    recorder.join(SimpleNamespace(without_inputs=False))
    params = [model.first, model.second, model.unused]
    hooks.recorder = recorder
    hooks.put_on(params)
    hooks.install(dict(enumerate(listener.mark(name) for name in ("first", "second", "unused"))))
    return model, watch, listener, recorder


def step(model, watch):
    outputs = model(torch.ones(8, requires_grad=True))
    watch.watch(outputs)
    outputs.sum().backward()


def test_everything_is_timed(group):
    model, watch, listener, recorder = recorded()
    for _ in range(3):
        step(model, watch)
    assert listener.calls == 3 * [("open", True), "second", "first", ("close", True)]
    assert recorder.steps == 3
    plan = dpfuse.tune.plan_from_groups(dpfuse.plan_buckets(model).specs, [[1], [0, 2]])
    timeline = timeline_of(recorder.gather(group), plan, Wire("bfloat16"))
    first, second, unused = timeline.ready
    # Announced by the output's gradient; a pause, the second; a pause, the first; a pause before the end.
    assert PAUSE <= second <= first - PAUSE
    assert first + PAUSE <= unused == timeline.backward_end < 1
    assert timeline.wire_dtype == "bfloat16"


def test_a_backward_that_does_not_synchronise_is_no_record(group):
    model, watch, _, recorder = recorded(synchronises=False)
    step(model, watch)
    assert recorder.steps == 0
    with pytest.raises(DPFuseError, match=r"the ranks recorded \[0\] synchronised backwards"):
        recorder.gather(group)


def test_the_first_ones_can_be_left_out(group):
    seen = []
    model, watch, _, recorder = recorded(after=lambda: seen.append(recorder.steps))
    recorder.restart(3, skip=2)
    for _ in range(4):
        step(model, watch)
    assert (recorder.steps, seen) == (2, [1, 2])


def test_a_backward_that_died_is_no_record(group):
    model, watch, listener, recorder = recorded()
    step(model, watch)
    model.second.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, watch)
    assert listener.calls[-1] == "abandon"
    assert recorder.steps == 1


def test_an_unannounced_backward_is_opened_by_its_first_ready_mark(group):
    model, watch, _, recorder = recorded()
    marks = [lambda param: watch.begin() for _ in range(3)]
    for param in (model.first, model.second):
        param._post_accumulate_grad_hooks.clear()
    hooks = ReadyHooks(alone=False)
    hooks.recorder = recorder
    hooks.put_on([model.first, model.second, model.unused])
    hooks.install(dict(enumerate(marks)))
    model(torch.ones(8)).sum().backward()
    assert recorder.steps == 1
    timeline = timeline_of(recorder.gather(group), dpfuse.plan_buckets(model))
    assert timeline.ready[1] == 0.0
    assert timeline.ready[0] >= PAUSE
