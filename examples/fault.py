"""Train on two ranks of which one has another learning rate: under torch's DDP, and beside it under dpfuse.

    python -m dpfuse.launch --nproc_per_node 2 examples/fault.py

Both wrappers have their default arguments, the same network and the same samples. A row of the table says how far the
weights of the ranks are apart, or what a wrapper has said. The training under dpfuse ends as soon as it has said that
the learning rates differ. The exit code is 0 only if every check at the end passed.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable

import checks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from display import Check, show_checks
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dpfuse

RATES = (0.1, 0.2)  # the learning rate of each rank
STEPS = 400
SHOWN = (1, 10, 50, 100, 200, STEPS)  # steps with a row
SAMPLES, INPUTS, CLASSES = 32, 32, 10  # samples per rank and step
QUESTIONS = 1000  # inputs on which the models of the ranks are compared at the end
CODE = "DPF-L07"  # of other learning rates
PATIENCE = 300.0  # seconds to wait for the other rank
CPU = torch.device("cpu")


class Training:
    """One wrapped network in training, with all that Python was warned of meanwhile."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        hidden = 64
        layers = (nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.model = wrap(nn.Sequential(*layers, nn.Linear(hidden, CLASSES)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATES[dist.get_rank()])
        self.said: list[str] = []

    def step(self, samples: torch.Tensor, labels: torch.Tensor) -> list[str]:
        """Train one step, and return what was said in it."""
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            F.cross_entropy(self.model(samples), labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        texts = [str(warning.message) for warning in heard]
        self.said += texts
        return texts

    @property
    def named(self) -> bool:
        """Whether it was said that the learning rates differ; both ranks say it in the same step."""
        return any(CODE in text for text in self.said)

    def apart(self) -> str:
        """Say how far the weights of the ranks are apart. Both ranks must call it."""
        one, other = of_both_ranks(nn.utils.parameters_to_vector(self.model.parameters()).detach())
        return f"weights apart by up to {(one - other).abs().max().item():.2g}"


def of_both_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor of each rank. Both ranks must call it."""
    both = [torch.empty_like(tensor) for _ in RATES]
    dist.all_gather(both, tensor)
    return both


def main() -> int:
    """Train with both wrappers, and show what each says.

    Returns:
        0 if every check passed, else 1; the same on every rank.
    """
    os.environ["DPFUSE_BACKEND"] = "gloo"
    if dpfuse.init_parallel_env(timeout=PATIENCE) is None or dist.get_world_size() != len(RATES):
        sys.exit("start it with: python -m dpfuse.launch --nproc_per_node 2 examples/fault.py")
    rank = dist.get_rank()
    console = Console(quiet=rank != 0)
    text = f"A mistake: rank 0 trains with the learning rate {RATES[0]}, rank 1 with {RATES[1]}. Who says so?"
    console.print(text, highlight=False, soft_wrap=True)

    theirs, ours = Training(DistributedDataParallel), Training(dpfuse.DistributedDataParallel)
    table = Table("step", "torch DDP", "dpfuse")
    draw = torch.Generator().manual_seed(rank)
    with Live(table, console=console, auto_refresh=False) as live:
        for step in range(1, STEPS + 1):
            samples = torch.randn(SAMPLES, INPUTS, generator=draw)
            labels = samples[:, :CLASSES].argmax(dim=1)
            ended = ours.named
            cells = [theirs.step(samples, labels), [] if ended else ours.step(samples, labels)]
            if any(cells):
                texts = ("\n".join(map(shortened, said)) or "(no word)" for said in cells)
                table.add_row(str(step), *map(Text, texts))
                live.refresh()
            if step in SHOWN:
                table.add_row(str(step), theirs.apart(), "(training ended)" if ended else ours.apart())
                live.refresh()

    questions = torch.randn(QUESTIONS, INPUTS, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = of_both_ranks(theirs.model(questions).argmax(dim=1))
    different = int((one != other).sum())
    answers = f"the two models that torch DDP trained answer {different} of {QUESTIONS} questions differently"
    results = [
        Check("torch DDP said nothing, on both ranks", checks.true_everywhere(not theirs.said, CPU)),
        Check(answers, different > 0),
        Check("dpfuse named the learning rates, on both ranks", checks.true_everywhere(ours.named, CPU)),
    ]
    show_checks(console, results)
    dist.barrier()  # a launcher ends all ranks when one fails, but rank 0 must finish its report
    dist.destroy_process_group()
    return 0 if all(check.passed for check in results) else 1


def shortened(text: str) -> str:
    """Return the first two sentences of what a wrapper said."""
    sentences = re.split(r"(?<=\.) ", text)
    return " ".join(sentences[:2]) + (" …" if len(sentences) > 2 else "")


if __name__ == "__main__":
    sys.exit(main())
