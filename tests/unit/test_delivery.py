"""How gradients leave a buffer: as views, copied, or copied while backward runs, with streams that pretend."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from dpfuse.comm.abilities import Abilities
from dpfuse.engine.averaging import Averaging
from dpfuse.engine.comm_buffer import CommBuffer, zeros_on
from dpfuse.engine.delivery import EarlyPrivate, Private, RenewedViews, Views
from dpfuse.engine.param_spec import ParamSpec
from dpfuse.engine.plan import plan_buckets
from dpfuse.engine.streams import SideStream
from dpfuse.engine.torch_private import Hooks
from tests.streams import PretendedWork

CUDA = torch.device("cuda", 0)


def make_params(*shapes, dtype=torch.float32):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.full_like(param, 9.0)
    return params


def buffer_of(params, wire=None, room=0):
    """A buffer in which the gradient of parameter i is full of i + 1; what is not a gradient's is 5."""
    specs = [
        ParamSpec(f"p{i}", tuple(param.shape), str(param.dtype).removeprefix("torch."))
        for i, param in enumerate(params)
    ]
    (bucket,) = plan_buckets(specs).buckets
    real = str(params[0].dtype.to_real()).removeprefix("torch.")
    params = [params[index] for index in bucket.params]
    names = [specs[index].name for index in bucket.params]
    buffer = CommBuffer(bucket, params, names, Averaging(wire or real, 1.0), zeros=zeros_on("cpu"), room=room)
    for index, view in zip(bucket.params, buffer.views, strict=True):
        view.fill_(index + 1)
    if room:
        buffer.report.fill_(5)
    return buffer


def values(params):
    """The number of which each gradient is full; None where there is no gradient."""
    assert all(param.grad is None or (param.grad == param.grad.flatten()[0]).all() for param in params)
    return [None if param.grad is None else param.grad.flatten()[0].item() for param in params]


def is_view(param, buffer):
    low, high = buffer.table.storage_range
    return param.grad is not None and low <= param.grad.data_ptr() < high


# --- Views ---


def views_of(params, **how):
    buffer = buffer_of(params, **how)
    return buffer, Views(buffer, Hooks(buffer.params))


def test_views_are_handed_out_when_the_bucket_is_sent_and_the_missing_ones_at_the_end():
    params = make_params(3, 5, 7)
    params[1].grad = None
    buffer, delivery = views_of(params)
    delivery.hand_out_early({1})
    assert delivery.handed_out
    assert [is_view(param, buffer) for param in params] == [True, False, True]
    assert delivery.deliver({1}, set())
    assert values(params) == [1, 2, 3]
    assert all(is_view(param, buffer) for param in params)


def test_views_are_handed_out_at_the_end_where_another_hook_still_reads_the_gradients():
    params = make_params(3, 5)
    handles = [params[0].register_post_accumulate_grad_hook(lambda param: None) for _ in range(3)]
    buffer, delivery = views_of(params)
    delivery.hand_out_early(set())
    assert not delivery.handed_out
    assert values(params) == [9, 9]
    assert delivery.deliver(set(), set())
    assert all(is_view(param, buffer) for param in params)
    for handle in handles:
        handle.remove()
    delivery.hand_out_early(set())
    assert delivery.handed_out, "hooks come and go"


# --- Private gradients ---


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_private_gradients_are_copied_to_where_they_are(wire):
    params = make_params(3, (2, 4))
    kept = [param.grad for param in params]
    delivery = Private(buffer_of(params, wire), 0.5)
    assert delivery.deliver(set(), set())
    assert values(params) == [0.5, 1.0]
    assert all(param.grad is grad for param, grad in zip(params, kept, strict=True))


# --- Private gradients that are copied early ---


class NotedPrivate(Private):
    """Notes on which stream it copies."""

    def __init__(self, streams, buffer, error=None):
        super().__init__(buffer, 1.0)
        self.streams, self.error = streams, error

    def copy_now(self, targets, *, matched=True):
        self.streams.log.append(f"copies on {self.streams.current.name}")
        if self.error is not None and self.streams.current.name == "side":
            raise self.error
        super().copy_now(targets, matched=matched)


def early_of(streams, params, error=None):
    buffer = buffer_of(params)
    return EarlyPrivate(NotedPrivate(streams, buffer, error), buffer, SideStream(CUDA))


def test_a_copy_runs_behind_the_collective_on_the_side_and_nothing_is_left_to_deliver(streams):
    params = make_params(3, 5)
    early = early_of(streams, params)
    early.hand_out_early(set())
    early.sent(PretendedWork(streams), clean=True)
    assert streams.log == ["side waits for the work", "copies on side"]
    early.landed()
    assert early.deliver(set(), set())
    assert streams.log[2:] == ["main waits for side"]
    assert values(params) == [1, 2]


@pytest.mark.parametrize("fails", ["the work", "the copy"])
def test_what_cannot_be_queued_is_copied_at_the_end(streams, fails):
    params = make_params(3)
    early = early_of(streams, params, ValueError("planted") if fails == "the copy" else None)
    early.sent(PretendedWork(streams, RuntimeError("planted") if fails == "the work" else None), clean=True)
    early.landed()
    assert streams.log[-1] == "main waits for side", "some of it may have been queued"
    assert early.deliver(set(), set())
    assert streams.log[-1] == "copies on main"
    assert values(params) == [1]


def test_a_bucket_that_is_not_clean_is_copied_at_the_end(streams):
    params = make_params(3)
    early = early_of(streams, params)
    early.sent(PretendedWork(streams), clean=False)
    early.landed()
    assert streams.log == []
    early.deliver(set(), set())
    assert streams.log == ["copies on main"]


def test_gradients_that_a_feed_holds_are_made_at_the_end(streams):
    """The feed that accumulates leaves no gradient, and yet none is missing."""
    params = make_params(3, 5)
    params[0].grad = None
    early = early_of(streams, params)
    early.sent(PretendedWork(streams), clean=True)
    early.landed()
    assert early.deliver(set(), set())
    assert values(params) == [1, 2]
    assert streams.log[-1] == "copies on main"


def test_only_gradients_that_no_other_code_has_or_awaits_are_written(streams):
    def written(param):
        streams.log.clear()
        early = early_of(streams, [param])
        early.sent(PretendedWork(streams), clean=True)
        return "copies on side" in streams.log and early.delivered() == {0}

    def param():
        return make_params(3)[0]

    assert written(param())
    viewed = param()
    view = viewed.grad.view(3)
    assert not written(viewed)
    del view
    assert written(viewed)
    graphed = param()
    graphed.grad = torch.zeros(3, requires_grad=True)
    assert not written(graphed)
    heard = param()
    for _ in range(2):
        heard.register_post_accumulate_grad_hook(lambda param: None)
    assert not written(heard)
    streams.current = streams.new("capture", captured=True)
    assert not written(param())


def test_a_gradient_that_was_replaced_or_moved_is_copied_again(streams):
    params = make_params(3, 3, 3, 3)
    early = early_of(streams, params)
    early.sent(PretendedWork(streams), clean=True)
    params[1].grad = torch.full((3,), 9.0)
    params[2].grad.data = torch.full((3,), 9.0)
    params[3].grad = None
    params[0].grad.fill_(7)  # is its own, and needs no copy
    early.landed()
    assert early.deliver(set(), set()) is False, "one was delivered before"
    assert values(params) == [7, 2, 3, 4]
    assert early.delivered() == set()


def test_discarded_gradients_that_were_written_become_zeros_and_no_others(streams):
    params = make_params(3, 3)
    early = early_of(streams, params)
    early.sent(PretendedWork(streams), clean=True)
    params[1].grad = torch.full((3,), 9.0)
    early.landed()
    early.discard()
    assert values(params) == [0, 9]
    assert early.delivered() == set()


# --- Which delivery a wrapper gets ---


def deliveries(model):
    return {type(bucket.parts.delivery) for bucket in model.reducer.buckets if bucket.params}


def net():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def pretend(monkeypatch, streams):
    monkeypatch.setattr("dpfuse.engine.assembly.abilities_of", lambda group, device: Abilities(on_streams=True))
    monkeypatch.setattr("dpfuse.engine.assembly.LEAST", 0)
    streams.initialized = False  # of graphs there is nothing here
    copy_now = Private.copy_now

    def noted(private, targets, *, matched=True):
        streams.log.append(f"copies {private._label.split()[1]} on {streams.current.name}")
        copy_now(private, targets, matched=matched)

    monkeypatch.setattr(Private, "copy_now", noted)


def test_on_a_cpu_nothing_is_copied_early(group, monkeypatch):
    monkeypatch.setattr("dpfuse.engine.assembly.LEAST", 0)
    assert deliveries(dpfuse.DistributedDataParallel(net())) == {RenewedViews}
    assert deliveries(dpfuse.DistributedDataParallel(net(), wire_dtype=torch.bfloat16)) == {Private}
    monkeypatch.setattr("dpfuse.engine.assembly.COUNTS_REFERENCES", False)
    assert deliveries(dpfuse.DistributedDataParallel(net())) == {Private}


def test_a_backward_copies_all_but_the_last_bucket_on_the_side_and_joins_before_it_ends(streams, group, monkeypatch):
    pretend(monkeypatch, streams)
    model = dpfuse.DistributedDataParallel(net(), bucket_cap_mb=5e-5)
    x = torch.ones(2, 4)
    for set_to_none in (True, True, False):
        model.zero_grad(set_to_none=set_to_none)
        streams.log.clear()
        count = len(model.bucket_plan.buckets)
        assert count > 2
        model(x).sum().backward()
        on_side = [f"copies {order} on side" for order in range(count - 1)]
        assert streams.log == [*on_side, "main waits for side", f"copies {count - 1} on main"]


def test_views_and_small_gradients_are_not_copied_early(streams, group, monkeypatch):
    pretend(monkeypatch, streams)
    model = dpfuse.DistributedDataParallel(net(), bucket_cap_mb=1e-4)
    assert deliveries(model) == {EarlyPrivate, Private}
    model.register_comm_hook(None, lambda state, bucket: None)
    assert deliveries(model) >= {Private}
    assert EarlyPrivate not in deliveries(model), "a hook's future tells nothing to a stream"
    assert deliveries(dpfuse.DistributedDataParallel(net(), gradient_as_bucket_view=True)) == {Views}
    monkeypatch.setattr("dpfuse.engine.assembly.LEAST", 1000)
    assert deliveries(dpfuse.DistributedDataParallel(net(), bucket_cap_mb=1e-4)) == {Private}
