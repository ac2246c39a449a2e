"""What a record says of the machine, the software and the commit that it was measured with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe", "machine_name"]

ROOT = Path(__file__).resolve().parents[1]


def machine_name(*, gpu: bool) -> str:
    """The GPU's name in small letters and hyphens, or `cpu` and the number of cores."""
    if not gpu:
        return f"cpu{_cores()}"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def describe(*, gpu: bool) -> dict[str, Any]:
    """Facts as JSON holds them; None for what is absent."""
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "pytest_benchmark": _version("pytest-benchmark"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": None if (status := _git("status", "--porcelain")) is None else bool(status),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
