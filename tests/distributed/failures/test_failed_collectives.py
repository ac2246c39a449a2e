"""A collective fails in a group of the user's: each rank raises an error that names a rank, and nothing hangs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import dpfuse
from dpfuse.comm.failed import has_raised
from dpfuse.engine.exchanges import in_place


class GroupError(Exception):
    """An error of the group that forbids attributes."""

    def __setattr__(self, name, value):
        raise AttributeError(name)


class FailingWork(dist._Work):
    """A work that fails when it is waited for."""

    def __init__(self, work):
        super().__init__()
        self._work = work

    def wait(self, timeout=timedelta(0)):
        self._work.wait()
        raise GroupError("planted")


class FailingGroup(dist.ProcessGroup):
    """Gloo's collectives. The next collective named `fails` raises: when it starts, or when it is waited for."""

    def __init__(self, store, rank, size):
        super().__init__(rank, size)
        self.fails, self.late = "", False
        self._rank, self._size = rank, size
        self._inner = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))

    def getBackendName(self):  # noqa: N802  # torch's names
        return "failing"

    def getSize(self):  # noqa: N802
        return self._size

    @property
    def _device_types(self):
        return [torch.device("cpu")]

    def _get_backend(self, device):
        """Its works are gloo's, so a wait for them can be interrupted: a rank raises, and its process goes on."""
        return self._inner

    def _start(self, name, *arguments):
        fails = self.fails == name
        if fails:
            self.fails = ""
            if not self.late:
                raise GroupError("planted")
        work = getattr(self._inner, name)(*arguments)
        return FailingWork(work) if fails else work

    def allreduce(self, tensors, options):
        return self._start("allreduce", tensors, options)

    def broadcast(self, tensors, options):
        return self._start("broadcast", tensors, options)

    def allgather(self, outputs, inputs, options):
        return self._start("allgather", outputs, inputs, options)

    def alltoall_base(self, output, values, output_sizes, sizes, options):
        return self._start("alltoall_base", output, values, output_sizes, sizes, options)

    def _allgather_base(self, output, values, options):
        return self._start("_allgather_base", output, values, options)


def group_of(case, rank, size):
    group = FailingGroup(dist.PrefixStore(f"failing {case}", _get_default_store()), rank, size)
    kept.append(group)
    return group


kept = []  # gloo waits, when a group ends, for the collectives that its peers have not joined


def ended(function):
    """The error of a call, None if there is none."""
    try:
        function()
    except Exception as error:
        return error
    return None


def named(error, rank):
    return isinstance(error, dpfuse.DPFuseError) and f"rank {rank}" in str(error)


PLAIN, WIRE, ORDERED = {}, {"wire_dtype": torch.bfloat16}, {"deterministic": True}


@pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.slow), True], ids=["when it starts", "when it is waited for"]
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", PLAIN),
        pytest.param("_allgather_base", ORDERED, marks=pytest.mark.slow),
        pytest.param("allreduce", WIRE, marks=pytest.mark.slow),
        pytest.param("allreduce", {"bucket_size": 0}, marks=pytest.mark.slow),
        pytest.param("allgather", PLAIN, marks=pytest.mark.slow),
        pytest.param("alltoall_base", ORDERED, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.ranks(timeout=30)
def test_by_hand_all_ranks_raise_errors_that_name_the_rank_of_a_failed_collective(rank, size, name, late, options):
    group = group_of((name, late, options), rank, size)
    params = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(700_000))]

    def step():
        for param in params:
            param.grad = torch.full_like(param, float(rank + 1))
        dpfuse.fused_allreduce_gradients(params, group, **options)

    step()
    step()
    if rank == 0:
        group.fails, group.late = name, late
    errors = [ended(step) for _ in range(3)]
    if rank == 0:
        assert isinstance(errors[0], GroupError), errors
    else:
        # What it waits for may have come: then it hears in the next step.
        errors = errors[1:] if errors[0] is None else errors
    assert all(named(error, 0) for error in errors[1:]), errors


SMALL = {"comm_buffer_size": 1e-4, "last_comm_buffer_size": 1e-4}


@pytest.mark.parametrize("late", [False, True], ids=["when it starts", "when it is waited for"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", SMALL),
        pytest.param("allreduce", {}, marks=pytest.mark.slow),
        pytest.param("alltoall_base", ORDERED, marks=pytest.mark.slow),
        pytest.param("_allgather_base", ORDERED, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.ranks(timeout=30)
def test_in_backward_all_ranks_raise_errors_that_name_the_rank_of_a_failed_collective(rank, size, name, late, options):
    group = group_of(("wrapped", name, late, options), rank, size)
    torch.manual_seed(0)
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), group=group, **options)

    def step():
        model.zero_grad()
        model(torch.full((3, 4), float(rank + 1))).sum().backward()

    step()
    step()
    if rank == 0:
        group.fails, group.late = name, late
    errors = [ended(step) for _ in range(3)]
    if rank == 0:
        assert isinstance(errors[0], (GroupError, dpfuse.DPFuseError)), errors
    else:
        errors = errors[1:] if errors[0] is None else errors
    assert all(named(error, 0) for error in errors[1:]), errors


@pytest.mark.parametrize("raises", [RuntimeError, KeyError, GroupError])
@pytest.mark.ranks(timeout=30)
def test_an_error_of_a_users_hook_is_no_failed_collective(rank, size, raises):
    """A user's hook raises: the wrapper cannot be used any more, but its group can, since no rank has left it."""
    spoils = []

    def hook(state, bucket):
        if spoils:
            raise raises("planted")
        future = dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def wrapped_again():
        spoils.clear()
        model = dpfuse.DistributedDataParallel(nn.Linear(4, 2))
        model.register_comm_hook(None, hook)
        return model

    def step(model):
        model.zero_grad()
        model(torch.full((3, 4), float(rank + 1))).sum().backward()

    model = wrapped_again()
    step(model)
    spoils.append(True)
    error = ended(lambda: step(model))
    assert isinstance(error, raises), error
    assert not has_raised(error)
    assert named(ended(lambda: step(model)), rank)
    model = wrapped_again()
    for _ in range(2):
        step(model)
    assert model.module.weight.grad.eq(3 * (size + 1) / 2).all()


@pytest.mark.ranks(timeout=30)
def test_an_error_beside_the_start_of_a_collective_costs_only_that_call(rank, size):
    """An error beside the start of a collective: no rank leaves the group, and the next call is right."""
    params = [nn.Parameter(torch.zeros(700_000)), nn.Parameter(torch.zeros(5))]

    def step():
        for param in params:
            param.grad = torch.full_like(param, float(rank + 1))
        dpfuse.fused_allreduce_gradients(params)

    step()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:

            def fail(*arguments):
                patch.undo()
                raise GroupError("planted")

            patch.setattr(in_place.collective, "all_reduce_together", fail)
        error = ended(step)
    assert named(error, 0), error
    step()
    assert all(param.grad.eq((size + 1) / 2).all() for param in params)


@pytest.mark.ranks(timeout=30)
def test_a_wrong_group_is_refused_on_one_rank_and_the_call_repeated(rank, size):
    """The ranks whose group is right wait until the other one repeats its call."""
    params = [nn.Parameter(torch.zeros(5))]
    params[0].grad = torch.full((5,), float(rank + 1))
    if rank == 0:
        with pytest.raises(TypeError, match="group must be") as info:
            dpfuse.fused_allreduce_gradients(params, "world")
        assert not has_raised(info.value)
    dpfuse.fused_allreduce_gradients(params)
    assert params[0].grad.eq((size + 1) / 2).all()
