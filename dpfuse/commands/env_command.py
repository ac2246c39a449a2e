"""`dpfuse env`: what a report of a bug needs to say about machine and software. Starts nothing, and asks no rank."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from dpfuse.commands.machine import machine_facts, software_versions
from dpfuse.job.devices import visible_gpus

__all__ = ["environment_facts", "show_environment"]

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
# Variables whose values are numbers and choices. Of others only the names are shown: a value may be a secret.
HARMLESS = ("DPFUSE_KERNELS", "OMP_NUM_THREADS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "WORLD_SIZE")
PREFIXES = ("DPFUSE_", "NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "CUDA_", "TRITON_", "PADDLE_")


def show_environment(*, as_json: bool) -> int:
    """Print the facts, one per line or as JSON, and return 0."""
    facts = environment_facts()
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
            print(f"{name:<{width}}  {'none' if shown is None else shown}")
    return 0


def environment_facts() -> dict[str, Any]:
    """Return facts about this machine and its software as JSON values; None for what is missing.

    Example:
        >>> from dpfuse.commands.env_command import environment_facts
        >>> "gloo" in environment_facts()["back ends"]
        True
    """
    machine = machine_facts(torch.device("cpu"))
    set_here = sorted(name for name in os.environ if name in HARMLESS or name.startswith(PREFIXES))
    return {
        **software_versions(),
        "system": platform.platform(),
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "memory, GB": _memory(),
        "GPUs": [_gpu(index) for index in range(visible_gpus())],
        "back ends": [name for name in BACKENDS if _has(name)],
        "variables": [f"{name}={os.environ[name]}" if name in HARMLESS else name for name in set_here],
    }


def _has(backend: str) -> bool:
    try:
        return bool(dist.is_available() and dist.is_backend_available(backend))
    except (AttributeError, ValueError):  # a name that this torch does not know
        return False


def _gpu(index: int) -> str:
    facts = torch.cuda.get_device_properties(index)
    return f"{facts.name} (sm_{facts.major}{facts.minor}, {facts.total_memory >> 30} GB)"


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
