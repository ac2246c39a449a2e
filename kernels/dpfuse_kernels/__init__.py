"""Packs tensors into flat buffers, unpacks, measures and scales them. Needs torch; triton only to launch kernels."""

from dpfuse_kernels.backend import flatten, multiply, squared_norm, unflatten
from dpfuse_kernels.pointer_table import PointerTable, Slot

__all__ = ["PointerTable", "Slot", "flatten", "multiply", "squared_norm", "unflatten"]
