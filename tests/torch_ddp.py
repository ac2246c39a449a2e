"""torch's DistributedDataParallel, whatever release is installed, for tests that train beside it."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = ["TAKES", "TORCH", "needs_argument", "since_torch", "torch_ddp"]

TAKES = frozenset(inspect.signature(TorchDDP.__init__).parameters)
TORCH = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])


def torch_ddp(module: nn.Module, **options: Any) -> TorchDDP:
    """Wrap `module` with torch's class. An argument that an older torch knows by another name gets that name."""
    if "forward_sync_buffers" in options and "forward_sync_buffers" not in TAKES:
        options["broadcast_buffers"] = options.pop("forward_sync_buffers")
    return TorchDDP(module, **options)


def needs_argument(*names: str) -> pytest.MarkDecorator:
    """Skip where torch's class does not take these arguments: then there is nothing to compare with."""
    missing = sorted({*names} - TAKES)
    return pytest.mark.skipif(bool(missing), reason=f"torch {torch.__version__} has no {', '.join(missing)}")


def since_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skip under older releases, where `why` holds."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"torch before {major}.{minor}: {why}")
