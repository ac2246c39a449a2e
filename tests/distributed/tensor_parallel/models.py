"""No tests: modules that are divided over two ranks, meshes, and training beside one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dpfuse

WORDS, WIDTH = 12, 8


def mesh_of_four() -> DeviceMesh:
    """Return the mesh: ranks 0 and 1, and ranks 2 and 3, are tensor-parallel."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Tied(nn.Module):
    """A feed-forward layer between an embedding and a head with the same weight; only the layer is divided."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.norm(self.down(torch.relu(self.up(self.embedding(words))))))

    def divide(self, mesh):
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Sequence(Tied):
    """Its norm works on a part of the sequence, so the gradients of the norm are sums of both ranks."""

    def divide(self, mesh):
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
        }
        parallelize_module(self, mesh, plan)


class Everything(Tied):
    """All parameters are DTensors, the tied one too, and one does not divide evenly."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))
        self.odd = nn.Linear(WIDTH, 3)

    def forward(self, words):
        embedded = self.embedding(words) + self.shift
        logits = self.head(self.norm(self.down(torch.relu(self.up(embedded)))))
        return logits * (2 + self.odd(embedded).sum(-1, keepdim=True))

    def divide(self, mesh):
        def spread(name, module, mesh):
            for key, param in module.named_parameters(recurse=False):
                if name in ("up", "odd"):
                    module.register_parameter(key, nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)])))

        distribute_module(
            self,
            mesh,
            spread,
            lambda _, inputs, mesh: tuple(DTensor.from_local(each, mesh, [Replicate()]) for each in inputs),
            lambda _, output, mesh: output.redistribute(placements=[Replicate()]).to_local(),
        )
        self.head.weight = self.embedding.weight  # distribute_module has made two of it


class Attention(nn.Module):
    """Four heads."""

    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # its bias would have no gradient but rounding errors
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    """Two blocks, an embedding that is the head too, and attention of which each rank has half of the heads."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, words):
        x = self.embedding(words)
        for layer in range(2):
            x = x + self.attentions[layer](self.norms[2 * layer](x))
            x = x + self.downs[layer](torch.relu(self.ups[layer](self.norms[2 * layer + 1](x))))
        return self.head(x)

    def divide(self, mesh):
        plan = {"attentions.*.out": RowwiseParallel(), "ups.*": ColwiseParallel(), "downs.*": RowwiseParallel()}
        plan |= dict.fromkeys(("attentions.*.query", "attentions.*.key", "attentions.*.value"), ColwiseParallel())
        parallelize_module(self, mesh, plan)


def words_of(replica: int, step: int) -> Tensor:
    return torch.randint(0, WORDS, (3, 4), generator=torch.Generator().manual_seed(100 * step + replica))


def loss_of(model, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def made(kind: type, mesh: DeviceMesh | None = None):
    """Return a module of this kind with the same weights everywhere, divided over `mesh`."""
    torch.manual_seed(3)
    net = kind()
    if mesh is not None:
        net.divide(mesh)
    return net


FACES = {
    "DataParallel": lambda net, mesh: dpfuse.DataParallel(net, group=mesh["dp"].get_group()),
    "DistributedDataParallel": lambda net, mesh: dpfuse.DistributedDataParallel(net, device_mesh=mesh["dp"]),
    "replicate": lambda net, mesh: dpfuse.replicate(net, mesh=mesh["dp"]),
    "views": lambda net, mesh: dpfuse.DistributedDataParallel(
        net, device_mesh=mesh["dp"], gradient_as_bucket_view=True
    ),
}


def wrapper_of(model):
    """Return what averages: of a replicated module, the wrapper that it has inside."""
    return getattr(model, "replicated_by", model)
