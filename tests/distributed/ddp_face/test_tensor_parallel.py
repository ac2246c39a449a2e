"""Data parallel over one dimension of a mesh, tensor parallel over the other: gradients are those of torch's class."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dpfuse
from dpfuse import DistributedDataParallel


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x))))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(rank, size, views):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net, models = Mlp(), []
    for cls in (TorchDDP, DistributedDataParallel):
        mine = parallelize_module(copy.deepcopy(net), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        models.append(cls(mine, device_mesh=mesh["dp"], gradient_as_bucket_view=views, bucket_cap_mb=1e-4))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    alone = copy.deepcopy(net)
    for step in range(3):
        # Ranks of one tensor-parallel pair have the same batch.
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp")))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        for name, theirs in models[0].named_parameters():  # torch's class gives divided ones another place
            ours = models[1].get_parameter(name)
            assert torch.equal(local(ours.grad), local(theirs.grad)), name
        if step == 0:
            alone(x).square().sum().backward()
            mean = alone.head.bias.grad / size
            dist.all_reduce(mean)
            torch.testing.assert_close(local(models[1].module.head.bias.grad), mean)
        for optimizer in optimizers:
            optimizer.step()
    assert models[1].process_group.size() == 2
    assert list(models[1].state_dict()) == [f"module.{name}" for name in net.state_dict()]
    for name, theirs in models[0].named_parameters():
        assert torch.equal(local(models[1].get_parameter(name)), local(theirs))


def train_replicated(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net, gradients = Mlp(), []
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    for around in (
        lambda module: TorchDDP(module, device_mesh=mesh["dp"]),
        lambda module: dpfuse.replicate(module, mesh=mesh["dp"]),
    ):
        mine = parallelize_module(copy.deepcopy(net), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = around(mine)
        model(x).square().sum().backward()
        gradients.append({name: local(param.grad) for name, param in mine.named_parameters()})
    assert all(torch.equal(theirs, gradients[1][name]) for name, theirs in gradients[0].items())


def test_replicate_goes_with_tensor_parallel(ranks):
    ranks(train_replicated, size=4)


def test_a_sliced_mesh_goes_with_tensor_parallel(ranks):
    ranks(train, False, size=4)


def test_a_sliced_mesh_goes_with_views(ranks):
    ranks(train, True, size=4)
