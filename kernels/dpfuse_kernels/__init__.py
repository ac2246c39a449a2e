"""Packs tensors into flat buffers and unpacks them. Needs torch; triton only where a kernel is launched."""

from dpfuse_kernels.backend import flatten, sum_parts, unflatten
from dpfuse_kernels.pointer_table import PointerTable, Slot

__all__ = ["PointerTable", "Slot", "flatten", "sum_parts", "unflatten"]
