"""The settings of a process that numbers depend on: versions, threads, switches of torch. No value of a variable."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

from dpfuse.trace_file import FORMAT
from dpfuse.version import __version__

__all__ = ["process_settings"]


def process_settings() -> dict[str, Any]:
    """Return the settings as JSON values. Called inside a process group."""
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "format": FORMAT,
        "rank": dist.get_rank(),
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "versions": {
            "dpfuse": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "mkldnn": torch.backends.mkldnn.enabled,
    }
