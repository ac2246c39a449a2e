"""Numbers of each backward in a log: printed, in TensorBoard, or in Weights & Biases without network.

    python -m dpfuse.launch --nproc_per_node 2 examples/log_metrics.py
    python -m dpfuse.launch --nproc_per_node 2 examples/log_metrics.py --to tensorboard
    python -m dpfuse.launch --nproc_per_node 2 examples/log_metrics.py --to wandb

TensorBoard and Weights & Biases need their packages, `tensorboard` and `wandb`. Both write into --folder.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import dpfuse

Log = Callable[[dict[str, float], int], None]
EVERY = 5  # steps


def printed(folder: str) -> Log:
    """Print some of the numbers."""
    names = ("exposed_seconds", "grad_norm", "noise_scale")
    return lambda metrics, step: print(f"step {step}:", ", ".join(f"{name} {metrics[name]:.3g}" for name in names))


def tensorboard(folder: str) -> Log:
    """Write event files into the folder."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(f"dpfuse/{name}", value, step)
        writer.flush()

    return log


def wandb(folder: str) -> Log:
    """Write an offline run into the folder; `wandb sync` uploads it later."""
    import wandb

    run = wandb.init(project="dpfuse", dir=folder, mode="offline", settings=wandb.Settings(silent=True))
    return lambda metrics, step: run.log({f"dpfuse/{name}": value for name, value in metrics.items()}, step=step)


LOGS = {"print": printed, "tensorboard": tensorboard, "wandb": wandb}


class Averaged:
    """The noise scale of many steps: the quotient of two averages, since an average of quotients means nothing.

    Args:
        keep: part of the old average that remains after each step.
    """

    def __init__(self, keep: float = 0.9) -> None:
        self._keep = keep
        self._square = self._variance = 0.0

    def add(self, metrics: dict[str, float]) -> float:
        """Take the estimates of one step. Return the noise scale, in batches of one rank."""
        self._square += (1 - self._keep) * (metrics["gradient_square"] - self._square)
        self._variance += (1 - self._keep) * (metrics["gradient_variance"] - self._variance)
        return self._variance / self._square if self._square > 0 else float("inf")


def main() -> None:
    """Train a small network for some steps, and log on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", choices=LOGS, default="print")
    parser.add_argument("--folder", default="runs")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("got no ranks; start it with `python -m dpfuse.launch --nproc_per_node 2 examples/log_metrics.py`")
    dpfuse.init_parallel_env()
    torch.manual_seed(0)
    model = dpfuse.DataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), metrics=EVERY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = LOGS[options.to](options.folder) if dist.get_rank() == 0 else None
    noise = Averaged()
    torch.manual_seed(dist.get_rank())
    for step in range(1, options.steps + 1):
        pictures = torch.randn(32, 64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), pictures[:, :10].argmax(1)).backward()
        optimizer.step()
        if step % EVERY == 1:
            metrics = model.metrics()
            metrics["noise_scale"] = noise.add(metrics)
            if log is not None:
                log(metrics, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
