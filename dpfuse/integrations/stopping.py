"""What the callbacks of Lightning and of transformers share that stop all ranks together. Imports neither of them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from os import PathLike
from types import FrameType
from typing import Any

from torch import nn

from dpfuse import DistributedDataParallel, agree_to_stop, stop_on_signals
from dpfuse.errors import DPFuseError

__all__ = ["USUAL", "FitStopping", "check", "install", "stop_requested"]

USUAL = ("SIGTERM", "SIGUSR1")


def install(signals: Sequence[str | int], handlers: ExitStack) -> None:
    """Install the handlers of these signals, if there are any; closing `handlers` takes them off."""
    if signals:
        handlers.enter_context(stop_on_signals(*signals))


def check(model: nn.Module, ranks: int) -> None:
    """Check that the ranks can tell each other of a wish to stop.

    Raises:
        DPFuseError: there are several, and another library averages their gradients.
    """
    wrapped = getattr(model, "_orig_mod", model)
    if ranks > 1 and not isinstance(wrapped, DistributedDataParallel):
        raise DPFuseError(
            f"StopTogether was given to a Trainer of {ranks} ranks whose model is a {type(wrapped).__name__}, expected "
            "a dpfuse.DistributedDataParallel, which tells all ranks of a stop. Let the Trainer wrap the model in it."
        )


def stop_requested(model: nn.Module) -> bool:
    """Whether a rank has asked all ranks to stop."""
    wrapped = getattr(model, "_orig_mod", model)
    if isinstance(wrapped, DistributedDataParallel):
        return wrapped.stop_requested
    return agree_to_stop()  # of one rank: its own wish


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Stands for a handler of Lightning."""


class FitStopping:
    """Placed before a Trainer's `Callback` among the bases of a class.

    Attributes:
        end_of_fit: the exception by which a callback ends a fit of Lightning without an error.
    """

    end_of_fit: type[Exception]

    def __init__(self, path: str | PathLike[str], signals: Sequence[str | int] = USUAL) -> None:
        super().__init__()
        self.path, self.signals = path, tuple(signals)
        self.stopped = False
        self._handlers = ExitStack()
        self._step = 0  # the last one that has ended

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install the handlers of the signals, before Lightning installs its own.

        Raises:
            DPFuseError: the Trainer starts its ranks as functions, which cannot be left without an error; this is not
                the main thread.
        """
        if stage != "fit":
            return
        if (method := getattr(trainer.strategy, "_start_method", "popen")) != "popen":
            raise DPFuseError(
                f"StopTogether was given to a Trainer that starts its ranks with start_method={method!r}, expected a "
                "program of each rank. Leave start_method out."
            )
        self.stopped = False
        install(self.signals, self._handlers)
        if signal.SIGTERM in self.signals or "SIGTERM" in self.signals:
            # Lightning's handler sends a broadcast, so it hangs if one rank alone has got the signal. It calls ours
            # after it.
            trainer._signal_connector._sigterm_notifier_fn = _do_nothing

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the ranks can stop together.

        Raises:
            DPFuseError: there are several ranks, and the model is not wrapped by dpfuse.
        """
        check(trainer.strategy.model, trainer.world_size)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """If a rank has asked all ranks to stop, save and end the fit. Inside an accumulated step nothing happens."""
        before, self._step = self._step, trainer.global_step
        if self._step != before and stop_requested(trainer.strategy.model):
            self.stopped = True
            self._save(trainer)
            raise self.end_of_fit

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install the handlers again that were there before the fit."""
        self._uninstall(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As `teardown`, which Lightning leaves out then."""
        self._uninstall(trainer)

    def _save(self, trainer: Any) -> None:
        fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        if batches.is_last_batch and trainer.max_steps == -1:
            # As Lightning counts before it saves at the end of an epoch. Else it would not count the next one.
            batches.increment_completed()
            fit.epoch_progress.increment_processed()
        trainer.save_checkpoint(self.path)

    def _uninstall(self, trainer: Any) -> None:
        trainer._signal_connector.teardown()  # its handlers lie over ours
        vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)
        self._handlers.close()
