"""Mixed precision of `Model.prepare`: checks the settings, and makes torch's autocast and GradScaler from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dpfuse.arguments import flag
from dpfuse.paddle.static.names import suggestion

__all__ = ["MixedPrecision"]

SCALER_OPTIONS = {
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
}
OPTIONS = ("level", "use_dynamic_loss_scaling", *SCALER_OPTIONS)


@dataclass(frozen=True)
class MixedPrecision:
    """float16 with loss scaling on a GPU, bfloat16 without loss scaling on the CPU, or full precision."""

    enabled: bool
    scaler: torch.amp.GradScaler | None = None
    dynamic: bool = True  # whether the loss scale changes

    @classmethod
    def from_configs(cls, configs: Any, device: torch.device) -> MixedPrecision:
        """Return the precision that `configs` of `Model.prepare` means on `device`."""
        if configs is None or isinstance(configs, str):
            configs = {"level": configs or "O0"}
        if not isinstance(configs, Mapping):
            raise TypeError(f"amp_configs must be None, a level ('O0', 'O1') or a dict, got {configs!r}")
        for key in configs:
            if key not in OPTIONS:
                raise ValueError(f"amp_configs: unknown key {key!r}. {suggestion(key, OPTIONS)}")
        level = configs.get("level", "O1")
        if level == "O2":
            raise ValueError(
                "amp_configs: level 'O2' (pure float16) is not supported; use 'O1', or convert the network yourself "
                "with network.bfloat16() and train at 'O0'"
            )
        if level not in ("O0", "O1"):
            raise ValueError(f"amp_configs: got level {level!r}, expected 'O0' or 'O1'")
        dynamic = flag("amp_configs['use_dynamic_loss_scaling']", configs.get("use_dynamic_loss_scaling", True))
        scaler = None
        if level == "O1" and device.type == "cuda":
            options = {name: configs[key] for key, name in SCALER_OPTIONS.items() if key in configs}
            scaler = torch.amp.GradScaler("cuda", **options)
        return cls(level == "O1", scaler, dynamic)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context for forward and loss."""
        if not self.enabled:
            return nullcontext()
        return torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, after dividing the gradients by the loss scale."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        # Also with a constant scale: `update` resets what this step has found in the gradients.
        self.scaler.update(None if self.dynamic else self.scaler.get_scale())
