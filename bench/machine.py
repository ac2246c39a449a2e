"""The machine, the software and the commit of a record."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dpfuse.commands.machine import machine_facts, software_versions
from dpfuse.job.devices import cpu_count

__all__ = ["describe", "machine_name"]

ROOT = Path(__file__).resolve().parents[1]


def machine_name(*, gpu: bool) -> str:
    """Return the GPU's name in lower case with hyphens, or `cpu` and the number of cores."""
    if not gpu:
        return f"cpu{cpu_count()}"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def describe(*, gpu: bool) -> dict[str, Any]:
    """Return the facts as JSON values, None if one is missing."""
    return {
        **machine_facts(torch.device("cuda", 0) if gpu else torch.device("cpu")),
        **software_versions(),
        "pytest_benchmark": version("pytest-benchmark"),
        "deepspeed": version("deepspeed") if find_spec("deepspeed") else None,
        "commit": os.environ.get("DPFUSE_COMMIT") or _git("rev-parse", "HEAD"),  # there may be no .git
        "uncommitted_changes": None if (status := _git("status", "--porcelain")) is None else bool(status),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
