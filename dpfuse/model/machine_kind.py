"""What of a machine and its libraries decides the bits of a computation."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["machine_kind"]


def machine_kind(device: torch.device) -> dict[str, str]:
    """Return what decides bits, by name. Where two machines differ in none of it, they are of one kind.

    Example:
        >>> import torch
        >>> from dpfuse.model.machine_kind import machine_kind
        >>> sorted(machine_kind(torch.device("cpu")))
        ['BLAS', 'instruction set', 'processor', 'torch']
    """
    kind = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        kind["GPU"] = torch.cuda.get_device_name(device)
        kind["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        return kind
    kind["processor"] = _processor()
    kind["instruction set"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    config = torch.__config__.show().splitlines()
    libraries = [line.strip(" -") for line in config if "Math Kernel Library" in line or "MKL-DNN" in line]
    kind["BLAS"] = "; ".join(libraries) or "that of this build of torch"
    return kind


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
