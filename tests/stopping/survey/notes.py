"""What a rank of the survey writes down: the samples of each step, what it has saved, and how it has ended."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Notes", "hash_of", "read_notes"]


class Notes:
    """The notes of this rank, a line of JSON each.

    Args:
        folder: of the trial.
        part: the name of the job: "first" or "rest".
    """

    def __init__(self, folder: Path, part: str) -> None:
        self._path = folder / f"{part}-{dist.get_rank()}.jsonl"

    def write(self, **facts: Any) -> None:
        """Add a line."""
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def read_notes(folder: Path, part: str) -> list[list[dict[str, Any]]]:
    """The notes of each rank of a job."""
    files = sorted(folder.glob(f"{part}-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def hash_of(net: nn.Module) -> str:
    """A number for the bits of all weights."""
    data = b"".join(param.detach().contiguous().view(torch.uint8).numpy().tobytes() for param in net.parameters())
    return hashlib.sha256(data).hexdigest()[:16]
