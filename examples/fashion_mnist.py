"""Train a deep narrow network on Fashion-MNIST with dpfuse.DataParallel, and also with torch's DDP.

    python -m dpfuse.launch --nproc_per_node 2 examples/fashion_mnist.py

Three places make the training parallel: [1] joins the ranks, [2] wraps the network, [3] gives each rank its own images.
The rest is the same on one process, or compares the wrappers: dpfuse with its default arguments, and DDP in every mode
that this torch has. All train the same network on the same batches. They take turns every few steps, so that other load
of the machine slows all of them equally.
The exit code is 0 only if every check of the summary passed.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import checks
import images
import torch
import torch.distributed as dist
import torch.nn.functional as F
from display import Check, RaceDisplay, show_curve, show_summary
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse

WIDTH, BLOCKS = 64, 80  # 408 parameters and 243 buffers, 1.5 MB: many small tensors, as networks with many norms have
TURN = 20  # steps of one wrapper before the turn of the other
REQUIRED_ACCURACY = 0.87  # of the whole of Fashion-MNIST
DEFAULT = "torch DDP"  # with default arguments
PATIENCE = 420.0  # seconds to wait for the other ranks: one of them may still be downloading the images


class Block(nn.Module):
    """Adds a small correction to its input of shape [n, width]; five parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the corrected `x`."""
        return x + self.scale * F.relu(self.linear(self.norm(x)))


def network(device: torch.device, seed: int) -> nn.Module:
    """Return a network with BLOCKS blocks, whose parameters depend only on the seed."""
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, WIDTH),
        *[Block(WIDTH) for _ in range(BLOCKS)],
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, images.CLASSES),
    )  # fmt: skip
    return layers.to(device)


class Training:
    """One network in training, with its time and its losses."""

    def __init__(self, model: nn.Module, learning_rate: float, steps: int) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, learning_rate, total_steps=steps)
        self.losses: list[torch.Tensor] = []  # of this rank's part of each batch
        self.seconds = 0.0

    def train(self, pictures: torch.Tensor, labels: torch.Tensor, batches: Sequence[torch.Tensor]) -> None:
        """Train one step for each batch of indices."""
        dist.barrier()  # earlier work of the ranks is not part of this training's time
        start = perf_counter()
        for batch in batches:
            loss = F.cross_entropy(self.model(pictures[batch]), labels[batch])
            loss.backward()  # meanwhile the wrapper averages the gradients; when this returns they are final
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
        if pictures.is_cuda:
            torch.cuda.synchronize()
        self.seconds += perf_counter() - start


def shuffled_batches(count: int, size: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return this rank's batches of one epoch, as indices. An incomplete last batch is left out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    mine = order[dist.get_rank() :: dist.get_world_size()]  # [3] the same order everywhere, each rank its own part
    steps = count // (size * dist.get_world_size())
    return torch.split(mine[: steps * size], size)


@torch.no_grad()
def accuracy(model: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the fraction of pictures with the right label. Each rank evaluates a part of them."""
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = torch.zeros((), dtype=torch.int64, device=labels.device)
    for some, truth in zip(pictures[mine].split(1000), labels[mine].split(1000), strict=True):
        right += (model(some).argmax(dim=1) == truth).sum()
    dist.all_reduce(right)
    return right.item() / len(labels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, report.

    Returns:
        0 if every check passed, else 1; the same on every rank.
    """
    options = parse(arguments)
    device = choose_device()
    if dpfuse.init_parallel_env(timeout=PATIENCE) is None:  # [1] join the ranks
        sys.exit("start it with: python -m dpfuse.launch --nproc_per_node 2 examples/fashion_mnist.py")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0)

    console.print("Looking for Fashion-MNIST …")
    data = load(options.data, options.limit, device)
    console.print(f"Training on {data.name}, {data.origin}", highlight=False, markup=False, soft_wrap=True)
    labels, test_labels = data.train_labels.to(device), data.test_labels.to(device)
    pictures, test_pictures = normalised(data.train_images, device), normalised(data.test_images, device)

    steps_per_epoch = len(labels) // (options.batch_size * world_size)
    if steps_per_epoch == 0:
        sys.exit(f"{len(labels)} images are too few for a batch of {options.batch_size} on each of {world_size} ranks")
    steps = options.epochs * steps_per_epoch

    def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Training:
        return Training(wrap(network(device, options.seed)), options.learning_rate, steps)

    ours = wrapped(dpfuse.DistributedDataParallel)  # [2] wrap the network
    theirs = {mode: wrapped(partial(DistributedDataParallel, **arguments)) for mode, arguments in ddp_modes().items()}
    model = ours.model
    assert isinstance(model, dpfuse.DistributedDataParallel)

    named = {"dpfuse": ours} | theirs
    console.print(
        f"{world_size} ranks train one network {len(named)} times, in turns of {TURN} steps, {steps} steps each:\n"
        f"once with dpfuse, and with torch's DDP in {len(theirs)} modes. All must end with the same bits.",
        highlight=False,
        soft_wrap=True,
    )
    order, everyone = random.Random(options.seed), list(named.values())
    # Only dpfuse's communication is timed, which costs it a little.
    with dpfuse.time_communication(model) as communication, RaceDisplay(console, steps) as progress:
        for epoch in range(options.epochs):
            batches = shuffled_batches(len(labels), options.batch_size, options.seed + epoch)
            for start in range(0, steps_per_epoch, TURN):
                turn = batches[start : start + TURN]
                for training in order.sample(everyone, len(everyone)):  # the same order on every rank
                    training.train(pictures, labels, turn)
                loss = ours.losses[-1].item()
                seconds = {name: training.seconds for name, training in named.items()}
                progress.advance(len(turn), f"epoch {epoch + 1} of {options.epochs}, loss {loss:.3f}", seconds)

    losses = torch.stack(ours.losses).cpu()
    differs = [checks.first_difference(losses, torch.stack(each.losses).cpu()) for each in theirs.values()]
    first = min((step for step in differs if step is not None), default=None)
    where = "" if first is None else f" (on rank {rank} they differ from step {first} on)"
    weights = list(model.parameters())
    same_weights = all(all(map(checks.same_bits, weights, each.model.parameters())) for each in theirs.values())
    state = list(model.state_dict().values())
    reached = accuracy(model, test_pictures, test_labels)
    results = [
        Check(
            f"all {world_size} ranks hold bitwise equal weights and BatchNorm statistics",
            checks.equal_everywhere(state, device),
        ),
        Check(
            f"all {steps} losses of every rank equal DDP's bitwise, in each mode{where}",
            checks.true_everywhere(first is None, device),
        ),
        Check("the trained weights equal DDP's bitwise, in each mode", checks.true_everywhere(same_weights, device)),
    ]
    required = options.required_accuracy
    if required is None and data.name == images.FASHION_MNIST and options.limit is None:
        required = REQUIRED_ACCURACY
    if required is not None:
        results.append(Check(f"the accuracy, {reached:.2%}, is at least {required:.0%}", reached >= required))

    sent, exposed = mean_over_ranks([communication.seconds, communication.exposed], device)
    facts = {
        "data": f"{data.name}, {data.origin}",
        "images": f"{len(labels)} to train on, {len(test_labels)} to test",
        "test accuracy": f"{reached:.2%} after {steps} steps ({options.epochs} × {steps_per_epoch})",
        "ranks": f"{world_size} on {device.type}, {options.batch_size} images per rank and step",
        "communication": f"{sent:.2f} s from sent to landed, added up over {communication.collectives} all-reduces",
        "of it exposed": f"{exposed:.2f} s, {exposed / ours.seconds:.1%} of the training: backward could only wait",
        "speed": verdict(ours.seconds, {mode: each.seconds for mode, each in theirs.items()}),
    }
    races = {
        "": list(named),
        "steps/s": [f"{steps / each.seconds:.1f}" for each in named.values()],
        "seconds": [f"{each.seconds:.2f}" for each in named.values()],
        "last loss": [f"{each.losses[-1].item():.6f}" for each in named.values()],
    }
    console.print("\nThe loss of each step with dpfuse, on rank 0:", highlight=False)
    parts = torch.split(losses, steps_per_epoch)
    show_curve(console, {f"epoch {epoch + 1}": part.tolist() for epoch, part in enumerate(parts)})
    show_summary(console, facts, races, model.bucket_plan.explain(), results)
    dist.barrier()  # a launcher ends all ranks when one fails, but rank 0 must finish its report
    dist.destroy_process_group()
    return 0 if all(check.passed for check in results) else 1


def ddp_modes() -> dict[str, dict[str, bool]]:
    """Return the arguments of torch's DDP in each mode that this torch has; the first mode is the default."""
    modes = {DEFAULT: {}, "torch DDP, view": {"gradient_as_bucket_view": True}}
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        batched = {"batched_grad_copy": True}
        modes |= {"torch DDP, batched": batched, "torch DDP, view + batched": modes["torch DDP, view"] | batched}
    return modes


def verdict(ours: float, theirs: Mapping[str, float]) -> str:
    """Say plainly who is faster.

    Args:
        ours: seconds of dpfuse.
        theirs: seconds of DDP by mode, with `DEFAULT`.
    """
    fastest = min(theirs, key=lambda mode: theirs[mode])
    over_default, over_fastest = theirs[DEFAULT] / ours, theirs[fastest] / ours
    text = f"{over_default:.2f} times that of DDP with default arguments"
    if fastest != DEFAULT:
        text += f", {over_fastest:.2f} times that of its fastest mode here ({fastest.removeprefix(f'{DEFAULT}, ')})"
    return text if over_fastest >= 1 else f"{text}: dpfuse is NOT the fastest on this machine"


def load(folder: Path, limit: int | None, device: torch.device) -> images.Images:
    """Return the images. If they are missing, the first rank of each machine downloads them, and other ranks wait."""
    data = images.load(folder) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None
    dist.barrier()
    if data is None:
        data = images.load(folder, fetch=False)
    if not checks.equal_everywhere(data.tensors, device):
        sys.exit(f"the ranks have different images; on rank {dist.get_rank()}: {data.name}, {data.origin}")
    return data.first(limit)


def normalised(pictures: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the network's input [n, 1, 28, 28]: brightness with mean 0 and deviation 1 over Fashion-MNIST."""
    return pictures.to(device).unsqueeze(1).float().div_(255).sub_(0.286).div_(0.353)


def choose_device() -> torch.device:
    """Return a GPU for each rank of this machine, or the CPU for all."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault("DPFUSE_BACKEND", "gloo")
        return torch.device("cpu")
    torch.backends.cudnn.deterministic = True  # else two trainings of one network would give different results
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def mean_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return each value's mean over the ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [value / dist.get_world_size() for value in total.tolist()]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description="Train on Fashion-MNIST, with dpfuse beside DDP.", formatter_class=formatter
    )
    folder = os.environ.get("DPFUSE_DATA") or Path(__file__).resolve().parent.parent / "data"
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--batch-size", type=positive, default=64, help="images per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="at its highest; it rises, then falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", type=Path, default=folder, help="where the images are, or are put; or set DPFUSE_DATA"
    )
    parser.add_argument("--limit", type=positive, help="use only so many images to train and to test")
    parser.add_argument("--required-accuracy", type=float, help=f"{REQUIRED_ACCURACY} on the whole of Fashion-MNIST")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Parse a number that is at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
