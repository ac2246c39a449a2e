"""Train the network of the demo on 1, 2, 3 and 4 ranks, one job after the other, to weights with the same bits.

    python examples/same_bits.py

A step has 8 micro-batches, on any number of ranks. Four places make the bits independent of that number. [1] The
wrapper adds gradients in one tree over the micro-batches. [2] No layer has statistics over the samples of a rank. [3]
The loop takes this rank's numbers. [4] The number decides which samples a micro-batch has.

The table has a hash of all weights and optimizer states for each number of ranks. The exit code is 0 only if all ranks
of all jobs have the same hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import fashion_mnist
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import dpfuse

CPU = torch.device("cpu")  # all jobs compute on the same kind of device, however many GPUs there are
MICRO_BATCHES = 8  # of a step, over all ranks
SIZE = 12  # images of a micro-batch
JOBS = (1, 2, 3, 4)  # ranks of the jobs


def network() -> nn.Module:
    """Return the network of the demo, with LayerNorm in place of BatchNorm, and with dropout."""
    layers = fashion_mnist.network(CPU, seed=0)
    assert isinstance(layers, nn.Sequential)
    for parent in list(layers.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.BatchNorm1d):
                setattr(parent, name, nn.LayerNorm(layer.num_features))  # [2]
    layers.insert(len(layers) - 1, nn.Dropout(0.1))
    return layers


def samples_of(step: int, number: int, count: int) -> torch.Tensor:
    """Return the indices of the samples of one micro-batch. An incomplete last step of an epoch is left out.

    Args:
        step: from 0.
        number: of the micro-batch in its step.
        count: the number of samples.
    """
    epoch, place = divmod(step, count // (MICRO_BATCHES * SIZE))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    first = (place * MICRO_BATCHES + number) * SIZE
    return order[first : first + SIZE]


def train(options: argparse.Namespace) -> int:
    """Train as one rank of a job, and note the hash and the seconds."""
    if dpfuse.init_parallel_env(timeout=fashion_mnist.PATIENCE) is None:
        sys.exit("start it with: python examples/same_bits.py")
    data = fashion_mnist.load(options.data, options.limit, CPU)
    model = dpfuse.DataParallel(network(), fixed_micro_batches=MICRO_BATCHES)  # [1]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    pictures, labels = fashion_mnist.normalised(data.train_images, CPU), data.train_labels
    if len(labels) < MICRO_BATCHES * SIZE:
        sys.exit(f"{len(labels)} images are too few for a step of {MICRO_BATCHES} micro-batches of {SIZE}")
    dealt = set()
    dist.barrier()
    start = perf_counter()
    for step in range(options.steps):
        for number in model.micro_batches():  # [3]
            batch = samples_of(step, number, len(labels))  # [4]
            F.cross_entropy(model(pictures[batch]), labels[batch]).backward()
            dealt.add(number)
        optimizer.step()
        optimizer.zero_grad()
    seconds = perf_counter() - start
    noted = {"hash": hash_of(model, optimizer), "seconds": seconds, "dealt": sorted(dealt), "data": data.name}
    notes_of(options.notes, dist.get_rank(), dist.get_world_size()).write_text(json.dumps(noted))
    dist.destroy_process_group()
    return 0


def hash_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of all bits of the weights and of the optimizer's states."""
    digest = hashlib.sha256()
    for param in model.parameters():
        for tensor in (param.detach(), *optimizer.state[param].values()):
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def notes_of(folder: Path, rank: int, ranks: int) -> Path:
    """Return the file in which a rank of a job notes its results."""
    return folder / f"rank-{rank}-of-{ranks}.json"


def compare(options: argparse.Namespace) -> int:
    """Train in four jobs, of 1 to 4 ranks.

    Returns:
        0 if all ranks of all jobs have the same hash, else 1.
    """
    environment = os.environ | {"DPFUSE_BACKEND": "gloo", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as name:
        for ranks in JOBS:
            words = ["-m", "dpfuse.launch", "--nproc_per_node", str(ranks), __file__, "--notes", name]
            words += ["--steps", str(options.steps), "--data", str(options.data), "--limit", str(options.limit)]
            job = subprocess.run([sys.executable, *words], env=environment, check=False)
            if job.returncode:
                sys.exit(f"the job of {ranks} rank(s) ended with exit code {job.returncode}, expected 0")
        return report(Path(name), options.steps)


def report(folder: Path, steps: int) -> int:
    """Print the hash and the seconds of each job.

    Returns:
        0 if all ranks of all jobs have the same hash, else 1.
    """
    noted = {ranks: [read(notes_of(folder, rank, ranks)) for rank in range(ranks)] for ranks in JOBS}
    table = Table("ranks", "micro-batches", "hash of the training", "seconds")
    for ranks, results in noted.items():
        deal = " | ".join(" ".join(map(str, result["dealt"])) for result in results)
        hashes = sorted({result["hash"] for result in results})  # more than one where ranks differ
        seconds = max(result["seconds"] for result in results)
        table.add_row(str(ranks), deal, ", ".join(hashes), f"{seconds:.1f}")
    Console().print(table)
    everyone = [result for results in noted.values() for result in results]
    if len({result["hash"] for result in everyone}) == 1:
        print(f"all {len(everyone)} ranks of {len(JOBS)} jobs have the same bits after {steps} steps", end="")
        print(f" of {MICRO_BATCHES} micro-batches, on {everyone[0]['data']}")
        return 0
    print("FAILED: the bits depend on the number of ranks")
    return 1


def read(path: Path) -> dict[str, Any]:
    """Return the results of a rank."""
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the jobs, or train as a rank of one."""
    options = parse(arguments)
    return compare(options) if options.notes is None else train(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description="The same bits on 1, 2, 3 and 4 ranks.", formatter_class=formatter)
    folder = os.environ.get("DPFUSE_DATA") or Path(__file__).resolve().parent.parent / "data"
    parser.add_argument("--steps", type=fashion_mnist.positive, default=20)
    parser.add_argument("--data", type=Path, default=folder, help="where the images are; or set DPFUSE_DATA")
    parser.add_argument("--limit", type=fashion_mnist.positive, default=10_000, help="use only so many images")
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)  # set for the ranks: where they note results
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
