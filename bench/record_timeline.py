"""`python -m bench.record_timeline`: records the backward of ResNet-50 on two CPU ranks, and the cost of all-reduces.

It writes `bench/timelines/resnet50-cpu2.json`, which `bench_planner` uses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import dpfuse
from bench.large_models import ResNet50
from bench.rank_group import on_ranks

__all__ = ["FOLDER", "record"]

FOLDER = Path(__file__).parent / "timelines"
BATCH = 4
STEPS = 5


def record() -> dict[str, Any]:
    """Train on every rank until `autotune` is done. Return the timeline and the cost table as JSON values."""
    torch.manual_seed(0)
    model = dpfuse.DataParallel(ResNet50())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))
    tuning = dpfuse.autotune(model, steps=STEPS)
    while not tuning.done:
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    if tuning.timeline is None or tuning.cost is None:
        raise RuntimeError(tuning.explain())
    return {"timeline": tuning.timeline.to_json(), "cost": tuning.cost.to_json()}


def main() -> None:
    found = on_ranks(2, "cpu", record)
    path = FOLDER / "resnet50-cpu2.json"
    path.write_text(json.dumps(found) + "\n")
    print(path)


if __name__ == "__main__":
    main()
