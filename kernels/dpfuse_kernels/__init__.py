"""Packs tensors into flat buffers, unpacks, measures and scales them. Needs torch; triton only to launch kernels."""

from dpfuse_kernels.backend import flatten, multiply, squared_norm, unflatten
from dpfuse_kernels.flatten import all_finite
from dpfuse_kernels.pointer_table import PointerTable, Slot
from dpfuse_kernels.squared_norm import row_norms

__all__ = ["PointerTable", "Slot", "all_finite", "flatten", "multiply", "row_norms", "squared_norm", "unflatten"]
