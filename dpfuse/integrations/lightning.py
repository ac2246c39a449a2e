"""`strategy="dpfuse"` for Lightning's Trainer and for Fabric. Importing this file is what registers the name."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpfuse import patch

__all__ = ["DPFuseFabricStrategy", "DPFuseStrategy"]

NAME = "dpfuse"
DESCRIPTION = "DDP with dpfuse's DistributedDataParallel"


class DPFuseStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` around `dpfuse.DistributedDataParallel`; takes the same arguments.

    Automatic and manual optimisation, gradient accumulation, checkpoints: everything else is Lightning's.
    """

    strategy_name = NAME

    def configure_ddp(self) -> None:
        """Wrap the model."""
        with patch():
            super().configure_ddp()


class DPFuseFabricStrategy(FabricDDPStrategy):
    """Fabric's `DDPStrategy` around `dpfuse.DistributedDataParallel`; takes the same arguments."""

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module."""
        with patch():
            wrapped: DistributedDataParallel = super().setup_module(module)
        return wrapped


StrategyRegistry.register(NAME, DPFuseStrategy, description=DESCRIPTION, override=True)
STRATEGY_REGISTRY.register(NAME, DPFuseFabricStrategy, description=DESCRIPTION, override=True)
