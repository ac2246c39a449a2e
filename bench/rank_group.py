"""Runs a measurement in a new process group: in this process for one rank, in new processes for several ranks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.interleave import one_thread

__all__ = ["agreed", "on_ranks"]


def on_ranks(size: int, device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` on every rank of a group. Return rank 0's result as JSON values.

    Args:
        size: number of ranks.
        device: `"cpu"` for gloo, `"cuda"` for NCCL with one GPU per rank.
        function: importable if there are several ranks.
        args: of the function.
    """
    with tempfile.TemporaryDirectory(prefix="dpfuse-bench-") as folder:
        if size == 1:
            _run(0, 1, device, folder, function, args)
        else:
            spawn(_run, (size, device, folder, function, args), nprocs=size)
        return json.loads(Path(folder, "result.json").read_text())


def agreed(value: int, device: str) -> int:
    """Return rank 0's `value` on every rank."""
    tensor = torch.tensor([value], device=device)
    dist.broadcast(tensor, 0)
    return int(tensor.item())


@one_thread()
def _run(rank: int, size: int, device: str, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
    )
    try:
        result = function(*args)
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(result))
        if size > 1:
            # A rank that ends first would close the connections of other ranks.
            dist.barrier()
    finally:
        dist.destroy_process_group()
