"""Facts about the machine and the software, for reports."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dpfuse.job.devices import cpu_count
from dpfuse.version import __version__

__all__ = ["machine_facts", "software_versions"]


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return facts about the machine as JSON values; None for a fact that is missing."""
    gpu, name = device.type == "cuda", platform.uname()
    return {
        "cpu": _cpu(),
        "cores": cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "system": f"{name.system} {name.machine}",
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "gpus": torch.cuda.device_count() if gpu else 0,
    }


def software_versions() -> dict[str, Any]:
    """Return versions by name; None for software that is missing."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "dpfuse": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
