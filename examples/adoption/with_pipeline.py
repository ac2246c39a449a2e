"""torch's pipeline parallelism: each stage is wrapped in `dpfuse.DistributedDataParallel`, over the stage's ranks.

    python -m dpfuse.launch --nproc_per_node 4 examples/adoption/with_pipeline.py

Four ranks are a mesh of 2 pipelines with 2 stages each. The line is [1]. GPipe runs 4 micro-batches; only the backward
of the last one synchronises. The program also runs with torch's DDP. Losses, gradients and weights must be equal bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checklist import Checklist, same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import dpfuse

STAGES = 2
MICRO_BATCHES = 4
BATCH = 64  # of each pipeline
STEPS = 10


def stage_of(number: int) -> nn.Module:
    """Return one half of the network."""
    torch.manual_seed(number)
    if number == 0:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def train(wrap: Callable[..., nn.Module], mesh: DeviceMesh) -> list[Tensor]:
    """Train, and return the last stage's losses, the gradients of every step, and the final weights."""
    number = mesh.get_local_rank("stage")
    model = wrap(stage_of(number), device_mesh=mesh["data"])  # [1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stage = PipelineStage(model, number, STAGES, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    pictures, labels = digits.dataset().tensors
    mine = slice(mesh.get_local_rank("data"), None, mesh["data"].size())
    values: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        part = slice(step * BATCH, (step + 1) * BATCH)
        losses: list[Tensor] = []
        if number == 0:
            schedule.step(pictures[mine][part])
        else:
            schedule.step(target=labels[mine][part], losses=losses)
        values += [loss.detach() for loss in losses]
        values += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
    return [*values, *model.parameters()]


def main() -> None:
    dpfuse.init_parallel_env()
    checklist = Checklist()
    if dist.get_world_size() % STAGES:
        raise SystemExit(f"got {dist.get_world_size()} ranks for pipelines of {STAGES} stages; expected 4")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // STAGES, STAGES), mesh_dim_names=("data", "stage"))
    ours = train(dpfuse.DistributedDataParallel, mesh)
    # Without this flag torch's class fails in its second step, with an internal error of its reducer.
    theirs = train(partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True), mesh)
    name = f"{STEPS} steps of {MICRO_BATCHES} micro-batches"
    checklist.check(f"{name}: losses, gradients and weights equal DDP's bitwise", same_bits(ours, theirs))
    checklist.end()


if __name__ == "__main__":
    main()
