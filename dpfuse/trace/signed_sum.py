"""A number of a tensor from which the distance of two tensors can be estimated without having both. Knows no step."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dpfuse.engine.tensor_hash import parts_of_class

__all__ = ["signed_sum"]

CHUNK = 1 << 20  # elements; each takes 16 bytes meanwhile


@cache
def _signs(device: torch.device) -> Tensor:
    """Return fixed random signs, [CHUNK] float64."""
    generator = torch.Generator().manual_seed(20261126)
    return (torch.randint(2, (CHUNK,), generator=generator, dtype=torch.float64, device="cpu") * 2 - 1).to(device)


def signed_sum(tensor: Tensor) -> Tensor:
    """Return the sum of all elements, each with a fixed random sign.

    The square of the difference of two such sums is, on average over signs, the squared distance of the tensors.

    Args:
        tensor: of any shape, dense or sparse with coordinates.

    Returns:
        [] float64 on the device of the tensor; 0 for a tensor whose elements are not here.

    Source: the sketch of Alon, Matias and Szegedy, "The space complexity of approximating the frequency
    moments" (1996).
    """
    parts = parts_of_class(tensor)
    if parts is not None:
        return sum((signed_sum(each) for each in parts), torch.zeros((), dtype=torch.float64, device=tensor.device))
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            return _signed_sum_of_rows(tensor.detach().coalesce())
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        signs = _signs(flat.device)
        total = torch.zeros((), dtype=torch.float64, device=flat.device)
        for part in flat.split(CHUNK):
            total += torch.dot(part.double(), signs[: len(part)])
        return total


def _signed_sum_of_rows(tensor: Tensor) -> Tensor:
    """Return what the dense tensor would give, without making it: each element has the sign of its place."""
    values = tensor.values()
    rows = torch.zeros(values.shape[0], dtype=torch.int64, device=values.device)
    for size, indices in zip(tensor.shape, tensor.indices(), strict=False):
        rows = rows * size + indices
    width = values[0].numel() if len(values) else 1
    places = (rows[:, None] * width + torch.arange(width, device=values.device)) % CHUNK
    return torch.dot(values.reshape(-1).double(), _signs(values.device)[places.reshape(-1)])
