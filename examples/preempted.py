"""Train on Fashion-MNIST until a cluster takes the machine away, and go on with another number of ranks.

    python -m dpfuse.launch --nproc_per_node 2 --requeue_exit 85 examples/preempted.py
    python examples/preempted.py --play

Four places make a training stop and go on: [1] notes signals, [2] deals the samples to any number of ranks, [3] loads
the newest checkpoint if there is one, and [4] asks in each step whether all ranks stop. If they do, the launcher ends
with exit code 85, and the same command goes on from there.

With `--play`, two ranks begin, three go on, and one trains to the end. The first two jobs are stopped: one of their
ranks gets SIGUSR1 in a random step. Then the samples are counted that the ranks have noted. The exit code is 0 only if
each was trained once per epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fashion_mnist
import torch
import torch.distributed as dist
import torch.nn.functional as F
from display import show_curve
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfuse
from dpfuse.data import ResumableBatchSampler

CPU = torch.device("cpu")
BATCH = 96  # images of one step, over all ranks
JOBS = (2, 3, 1)  # ranks of the jobs that are played
REQUEUE = 85  # exit code of a job that is to be started again


def network() -> nn.Module:
    """Return a small network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(options: argparse.Namespace) -> int:
    """Train from the newest checkpoint on, until the last epoch ends or a rank gets a signal."""
    if dpfuse.init_parallel_env(timeout=fashion_mnist.PATIENCE) is None:
        sys.exit("start it with: python -m dpfuse.launch --nproc_per_node 2 examples/preempted.py; or play it: --play")
    dpfuse.stop_on_signals()  # [1] SIGTERM and SIGUSR1
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = fashion_mnist.load(options.data, options.limit, CPU)
    pictures, labels = fashion_mnist.normalised(data.train_images, CPU), data.train_labels
    dataset = TensorDataset(pictures, labels, torch.arange(len(labels)))
    sampler = ResumableBatchSampler(dataset, max(1, BATCH // ranks))  # [2]
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = dpfuse.DataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    folder = options.checkpoints
    # [3] Only the order of the samples is random here, and the sampler knows it. So no other random state is needed.
    step = dpfuse.load_checkpoint(folder, model, optimizer, sampler=sampler, random_state=False).step
    if rank == 0:
        print(f"ranks: {ranks}; begins after step {step}, in epoch {sampler.epoch}, on {data.name}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with open(notes_of(folder, rank, ranks), "a", buffering=1) as notes:
        print(json.dumps({"pid": os.getpid(), "samples": len(dataset)}), file=notes)
        while sampler.epoch < options.epochs and not model.stop_requested:
            for batch, truth, numbers in sampler.track(loader):
                model.set_gradient_weight(len(truth))  # the last batches of an epoch may differ in size
                loss = F.cross_entropy(model(batch), truth)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                print(json.dumps([sampler.epoch, loss.item(), numbers.tolist()]), file=notes)
                if model.stop_requested:  # [4] the same answer on all ranks in the same step
                    break
    dpfuse.save_checkpoint(folder, model, optimizer, step=step, sampler=sampler)
    if rank == 0:
        print(f"saved after step {step}: {model.stop_reason or 'the training is complete'}", flush=True)
    return 0


def notes_of(folder: Path, rank: int, ranks: int) -> Path:
    """Return the file in which a rank notes each batch that it has trained."""
    return folder / f"rank-{rank}-of-{ranks}.jsonl"


def play(options: argparse.Namespace) -> int:
    """Train in three jobs, of which the first two are stopped by a signal to one rank.

    Returns:
        0 if each sample was trained once per epoch, else 1.
    """
    seed = random.randrange(10_000) if options.seed is None else options.seed
    print(f"playing with --seed {seed}", flush=True)
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        for ranks in JOBS:
            launch = ["-m", "dpfuse.launch", "--nproc_per_node", str(ranks), "--requeue_exit", str(REQUEUE), __file__]
            words = ["--checkpoints", name, "--epochs", str(options.epochs), "--data", str(options.data)]
            words += ["--limit", str(options.limit)]
            expected = 0 if ranks == JOBS[-1] else REQUEUE
            with subprocess.Popen([sys.executable, *launch, *words]) as job:
                if expected == REQUEUE:
                    send_a_signal(job, Path(name), ranks, options.epochs, draw)
            if job.returncode != expected:
                sys.exit(f"the job of {ranks} rank(s) ended with exit code {job.returncode}, expected {expected}")
        return report(Path(name), options.epochs)


def send_a_signal(job: subprocess.Popen[bytes], folder: Path, ranks: int, epochs: int, draw: random.Random) -> None:
    """Send SIGUSR1 to one rank of a job, after a random number of its steps."""
    rank, part = draw.randrange(ranks), draw.uniform(1 / 6, 1 / 3)
    path = notes_of(folder, rank, ranks)
    while job.poll() is None:
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and len(lines) - 1 >= part * epochs * json.loads(lines[0])["samples"] / BATCH:
            os.kill(json.loads(lines[0])["pid"], signal.SIGUSR1)
            print(f"SIGUSR1 to rank {rank} of {ranks}, after {len(lines) - 1} steps of this job", flush=True)
            return
        time.sleep(0.01)


def report(folder: Path, epochs: int) -> int:
    """Print the losses of all jobs, and how often each sample was trained.

    Returns:
        0 if that was once per epoch, else 1.
    """
    losses: dict[str, list[float]] = {}
    trained: Counter[tuple[int, int]] = Counter()  # epoch and sample
    samples = 0
    for ranks in JOBS:
        noted = [read(notes_of(folder, rank, ranks)) for rank in range(ranks)]
        samples = noted[0][0]["samples"]
        steps = list(zip(*(lines[1:] for lines in noted), strict=True))  # in each of them, a line of every rank
        losses[f"ranks: {ranks}"] = [
            sum(loss * len(batch) for _, loss, batch in step) / sum(len(batch) for *_, batch in step) for step in steps
        ]
        trained.update((epoch, number) for step in steps for epoch, _, batch in step for number in batch)
    print("\nthe loss of each step:")
    show_curve(Console(), losses)
    if trained == Counter((epoch, number) for epoch in range(epochs) for number in range(samples)):
        print(f"\neach of the {samples} samples was trained once per epoch, in {epochs} epoch(s)")
        return 0
    missed, again = epochs * samples - len(trained), sum(count > 1 for count in trained.values())
    print(f"\nFAILED: over {epochs} epoch(s), {missed} times a sample was not trained, {again} times more than once")
    return 1


def read(path: Path) -> list[Any]:
    """Return the lines of a rank's notes."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or play a training that is stopped twice."""
    options = parse(arguments)
    return play(options) if options.play else train(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="Train on Fashion-MNIST, stop and go on.", formatter_class=formatter)
    folder = os.environ.get("DPFUSE_DATA") or Path(__file__).resolve().parent.parent / "data"
    parser.add_argument("--play", action="store_true", help="play a training that is stopped twice")
    parser.add_argument("--seed", type=int, help="of the ranks and steps that are played; drawn if it is not given")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="where they are put")
    parser.add_argument("--epochs", type=fashion_mnist.positive, default=2)
    parser.add_argument("--data", type=Path, default=folder, help="where the images are; or set DPFUSE_DATA")
    parser.add_argument("--limit", type=fashion_mnist.positive, default=10_000, help="use only so many images")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
