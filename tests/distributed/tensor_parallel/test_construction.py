"""Which DTensors can be averaged, and what the ranks have in common when a model with them is wrapped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dpfuse
from tests.distributed.tensor_parallel.models import (
    FACES,
    Everything,
    Tied,
    local,
    loss_of,
    made,
    mesh_of_four,
    words_of,
)


@pytest.mark.ranks(size=4)
def test_the_first_replica_gives_its_weights_to_the_other(rank, size):
    mesh = mesh_of_four()
    net = made(Everything, mesh["tp"])
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            local(tensor).add_(mesh.get_local_rank("dp"))
    FACES["DataParallel"](net, mesh)
    expected = made(Everything, mesh["tp"]).state_dict()
    assert all(torch.equal(local(value), local(expected[name])) for name, value in net.state_dict().items())


@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("around", [dpfuse.DataParallel, dpfuse.DistributedDataParallel, dpfuse.replicate])
def test_a_mesh_with_ranks_of_the_group_is_refused(rank, size, around):
    net = made(Tied, mesh_of_four()["tp"])
    text = r"'up\.weight' is a DTensor over the mesh .* the ranks \[[01, 23]+\] of that mesh are in the group"
    with pytest.raises(ValueError, match=text):
        around(net)  # over all four


@pytest.mark.ranks(size=4)
def test_fsdp_parameters_are_refused(rank, size):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of_four()
    net = nn.Linear(8, 8)
    fully_shard(net, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"'weight' is a DTensor over the mesh .*FSDP averages its own"):
        dpfuse.DistributedDataParallel(net, device_mesh=mesh["dp"])


@pytest.mark.ranks(size=4)
def test_sums_that_are_not_added_up_are_refused(rank, size):
    mesh, net = mesh_of_four(), nn.Linear(8, 8)
    net.weight = nn.Parameter(DTensor.from_local(net.weight.data, mesh["tp"], [Partial()]))
    with pytest.raises(ValueError, match=r"'weight' is a DTensor with placements .*sums that are not added up"):
        dpfuse.DistributedDataParallel(net, device_mesh=mesh["dp"])


@pytest.mark.ranks(size=4)
def test_a_group_whose_ranks_have_other_parts_is_refused(rank, size):
    net = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh_of_four()["tp"], {"0": ColwiseParallel()})
    across = [dist.new_group(members) for members in ([0, 3], [1, 2])]
    with pytest.raises(dpfuse.DPFuseError, match=r"(?s)the wrapped module.*part \[?\(?[01]"):
        dpfuse.DataParallel(net, group=across[rank in (1, 2)])


@pytest.mark.ranks(size=4)
def test_ranks_that_divide_a_parameter_otherwise_are_refused(rank, size):
    mesh, net = mesh_of_four(), nn.Linear(8, 8)
    placement = Shard(0) if mesh.get_local_rank("dp") == 0 else Shard(1)
    net.weight = nn.Parameter(distribute_tensor(net.weight.data, mesh["tp"], [placement]))
    with pytest.raises(dpfuse.DPFuseError, match=r"parameter weight"):
        dpfuse.DataParallel(net, group=mesh["dp"].get_group())


@pytest.mark.ranks(size=4)
def test_a_mesh_of_one_rank_beside_the_group_is_no_hindrance(rank, size):
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    net = nn.Linear(8, 8)
    net.weight = nn.Parameter(distribute_tensor(net.weight.data, mesh["tp"], [Replicate()]))
    net.bias = nn.Parameter(distribute_tensor(net.bias.data, mesh["tp"], [Replicate()]))
    model = dpfuse.DistributedDataParallel(net)
    x = DTensor.from_local(torch.full((1, 8), rank + 1.0), mesh["tp"], [Replicate()])
    model(x).sum().backward()
    assert torch.equal(local(net.weight.grad), torch.full((8, 8), 2.5))


@pytest.mark.slow
@pytest.mark.ranks(size=4)
def test_a_parameter_with_other_memory_is_followed(rank, size):
    mesh = mesh_of_four()
    net = made(Tied, mesh["tp"])
    model = FACES["DistributedDataParallel"](net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    for step in range(80):  # weights are compared once in 64 steps
        optimizer.zero_grad()
        loss_of(model, words_of(mesh.get_local_rank("dp"), step)).backward()
        if step == 2 and rank > 1:
            moved = DTensor.from_local(local(net.up.weight).detach().clone(), mesh["tp"], [Shard(0)])
            moved.grad = net.up.weight.grad
            torch.utils.swap_tensors(net.up.weight, nn.Parameter(moved))
            net.up.weight.grad = moved.grad
        optimizer.step()
    sync = model._sync
    assert sync is not None
    assert sync.weights is not None
    assert sync.weights.known == {}


@pytest.mark.ranks(size=4)
def test_a_model_that_is_converted_is_followed(rank, size):
    mesh = mesh_of_four()
    net, expected = made(Tied, mesh["tp"]), made(Tied, mesh["tp"]).double()
    models = [FACES["DataParallel"](each, mesh) for each in (net, expected)]
    words = words_of(mesh.get_local_rank("dp"), 0)
    for model in models:
        loss_of(model, words).backward()
    for model in models:
        model.double()
        model.zero_grad()
        loss_of(model, words).backward()
    assert net.up.weight.grad.dtype is torch.float64
    assert torch.equal(local(net.up.weight.grad), local(expected.up.weight.grad))


@pytest.mark.ranks(size=4)
def test_a_parameter_is_frozen_and_unfrozen(rank, size):
    mesh = mesh_of_four()
    net = made(Tied, mesh["tp"])
    model = FACES["DistributedDataParallel"](net, mesh)
    words = words_of(mesh.get_local_rank("dp"), 0)
    loss_of(model, words).backward()
    expected = local(net.up.weight.grad).clone()
    for frozen in (True, True, False, False):
        model.zero_grad()
        net.up.weight.requires_grad_(not frozen)
        loss_of(model, words).backward()
        assert (net.up.weight.grad is None) is frozen
    torch.testing.assert_close(local(net.up.weight.grad), expected, rtol=0, atol=0)


@pytest.mark.ranks(size=4)
def test_a_layer_that_is_divided_after_wrapping_is_followed(rank, size):
    mesh = mesh_of_four()
    net, expected = made(Tied), made(Tied, mesh["tp"])
    models = [FACES["DataParallel"](each, mesh) for each in (net, expected)]
    words = words_of(mesh.get_local_rank("dp"), 0)
    for model in models:
        loss_of(model, words).backward()
    net.divide(mesh["tp"])
    for model in models:
        model.zero_grad()
        loss_of(model, words).backward()
    for name, param in net.named_parameters():
        assert torch.equal(local(param.grad), local(expected.get_parameter(name).grad)), name


@pytest.mark.ranks(size=4)
def test_a_gradient_that_is_no_dtensor_is_an_error_on_all_ranks(rank, size):
    mesh = mesh_of_four()
    net = made(Tied, mesh["tp"])
    model = FACES["DataParallel"](net, mesh)
    net.up.weight.grad = torch.zeros(16, 8)
    with pytest.raises((RuntimeError, TypeError), match=r"mixed|of a DTensor of shape"):
        loss_of(model, words_of(0, 0)).backward()


@pytest.mark.ranks(size=4)
def test_parts_of_a_divided_module_are_replicated_before_the_whole(rank, size):
    mesh = mesh_of_four()
    net, expected = made(Tied, mesh["tp"]), made(Tied, mesh["tp"])
    dpfuse.replicate(net.up, mesh=mesh["dp"])
    models = [dpfuse.replicate(each, mesh=mesh["dp"]) for each in (net, expected)]
    for model in models:
        loss_of(model, words_of(mesh.get_local_rank("dp"), 0)).backward()
    for name, param in net.named_parameters():
        assert torch.equal(local(param.grad), local(expected.get_parameter(name).grad)), name


class Sum(nn.Module):
    """Two parameters whose gradients torch keeps in the same memory, that of the gradient of the input."""

    def __init__(self, mesh):
        super().__init__()
        self.left, self.right = (nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()])) for _ in range(2))

    def forward(self, x):
        return (self.left.to_local() + self.right.to_local() + x).square()


@pytest.mark.ranks(size=4)
@pytest.mark.parametrize("face", ["DistributedDataParallel", "views"])
def test_gradients_that_share_memory_get_their_own(rank, size, face):
    mesh = mesh_of_four()
    net, replica = Sum(mesh["tp"]), mesh.get_local_rank("dp")
    model = FACES[face](net, mesh)
    x = torch.full((4,), float(replica), requires_grad=True)
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.full((4,), 4.0 + 2.0 * replica))
        assert torch.equal(local(net.left.grad), torch.full((4,), 5.0))
        torch.testing.assert_close(model.clip_grad_norm_(1.0).item(), 5.0 * 8**0.5)
        torch.testing.assert_close(local(net.right.grad), torch.full((4,), 8**-0.5))


@pytest.mark.ranks(size=4)
def test_gradients_of_another_dtype_are_averaged_in_theirs(rank, size):
    mesh, net = mesh_of_four(), nn.Sequential(nn.Linear(8, 8, bias=False).bfloat16())
    net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    net[0].weight.grad_dtype = torch.float32
    model = FACES["views"](net, mesh)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 8), 1.0 + mesh.get_local_rank("dp"), dtype=torch.bfloat16)).sum().backward()
        assert net[0].weight.grad.dtype is torch.float32
        assert torch.equal(local(net[0].weight.grad), torch.full((4, 8), 1.5))
