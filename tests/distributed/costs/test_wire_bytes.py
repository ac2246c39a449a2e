"""How many bytes a narrow wire really saves: those that are handed to collectives are counted, tail and padding too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dpfuse
from tests.operations import Operations


class Residual(nn.Module):
    """A small residual network of 1.2 million parameters, most of them in few weights, as in larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
                nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
                nn.BatchNorm2d(2 * width),
            )
            for width in (64, 128)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x.mean((2, 3)))


def shares(rank, size, wires):
    """Bytes of a step over those of float32, by wire."""
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank))
    steps = {}
    for wire in [None, *wires]:
        torch.manual_seed(0)
        options = {} if wire is None else {"wire_dtype": wire}
        model = dpfuse.DataParallel(Residual(), comm_buffer_size=1, last_comm_buffer_size=0.25, **options)
        assert sum(param.numel() for param in model.parameters()) > 1_000_000
        model(x).square().mean().backward()  # after it the buckets are rebuilt
        model.zero_grad()
        with Operations() as done:
            model(x).square().mean().backward()
        steps[wire] = done.sent(size)
        assert len(done.collectives) >= 3
    whole = steps.pop(None)
    numel = sum(param.numel() for param in model.parameters())
    # Nothing is counted twice or left out: a ring sends every element so often.
    assert 1 <= whole / (2 * (size - 1) / size * 4 * numel) < 1.001
    return {key: nbytes / whole for key, nbytes in steps.items()}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_16_bits_send_half_and_8_with_their_scales_little_more_than_a_quarter(ranks, size):
    halves = [torch.bfloat16, (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
    quarters = [torch.float8_e4m3fn, (torch.float8_e5m2, torch.float32)]
    found = ranks(shares, halves + quarters, size=size)[0]
    assert all(abs(found[wire] - 0.5) < 0.001 for wire in halves), found
    assert all(0.25 < found[wire] <= 0.27 for wire in quarters), found
