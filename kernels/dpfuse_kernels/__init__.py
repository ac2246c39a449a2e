"""Packs tensors into flat buffers, unpacks, measures and scales them. Needs torch; triton only to launch kernels."""

from dpfuse_kernels.backend import flatten, multiply, spoil, squared_norm, sum_parts, unflatten
from dpfuse_kernels.pointer_table import PointerTable, Slot
from dpfuse_kernels.spoil import SpoilTable

__all__ = [
    "PointerTable",
    "Slot",
    "SpoilTable",
    "flatten",
    "multiply",
    "spoil",
    "squared_norm",
    "sum_parts",
    "unflatten",
]
