"""One of two NCCL ranks that share the first GPU: `python -m tests.gpu.two_ranks RANK STORE`.

Prints each kind of wrapper that it has checked.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dpfuse
from dpfuse.engine import assembly
from dpfuse.engine.exchanges import in_place as in_place_exchange
from tests.distributed.wires.hard_gradients import sent

SIZE = 2
STEPS = 4
WRAPS = {
    "views": lambda module: dpfuse.DataParallel(module, None, 0.05, 0.01),
    "private": lambda module: dpfuse.DataParallel(module, None, 0.05, 0.01, gradient_as_bucket_view=False),
    "torch's face": lambda module: dpfuse.DistributedDataParallel(module, bucket_cap_mb=0.05),
    "in place": lambda module: dpfuse.DataParallel(module, None, 0.05, 0.01, gradient_as_bucket_view=False),
    "deterministic": lambda module: dpfuse.DataParallel(module, None, 0.05, 0.01, deterministic=True),
    "bfloat16": lambda module: dpfuse.DataParallel(module, None, 0.05, 0.01, wire_dtype=torch.bfloat16),
    "bfloat16 in float32": lambda module: dpfuse.DataParallel(
        module, None, 0.05, 0.01, wire_dtype=(torch.bfloat16, torch.float32)
    ),
    "eight bits": lambda module: dpfuse.DataParallel(module, None, 0.05, 0.01, wire_dtype=torch.float8_e4m3fn),
}
WIRES = {"bfloat16": torch.bfloat16, "bfloat16 in float32": torch.bfloat16, "eight bits": torch.float8_e4m3fn}


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(31 * step + rank)).cuda()


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(module(x).square().sum(), list(module.parameters())))


def mean(both: list[Tensor], wire: torch.dtype) -> Tensor:
    """Each half rounded to what travels, their sum rounded again: two numbers have but one sum."""
    first, second = (sent((gradient * 0.5).flatten().cpu(), wire) for gradient in both)
    return sent(first + second, wire).view(both[0].shape).cuda()


def check(kind: str, rank: int) -> None:
    torch.manual_seed(rank)  # the wrapper is to send rank 0's weights
    model = WRAPS[kind](
        nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 7)).cuda()
    )
    bare = copy.deepcopy(model.module)
    wire = WIRES.get(kind, torch.float32)
    for step in range(STEPS):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        both = zip(*(gradients(bare, batch(other, step)) for other in range(SIZE)), strict=True)
        for (name, param), pair in zip(model.module.named_parameters(), both, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, mean(list(pair), wire)), f"{kind}: {name} in step {step}"


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    assembly.LEAST = 0  # private gradients are unpacked early, however small
    dist.init_process_group("nccl", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE)
    large = in_place_exchange.LARGE
    for kind in WRAPS:
        in_place_exchange.LARGE = 1 if kind == "in place" else large
        check(kind, rank)
        print(kind, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
