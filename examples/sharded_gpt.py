"""A small GPT on the source of Python's standard library. Each rank keeps one part of AdamW.

    python -m dpfuse.launch --nproc_per_node 2 examples/sharded_gpt.py --checkpoints checkpoints

The model and the batches are those of docs/start/first_training.md. Places [1] to [3] belong to the sharded optimizer;
the rest is the program for a plain one, which `--plain` uses. Both have the same losses. Parameter groups, a schedule,
accumulation, clipping and checkpoints are used as usual: run the command again with more `--steps`, and it resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import dpfuse

PAGE = Path(__file__).resolve().parent.parent / "docs" / "start" / "first_training.md"
WARM_UP = 10  # steps


class AdamW(torch.optim.AdamW):
    """AdamW that remembers its instances: a sharded optimizer makes one for each bucket, and their states are counted.

    A program that needs no count passes `torch.optim.AdamW` itself.
    """

    instances: ClassVar[weakref.WeakSet[AdamW]] = weakref.WeakSet()

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.instances.add(self)


def state_bytes() -> int:
    """Return the bytes behind the optimizer's states on this rank, without single numbers such as `step`."""
    states = [state for one in AdamW.instances for state in one.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def tutorial(file: str) -> types.ModuleType:
    """Return a program of the tutorial's page as a module, which other programs of the page can import."""
    block = re.search(rf"^```python\n(# {re.escape(file)}\n.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.M)
    if block is None:
        raise ValueError(f"{PAGE} has no block that begins with '# {file}', expected one")
    module = types.ModuleType(file.removesuffix(".py"))
    sys.modules[module.__name__] = module
    exec(compile(block[1], file, "exec"), module.__dict__)
    return module


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices decay, biases and norms do not."""
    params = list(net.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    """Return the factor of the learning rate: it rises to 1, then falls with the square root of the step."""
    return min((step + 1) / WARM_UP, math.sqrt(WARM_UP / (step + 1)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from the newest checkpoint on. Rank 0 prints losses, and the bytes of the states of each rank."""
    options = parse(arguments)
    gpt, training = tutorial("gpt.py"), tutorial("train.py")
    if dpfuse.init_parallel_env() is None:
        sys.exit("start it with: python -m dpfuse.launch --nproc_per_node 2 examples/sharded_gpt.py")
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), dpfuse.ParallelEnv().device_type
    torch.manual_seed(0)
    net = gpt.GPT(options.layers).to(device)
    # Buckets that never change: from the first step on, both optimizers add up the norm in the same order.
    model = dpfuse.DataParallel(net, plan=dpfuse.plan_buckets(net, comm_buffer_size=1))
    if options.plain:
        optimizer: torch.optim.Optimizer = AdamW(groups(net), lr=2e-3)
    else:
        optimizer = dpfuse.ShardedOptimizer(model, AdamW, groups(net), lr=2e-3)  # [1]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    first = 0
    if options.checkpoints is not None:
        first = dpfuse.load_checkpoint(options.checkpoints, model, optimizer, scheduler=scheduler).step
    if rank == 0:
        print(f"step {first} of {options.steps}: {'resumes' if first else 'begins'}", flush=True)
    text, losses = training.corpus(), []
    for step in range(first, options.steps):
        generator = torch.Generator().manual_seed(step * world_size + rank)  # other batches, also after a resume
        total = torch.zeros((), device=device)
        for micro in range(options.micro):
            tokens, targets = (part.to(device) for part in training.batch(text, generator))
            with model.no_sync(enabled=micro < options.micro - 1):
                loss = model(tokens, targets) / options.micro
                loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(options.clip)  # [2] torch's function cannot: no rank has whole gradients
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}", flush=True)
        if options.checkpoints is not None and ((step + 1) % options.every == 0 or step + 1 == options.steps):
            # [3] on all ranks: each has a part of the state
            dpfuse.save_checkpoint(options.checkpoints, model, optimizer, step=step + 1, scheduler=scheduler)

    nbytes = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(nbytes, torch.tensor(state_bytes(), device=device))
    if rank == 0:
        count = sum(param.numel() for param in model.parameters())
        each = ", ".join(f"{value.item()}" for value in nbytes)
        print(f"{count} parameters; bytes of optimizer states on each rank: {each}", flush=True)
        if options.losses is not None:
            options.losses.write_text(json.dumps(losses))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train a small GPT with a sharded AdamW.", formatter_class=formatter)
    parser.add_argument("--plain", action="store_true", help="keep the whole optimizer on each rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro", type=int, default=2, help="backwards for each step")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--checkpoints", type=Path, help="folder; without one, none is loaded or saved")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--losses", type=Path, help="file for the loss of each step, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
