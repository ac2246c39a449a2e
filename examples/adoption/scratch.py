"""A folder for checkpoints, the same on all ranks of this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

__all__ = ["shared_folder"]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder that rank 0 makes, and removes when all ranks are done."""
    with tempfile.TemporaryDirectory() as own:  # the folders of other ranks stay empty
        name = [own]
        dist.broadcast_object_list(name, src=0)
        yield Path(name[0])
        dist.barrier()
