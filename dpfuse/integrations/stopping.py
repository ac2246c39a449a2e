"""What the callbacks of Lightning and of transformers share that stop all ranks together. Imports neither of them."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from os import PathLike
from types import FrameType
from typing import Any

from torch import nn

from dpfuse import stop_on_signals
from dpfuse.engine.torch_private import uncompiled
from dpfuse.errors import DPFuseError
from dpfuse.stopping.deadline import GRACE
from dpfuse.stopping.handlers import USUAL
from dpfuse.stopping.request import own_reason, tell_program
from dpfuse.wrapper import wrapper_of

__all__ = ["GRACE", "USUAL", "FitStopping", "Signals", "check", "install", "listed", "stop_requested"]

Signals = Sequence[str | int] | str | int


def install(signals: Signals, grace: float, handlers: ExitStack) -> None:
    """Install the handlers of these signals, if there are any; closing `handlers` takes them off."""
    if several := listed(signals):
        handlers.enter_context(stop_on_signals(*several, grace=grace))


def listed(signals: Signals) -> tuple[str | int, ...]:
    """Return the signals that one of them or several were given as."""
    return (signals,) if isinstance(signals, (str, int)) else tuple(signals)


def check(model: nn.Module, ranks: int) -> None:
    """Check that the ranks can tell each other of a wish to stop.

    Raises:
        DPFuseError: there are several, and another library averages their gradients.
    """
    if ranks > 1 and wrapper_of(model) is None:
        raise DPFuseError(
            f"StopTogether was given to a Trainer of {ranks} ranks whose model is a "
            f"{type(uncompiled(model)).__name__}, expected "
            'a wrapper of dpfuse, which tells all ranks of a stop. Pass strategy="dpfuse" to the Trainer of Lightning, '
            "and call that of transformers under dpfuse.patch()."
        )


def stop_requested(model: nn.Module) -> bool:
    """Whether a rank has asked all ranks to stop."""
    wrapper = wrapper_of(model)
    if wrapper is not None:
        return wrapper.stop_requested
    return tell_program(own_reason()) is not None  # one rank, which may be one of a larger job


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Stands for a handler of Lightning."""


class FitStopping:
    """Ends the fit of all ranks in the same step if one of them gets a signal, or calls `dpfuse.request_stop`.

    It saves a checkpoint before, for `trainer.fit(ckpt_path=…)`. It leaves out validation, and the hooks at the end of
    an epoch and of a training; `min_epochs` and `min_steps` do not count. Give it last among the callbacks: what others
    do after it at the end of that batch is left out as well.

    Args:
        path: of the checkpoint, as for `trainer.save_checkpoint`.
        signals: as for `dpfuse.stop_on_signals`. During the fit they replace Lightning's own handlers, also those that
            start a job of Slurm again. An empty tuple leaves all signals to the program.
        grace: as for `dpfuse.stop_on_signals`. Lightning's checkpoints are not measured: give four times what one
            takes.

    Attributes:
        stopped: whether it has ended the last fit.
    """

    # The exception by which a callback ends a fit of Lightning without an error. A class that has `Callback` as its
    # second base gives it.
    end_of_fit: type[Exception]

    def __init__(self, path: str | PathLike[str], signals: Signals = USUAL, grace: float = GRACE) -> None:
        super().__init__()
        self.path, self.signals, self.grace = path, listed(signals), grace
        self.stopped = False
        self._handlers = ExitStack()
        self._step = 0  # the number of the last step that has ended

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
                f"StopTogether was given to a Trainer that starts its ranks as functions (start_method={method!r}), "
                "expected a program of each rank. Leave start_method out."
            )
        self.stopped = False
        install(self.signals, self.grace, self._handlers)
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
            pl_module.on_train_batch_end(outputs, batch, batch_idx)  # which Lightning calls after the callbacks
            self._save(trainer)
            raise self.end_of_fit

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install the handlers again that were there before the fit."""
        trainer._signal_connector.teardown()  # Lightning has installed its handlers after ours
        vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)
        self._handlers.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As `teardown`, which Lightning leaves out then."""
        self.teardown(trainer, pl_module, "fit")

    def _save(self, trainer: Any) -> None:
        fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
        if batches.is_last_batch and trainer.max_steps == -1:
            # As Lightning counts before it saves at the end of an epoch. Else it would not count the next one.
            batches.increment_completed()
            fit.epoch_progress.increment_processed()
            fit.epoch_loop._batches_that_stepped += 1  # the step of loggers
        trainer.save_checkpoint(self.path)
