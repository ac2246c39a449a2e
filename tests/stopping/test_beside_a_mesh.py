"""A wish of one rank stops all groups of a mesh after the same averaged backward."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, nullcontext
from functools import partial
from time import sleep
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dpfuse
from dpfuse.model import module_sync
from dpfuse.stopping.mesh_groups import DELAY, LATE_DELAY, MeshGroups, groups_around
from tests.distributed.failures.test_spoiler import as_on_a_gpu
from tests.distributed.tensor_parallel.models import FACES, mesh_of_four, wrapper_of
from tests.stopping.test_same_backward import forgetting

MOST = 12  # averaged backwards, if no rank stops


def network(mesh):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    if mesh is not None:
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return net


def ask(rank, way):
    if way == "call":
        dpfuse.request_stop(f"me{rank}")
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def train(model, batch, asks=lambda step, micro: None, micros=1, before_backward=lambda: None):
    """Train until all ranks stop; return after how many averaged backwards, and why."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, MOST + 1):
        optimizer.zero_grad()
        for micro in range(1, micros + 1):
            asks(step, micro)
            with nullcontext() if micro == micros else wrapper_of(model).no_sync():
                loss = model(batch).square().mean()
                before_backward()
                loss.backward()
        optimizer.step()
        assert wrapper_of(model).stop_requested == (wrapper_of(model).stop_reason is not None)
        if wrapper_of(model).stop_requested:
            return step, str(wrapper_of(model).stop_reason)
    return MOST, ""


def asked(rank, size, asker, way, micro, slow=None):
    mesh = mesh_of_four()
    model = dpfuse.DistributedDataParallel(network(mesh["tp"]), device_mesh=mesh["dp"])
    with forgetting(), dpfuse.stop_on_signals("SIGTERM"):
        return train(
            model,
            torch.full((2, 4), 1.0 + mesh.get_local_rank("dp")),
            lambda step, at: ask(rank, way) if (rank, step, at) == (asker, 3, micro) else None,
            micros=3,
            before_backward=partial(sleep, 0.1) if mesh.get_local_rank("tp") == slow else lambda: None,
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("asker", range(4))
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("way", ["call", "signal"])
def test_all_groups_stop_one_average_later(ranks, way, micro, asker):
    why = {"call": f"rank {asker} has asked: me{asker}", "signal": f"rank {asker} got SIGTERM"}[way]
    assert ranks(asked, asker, way, micro, size=4) == [(3 + DELAY, why)] * 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("slow", [0, 1])
def test_a_group_that_hears_while_another_one_is_before_the_same_backward(ranks, slow):
    """Nothing in these backwards waits for the other group, so one may end before the other begins."""
    expected = [(3 + DELAY, "rank 1 has asked: me1")] * 4
    assert ranks(asked, 1, "call", 3, slow, size=4) == expected


def by_face(rank, size, face):
    mesh = mesh_of_four()
    model = FACES[face](network(mesh["tp"]), mesh)
    with forgetting():
        return train(model, torch.ones(2, 4), lambda step, _: ask(rank, "call") if (rank, step) == (3, 2) else None)


@pytest.mark.parametrize("face", ["DataParallel", "replicate"])
def test_the_mesh_of_a_parameter_is_enough(ranks, face):
    assert ranks(by_face, face, size=4) == [(2 + DELAY, "rank 3 has asked: me3")] * 4


def late(rank, size):
    always = mock.patch.object(module_sync, "groups_around", lambda *known, late: groups_around(*known, late=True))
    with as_on_a_gpu(), always:
        return by_face(rank, size, "DistributedDataParallel")


def test_on_a_gpu_all_groups_stop_some_averages_later(ranks):
    """A group hears one backward later."""
    assert ranks(late, size=4) == [(2 + 1 + LATE_DELAY, "rank 3 has asked: me3")] * 4


def in_both_groups(rank, size, askers):
    mesh = mesh_of_four()
    model = dpfuse.DistributedDataParallel(network(mesh["tp"]), device_mesh=mesh["dp"])
    with forgetting():
        return train(model, torch.ones(2, 4), lambda step, _: ask(rank, "call") if askers.get(rank) == step else None)


@pytest.mark.parametrize(("askers", "last"), [({0: 2, 1: 2}, 2 + DELAY), ({1: 2, 2: 3, 3: 3}, 2 + DELAY)])
def test_ranks_of_several_groups_that_ask_give_one_reason(ranks, askers, last):
    results = ranks(in_both_groups, askers, size=4)
    assert {step for step, _ in results} == {last}
    assert len({why for _, why in results}) == 1


def again(rank, size):
    mesh = mesh_of_four()
    model = dpfuse.DistributedDataParallel(network(mesh["tp"]), device_mesh=mesh["dp"])
    results = []
    for asker in (0, None, 3):
        with forgetting():
            asks = lambda step, _, asker=asker: ask(rank, "call") if (rank, step) == (asker, 3) else None  # noqa: E731
            results.append(train(model, torch.ones(2, 4), asks))
    return results


def test_a_wish_that_is_forgotten_stops_no_group(ranks):
    expected = [(3 + DELAY, "rank 0 has asked: me0"), (MOST, ""), (3 + DELAY, "rank 3 has asked: me3")]
    assert ranks(again, size=4) == [expected] * 4


def two_models(rank, size):
    """The second model takes two steps for each one of the first."""
    mesh = mesh_of_four()
    first, second = (dpfuse.DistributedDataParallel(network(mesh["tp"]), device_mesh=mesh["dp"]) for _ in range(2))
    with forgetting():
        for step in range(1, MOST + 1):
            if (rank, step) == (1, 3):
                dpfuse.request_stop("me1")
            for model in (second, second, first):
                model(torch.ones(2, 4)).sum().backward()
            if first.stop_requested:
                return step, second.stop_requested
        return MOST, False


def test_each_model_counts_its_own_averages(ranks):
    assert ranks(two_models, size=4) == [(3 + DELAY, True)] * 4


def another_layout(rank, size, asker):
    """Groups of which dpfuse knows no mesh. In each step all ranks wait for each other, as with tensor parallelism."""
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    model = dpfuse.DistributedDataParallel(network(None), process_group=groups[rank % 2])
    with forgetting():
        for step in range(1, MOST + 1):
            if (rank, step) == (asker, 3):
                dpfuse.request_stop()
            model(torch.ones(2, 4)).sum().backward()
            if dpfuse.agree_to_stop():
                return step
        return MOST


def test_in_another_layout_all_ranks_agree(ranks):
    assert ranks(another_layout, 1, size=4) == [3] * 4


def apart(rank, size, first, second):
    """Two trainings that share nothing but the mesh: the second one makes so many averages before the first begins."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("trial", "dp"))
    trial = mesh.get_local_rank("trial")
    model = dpfuse.DistributedDataParallel(network(None), device_mesh=mesh["dp"])
    for _ in range((first, second)[trial]):
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    with forgetting():
        done = None
        if trial == 0:
            done, _ = train(model, torch.ones(2, 4), lambda step, _: ask(rank, "call") if (rank, step) == (0, 2) else 0)
        dist.barrier()
        if trial == 1:
            if rank == 2:
                sleep(0.2)
            done, _ = train(model, torch.ones(2, 4))
        dist.barrier()
    return done


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("first", "second"), [(0, 9), (40, 1)])
def test_groups_whose_steps_are_not_together_each_stop_together(ranks, first, second):
    assert ranks(apart, first, second, size=4) == [2 + DELAY, 2 + DELAY, 1, 1]


def failing(rank, size, fails):
    """One rank of each group fails in a backward, and the program trains on."""
    mesh = mesh_of_four()
    model = dpfuse.DistributedDataParallel(network(mesh["tp"]), device_mesh=mesh["dp"])

    def fail(grad):
        raise ZeroDivisionError

    with forgetting():
        for step in range(1, MOST + 1):
            if (rank, step) == (2, 3):
                dpfuse.request_stop()
            with ExitStack() as stack:
                if step == fails:
                    stack.enter_context(pytest.raises((ZeroDivisionError, dpfuse.DPFuseError)))
                    if mesh.get_local_rank("dp") == 0:
                        stack.callback(next(model.parameters()).register_hook(fail).remove)
                model(torch.ones(2, 4)).sum().backward()
            if model.stop_requested:
                return step
        return MOST


@pytest.mark.parametrize("fails", [3, 3 + DELAY])
def test_ranks_whose_backward_has_failed_stop_with_the_others(ranks, fails):
    assert ranks(failing, fails, size=4) == [3 + DELAY] * 4


def uneven(rank, size, asker):
    """The ranks with the first replica have fewer batches, and go on without inputs."""
    mesh = mesh_of_four()
    model = dpfuse.DistributedDataParallel(network(mesh["tp"]), device_mesh=mesh["dp"])
    done = 0
    with forgetting():
        with model.join():
            for _ in range((2, MOST)[mesh.get_local_rank("dp")]):
                if (rank, done) == (asker, 4):
                    dpfuse.request_stop("me")
                model(torch.ones(2, 4)).sum().backward()
                done += 1
                if model.stop_requested:
                    break
        return done, str(model.stop_reason)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("asker", [2, 3])
def test_ranks_without_inputs_hear_it(ranks, asker):
    why = f"rank {asker} has asked: me"
    assert ranks(uneven, asker, size=4) == [(2, why)] * 2 + [(5 + DELAY, why)] * 2


def keys(rank, size):
    mesh = mesh_of_four()
    groups = (mesh[name].get_group() for name in ("dp", "tp"))
    return [groups_around(group, [mesh], 0, late=False)._key for group in groups]


def test_wrappers_over_two_dimensions_of_one_mesh_do_not_hear_each_other(ranks):
    """They may average a different number of times."""
    over_dp, over_tp = zip(*ranks(keys, size=4), strict=True)
    assert len({*over_dp}) == len({*over_tp}) == 1
    assert over_dp[0] != over_tp[0]


def alone(rank, size):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    model = dpfuse.DistributedDataParallel(network(mesh["tp"]), device_mesh=mesh["dp"])
    with forgetting():
        return train(model, torch.ones(2, 4), lambda step, _: ask(rank, "call") if (rank, step) == (1, 3) else None)


def test_groups_of_one_rank_stop_together(ranks):
    assert ranks(alone, size=4) == [(3 + DELAY, "rank 1 has asked: me1")] * 4


def without_store(rank, size):
    mesh = mesh_of_four()
    with mock.patch("dpfuse.stopping.mesh_groups.default_store") as store:
        store.return_value.check.side_effect = dist.DistStoreError("its server has ended")
        store.return_value.compare_set.side_effect = dist.DistStoreError("its server has ended")
        model = dpfuse.DistributedDataParallel(network(None), device_mesh=mesh["dp"])
    with forgetting():
        return train(model, torch.ones(2, 4), lambda step, _: ask(rank, "call") if (rank, step) == (2, 3) else None)


def test_where_the_store_has_ended_a_group_stops_alone(ranks):
    expected = [(3 + DELAY, "rank 2 has asked: me2"), (MOST, "")] * 2
    assert ranks(without_store, size=4) == expected


def unmeshed(rank, size, kind):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) if kind == "one dimension" else None
    with mock.patch.object(MeshGroups, "__init__", side_effect=AssertionError):
        model = dpfuse.DistributedDataParallel(network(None), device_mesh=mesh)
    with forgetting():
        return train(model, torch.ones(2, 4), lambda step, _: ask(rank, "call") if (rank, step) == (1, 3) else None)


@pytest.mark.parametrize("kind", ["one dimension", "no mesh"])
def test_where_the_group_is_the_mesh_nothing_changes(ranks, kind):
    assert ranks(unmeshed, kind) == [(3, "rank 1 has asked: me1")] * 2
