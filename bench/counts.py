"""Counts one step's torch operators, GPU launches and copies in a profiler's trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Counts", "count"]


class Counts(NamedTuple):
    """Counts of one step."""

    operators: int  # torch operators that the host called, nested ones included
    launches: int  # kernels, copies and fills on the GPU
    host_to_device: int  # copies to the GPU
    packs: int  # packs of dpfuse; on the GPU its kernels
    unpacks: int


def count(step: Callable[[], object], *, cuda: bool) -> Counts:
    """Profile one step. The step should have run a few times before."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="dpfuse-bench-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    names: dict[str, list[str]] = {}
    for event in events:
        if event.get("ph") == "X":
            names.setdefault(event.get("cat", ""), []).append(event.get("name", ""))
    kernels = names.get("kernel", [])
    copies = names.get("gpu_memcpy", [])
    marks = kernels if cuda else names.get("user_annotation", [])
    pack, unpack = ("_flatten_kernel", "_unflatten_kernel") if cuda else ("dpfuse::pack", "dpfuse::unpack")
    return Counts(
        operators=len(names.get("cpu_op", [])),
        launches=len(kernels) + len(copies) + len(names.get("gpu_memset", [])),
        host_to_device=sum("HtoD" in name for name in copies),
        packs=sum(name.startswith(pack) for name in marks),
        unpacks=sum(name.startswith(unpack) for name in marks),
    )
