"""Seeds: the gradient of the loss with which backward starts on each device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpfuse.paddle.static.strategies import BuildStrategy

__all__ = ["Seed", "seeds_of"]

Seed = float | Tensor


def seeds_of(
    feed: Any, name: str, strategy: BuildStrategy.GradientScaleStrategy, devices: int, trainers: int
) -> tuple[Any, list[Seed]]:
    """Split a feed into the program's feed and the gradient of the loss on each device.

    Gradients are summed over devices and trainers, so 1 / their number gives the mean. The feed is not yet checked; the
    returned one is without the gradient, which has the key `name`.

    Raises:
        ValueError: The number of fed seeds is not the number of devices.

    Example:
        >>> from dpfuse.paddle.static import BuildStrategy
        >>> from dpfuse.paddle.static.seeds import seeds_of
        >>> seeds_of({"x": 1}, "loss@GRAD", BuildStrategy.GradientScaleStrategy.CoeffNumDevice, 2, 1)
        ({'x': 1}, [0.5, 0.5])
    """
    if strategy is not BuildStrategy.GradientScaleStrategy.Customized:
        factor = 1.0 if strategy is BuildStrategy.GradientScaleStrategy.One else 1.0 / (devices * trainers)
        return feed, [factor] * devices
    parts = feed if isinstance(feed, (list, tuple)) else [feed]
    seeds: list[Seed] = []
    for part in parts:
        if isinstance(part, Mapping) and name in part:
            seeds += torch.as_tensor(part[name], dtype=torch.float64, device="cpu").reshape(-1)
    if len(seeds) != devices:
        raise ValueError(
            f"feed has {len(seeds)} values of {name!r}, expected one for each of the {devices} devices, because "
            "gradient_scale_strategy is Customized"
        )
    rest = [
        {key: value for key, value in part.items() if key != name} if isinstance(part, Mapping) else part
        for part in parts
    ]
    return (rest if parts is feed else rest[0]), seeds
