"""The methods that Lightning's strategies replace: they wrap the model in dpfuse. Imports no Lightning package."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpfuse import patch

__all__ = ["DESCRIPTION", "NAME", "FabricWrapping", "TrainerWrapping"]

NAME = "dpfuse"
DESCRIPTION = "DDP with dpfuse's DistributedDataParallel"


class TrainerWrapping:
    """Placed before a Trainer's `DDPStrategy` among the bases of a class."""

    strategy_name = NAME

    def configure_ddp(self) -> None:
        """Wrap the model."""
        with patch():
            super().configure_ddp()  # type: ignore[misc]  # of DDPStrategy


class FabricWrapping:
    """Placed before Fabric's `DDPStrategy` among the bases of a class."""

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module."""
        with patch():
            wrapped: DistributedDataParallel = super().setup_module(module)  # type: ignore[misc]  # of DDPStrategy
        return wrapped
