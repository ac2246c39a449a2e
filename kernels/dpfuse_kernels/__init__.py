"""Packs tensors into flat buffers and unpacks them. Needs torch; triton only where a kernel is launched."""

from dpfuse_kernels.backend import flatten, spoil, sum_parts, unflatten
from dpfuse_kernels.pointer_table import PointerTable, Slot
from dpfuse_kernels.spoil import SpoilTable

__all__ = ["PointerTable", "Slot", "SpoilTable", "flatten", "spoil", "sum_parts", "unflatten"]
