"""Device meshes: a 1-D mesh instead of a process group, and a slice of a 2-D mesh with torch's tensor parallelism.

    python -m dpfuse.launch --nproc_per_node 4 examples/adoption/with_device_mesh.py

The lines are [1] and [2]. Both also run with torch's DDP. Losses and weights must be equal, bit for bit with two ranks.
With more ranks, gloo's order of additions depends on the sizes of the buckets, so the last bits may differ.
"""

from __future__ import annotations

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checklist import Checklist, same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dpfuse

STEPS = 10
BATCH = 32  # of each replica
TORCHS = nn.parallel.DistributedDataParallel


def train(model: nn.Module, mesh: DeviceMesh) -> list[Tensor]:
    """Train, and return losses and final weights. Each replica of the mesh has its own pictures."""
    named = sorted(model.named_parameters())  # before a forward, after which torch's class no longer has divided ones
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pictures, labels = digits.dataset().tensors
    values = []
    for step in range(STEPS):
        start = (step * mesh.size() + mesh.get_local_rank()) * BATCH
        part = slice(start, start + BATCH)
        loss = F.cross_entropy(model(pictures[part]), labels[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
    return [*values, *(local(param) for _, param in named)]


def replicated(wrapper: type[nn.Module], mesh: DeviceMesh) -> list[Tensor]:
    """Train with the whole network on every rank."""
    return train(wrapper(digits.network(), device_mesh=mesh), mesh)  # [1]


def sharded(wrapper: type[nn.Module], mesh: DeviceMesh) -> list[Tensor]:
    """Train with two layers split over the ranks of a replica. Gradients are averaged over the replicas."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    parallelize_module(network, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return train(wrapper(network, device_mesh=mesh["data"]), mesh["data"])  # [2]


def local(param: Tensor) -> Tensor:
    """Return this rank's part."""
    return param.to_local() if isinstance(param, DTensor) else param


def close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether both are equal except for rounding."""
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    results = [replicated(wrapper, flat) for wrapper in (dpfuse.DistributedDataParallel, TORCHS)]
    equal = same_bits(*results) if ranks <= 2 else close(*results)
    checklist.check(f"a 1-D mesh of {ranks}: losses and weights equal DDP's{' bitwise' if ranks <= 2 else ''}", equal)
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        equal = same_bits(*(sharded(wrapper, mesh) for wrapper in (dpfuse.DistributedDataParallel, TORCHS)))
        checklist.check("a slice of 2 x 2, with tensor parallelism: losses and weights equal DDP's bitwise", equal)
    checklist.end()


if __name__ == "__main__":
    main()
