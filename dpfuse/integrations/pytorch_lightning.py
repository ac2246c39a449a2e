"""`strategy="dpfuse"` for the packages `pytorch_lightning` and `lightning_fabric`. The import registers the name."""

from __future__ import annotations

from dpfuse.integrations.stopping import FitStopping
from dpfuse.integrations.wrapping import FabricWrapping, MetricsLogging, TrainerWrapping, register

try:
    from lightning_fabric.strategies import STRATEGY_REGISTRY
    from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    from pytorch_lightning.utilities.exceptions import _TunerExitException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dpfuse.integrations.pytorch_lightning needs the package pytorch_lightning, and there is no module "
        f"{error.name!r}: pip install pytorch_lightning"
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
