"""What a right program calls after a backward that has failed, and before its next forward, says nothing false.

The program has caught its exception, and goes on with the next batch. A thread of the engine may still hold the
backward: a GPU has such a thread, and here a thread of the test does it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dpfuse
from dpfuse import DPFuseError
from dpfuse.engine import autograd

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
SMALL = {
    "dp": {"comm_buffer_size": 0, "last_comm_buffer_size": 0},  # a bucket for each parameter
    "ddp": {"bucket_cap_mb": 1e-5},
}


def wrapped(face="dp", group=None, **options):
    torch.manual_seed(0)
    own = {"group" if face == "dp" else "process_group": group or dist.new_group()}
    return FACES[face](nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), **own, **SMALL[face], **options)


def batch(rank, number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(model, rank, number):
    return model(batch(rank, number)).square().mean()


def assert_mean(model, rank, number, weight=1.0):
    """Assert that the gradients are the weighted mean over this batch of all ranks, at the weights of each."""
    bare = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    bare.load_state_dict(model.module.state_dict())
    loss_of(bare, rank, number).backward()
    total = torch.tensor(float(weight))
    dist.all_reduce(total)
    for got, local in zip(model.module.parameters(), bare.parameters(), strict=True):
        mean = local.grad * weight
        dist.all_reduce(mean)
        torch.testing.assert_close(got.grad, mean / total)


def right_steps(model, rank, size, numbers=(20, 21, 22)):
    for number in numbers:
        model.zero_grad()
        loss_of(model, rank, number).backward()
        assert_mean(model, rank, number)


def raising(*_):
    raise ValueError("planted")


PLACES = {
    "above the outputs": lambda model: model.register_forward_hook(lambda module, args, out: out * 1),
    "before the first bucket": lambda model: model.module[2].register_full_backward_hook(raising),
    "in the middle": lambda model: model.module[0].weight.register_hook(raising),
}


def fail(model, rank, number, place, failing):
    """Run a backward that fails on these ranks, and catch what it raises."""
    handle = PLACES[place](model) if rank in failing else None
    outputs = model(batch(rank, number))
    if place == "above the outputs" and rank in failing:
        outputs.register_hook(raising)
    with pytest.raises(
        ValueError if rank in failing else DPFuseError, match="planted" if rank in failing else "failed"
    ):
        outputs.square().mean().backward()
    if handle is not None:
        handle.remove()


@contextmanager
def a_thread_that_holds_backwards(holds=0.05):
    """Have a thread free each backward that begins inside only once Python gives it the time, as one of the engine."""
    held, ended = [], threading.Event()
    queue = autograd._queue_callback

    def queue_and_hold(callback):
        held.append((time.monotonic(), callback))
        queue(callback)

    def free():
        while not ended.is_set():
            if held and time.monotonic() > held[0][0] + holds:
                held.pop(0)
            time.sleep(0.002)

    thread = threading.Thread(target=free)
    autograd._queue_callback = queue_and_hold
    thread.start()
    try:
        yield
    finally:
        autograd._queue_callback = queue
        ended.set()
        thread.join()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("face", FACES)
def test_a_weight_is_that_of_the_next_backward(rank, size, face, held):
    for place in PLACES:
        for failing in ({0, 1}, {0}, {1}):
            for before in (0, 2):
                model = wrapped(face)
                for number in range(before + 4):
                    model.zero_grad()
                    weight = 1.0 + rank + number
                    model.set_gradient_weight(weight)
                    if number != before:
                        loss_of(model, rank, number).backward()
                        assert_mean(model, rank, number, weight)
                        continue
                    with a_thread_that_holds_backwards() if held else nullcontext():
                        fail(model, rank, number, place, failing)
                        model.zero_grad()
                        model.set_gradient_weight(7.0)  # it is given again in the next turn of the loop


def test_a_first_weight_after_a_failure_counts_and_none_after_it_does_not(rank, size):
    for failing in ({0, 1}, {1}):
        model = wrapped()
        right_steps(model, rank, size)
        fail(model, rank, 5, "in the middle", failing)
        model.zero_grad()
        model.set_gradient_weight(3.0 - rank)
        loss_of(model, rank, 6).backward()
        assert_mean(model, rank, 6, 3.0 - rank)
        model.set_gradient_weight(5.0 + rank)
        fail(model, rank, 7, "in the middle", failing)
        model.set_gradient_weight(None)
        right_steps(model, rank, size)


def test_a_weight_inside_a_backward_is_refused(rank, size):
    model = wrapped()
    refused = []

    def weigh(grad):
        with pytest.raises(DPFuseError, match=r"set_gradient_weight\(\) was called while a backward is RE"):
            model.set_gradient_weight(2.0)
        refused.append(True)

    for number in range(3):
        handle = model.module[0].weight.register_hook(weigh)
        model.zero_grad()
        loss_of(model, rank, number).backward()
        handle.remove()
        assert_mean(model, rank, number)
    assert len(refused) == 3


# --- Other calls ---


def no_sync(model, rank):
    with model.no_sync():
        pass


def state_dicts(model, rank):
    model.load_state_dict(model.state_dict())


def checkpoints(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dpfuse.save_checkpoint(model.module.folder, model, optimizer, step=1)
    assert dpfuse.load_checkpoint(model.module.folder, model, optimizer).step == 1


def synchronize(model, rank):
    model.synchronize_weights()


def stop(model, rank):
    assert not model.stop_requested


def autotune(model, rank):
    dpfuse.autotune(model, steps=1)


def scaler(model, rank):
    dpfuse.GradScaler(model=model, init_scale=1.0)


def another_model(model, rank):
    other = wrapped("dp", model._group)
    for number in range(2):
        other.zero_grad()
        loss_of(other, rank, number).backward()
        assert_mean(other, rank, number)


def by_hand(model, rank):
    layer = nn.Linear(2, 2)
    layer(torch.full((1, 2), 1.0 + rank)).sum().backward()
    dpfuse.fused_allreduce_gradients(layer.parameters(), model._group)
    assert layer.weight.grad[0, 0] == 1.5


CALLS = [no_sync, state_dicts, checkpoints, synchronize, stop, autotune, scaler, another_model, by_hand]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_between_backwards(rank, size, call, held):
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    for place in PLACES:
        for failing in ({0, 1}, {1}):
            for face, before in (("dp", 2), ("ddp", 0)):
                model = wrapped(face)
                model.module.folder = folders[0]
                right_steps(model, rank, size, range(before))
                with a_thread_that_holds_backwards() if held else nullcontext():
                    fail(model, rank, 5, place, failing)
                    call(model, rank)
                right_steps(model, rank, size, range(20, 26))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("failing", [{0, 1}, {1}])
def test_a_hook_can_be_registered(rank, size, failing):
    for before in (0, 2):
        model = wrapped("ddp")
        right_steps(model, rank, size, range(before))
        fail(model, rank, 5, "in the middle", failing)
        model.register_comm_hook(None, allreduce_hook)
        right_steps(model, rank, size)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("failing", [{0, 1}, {1}])
def test_an_optimizer_can_be_sharded(rank, size, failing):
    for before in (0, 2):
        model, other = wrapped(), wrapped()
        right_steps(model, rank, size, range(before))
        fail(model, rank, 5, "in the middle", failing)
        model.zero_grad()
        optimizer = dpfuse.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        plain = torch.optim.SGD(other.parameters(), lr=0.1)
        for number in range(3):
            for each, one in ((model, optimizer), (other, plain)):
                one.zero_grad()
                loss_of(each, rank, number).backward()
                one.step()
        for param, same in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(param, same)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("failing", [{0, 1}, {1}])
def test_a_join_can_begin(rank, size, failing):
    for before in (0, 2):
        model = wrapped("ddp")
        right_steps(model, rank, size, range(before))
        fail(model, rank, 5, "in the middle", failing)
        with model.join():
            for number in range(2 + rank):
                model.zero_grad()
                loss_of(model, rank, number).backward()
        right_steps(model, rank, size)


def test_gradients_of_a_failed_backward_are_called_that(rank, size):
    model = wrapped()
    right_steps(model, rank, size)
    with a_thread_that_holds_backwards():
        fail(model, rank, 5, "in the middle", {0, 1})
        with pytest.raises(DPFuseError, match="the last backward raised an exception"):
            model.clip_grad_norm_(1.0)
        model.reducer.discard_accumulated()
    right_steps(model, rank, size)
