"""ResNet with bottlenecks, which fleet's example imports from paddle.vision. It does not need torchvision."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["LAYERS", "ResNet"]

EXPANSION = 4  # output channels of a bottleneck, divided by its inner channels
LAYERS = {14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # bottlenecks of each stage

Conv = partial(nn.Conv2d, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, and a skip connection."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * channels
        self.body = nn.Sequential(
            Conv(channels_in, channels, 1), nn.BatchNorm2d(channels), nn.ReLU(),
            Conv(channels, channels, 3, stride, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            Conv(channels, channels_out, 1), nn.BatchNorm2d(channels_out),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.around = nn.Sequential(Conv(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.around(x))


class ResNet(nn.Sequential):
    """Maps pictures [n, 3, height, width] to logits [n, num_classes].

    Args:
        depth: layers with weights, one of LAYERS.
        num_classes: of the logits.
    """

    def __init__(self, depth: int, num_classes: int) -> None:
        stem = [Conv(3, 64, 7, 2, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        stages: list[nn.Module] = []
        channels_in = 64
        for stage, count in enumerate(LAYERS[depth]):
            channels = 64 * 2**stage
            for index in range(count):
                stages.append(Bottleneck(channels_in, channels, stride=2 if stage and not index else 1))
                channels_in = EXPANSION * channels
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, num_classes)]
        super().__init__(*stem, *stages, *head)
