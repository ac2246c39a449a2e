"""How often a tensor was written."""

from __future__ import annotations

from torch import Tensor

__all__ = ["write_count"]


def write_count(tensor: Tensor) -> int:
    """Return torch's count; 0 for a tensor of `torch.inference_mode()`, of which torch has none."""
    return 0 if tensor.is_inference() else tensor._version
