"""transformers' `Trainer` with dpfuse's wrapper and means over all tokens of a step, and a callback that stops it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from dpfuse.integrations.stopping import GRACE, USUAL, Signals, check, install, listed, stop_requested
from dpfuse.integrations.token_weights import TokenWeights

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"dpfuse.integrations.transformers needs the package transformers, and there is no module {error.name!r}: "
        "pip install 'dpfuse[transformers]'"
    ) from error

__all__ = ["DPFuseTrainer", "StopTogether", "TokenWeights"]


class DPFuseTrainer(TokenWeights, Trainer):
    """transformers' `Trainer` with dpfuse's wrapper, and with the mean over all tokens; it takes the same arguments."""


class StopTogether(TrainerCallback):
    """Ends the training of all ranks in the same step if one of them gets a signal, or calls `dpfuse.request_stop`.

    `trainer.add_callback(StopTogether(trainer))` is enough, also for a `Trainer` under `dpfuse.patch()`. The Trainer
    saves before, for `trainer.train(resume_from_checkpoint=True)`. It neither evaluates nor loads its best model.

    Args:
        trainer: whose training ends.
        signals: as for `dpfuse.stop_on_signals`; during the training. An empty tuple leaves all signals to the program.
            After an exception in the training their handlers stay until the next one.
        grace: as for `dpfuse.stop_on_signals`. The Trainer's checkpoints are not measured: give four times what one
            takes.

    Attributes:
        stopped: whether it has ended the last training.
    """

    def __init__(self, trainer: Trainer, signals: Signals = USUAL, grace: float = GRACE) -> None:
        self.trainer, self.signals, self.grace = trainer, listed(signals), grace
        self.stopped = False
        self._handlers = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the handlers of the signals.

        Raises:
            DPFuseError: there are several ranks, and the model is not wrapped by dpfuse; this is not the main thread.
        """
        check(self.trainer.model_wrapped, self.trainer.accelerator.num_processes)
        self.stopped = False
        self._handlers.close()  # of a training that an exception has ended
        install(self.signals, self.grace, self._handlers)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """If a rank has asked all ranks to stop, let the Trainer save and end."""
        if stop_requested(self.trainer.model_wrapped):
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a stop, which ends the epoch early, neither save again nor evaluate."""
        if self.stopped:
            control.should_save = control.should_evaluate = False
            state.best_model_checkpoint = None  # else a Trainer that keeps one checkpoint deletes the one of the stop

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the handlers again that were there before."""
        self._handlers.close()
