"""Training curves by wire format: does training with a narrow wire reach the same loss?

    python -m bench.curves

Train two small networks on two ranks, once for each format and seed: a convolutional network on Fashion-MNIST, and a
transformer that reads the Python standard library byte by byte. Write a record and a picture. Formats are compared for
each seed; the noise is the difference between seeds of float32.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dpfuse
from bench.machine import ROOT, describe, machine_name
from bench.rank_group import on_ranks
from bench.record import write_record

sys.path.insert(0, str(ROOT / "examples"))  # has the data of the demo
import images

__all__ = ["FORMATS", "TASKS", "main"]

RANKS = 2
SEEDS = 3
BASE = "float32"
FORMATS: dict[str, dict[str, Any]] = {
    BASE: {},
    "float16": {"wire_dtype": torch.float16},
    "bfloat16": {"wire_dtype": torch.bfloat16},
    "bfloat16, fp32 sum": {"wire_dtype": (torch.bfloat16, torch.float32)},
    "bfloat16 + feedback": {"wire_dtype": torch.bfloat16, "error_feedback": True},
    "e4m3": {"wire_dtype": torch.float8_e4m3fn},
    "e4m3 + feedback": {"wire_dtype": torch.float8_e4m3fn, "error_feedback": True},
    "e5m2": {"wire_dtype": torch.float8_e5m2},
    "e5m2 + feedback": {"wire_dtype": torch.float8_e5m2, "error_feedback": True},
}
POINTS = 20  # per curve
WITHIN = 2.0  # allowed difference of a format's mean, in standard deviations of float32's seeds

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A network with its data."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]  # this rank's next batch
    held_out: Callable[[], Batch]  # data for the test of the result
    steps: int
    learning_rate: float


@cache
def _pictures() -> images.Images:
    return images.load(ROOT / "data")


def _scaled(pictures: Tensor) -> Tensor:
    return pictures.unsqueeze(1).float().div_(127.5).sub_(1)


def _picture_batch(generator: torch.Generator) -> Batch:
    data = _pictures()
    chosen = torch.randint(len(data.train_labels), (64,), generator=generator)
    return _scaled(data.train_images[chosen]), data.train_labels[chosen]


def _held_out_pictures() -> Batch:
    data = _pictures()
    return _scaled(data.test_images), data.test_labels


def _picture_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128), nn.ReLU(),
        nn.Linear(128, images.CLASSES),
    )  # fmt: skip


CONTEXT = 64  # bytes that the transformer sees


@cache
def _text() -> tuple[Tensor, Tensor]:
    """Return the standard library's modules as bytes, for training and for the test."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def _windows(text: Tensor, starts: Tensor) -> Batch:
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def _text_batch(generator: torch.Generator) -> Batch:
    text, _ = _text()
    return _windows(text, torch.randint(len(text) - CONTEXT, (16,), generator=generator))


def _held_out_text() -> Batch:
    _, text = _text()
    return _windows(text, torch.arange(0, len(text) - CONTEXT, len(text) // 512)[:512])


class _Reader(nn.Module):
    """A transformer of two layers that predicts the next byte."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.bytes(rows) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        guesses: Tensor = self.head(hidden)
        return guesses.transpose(1, 2)


TASKS = {
    "Fashion-MNIST": Task(_picture_network, _picture_batch, _held_out_pictures, steps=600, learning_rate=1e-3),
    "standard library": Task(_Reader, _text_batch, _held_out_text, steps=500, learning_rate=2e-3),
}


def train(name: str, options: Mapping[str, Any], seed: int, steps: int, rows: int | None) -> dict[str, Any]:
    """Train `TASKS[name]` once, on every rank of the group, and test it on so many rows (None: on all).

    Returns:
        `curve`: mean training loss of this rank in each part of the training; `loss` and `accuracy` on the held-out
        data; `seconds` of the training.
    """
    task = TASKS[name]
    torch.manual_seed(seed)
    model = dpfuse.DataParallel(task.build(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), task.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.learning_rate, total_steps=steps)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    start = perf_counter()
    for _ in range(steps):
        inputs, targets = task.batch(generator)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    seconds = perf_counter() - start
    with torch.no_grad():
        inputs, targets = (part[:rows] for part in task.held_out())
        guesses = torch.cat([model.module(part) for part in inputs.split(256)])
    curve = [part.mean().item() for part in torch.stack(losses).tensor_split(min(POINTS, steps))]
    return {
        "curve": curve,
        "loss": F.cross_entropy(guesses, targets).item(),
        "accuracy": (guesses.argmax(1) == targets).float().mean().item(),
        "seconds": seconds,
    }


def train_all(
    name: str, formats: list[str], seeds: int, steps: int, rows: int | None
) -> dict[str, list[dict[str, Any]]]:
    """Train one task with every format and seed, in one group. Return results by format."""
    return {kind: [train(name, FORMATS[kind], seed, steps, rows) for seed in range(seeds)] for kind in formats}


def compare(results: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each format the difference of its held-out loss to float32 with the same seed, and the noise.

    Example:
        >>> runs = {"float32": [{"loss": 1.0}, {"loss": 1.2}], "e4m3": [{"loss": 1.1}, {"loss": 1.2}]}
        >>> [(row["format"], round(row["difference"], 3), row["within_noise"]) for row in compare(runs)]
        [('float32', 0.0, True), ('e4m3', 0.05, True)]
    """
    base = [run["loss"] for run in results[BASE]]
    noise = stdev(base) if len(base) > 1 else 0.0
    rows = []
    for kind, runs in results.items():
        differences = [run["loss"] - loss for run, loss in zip(runs, base, strict=True)]
        rows.append({
            "format": kind,
            "loss": mean(run["loss"] for run in runs),
            "difference": mean(differences),
            "noise": noise,
            "within_noise": mean(differences) <= WITHIN * noise,  # a lower loss is fine
        })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Train all tasks. Return 0 if every format is as good as float32, within the noise."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that everything runs")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="folder of the record")
    parser.add_argument("--picture", type=Path, default=ROOT / "bench" / "out" / "curves.png", help="the plot")
    options = parser.parse_args(arguments)
    began = datetime.now(timezone.utc)
    _pictures()  # download them before the ranks start
    tasks, measurements, ratios = {}, [], []
    for name, task in TASKS.items():
        steps = 4 if options.quick else task.steps
        seeds = 2 if options.quick else SEEDS
        rows = 256 if options.quick else None
        results = on_ranks(RANKS, "cpu", train_all, name, list(FORMATS), seeds, steps, rows)
        tasks[name] = {"steps": steps, "seeds": seeds, "parameters": sum(p.numel() for p in task.build().parameters())}
        measurements += [
            {"task": name, "format": kind, "seed": seed, **run}
            for kind, runs in results.items()
            for seed, run in enumerate(runs)
        ]
        ratios += [{"task": name, **row} for row in compare(results)]
    record = {
        "name": f"curves-{machine_name(gpu=False)}-{began:%Y-%m-%d}{'-quick' if options.quick else ''}",
        "date": began.isoformat(timespec="seconds"),
        "quick": options.quick,
        "command": "python -m bench.curves" + (" --quick" if options.quick else ""),
        "machine": describe(gpu=False),
        "data": _pictures().name,
        "tasks": tasks,
        "ratios": ratios,
        "measurements": measurements,
    }
    write_record(record, options.results / f"{record['name']}.json")
    draw(record, options.picture)
    for row in ratios:
        print(
            f"{row['task']:17} {row['format']:20} held-out loss {row['loss']:.4f}, {row['difference']:+.4f} from "
            f"float32; seeds of float32 differ by {row['noise']:.4f}"
        )
    return 0 if all(row["within_noise"] for row in ratios) else 1


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Plot the curves of all formats, one panel per task, as means over the seeds; below, differences to float32."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(record["tasks"]), figsize=(13, 8), layout="constrained", squeeze=False)
    for column, (name, facts) in enumerate(record["tasks"].items()):
        curves: dict[str, Tensor] = {}
        for kind in FORMATS:
            runs = [run["curve"] for run in record["measurements"] if (run["task"], run["format"]) == (name, kind)]
            curves[kind] = torch.tensor(runs)
        steps = torch.linspace(0, facts["steps"], curves[BASE].shape[1] + 1)[1:]
        for kind, curve in curves.items():
            axes[0][column].plot(steps, curve.mean(0), label=kind, linewidth=1)
            axes[1][column].plot(steps, (curve - curves[BASE]).mean(0), label=kind, linewidth=1)
        spread = curves[BASE].std(0)
        axes[1][column].fill_between(steps, -spread, spread, color="0.85", label="float32, seed to seed")
        axes[0][column].set(title=f"{name}: training loss", xlabel="step", yscale="log")
        axes[1][column].set(title="less that of float32, seed by seed", xlabel="step")
    axes[0][0].legend(fontsize=8)
    axes[1][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
