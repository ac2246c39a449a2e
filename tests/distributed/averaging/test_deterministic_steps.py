"""What else happens to a wrapper with `deterministic=True`: as ever, or refused by name."""

from __future__ import annotations

import copy
import re
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from bench.network import Network, simulated_network
from dpfuse.comm import collective
from dpfuse.engine.exchanges.ordered import OrderedParts, OrderedSum
from tests.distributed.random_models import added_in_rank_order, trained


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 3))
        self.extra = nn.Linear(6, 3)

    def forward(self, x, extra=False):
        return self.layers(x) + self.extra(x) if extra else self.layers(x)


def small(net, face=dpfuse.DataParallel, **options):
    sizes = {"comm_buffer_size": 1e-4, "last_comm_buffer_size": 1e-5}
    if face is dpfuse.DistributedDataParallel:
        sizes = {"bucket_cap_mb": 1e-4}
    return face(net, find_unused_parameters=True, deterministic=True, **sizes, **options)


def assert_mean(model, rank, size, step, used=(True,)):
    """Gradients after one synchronised backward from none are the sums in rank order of those of the bare module."""
    bare = copy.deepcopy(model.module)
    for param in bare.parameters():
        param.grad = None
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    extra = used[rank % len(used)]
    model.zero_grad()
    model(x, extra).square().sum().backward()
    bare(x, extra).square().sum().backward()
    for (name, param), twin in zip(model.module.named_parameters(), bare.parameters(), strict=True):
        if not any(used) and name.startswith("extra"):
            assert param.grad is None
            continue
        wanted = added_in_rank_order(torch.zeros_like(twin) if twin.grad is None else twin.grad, size)
        assert torch.equal(param.grad, wanted), f"{name} in step {step}"  # not in bits: a zero added loses its sign


def _raise(_grad):
    raise KeyError("planted")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("views", [True, False], ids=["views", "private"])
@pytest.mark.parametrize("face", [dpfuse.DataParallel, dpfuse.DistributedDataParallel])
@pytest.mark.ranks(size=3)
def test_unused_parameters_errors_and_changes_go_their_usual_way(rank, size, face, views):
    model = small(Mlp(), face, gradient_as_bucket_view=views)
    for step in range(3):
        assert_mean(model, rank, size, step)
    assert_mean(model, rank, size, 3, used=(True, False))  # of some ranks only
    assert_mean(model, rank, size, 4, used=(False,))
    # An error on one rank is one on all, and costs that step alone.
    handle = None
    if rank == 1:
        handle = model.module.layers[2].weight.register_hook(_raise)
    with pytest.raises((KeyError, dpfuse.DPFuseError), match=r"planted|failed on rank 1 of 3"):
        model.zero_grad()
        model(torch.ones(2, 6), True).sum().backward()
        if rank == 1:
            raise AssertionError("its own error did not surface")
    if handle is not None:
        handle.remove()
    assert_mean(model, rank, size, 6)
    # A changed model is planned again, on all ranks.
    model.module.layers[0].weight.requires_grad_(False)
    model.module.layers[4].bias = nn.Parameter(torch.full((3,), 0.5))
    model.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    bare = copy.deepcopy(model.module)
    for wrapper in (model, bare):
        wrapper(x, True).square().sum().backward()
    for param, twin in zip(trained(model), trained(bare), strict=True):
        assert torch.equal(param.grad, added_in_rank_order(twin.grad, size))
    assert model._options.common["deterministic"]


@pytest.mark.ranks(size=3)
def test_ranks_without_input_take_part_with_zeros(rank, size):
    net = nn.Linear(3, 2)
    model = dpfuse.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1e-5, deterministic=True)
    grads = []
    with model.join():
        for step in range(rank + 1):
            model.zero_grad()
            model(torch.full((1, 3), rank + step + 1.0)).sum().backward()
            grads.append(model.module.weight.grad[0, 0].item())
    # In step s the ranks r >= s have input r + s + 1; means are over all three.
    wanted = [sum(r + s + 1.0 for r in range(s, size)) / size for s in range(rank + 1)]
    assert grads == pytest.approx(wanted)


@pytest.mark.ranks(size=3)
def test_sparse_gradients_are_added_in_rank_order_too(rank, size):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 5, sparse=True), nn.Linear(5, 3))
    bare, results = copy.deepcopy(net), []
    index = torch.randint(20, (9,), generator=torch.Generator().manual_seed(rank))
    for cap in (25, 0, 1e-5):
        model = dpfuse.DataParallel(copy.deepcopy(net), comm_buffer_size=cap, deterministic=True)
        for _ in range(2):
            model.zero_grad()
            model(index).square().sum().backward()
        results.append([param.grad.to_dense() for param in model.parameters()])
    bare(index).square().sum().backward()
    for other in results:
        for grad, param in zip(other, bare.parameters(), strict=True):
            assert torch.equal(grad, added_in_rank_order(param.grad.to_dense(), size))


@pytest.mark.ranks(size=3)
def test_a_copy_is_deterministic_too(rank, size):
    model = small(Mlp())
    assert_mean(copy.deepcopy(model), rank, size, 0)
    dist.barrier()


def summing(flat):
    return OrderedSum(dist.group.WORLD, OrderedParts(dist.get_world_size())).start(flat)


@pytest.mark.ranks(size=3)
def test_on_a_stream_the_gather_is_queued_when_the_bucket_is_sent(rank, size):
    """What follows on a GPU, with streams that are none: nobody has to wait before everything is under way."""
    made = []
    gather = collective.start_all_gather_into
    flat = torch.arange(8.0 * size) + rank
    expected = added_in_rank_order(size * flat, size)
    entered = mock.Mock(side_effect=nullcontext)
    with (
        mock.patch.object(torch.cuda, "stream", entered),
        mock.patch.object(collective, "start_all_gather_into", lambda *args: made.append(gather(*args)) or made[-1]),
    ):
        work = summing(flat)
        work.go_on_on("stream")
        assert len(made) == 1
        assert not work.get_future().done()
        work.wait()
    entered.assert_called_once_with("stream")
    assert len(made) == 1
    assert work.get_future().done()
    assert torch.equal(flat, expected)


def waited_for_in_slices(rank, size):
    """As who wants to look around now and then."""
    flat = torch.full((8 * size,), rank + 1.0)
    store = dist.PrefixStore("in slices", dist.distributed_c10d._get_default_store())
    if rank == 1:
        store.wait(["was too short"])
        store.delete_key("was too short")
    work = summing(flat)
    too_short = 0
    while True:
        try:
            assert work.wait(timedelta(milliseconds=30))
            break
        except RuntimeError:
            assert not work.is_completed()  # else it had failed
            too_short += 1
        if rank == 0 and too_short == 3:
            store.set("was too short", "")
        if rank == 1:
            time.sleep(0.1)
    assert work.is_completed()
    assert work.get_future().done()
    assert flat.tolist() == [sum(range(1, size + 1))] * len(flat)
    return too_short


def test_it_can_be_waited_for_again_when_the_time_was_too_short(ranks):
    assert ranks(waited_for_in_slices, size=2)[0] >= 3


def test_it_is_told_from_one_that_has_failed(group):
    exchange = mock.Mock(**{"wait.side_effect": RuntimeError("connection closed"), "is_completed.return_value": False})
    flat = torch.ones(8)
    with mock.patch.object(collective, "start_all_to_all", return_value=exchange):
        work = summing(flat)
        assert not work.is_completed()
    exchange.is_completed.return_value = True
    with pytest.raises(RuntimeError, match="connection closed"):
        work.wait()
    assert work.is_completed()
    exchange.wait.side_effect = None  # it has come to an end just now: the gather is still to come
    assert not work.is_completed()


def test_communication_is_timed_and_counted(rank, size):
    times = []
    for deterministic in (True, False):
        model = dpfuse.DataParallel(nn.Linear(64, 64), deterministic=deterministic)
        with dpfuse.time_communication(model) as measured:
            model(torch.ones(1, 64)).sum().backward()
        times.append(measured)
    ours, theirs = times
    assert (ours.steps, ours.collectives) == (theirs.steps, theirs.collectives) == (1, 1)
    assert 0 <= ours.nbytes - theirs.nbytes < 8 * 4 * size  # padding up to whole parts
    assert ours.seconds >= ours.exposed * 0.5 > 0


def test_ranks_must_agree_and_hooks_are_refused(rank, size):
    with pytest.raises(dpfuse.DPFuseError, match=r"option deterministic = (True|False)"):
        dpfuse.DataParallel(Mlp(), deterministic=rank == 0)
    params = list(Mlp().parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(dpfuse.DPFuseError, match=r"deterministic=(True|False)"):
        dpfuse.fused_allreduce_gradients(params, deterministic=rank == 0)
    assert all(param.grad.eq(1).all() for param in params)
    model = small(Mlp(), dpfuse.DistributedDataParallel)
    with pytest.raises(
        dpfuse.DPFuseError, match=r"rank \d: a communication hook was .* with deterministic=True.*Leave"
    ):
        model.register_comm_hook(None, lambda state, bucket: None)
    assert_mean(model, rank, size, 0)
    for call in (partial(dpfuse.DataParallel, Mlp()), partial(dpfuse.fused_allreduce_gradients, params)):
        with pytest.raises((TypeError, dpfuse.DPFuseError)[rank], match="deterministic must be True or False, got 1"):
            call(deterministic=1 if rank == 0 else True)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_what_is_no_bool_is_named(group, value):
    text = re.escape(f"deterministic must be True or False, got {value!r} of type {type(value).__name__}")
    for face in (dpfuse.DataParallel, dpfuse.DistributedDataParallel):
        with pytest.raises(TypeError, match=text):
            face(nn.Linear(2, 2), deterministic=value)
    with pytest.raises(TypeError, match=text):
        dpfuse.fused_allreduce_gradients([], deterministic=value)


NO_ALL_TO_ALL = r"rank 0: deterministic=True needs a back end with all-to-all .* simulated did not do: .* leave determi"


def test_a_back_end_without_all_to_all_is_named_at_construction(monkeypatch):
    with simulated_network():
        dpfuse.DataParallel(nn.Linear(2, 2), deterministic=True)
        for name in ("alltoall_base", "_allgather_base"):
            with monkeypatch.context() as patch:
                patch.delattr(Network, name)
                for face in (dpfuse.DataParallel, dpfuse.DistributedDataParallel):
                    face(nn.Linear(2, 2))
                    with pytest.raises(dpfuse.DPFuseError, match=NO_ALL_TO_ALL):
                        face(nn.Linear(2, 2), deterministic=True)


def test_a_back_end_without_all_to_all_is_named_before_averaging_by_hand(rank, size):
    def refuse(*_):
        raise RuntimeError("Backend does not support alltoall_base")

    params = list(Mlp().parameters())
    for param in params:
        param.grad = torch.full_like(param, rank)
    text = f"rank {rank}: deterministic=True needs .*does not support"
    with mock.patch("dpfuse.comm.collective.start_all_to_all", refuse), pytest.raises(dpfuse.DPFuseError, match=text):
        dpfuse.fused_allreduce_gradients(params, deterministic=True)
    assert all(param.grad.eq(rank).all() for param in params)
    dist.barrier()
