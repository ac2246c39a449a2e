"""`strategy="dpfuse"` for Lightning's Trainer and for Fabric. The import of this file registers the name."""

from __future__ import annotations

from dpfuse.integrations.stopping import FitStopping
from dpfuse.integrations.wrapping import DESCRIPTION, NAME, FabricWrapping, MetricsLogging, TrainerWrapping

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.utilities.exceptions import _TunerExitException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dpfuse.integrations.lightning needs the package lightning, and there is no module {error.name!r}: "
        "pip install 'dpfuse[lightning]'"
    ) from error

__all__ = ["DPFuseFabricStrategy", "DPFuseMetrics", "DPFuseStrategy", "StopTogether"]


class DPFuseStrategy(TrainerWrapping, DDPStrategy):
    """Lightning's `DDPStrategy` with `dpfuse.DistributedDataParallel`; it takes the same arguments.

    Automatic and manual optimisation, gradient accumulation, checkpoints: everything else is Lightning's.
    """


class DPFuseFabricStrategy(FabricWrapping, FabricDDPStrategy):
    """Fabric's `DDPStrategy` with `dpfuse.DistributedDataParallel`; it takes the same arguments."""


class DPFuseMetrics(MetricsLogging, Callback):
    """Logs `model.metrics()` with the Trainer's loggers, under names that begin with `dpfuse/`.

    `Trainer(strategy=DPFuseStrategy(metrics=20), callbacks=[DPFuseMetrics()], log_every_n_steps=20)`
    """


class StopTogether(FitStopping, Callback):
    __doc__ = FitStopping.__doc__
    end_of_fit = _TunerExitException


StrategyRegistry.register(NAME, DPFuseStrategy, description=DESCRIPTION, override=True)
STRATEGY_REGISTRY.register(NAME, DPFuseFabricStrategy, description=DESCRIPTION, override=True)
