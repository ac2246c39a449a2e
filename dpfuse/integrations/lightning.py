"""`strategy="dpfuse"` for Lightning's Trainer and for Fabric. The import of this file registers the name."""

from __future__ import annotations

from dpfuse.integrations.stopping import FitStopping
from dpfuse.integrations.wrapping import FabricWrapping, MetricsLogging, TrainerWrapping, register

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
    __doc__ = TrainerWrapping.__doc__


class DPFuseFabricStrategy(FabricWrapping, FabricDDPStrategy):
    __doc__ = FabricWrapping.__doc__


class DPFuseMetrics(MetricsLogging, Callback):
    __doc__ = MetricsLogging.__doc__


class StopTogether(FitStopping, Callback):
    __doc__ = FitStopping.__doc__
    end_of_fit = _TunerExitException


register(StrategyRegistry, DPFuseStrategy)
register(STRATEGY_REGISTRY, DPFuseFabricStrategy)
