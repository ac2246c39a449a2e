"""Profiles the pack of one bucket on a GPU: `python -m bench.profile_pack FOLDER`.

Writes a trace that a browser can show, and a table of kernels and host calls: how long the host takes for one launch,
how long the kernel runs, and whether anything is copied to the device in steady state.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dpfuse_kernels import PointerTable, Slot, flatten

__all__ = ["main", "packing"]

TENSORS, NUMEL = 400, 16_384  # 25 MiB of float32
WARM_UP, PACKS = 5, 10
UPLOAD = "Memcpy HtoD"


def packing(
    device: torch.device, tensors: int = TENSORS, numel: int = NUMEL
) -> tuple[list[torch.Tensor], PointerTable]:
    """Return gradients and the table of their bucket."""
    grads = [torch.full((numel,), float(index), device=device) for index in range(tensors)]
    slots = [Slot(f"p{index}", index * numel, (numel,), (1,)) for index in range(tensors)]
    return grads, PointerTable(torch.zeros(tensors * numel, device=device), slots, torch.float32)


def main(folder: str) -> int:
    """Profile, write trace and table to `folder`, and return 1 if something was copied to the device."""
    cuda = torch.cuda.is_available()
    grads, table = packing(torch.device("cuda" if cuda else "cpu"), *(() if cuda else (8, 64)))
    for _ in range(WARM_UP):
        flatten(grads, table, scale=0.5, matched=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as profiled:
        for _ in range(PACKS):
            flatten(grads, table, scale=0.5, matched=True)
        if cuda:
            torch.cuda.synchronize()
    out = Path(folder)
    profiled.export_chrome_trace(str(out / "pack-trace.json"))
    averages = profiled.key_averages()
    text = averages.table(sort_by="self_cuda_time_total" if cuda else "self_cpu_time_total", row_limit=30)
    (out / "pack-profile.txt").write_text(text + "\n")
    print(text)
    uploads = [event.key for event in averages if UPLOAD in event.key]
    print(f"{PACKS} packs of {len(grads)} tensors; copied to the device: {uploads or 'nothing'}")
    return 1 if uploads else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
