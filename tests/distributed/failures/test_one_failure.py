"""One failure, one error on each rank: its class, a mean that one rank has not used, and a loss that raised.

docs/design/failures.md has the rule. `test_two_failures.py` plays two of them, and `test_interruptions.py` the plain
cases.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from dpfuse import DPFuseError
from dpfuse.engine.events import Watcher

FACES = {"dp": dpfuse.DataParallel, "ddp": dpfuse.DistributedDataParallel}
SMALL = {"comm_buffer_size": 0, "last_comm_buffer_size": 0}
FAILED = r"the backward failed on rank 1 of 2, so rank 0 has no averaged gradients"
LOST = (
    r"rank {}: rank 1 has not used the mean of the last averaged backward, rank 0 has used every mean; expected the "
    r"same on every rank. An exception came after the mean.*Call synchronize_weights\(\) on every rank"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)


def wrapped(face="dp", group=None, **options):
    torch.manual_seed(0)
    # In a group of its own: Python's collector may not have found an earlier model yet.
    own = {"group" if face == "dp" else "process_group": group or dist.new_group()}
    return FACES[face](Net(), **own, **options)


def batch(rank, number):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(model, rank, number):
    return model(batch(rank, number)).square().sum()


def assert_mean(model, rank, size, number):
    """Assert that the gradients are the mean over this batch of all ranks, at the weights of each."""
    bare = Net()
    bare.load_state_dict(model.module.state_dict())
    loss_of(bare, rank, number).backward()
    for got, local in zip(model.module.layers.parameters(), bare.layers.parameters(), strict=True):
        mean = local.grad / size
        dist.all_reduce(mean)
        torch.testing.assert_close(got.grad, mean)


def right_steps(model, rank, size, numbers=(20, 21)):
    for number in numbers:
        model.zero_grad()
        loss_of(model, rank, number).backward()
        assert_mean(model, rank, size, number)


def raising(error):
    def hook(*_):
        raise error

    return hook


# --- The class of the peers' error ---


def in_a_hook(model, error):
    return model.module.layers[0].weight.register_hook(raising(error))


def in_the_loss(model, error):
    return model.module.register_forward_hook(lambda module, args, out: out.register_hook(raising(error)) and None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), MemoryError("planted"), RuntimeError("planted")])
@pytest.mark.parametrize("place", [in_a_hook, in_the_loss])
def test_the_peers_of_a_rank_without_memory_raise_an_error_of_that_class(rank, size, place, error):
    expected = dpfuse.OutOfMemoryError if type(error) is torch.OutOfMemoryError else DPFuseError
    for before in (0, 2):
        model = wrapped()
        right_steps(model, rank, size, range(before))
        planted = place(model, error) if rank == 1 else None
        with pytest.raises(type(error) if rank == 1 else expected) as caught:
            loss_of(model, rank, 5).backward()
        assert type(caught.value) is (type(error) if rank == 1 else expected)
        assert rank == 1 or ("memory ran out there" in str(caught.value)) == (expected is dpfuse.OutOfMemoryError)
        if planted is not None:
            planted.remove()
        right_steps(model, rank, size)


@pytest.mark.ranks(size=3)
def test_one_rank_without_memory_is_enough(rank, size):
    model = wrapped()
    right_steps(model, rank, size)
    errors = [RuntimeError("planted"), dpfuse.OutOfMemoryError, torch.OutOfMemoryError("planted")]
    planted = in_a_hook(model, errors[rank]) if rank != 1 else None
    with pytest.raises(RuntimeError, match="planted" if rank != 1 else r"failed on several ranks|rank 0, 2") as caught:
        loss_of(model, rank, 5).backward()
    assert rank != 1 or type(caught.value) is dpfuse.OutOfMemoryError
    if planted is not None:
        planted.remove()
    right_steps(model, rank, size)


def test_a_loop_skips_the_batch_on_all_ranks_that_is_too_large_on_one(rank, size):
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = []
    for number in range(6):
        planted = in_a_hook(model, torch.OutOfMemoryError("planted")) if number in (0, 3) and rank == 1 else None
        try:
            loss_of(model, rank, number).backward()
        except torch.OutOfMemoryError:
            skipped.append(number)
            continue
        else:
            assert_mean(model, rank, size, number)
            optimizer.step()
        finally:
            model.zero_grad()
            if planted is not None:
                planted.remove()
    assert skipped == [0, 3]


# --- A mean that one rank has not used ---


def step_that_raises(model, optimizer, rank, number):
    loss_of(model, rank, number).backward()
    planted = optimizer.register_step_pre_hook(raising(ZeroDivisionError()))
    try:
        optimizer.step()
    finally:
        planted.remove()


class Refuses(Watcher):
    def delivered(self):
        raise ZeroDivisionError


def watcher_that_raises(model, optimizer, rank, number):
    watcher = Refuses()
    model._sync.grads.events.add(watcher)
    try:
        loss_of(model, rank, number).backward()
    finally:
        model._sync.grads.events.remove(watcher)


def callback_that_raises(model, optimizer, rank, number):
    """One of the program, which the engine calls after ours."""
    engine = torch.autograd.Variable._execution_engine
    planted = model.module.layers[0].bias.register_hook(
        lambda grad: engine.queue_callback(raising(ZeroDivisionError()))
    )
    try:
        loss_of(model, rank, number).backward()
    finally:
        planted.remove()


LOSSES = [step_that_raises, watcher_that_raises, callback_that_raises]


def lose(model, optimizer, rank, number, how=step_that_raises, on=(1,)):
    """Train one batch, whose mean is not used on rank 1."""
    model.zero_grad()
    if rank in on:
        with pytest.raises(ZeroDivisionError):
            how(model, optimizer, rank, number)
    else:
        loss_of(model, rank, number).backward()
        optimizer.step()


def assert_told_once(model, rank, size):
    model.zero_grad()
    with pytest.raises(DPFuseError, match=LOST.format(rank)):
        loss_of(model, rank, 10).backward()
    right_steps(model, rank, size)


def start(rank, size, face="dp", **options):
    model = wrapped(face, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        right_steps(model, rank, size, [number])
        optimizer.step()
    return model, optimizer


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("face", FACES)
def test_a_mean_that_one_rank_has_not_used_is_told_on_all_in_the_next_backward(rank, size, face, how):
    model, optimizer = start(rank, size, face)
    lose(model, optimizer, rank, 5, how)
    assert_told_once(model, rank, size)


def test_a_warning_that_is_an_error_comes_after_the_mean(rank, size):
    model = wrapped("ddp")
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 1 else "ignore")
        with pytest.raises(UserWarning, match="got no gradient") if rank == 1 else nullcontext():
            loss_of(model, rank, 5).backward()
    assert_mean(model, rank, size, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_told_once(model, rank, size)


@pytest.mark.ranks(size=3)
def test_two_of_three_ranks_are_told_of(rank, size):
    model, optimizer = start(rank, size)
    lose(model, optimizer, rank, 5, on=(1, 2))
    assert_told_once(model, rank, size)


def test_several_are_counted(rank, size):
    """Inside no_sync() no report tells of the first one, and a second mean is lost with the next backward."""
    model, optimizer = start(rank, size)
    other = torch.optim.SGD(model.module.unused.parameters(), lr=0.1)
    lose(model, optimizer, rank, 5)
    del other
    assert_told_once(model, rank, size)


def synchronized(model, optimizer, folder):
    model.synchronize_weights()


def loaded(model, optimizer, folder):
    model.load_state_dict(torch.load(f"{folder}/state.pt"))


def loaded_without_prefix(model, optimizer, folder):
    if hasattr(model, "set_state_dict"):
        model.set_state_dict(torch.load(f"{folder}/state.pt"))
    else:
        bare = {key.removeprefix("module."): value for key, value in torch.load(f"{folder}/state.pt").items()}
        model.load_state_dict(bare)


def resumed(model, optimizer, folder):
    assert dpfuse.load_checkpoint(folder, model, optimizer).step == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mend", [synchronized, loaded, loaded_without_prefix, resumed])
@pytest.mark.parametrize("face", FACES)
def test_nothing_is_told_once_the_weights_are_equal_again(rank, size, face, mend):
    model, optimizer = start(rank, size, face)
    with shared_folder() as folder:
        if rank == 0:
            torch.save(model.state_dict(), f"{folder}/state.pt")
        dpfuse.save_checkpoint(folder, model, optimizer, step=2)
        for how in LOSSES:
            lose(model, optimizer, rank, 5, how)
            mend(model, optimizer, folder)
            right_steps(model, rank, size)
            optimizer.step()
    for param in model.parameters():
        found = [torch.empty_like(param) for _ in range(size)]
        dist.all_gather(found, param.detach())
        assert torch.equal(*found)


@contextmanager
def shared_folder():
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext():
        yield names[0]


def test_a_part_of_the_weights_is_not_enough(rank, size):
    model, optimizer = start(rank, size)
    lose(model, optimizer, rank, 5)
    model.load_state_dict({"unused.weight": torch.zeros(2, 2)}, strict=False)
    assert_told_once(model, rank, size)


def step_again(model, optimizer, rank):
    optimizer.step()


def step_of_an_optimizer_of_others(model, optimizer, rank):
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.ones(1)
    torch.optim.SGD([param], lr=0.1).step()


@pytest.mark.parametrize("how", LOSSES)
def test_a_step_that_follows_uses_the_mean(rank, size, how):
    model, optimizer = start(rank, size)
    lose(model, optimizer, rank, 5, how)
    if rank == 1:
        optimizer.step()
    right_steps(model, rank, size)
    lose(model, optimizer, rank, 5, how)
    step_of_an_optimizer_of_others(model, optimizer, rank)
    assert_told_once(model, rank, size)


@pytest.mark.parametrize("how", LOSSES)
def test_nothing_is_told_where_all_ranks_have_lost_it(rank, size, how):
    model, optimizer = start(rank, size)
    lose(model, optimizer, rank, 5, how, on=(0, 1))
    right_steps(model, rank, size)
    lose(model, optimizer, rank, 5, how)  # what was lost before is forgotten
    assert_told_once(model, rank, size)


def test_nothing_is_told_of_a_step_of_other_parameters(rank, size):
    model, optimizer = start(rank, size)
    param = nn.Parameter(torch.zeros(1))
    other = torch.optim.SGD([param], lr=0.1)
    right_steps(model, rank, size, [5])
    optimizer.step()
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            other.register_step_pre_hook(raising(ZeroDivisionError()))
            other.step()
    right_steps(model, rank, size)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_nothing_is_told_of_steps_that_run_whole_backwards(rank, size, search):
    model = wrapped()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn=search)
    for number in range(3):

        def closure(number=number):
            model.zero_grad()
            loss = loss_of(model, 0, number)  # the same on all ranks, which then run as many
            loss.backward()
            return loss

        optimizer.step(closure)
    right_steps(model, rank, size)


def test_a_closure_that_raises_has_lost_no_mean(rank, size):
    """Its backward fails on rank 1, and the peers raise from inside of their step, too."""
    model, optimizer = start(rank, size)

    def closure():
        model.zero_grad()
        loss = loss_of(model, rank, 5)
        loss.backward()
        return loss

    planted = in_a_hook(model, ZeroDivisionError()) if rank == 1 else None
    with pytest.raises(ZeroDivisionError if rank == 1 else DPFuseError):
        optimizer.step(closure)
    if planted is not None:
        planted.remove()
    right_steps(model, rank, size)


def test_it_is_told_although_a_forward_has_failed_meanwhile(rank, size):
    """What a rank runs in place of a forward that raised is not compared, so the backward after that one tells it."""
    model, optimizer = start(rank, size)
    lose(model, optimizer, rank, 5)
    model.zero_grad()
    if rank == 1:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 7))
    loss_of(model, rank, 6).backward()
    assert_told_once(model, rank, size)


def test_it_is_told_before_another_difference(rank, size):
    model, optimizer = start(rank, size)
    lose(model, optimizer, rank, 5)
    model.zero_grad()
    if rank == 1:
        with model.no_sync():
            loss_of(model, rank, 6).backward()
    with pytest.raises(DPFuseError, match="rank 1 has not used the mean of the last averaged backward"):
        loss_of(model, rank, 7).backward()
    model.zero_grad()
    loss_of(model, rank, 8).backward()  # once


@pytest.mark.parametrize("scaled", [torch.amp.GradScaler, dpfuse.GradScaler])
def test_a_step_that_a_scaler_skips_is_none(rank, size, scaled):
    model, optimizer = start(rank, size)
    scaler = scaled("cpu", init_scale=2.0**10, **({"model": model} if scaled is dpfuse.GradScaler else {}))
    for number in range(4):
        model.zero_grad()
        factor = float("inf") if number == 1 else 1.0
        scaler.scale(loss_of(model, rank, number) * factor).backward()
        scaler.step(optimizer)
        scaler.update()


class HalfUpdated(torch.optim.SGD):
    """Raises in its own update when it is told to."""

    error: type[BaseException] | None = None

    def step(self, closure=None):
        if HalfUpdated.error is not None:
            raise HalfUpdated.error
        return super().step(closure)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_sharded_optimizer_tells_of_its_own_steps(rank, size, error, in_backward):
    """The peers wait in the step for the part of each rank, so it is sent before anything is raised."""
    model = wrapped()
    model.module.unused.requires_grad_(False)  # in backward each parameter must be used
    optimizer = dpfuse.ShardedOptimizer(model, HalfUpdated, lr=0.1, step_in_backward=in_backward)
    raised = {}
    for number in range(8):
        optimizer.zero_grad()
        HalfUpdated.error = error if number == 3 and rank == 1 else None
        try:
            loss_of(model, rank, number).backward()
            optimizer.step()
        except (DPFuseError, KeyboardInterrupt) as caught:
            raised[number] = caught
    if rank == 1:
        own = raised.pop(3)
        # The weights are half updated, so no program may skip the batch.
        assert isinstance(own, KeyboardInterrupt if error is KeyboardInterrupt else DPFuseError)
        assert not isinstance(own, torch.OutOfMemoryError)
    # Until a checkpoint is loaded.
    assert list(raised) == [4, 5, 6, 7]
    told = [str(each) for each in raised.values()]
    assert all(
        "rank 1 has failed to update its part of the parameters" in text for text in told[: 1 if in_backward else 4]
    ), told


# --- A loss that raises ---


def fail_above_the_outputs(loss, rank):
    """The backward of rank 1 raises in a hook on its loss, and rank 0 hears of it."""
    if rank == 1:
        loss.register_hook(raising(KeyError("planted")))
    with pytest.raises(KeyError, match="planted") if rank == 1 else pytest.raises(DPFuseError, match=FAILED):
        loss.backward()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("before", [0, 2])
def test_a_loss_that_raises_above_the_outputs_is_told_to_the_peers(rank, size, face, before):
    model = wrapped(face)
    right_steps(model, rank, size, range(before))
    for number in (5, 6):
        model.zero_grad()
        loss = loss_of(model, rank, number) * 2
        fail_above_the_outputs(loss, rank)
        right_steps(model, rank, size)


def test_so_is_the_second_backward_of_one_forward(rank, size):
    model = wrapped()
    right_steps(model, rank, size)
    for number in (5, 6):
        model.zero_grad()
        loss = loss_of(model, rank, number) * 2
        loss.backward(retain_graph=True)
        model.zero_grad()
        fail_above_the_outputs(loss, rank)
        right_steps(model, rank, size)


def test_a_loss_that_all_ranks_try_again_pairs_with_itself(rank, size):
    model = wrapped()
    right_steps(model, rank, size)
    model.zero_grad()
    loss = loss_of(model, rank, 5)
    doubled = loss * 2
    if rank == 1:
        doubled.register_hook(raising(KeyError("planted")))
    with pytest.raises(KeyError, match="planted") if rank == 1 else pytest.raises(DPFuseError, match=FAILED):
        doubled.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_mean(model, rank, size, 5)
    right_steps(model, rank, size)


def test_inside_no_sync_the_window_can_begin_again(rank, size):
    model = wrapped()
    right_steps(model, rank, size)
    for tries in (1, 3):
        model.zero_grad()
        for _ in range(tries if rank == 1 else 0):
            with model.no_sync():
                loss = loss_of(model, rank, 5) * 2
                loss.register_hook(raising(KeyError("planted")))
                with pytest.raises(KeyError, match="planted"):
                    loss.backward()
        with model.no_sync():
            loss_of(model, rank, 6).backward()
        loss_of(model, rank, 7).backward()
        right_steps(model, rank, size)


def test_what_is_no_backward_of_the_model_is_none(rank, size):
    """Rank 1 alone runs backwards that raise: of another model, for autograd.grad(), and of a graph that is gone."""
    model, other = wrapped(), Net()
    right_steps(model, rank, size)
    if rank == 1:
        for _ in range(2):
            loss = loss_of(other, rank, 5) * 2
            loss.register_hook(raising(KeyError("planted")))
            with pytest.raises(KeyError, match="planted"):
                loss.backward()
        model.eval()
        loss = loss_of(model, rank, 5) * 2
        loss.register_hook(raising(KeyError("planted")))
        with pytest.raises(KeyError, match="planted"):
            torch.autograd.grad(loss, list(model.module.layers.parameters()))
        model.train()
    right_steps(model, rank, size)


def two_models(rank, size, steps):
    """Two of one group, each in several buckets, of which some have other sizes than those of the other one."""
    group = dist.new_group()
    models = [wrapped(group=group, **sizes) for sizes in (SMALL, {})]
    for number in range(steps):
        for model in models:
            right_steps(model, rank, size, [number])
    return models


def test_a_loss_that_would_reach_two_models_is_a_named_error_on_all(rank, size):
    """It is unknown in which of them the peers wait, so the rank that failed raises once more."""
    models = two_models(rank, size, 2)
    loss = sum(loss_of(model, rank, 5) for model in models) * 2
    if rank == 1:
        loss.register_hook(raising(KeyError("planted")))
        with pytest.raises(KeyError, match="planted"):
            loss.backward()
        loss = sum(loss_of(model, rank, 6) for model in models)
    with pytest.raises(DPFuseError, match=r"rank 1 has run 1 forward without a backward"):
        loss.backward()
    for model in models:
        right_steps(model, rank, size)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", [in_a_hook, in_the_loss])
@pytest.mark.parametrize("before", [0, 2])
def test_what_another_model_runs_next_does_not_pair_with_the_backward_that_failed(rank, size, before, place):
    """As where a program trains two models in turn, and skips the step of one."""
    models = two_models(rank, size, before)
    for number in (5, 6):
        planted = place(models[0], KeyError("planted")) if rank == 1 else None
        with pytest.raises(KeyError, match="planted") if rank == 1 else pytest.raises(DPFuseError, match=FAILED):
            loss_of(models[0], rank, number).backward()
        if planted is not None:
            planted.remove()
        right_steps(models[1], rank, size, [number])
    for model in models:
        right_steps(model, rank, size)


def test_nor_does_a_backward_whose_forward_was_before(rank, size):
    models = two_models(rank, size, 2)
    planted = in_a_hook(models[0], KeyError("planted")) if rank == 1 else None
    models[1].zero_grad()
    losses = [loss_of(model, rank, 5) for model in models]
    with pytest.raises(KeyError, match="planted") if rank == 1 else pytest.raises(DPFuseError, match=FAILED):
        losses[0].backward()
    if planted is not None:
        planted.remove()
    losses[1].backward()
    assert_mean(models[1], rank, size, 5)
    for model in models:
        right_steps(model, rank, size)


# --- What else a rank does before its next forward ---


def test_a_checkpoint_is_saved_or_loaded_once_the_peers_have_heard(rank, size):
    model, optimizer = start(rank, size)
    with shared_folder() as folder:
        for call in (
            lambda: dpfuse.save_checkpoint(folder, model, optimizer, step=2),
            lambda: dpfuse.load_checkpoint(folder, model, optimizer),
        ):
            planted = in_a_hook(model, KeyError("planted")) if rank == 1 else None
            with pytest.raises(KeyError, match="planted") if rank == 1 else pytest.raises(DPFuseError, match=FAILED):
                loss_of(model, rank, 5).backward()
            call()
            if planted is not None:
                planted.remove()
            right_steps(model, rank, size)


# --- The log ---


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.told = []

    def emit(self, record):
        self.told.append((record.name, record.rank, record.getMessage()))


@contextmanager
def kept_log():
    kept, logger = Kept(), logging.getLogger("dpfuse.failed")
    logger.addHandler(kept)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield kept.told
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)


def test_the_log_says_how_a_rank_has_completed_the_backward(rank, size):
    model, _ = start(rank, size)
    with kept_log() as told:
        planted = in_a_hook(model, KeyError("planted")) if rank == 1 else None
        with pytest.raises(KeyError if rank == 1 else DPFuseError):
            loss_of(model, rank, 5).backward()
        assert told == []
        if planted is not None:
            planted.remove()
        right_steps(model, rank, size)
    assert len(told) == (rank == 1)
    for name, of, text in told:
        assert (name, of) == ("dpfuse.failed", 1)
        assert text.startswith("rank 1: an exception ended the last backward; it was completed with zeros")
