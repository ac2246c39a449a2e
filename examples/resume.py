"""Train on Fashion-MNIST, and continue after an interruption of any kind.

    python -m dpfuse.launch --nproc_per_node 2 --max_restarts 1 examples/resume.py --crash-at 100

Two calls make the training resume: [1] loads the newest checkpoint, if there is one, and [2] saves one every few steps.
The option `--crash-at` kills a rank in its first attempt. The launcher starts all ranks again. They end with the same
weights, bit for bit, as a training without interruption.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import fashion_mnist
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dpfuse


def network() -> nn.Module:
    """Return a small network with dropout. A resumed training must also continue its random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 7 * 7, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from the newest checkpoint on. Rank 0 prints its progress."""
    options = parse(arguments)
    if dpfuse.init_parallel_env() is None:
        sys.exit("start it with: python -m dpfuse.launch --nproc_per_node 2 --max_restarts 1 examples/resume.py")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = fashion_mnist.load(options.data, options.limit, torch.device("cpu"))
    pictures, labels = fashion_mnist.normalised(data.train_images, torch.device("cpu")), data.train_labels

    model = dpfuse.DataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(rank)  # from here on, each rank has its own dropout
    steps_per_epoch = len(labels) // (options.batch_size * world_size)
    steps = options.epochs * steps_per_epoch

    resumed = dpfuse.load_checkpoint(options.checkpoints, model, optimizer)  # [1] step 0 without a checkpoint
    if rank == 0:
        how = "begins" if resumed.path is None else f"resumes from {resumed.path}"
        print(f"step {resumed.step} of {steps}: {how}", flush=True)
    for step in range(resumed.step, steps):
        if step == options.crash_at and rank == world_size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)  # a crash on purpose: the rank cannot clean up
        epoch, position = divmod(step, steps_per_epoch)
        batch = fashion_mnist.shuffled_batches(len(labels), options.batch_size, epoch)[position]
        loss = F.cross_entropy(model(pictures[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.every == 0 or step + 1 == steps:
            dpfuse.save_checkpoint(options.checkpoints, model, optimizer, step=step + 1)  # [2]
            if rank == 0:
                print(f"step {step + 1} of {steps}: saved, loss {loss.item():.3f}", flush=True)

    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if rank == 0:
        print(f"the weights after {steps} steps: {weights[:16]}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST, and resume.", formatter_class=formatter)
    positive = fashion_mnist.positive
    folder = os.environ.get("DPFUSE_DATA") or Path(__file__).resolve().parent.parent / "data"
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="where they are put")
    parser.add_argument("--every", type=positive, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--crash-at", type=int, help="kill a rank before this step, in the first attempt")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--batch-size", type=positive, default=64, help="images per rank and step")
    parser.add_argument("--data", type=Path, default=folder, help="where the images are; or set DPFUSE_DATA")
    parser.add_argument("--limit", type=positive, help="use only so many images")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
