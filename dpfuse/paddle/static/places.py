"""The devices on which programs run: Paddle's places, as torch devices."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dpfuse.arguments import integer

__all__ = ["CPUPlace", "CUDAPlace", "cpu_places", "cuda_places", "place_of"]


def CPUPlace() -> torch.device:  # noqa: N802 - Paddle's name
    """Return the CPU as a device.

    Example:
        >>> from dpfuse.paddle.static import CPUPlace
        >>> CPUPlace()
        device(type='cpu')
    """
    return torch.device("cpu")


def CUDAPlace(id: int) -> torch.device:  # noqa: N802 - Paddle's name
    """Return the visible GPU number `id` as a device.

    Example:
        >>> from dpfuse.paddle.static import CUDAPlace
        >>> CUDAPlace(0)
        device(type='cuda', index=0)
    """
    return torch.device("cuda", integer("id", id, 0))


def cpu_places(device_count: int | None = None) -> list[torch.device]:
    """Return several CPU devices. Each gets a replica.

    Args:
        device_count: their number; None reads the environment variable CPU_NUM. If that is not set, there is one
            device, the variable is set to 1, and a warning is shown once.

    Raises:
        TypeError, ValueError: `device_count` or CPU_NUM is not an integer above 0.

    Example:
        >>> from dpfuse.paddle.static import cpu_places
        >>> cpu_places(2)
        [device(type='cpu'), device(type='cpu')]
    """
    if device_count is None:
        device_count = _cpu_num()
    return [torch.device("cpu")] * integer("device_count", device_count, 1)


def cuda_places(device_ids: Sequence[int] | None = None) -> list[torch.device]:
    """Return GPUs. Each gets a replica.

    Args:
        device_ids: indices among the visible GPUs. None means those of FLAGS_selected_gpus, which the launcher sets, or
            else all.

    Raises:
        ValueError: There is no GPU, or an index is not visible.

    Example:
        >>> from dpfuse.paddle.static import cuda_places
        >>> cuda_places([0])  # doctest: +SKIP
        [device(type='cuda', index=0)]
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible:
        raise ValueError(
            "no CUDA device is visible, expected at least one; run on the CPU with use_cuda=False (CPU_NUM devices)"
        )
    source = "device_ids"
    if device_ids is None and (selected := os.environ.get("FLAGS_selected_gpus", "").strip()):  # noqa: SIM112
        source = "FLAGS_selected_gpus"
        if not re.fullmatch(r"\d+(\s*,\s*\d+)*", selected):
            raise ValueError(f"FLAGS_selected_gpus is {selected!r}; expected indices such as '0,1'")
        device_ids = [int(word) for word in selected.split(",")]
    ids = list(range(visible)) if device_ids is None else list(device_ids)
    wrong = [index for index in ids if not 0 <= index < visible]
    if wrong or not ids or len(set(ids)) < len(ids):
        raise ValueError(f"{source} is {ids}; expected distinct indices from 0 to {visible - 1}, the visible GPUs")
    return [torch.device("cuda", index) for index in ids]


def place_of(place: Any) -> torch.device:
    """Return the device for a user's value: None, a torch device, `"cpu"`, `"gpu:0"` or `"cuda:0"`."""
    if place is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not isinstance(place, (str, torch.device)):
        raise TypeError(f"place must be CPUPlace(), CUDAPlace(0), 'cpu' or 'gpu:0', got {place!r}")
    found = re.fullmatch(r"(cpu|gpu|cuda)(?::(\d+))?", str(place))
    if found is None:
        raise ValueError(f"place is {place!r}; expected 'cpu' or 'gpu:0'")
    return torch.device("cpu") if found[1] == "cpu" else cuda_places([int(found[2] or 0)])[0]


def _cpu_num() -> int:
    text = os.environ.get("CPU_NUM")
    if text is None:
        os.environ["CPU_NUM"] = "1"
        warnings.warn(
            "CPU_NUM is not set: the program runs on one CPU device, and CPU_NUM is now 1. Set it to the number of "
            "CPU devices; each gets a replica.",
            UserWarning,
            stacklevel=4,
        )
        return 1
    if not re.fullmatch(r"\s*[1-9]\d*\s*", text):
        raise ValueError(f"CPU_NUM is {text!r}; expected the number of CPU devices, at least 1")
    return int(text)
