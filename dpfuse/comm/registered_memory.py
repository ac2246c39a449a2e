"""Memory for buckets that a process group's back end has registered, as NCCL can. Knows no bucket.

NCCL leaves undefined what happens where some ranks pass registered memory and others do not, and wants a buffer to
start equally far into its segment on every rank. So it is used only where the user asked for it and where every
rank can register memory. Ranks compare that when they wrap, before the first bucket.

Each rank registers its memory alone (`symm=False` in torch's words). A symmetric registration is a collective call, at
each new segment of the allocator. Ranks whose allocators differ would then wait for each other forever.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["VARIABLE", "can_register", "zeros"]

VARIABLE = "DPFUSE_REGISTERED_BUFFERS"


def can_register(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether buckets on `device` are to lie in registered memory of `group`: asked for, offered, and tried.

    A group whose communicator does not exist yet refuses: `init_process_group(..., device_id=...)` makes it at once.

    Raises:
        ValueError: the environment variable is neither 0 nor 1.
    """
    wish = os.environ.get(VARIABLE, "0")
    if wish not in ("0", "1"):
        raise ValueError(f"{VARIABLE} is {wish!r}, expected 0 or 1. Correct it, or unset it.")
    if wish == "0" or device.type != "cuda" or group.size() == 1:
        return False
    try:
        backend: Any = group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return False
        backend.allocate_tensor(1, dtype=torch.float32, device=device)
    except (AttributeError, RuntimeError, ValueError):  # an older torch, another back end, no communicator yet
        return False
    return True


def zeros(numel: int, *, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """A flat tensor of zeros in registered memory of `group`, which can: [numel].

    Raises:
        RuntimeError: there is no memory left. Ordinary memory instead would be this rank's alone.
    """
    backend: Any = group._get_backend(device)
    flat: Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
    return flat.zero_()  # padding is summed, too, and has to stay zero
