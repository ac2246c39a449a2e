"""The methods that Lightning's strategies replace: they wrap the model in dpfuse. Imports no Lightning package."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpfuse import DistributedDataParallel as OurWrapper
from dpfuse import patch
from dpfuse.errors import DPFuseError
from dpfuse.integrations.counted_loader import counted

__all__ = ["FabricWrapping", "MetricsLogging", "TrainerWrapping", "register"]

NAME = "dpfuse"


def register(registry: Any, strategy: type) -> None:
    """Let users of a registry of Lightning ask for a strategy with `strategy="dpfuse"`."""
    registry.register(NAME, strategy, description="DDP with dpfuse's DistributedDataParallel", override=True)


class TrainerWrapping:
    """Lightning's `DDPStrategy` with `dpfuse.DistributedDataParallel`; it takes the same arguments.

    Automatic and manual optimisation, gradient accumulation, checkpoints: everything else is Lightning's.
    """

    # The first base of a class, and a Trainer's `DDPStrategy` the second.

    strategy_name = NAME

    lightning_module: Any

    def configure_ddp(self) -> None:
        """Wrap the model."""
        with patch():
            super().configure_ddp()  # type: ignore[misc]  # of DDPStrategy

    def process_dataloader(self, dataloader: object) -> object:
        """Count the batches of a `ResumableBatchSampler`, so that a fit can go on inside an epoch."""
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]  # of DDPStrategy
        return counted(loader, self.lightning_module.trainer)


class FabricWrapping:
    """Fabric's `DDPStrategy` with `dpfuse.DistributedDataParallel`; it takes the same arguments."""

    # The first base of a class, and Fabric's `DDPStrategy` the second.

    model: DistributedDataParallel  # what `setup_module` has returned last; Fabric hides it in a module of its own

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module."""
        with patch():
            wrapped: DistributedDataParallel = super().setup_module(module)  # type: ignore[misc]  # of DDPStrategy
        self.model = wrapped
        return wrapped


class MetricsLogging:
    """Logs `model.metrics()` with the Trainer's loggers, under names that begin with `dpfuse/`.

    `Trainer(strategy=DPFuseStrategy(metrics=20), callbacks=[DPFuseMetrics()], log_every_n_steps=20)`
    """

    # The first base of a class, and a Trainer's `Callback` the second.

    _logged = 0  # the step that was logged last: with accumulated batches, several batches belong to one step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that there is something to log.

        Raises:
            DPFuseError: the model is not wrapped by dpfuse, or was wrapped without `metrics=True`.
        """
        model = trainer.strategy.model
        if not isinstance(model, OurWrapper):
            raise DPFuseError(
                f"DPFuseMetrics was given to a Trainer whose model is a {type(model).__name__}, expected a "
                'dpfuse.DistributedDataParallel. Pass strategy=DPFuseStrategy(metrics=True) instead of strategy="…".'
            )
        model.metrics()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the numbers of the last synchronised backward at each step that the Trainer logs."""
        if trainer.global_step == self._logged or trainer.global_step % trainer.log_every_n_steps:
            return
        self._logged = trainer.global_step
        metrics = trainer.strategy.model.metrics()
        for logger in trainer.loggers if metrics else ():
            named = {f"dpfuse/{name}": value for name, value in metrics.items()}
            logger.log_metrics(named, step=trainer.global_step)
