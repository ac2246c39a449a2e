"""Gradients that are hard on a narrow wire, and how far from their mean it may end; for tests of several files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpfuse_kernels import mx_bytes, mx_decode, mx_encode
from tests.distributed.random_models import same_bits

__all__ = ["UNIT", "Given", "alike_everywhere", "hard_gradients", "sent", "warnings_are_errors", "worst_share_of_bound"]

# The largest relative error of rounding to nearest.
UNIT = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}


class Given(nn.Module):
    """Parameters of these lengths, whose gradients are whatever `forward` is told, and one that is never used."""

    def __init__(self, numels: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel in numels)
        self.other = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        used = [(w * g).sum() for w, g in zip(self.weights, gradients, strict=True) if g is not None]
        return torch.stack(used).sum()


def hard_gradients(size: int, numel: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Names, and one float32 gradient per rank: random, cancelling, ladders of powers of two, constant."""
    numbers = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    yield "random", numbers
    yield "cancelling", [numbers[0] * (-1) ** rank + 1e-3 * numbers[rank] for rank in range(size)]
    ladder = torch.arange(numel) % 16 - 8.0
    yield "ladder", [torch.exp2(ladder.roll(3 * rank)) * numbers[rank].sign() for rank in range(size)]
    yield "constant", [torch.full((numel,), 1.1 + rank) for rank in range(size)]


def worst_share_of_bound(got: Tensor, parts: list[Tensor], dtype: torch.dtype, *, once: bool) -> float:
    """The largest error of `got`, the mean of `parts` over the wire, in terms of the error that the theory allows.

    Args:
        got: the mean that arrived.
        parts: of each rank.
        dtype: of the wire.
        once: whether sums are rounded once, and not after each addition.
    """
    size, u = len(parts), UNIT[dtype]
    exact = torch.stack(parts).double() / size
    mean, magnitude = exact.sum(0), exact.abs().sum(0)
    bound = u * (magnitude + mean.abs()) if once else size * u * magnitude
    # Products of two errors, the rounding of 1 / size, and numbers below the normal ones.
    bound = bound * (1 + size * u) + 2.0**-23 * magnitude
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * limits.eps  # half of the distance of the smallest numbers, and as much to spare
    if dtype.itemsize == 2:
        bound += (size + 1) * least
    else:
        # Of a block, too small a number is wrong by what is the distance for the largest, over which the scale lies.
        scales = _largest_of_block(magnitude) / (limits.max / 1.75) * 2
        bound += (size + 1) * least * scales
    return ((got.double() - mean).abs() / bound).max().item()


def _largest_of_block(magnitude: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(magnitude, (0, -len(magnitude) % 32)).view(-1, 32)
    return blocks.amax(1).repeat_interleave(32)[: len(magnitude)]


def sent(values: Tensor, wire: torch.dtype) -> Tensor:
    """One gradient in float32 as it comes out of a wire."""
    if wire.itemsize > 1:
        return values.to(wire).float()
    padded = torch.nn.functional.pad(values, (0, -len(values) % 512))
    packed = torch.empty(mx_bytes(len(padded)), dtype=torch.uint8)
    return mx_decode(mx_encode(padded, wire, packed), wire)[: len(values)]


def alike_everywhere(tensor: Tensor) -> bool:
    """Whether all ranks have the same bits here."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return all(same_bits(row, tensor) for row in rows)


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """Until the end of a context, or of a function that it decorates."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
