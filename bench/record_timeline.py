"""`python -m bench.record_timeline [MODEL …]`: records backwards on two CPU ranks, and the cost of their all-reduces.

It writes `bench/timelines/MODEL-cpu2.json`, which `bench_planner` uses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import dpfuse
from bench.large_models import BertLarge, Gpt2, ResNet50, VitLarge
from bench.models import tiny_2000
from bench.rank_group import on_ranks
from dpfuse.tune import CostTable, Timeline

__all__ = ["FOLDER", "MODELS", "load", "record"]

FOLDER = Path(__file__).parent / "timelines"
STEPS = 5

Training = tuple[nn.Module, Callable[[nn.Module], Tensor]]  # a model, and its loss on one batch


def _of_images(network: Callable[[], nn.Module]) -> Training:
    images, labels = torch.randn(4, 3, 224, 224), torch.randint(1000, (4,))
    return network(), lambda model: cross_entropy(model(images), labels)


def _of_tokens(network: Callable[[], nn.Module], words: int) -> Training:
    tokens = torch.randint(words, (2, 128))
    return network(), lambda model: model(tokens).square().mean()


def _small_layers() -> Training:
    """Return 75 residual layers of width 192: 300 parameters of 11 MB together, on 64 rows."""
    network = nn.Sequential(*[_Residual(192) for _ in range(75)])
    rows = torch.randn(64, 192)
    return network, lambda model: model(rows).square().mean()


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + relu(self.layer(self.norm(x)))


MODELS: dict[str, Callable[[], Training]] = {
    "resnet50": lambda: _of_images(ResNet50),
    "bert_large": lambda: _of_tokens(BertLarge, 30522),
    "gpt2": lambda: _of_tokens(Gpt2, 50257),
    "vit_large": lambda: _of_images(VitLarge),
    "tiny_2000": tiny_2000,
    "layers_300": _small_layers,
}


def load(name: str) -> tuple[Timeline, CostTable]:
    """Return the recorded backward of one of `MODELS`, and the cost of all-reduces on the machine that recorded it."""
    found = json.loads((FOLDER / f"{name}-cpu2.json").read_text())
    recorded, cost = found["timeline"], found["cost"]
    specs = tuple(
        dpfuse.ParamSpec(row["name"], tuple(row["shape"]), row["dtype"], row["device"], row["sparse"])
        for row in recorded["params"]
    )
    ready = tuple(row["ready"] for row in recorded["params"])
    timeline = Timeline(specs, ready, recorded["backward_end"], recorded["wire_dtype"])
    return timeline, CostTable(tuple(cost["sizes"]), tuple(cost["seconds"]))


def record(name: str) -> dict[str, Any]:
    """Train on every rank until `autotune` is done. Return the timeline and the cost table as JSON values."""
    torch.manual_seed(0)
    network, loss_of = MODELS[name]()
    model = dpfuse.DataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tuning = dpfuse.autotune(model, steps=STEPS)
    while not tuning.done:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    if tuning.timeline is None or tuning.cost is None:
        raise RuntimeError(tuning.explain())
    return _as_json(tuning.timeline, tuning.cost)


def _as_json(timeline: Timeline, cost: CostTable) -> dict[str, Any]:
    """Return what `load` reads."""
    params = [
        {
            "name": spec.name,
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "device": spec.device,
            "sparse": spec.sparse,
            "ready": ready,
        }
        for spec, ready in zip(timeline.specs, timeline.ready, strict=True)
    ]
    return {
        "timeline": {"backward_end": timeline.backward_end, "wire_dtype": timeline.wire_dtype, "params": params},
        "cost": {"sizes": cost.sizes, "seconds": cost.seconds},
    }


def main(names: list[str]) -> None:
    """Record these models, or all."""
    for name in names or MODELS:
        found = on_ranks(2, "cpu", partial(record, name))
        path = FOLDER / f"{name}-cpu2.json"
        path.write_text(json.dumps(found) + "\n")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
