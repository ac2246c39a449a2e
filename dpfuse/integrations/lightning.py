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
    """Ends the fit of all ranks in the same step if one of them gets a signal, or calls `dpfuse.request_stop`.

    It saves a checkpoint before, for `trainer.fit(ckpt_path=…)`. It leaves out validation, and the hooks at the end of
    an epoch and of a training; `min_epochs` and `min_steps` do not count. Give it last among the callbacks: what others
    change after it at the end of a batch is not saved.

    Args:
        path: of the checkpoint, as for `trainer.save_checkpoint`.
        signals: as for `dpfuse.stop_on_signals`. During the fit they act in place of Lightning's own handlers, also of
            those that start a job of Slurm again. An empty tuple leaves all signals to the program.

    Attributes:
        stopped: whether it has ended the last fit.
    """

    end_of_fit = _TunerExitException


StrategyRegistry.register(NAME, DPFuseStrategy, description=DESCRIPTION, override=True)
STRATEGY_REGISTRY.register(NAME, DPFuseFabricStrategy, description=DESCRIPTION, override=True)
