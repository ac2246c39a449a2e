"""Programs made at random in a mesh of two dimensions: the module is divided over one, and averaged over the other.

The rule and what a program does are those of `program`, with the ranks of the data-parallel dimension. The plain module
is not divided. Each process has a whole one, and the processes of one tensor-parallel group have the same.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.random_programs.program import OPTIONS, WEIGHTS, Net, Program

__all__ = ["MeshProgram"]

REFUSED = {"accumulate_in_buckets", "metrics"}  # beside DTensors
COLUMNS = {"output_layouts": Replicate()}  # of which each rank gets the whole output
ROWS = {"input_layouts": Replicate()}
# How the two layers of a branch are divided. What passes between them is a DTensor, since it may not divide evenly.
BRANCHES: list[dict[str, ParallelStyle]] = [
    {},
    {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()},
    {"0": ColwiseParallel(**COLUMNS)},
    {"2": RowwiseParallel(**ROWS)},
    {"0": RowwiseParallel(**ROWS), "2": ColwiseParallel(**COLUMNS)},
]
EMBEDDINGS: list[ParallelStyle | None] = [None, ColwiseParallel(**COLUMNS), RowwiseParallel(**ROWS)]
HEADS: list[ParallelStyle | None] = [None, ColwiseParallel(**COLUMNS), RowwiseParallel(**ROWS)]


class MeshNet(Net):
    """Its inputs have an embedding as well."""

    def __init__(self, shared: random.Random) -> None:
        super().__init__(shared)
        self.embedding = nn.Embedding(5, 4).double()

    def forward(self, x: Tensor, use: Sequence[int] = (), recompute: str = "", fail: str = "") -> dict[str, Tensor]:
        numbers = (x.detach()[:, 0].abs() * 3).long().remainder(5)
        return super().forward(x + self.embedding(numbers), use, recompute, fail)


class MeshProgram(Program):
    """One program. What it does is the same on all ranks; batches are the same in a tensor-parallel group.

    Args:
        mesh: of the dimensions "dp" and "tp".
        seed: of all choices.
    """

    # A penalty needs second derivatives, which the tensor-parallel layers of torch do not have.
    weights: ClassVar = {name: weight for name, weight in WEIGHTS.items() if name != "train_with_a_penalty"}
    # The sums over the parts of a product have another order. A norm over two rows, and the first step of an optimizer
    # that divides by gradients, enlarge the difference.
    tolerance = 1e-5
    possible: ClassVar = [
        {"check_finite": "warn"} if "check_finite" in option else option
        for option in OPTIONS
        if not REFUSED.intersection(option)
    ]

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        self._mesh = mesh
        super().__init__(mesh.get_local_rank("dp"), mesh["dp"].size(), seed, sharded=False)

    def _nets(self) -> tuple[Net, Net]:
        shared, tensor_parallel = self._shared, self._mesh["tp"]
        net = MeshNet(shared)
        plain = copy.deepcopy(net)
        for branch in net.branches:
            self._divide(branch)
        if embedding := shared.choice(EMBEDDINGS):
            parallelize_module(net.embedding, tensor_parallel, embedding)
        if isinstance(net.norm, nn.LayerNorm) and shared.random() < 0.5:
            # Each rank has a part of the rows, so gradients of the norm are sums that are not added up.
            whole, rows = Replicate(), Shard(0)
            styles = (
                PrepareModuleInput(input_layouts=whole, desired_input_layouts=rows),
                SequenceParallel(sequence_dim=0),
                PrepareModuleOutput(output_layouts=rows, desired_output_layouts=whole),
            )
            for style in styles:
                parallelize_module(net.norm, tensor_parallel, style)
            self.log.append("norm over rows")
        if head := shared.choice(HEADS):
            for module in (net.head, net.tied):
                if module is not None:
                    parallelize_module(module, tensor_parallel, head)
            if net.tied is not None:
                net.tied.weight = net.head.weight
        return net, plain

    def _divide(self, branch: nn.Module) -> None:
        parallelize_module(branch, self._mesh["tp"], self._shared.choice(BRANCHES))

    def _ranks(self, face: str) -> dict[str, Any]:
        mesh = self._mesh["dp"]
        if face == "DataParallel":
            return {"group": mesh.get_group()}
        return {"mesh": mesh} if face == "replicate" else {"device_mesh": mesh}

    def _pair(self, ours: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(ours, DTensor):
            return ours.detach(), plain.detach()
        (placement,) = ours.placements
        part = plain.detach()
        if isinstance(placement, Shard):
            part = part.chunk(self._mesh["tp"].size(), placement.dim)[self._mesh.get_local_rank("tp")]
        else:
            assert isinstance(placement, Replicate), f"got {placement}, expected no sum that is not added up"
        return ours.detach().to_local(), part

    def _move(self, param: nn.Parameter, *, turns: bool) -> None:
        if not isinstance(param, DTensor):
            super()._move(param, turns=turns)
            return
        with torch.no_grad():
            local = param.to_local()
        local.data = local.data.clone()
