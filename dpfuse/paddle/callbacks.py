"""`paddle.callbacks`: progress, checkpoints, learning rates and early stopping for `Model`. Communicates nothing."""

from __future__ import annotations

import os
from typing import Any

import torch

from dpfuse import get_rank
from dpfuse.arguments import a_path, flag, instance, integer, real
from dpfuse.paddle.callback_base import Callback, Logs
from dpfuse.paddle.counterparts import lacks
from dpfuse.paddle.epoch_display import EpochDisplay
from dpfuse.paddle.static.names import suggestion

__all__ = ["Callback", "EarlyStopping", "LRScheduler", "ModelCheckpoint", "ProgBarLogger"]

__getattr__ = lacks(__name__)


class ProgBarLogger(Callback):
    """Shows on rank 0 the progress of an epoch, with losses and metrics of rank 0's batches.

    Args:
        log_freq: steps from one line to the next.
        verbose: 0 shows nothing, 1 a bar if rich is installed and the output is a terminal, 2 lines.

    Source: `paddle.callbacks.ProgBarLogger`. `fit`, `evaluate` and `predict` add one if there is none.
    """

    def __init__(self, log_freq: int = 1, verbose: int = 2) -> None:
        if verbose not in (0, 1, 2):
            raise ValueError(f"verbose: got {verbose!r}, expected 0 (silent), 1 (bar) or 2 (lines)")
        self.log_freq = integer("log_freq", log_freq, 1)
        self.verbose = verbose
        self._display: EpochDisplay | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._begin(f"Epoch {epoch + 1}/{self.params['epochs']}", self.params["steps"])

    def on_eval_begin(self, logs: Logs = None) -> None:
        self._begin("Eval begin...", (logs or {}).get("steps"))

    def on_predict_begin(self, logs: Logs = None) -> None:
        self._begin("Predict begin...", (logs or {}).get("steps"))

    def on_train_batch_end(self, step: int, logs: Logs = None) -> None:
        if self._display is not None:
            values = {name: value for name, value in (logs or {}).items() if name not in ("step", "batch_size")}
            self._display.show(step + 1, values)

    on_eval_batch_end = on_predict_batch_end = on_train_batch_end

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        if self._display is not None:
            self._display.finish()
        self.close()

    on_eval_end = on_predict_end = on_epoch_end

    def close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None

    def _begin(self, title: str, steps: int | None) -> None:
        self.close()
        if self.verbose and get_rank() == 0:
            print(title, flush=True)
            self._display = EpochDisplay(steps, self.log_freq, bar=self.verbose == 1)


class ModelCheckpoint(Callback):
    """Saves the model on rank 0 during training: SAVE_DIR/0, … after epochs, SAVE_DIR/final at the end.

    Args:
        save_freq: epochs from one checkpoint to the next; the first epoch is always saved.
        save_dir: the folder; None means the `save_dir` of `fit`. Without either, nothing is saved.

    Source: `paddle.callbacks.ModelCheckpoint`, which does not use the `save_dir` of `fit`. `fit` adds a ModelCheckpoint
    with `fit`'s `save_freq` if there is none.
    """

    def __init__(self, save_freq: int = 1, save_dir: str | os.PathLike[str] | None = None) -> None:
        self.save_freq = integer("save_freq", save_freq, 1)
        if save_dir is not None:
            a_path("save_dir", save_dir, "checkpoint")
        self.save_dir = save_dir

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if epoch % self.save_freq == 0:
            self._save(str(epoch))

    def on_train_end(self, logs: Logs = None) -> None:
        self._save("final")

    def _save(self, name: str) -> None:
        folder = self.params["save_dir"] if self.save_dir is None else self.save_dir
        if folder is not None:
            path = os.path.join(folder, name)
            if self.params["verbose"] and get_rank() == 0:
                print(f"saving {os.path.abspath(path)}", flush=True)
            self.model.save(path)


class LRScheduler(Callback):
    """Steps a torch learning rate scheduler.

    Args:
        scheduler: of `torch.optim.lr_scheduler`. It is required, because a torch optimizer does not know its scheduler.
        by_step: step it after each step of the optimizer.
        by_epoch: step it after each epoch instead.

    Raises:
        TypeError: `scheduler` is no such scheduler, or needs a metric (ReduceLROnPlateau); or another argument is not
            True or False.
        ValueError: `by_step` and `by_epoch` are equal.

    Source: `paddle.callbacks.LRScheduler`. Paddle takes the scheduler from its optimizer, and steps it for every batch,
    even if `accumulate_grad_batches` delays the optimizer's step.
    """

    def __init__(
        self, scheduler: torch.optim.lr_scheduler.LRScheduler, by_step: bool = True, by_epoch: bool = False
    ) -> None:
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau or not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(
                f"scheduler must be one of torch.optim.lr_scheduler that steps without a metric, got "
                f"{type(scheduler).__name__}; write a Callback that steps it in on_eval_end"
            )
        if flag("by_step", by_step) == flag("by_epoch", by_epoch):
            raise ValueError(
                f"got by_step={by_step} and by_epoch={by_epoch}, expected exactly one of them; pass by_step=False, "
                "by_epoch=True to step after epochs"
            )
        self.scheduler = scheduler
        self.by_step = by_step

    def on_train_batch_end(self, step: int, logs: Logs = None) -> None:
        if self.by_step and self.model.stepped:
            self.scheduler.step()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not self.by_step:
            self.scheduler.step()


class EarlyStopping(Callback):
    """Ends training when the loss or a metric of the evaluation no longer improves.

    Args:
        monitor: "loss" or a metric's name.
        mode: "min" if less is better, "max" if more is better; "auto" means "max" for names that contain "acc".
        patience: training ends after this many evaluations without improvement; 0 is the same as 1.
        verbose: 1 prints a message, 0 does not.
        min_delta: a smaller change is no improvement.
        baseline: value that the first evaluation must improve; None means no such value.
        save_best_model: whether each improvement is saved as SAVE_DIR/best_model, if `fit` has a `save_dir`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The mode is unknown, or the callback is not used in `fit`. During training: the evaluation has no
            value `monitor`.

    Source: `paddle.callbacks.EarlyStopping`. With patience 0, Paddle always ends after the first evaluation.
    """

    def __init__(
        self,
        monitor: str = "loss",
        mode: str = "auto",
        patience: int = 0,
        verbose: int = 1,
        min_delta: float = 0,
        baseline: float | None = None,
        save_best_model: bool = True,
    ) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode: got {mode!r}, expected 'auto', 'min' or 'max'")
        instance("monitor", monitor, str, "the name of a value", "pass for example 'loss'")
        instance("verbose", verbose, int, "0 or 1")
        real("min_delta", min_delta)
        if baseline is not None:
            real("baseline", baseline, "a number or None")
        flag("save_best_model", save_best_model)
        self.monitor = monitor
        self.patience = integer("patience", patience, 0)
        self.verbose = verbose
        self.min_delta = abs(min_delta)
        self.baseline = baseline
        self.save_best_model = save_best_model
        self._sign = -1 if mode == "max" or (mode == "auto" and "acc" in monitor) else 1

    def on_eval_begin(self, logs: Logs = None) -> None:
        if "epochs" not in self.params:
            raise ValueError("EarlyStopping was passed to evaluate, expected fit: it ends a training; pass it to fit")

    def on_train_begin(self, logs: Logs = None) -> None:
        self.wait_epoch = 0
        self.best_value = self._sign * float("inf") if self.baseline is None else self.baseline

    def on_eval_end(self, logs: Logs = None) -> None:
        logs = logs or {}
        if self.monitor not in logs:
            known = [name for name in logs if name not in ("step", "batch_size")]
            raise ValueError(f"monitor: the evaluation has no {self.monitor!r}. {suggestion(self.monitor, known)}")
        value = logs[self.monitor]
        current = float(value[0] if isinstance(value, (list, tuple)) else value)
        if self._sign * (self.best_value - current) > self.min_delta:
            self.best_value = current
            self.wait_epoch = 0
            if self.save_best_model and self.params["save_dir"] is not None:
                self.model.save(os.path.join(self.params["save_dir"], "best_model"))
            return
        self.wait_epoch += 1
        if self.wait_epoch >= self.patience:
            self.model.stop_training = True
            if self.verbose and get_rank() == 0:
                best = f"{self.best_value:.4g}"
                print(f"early stopping: {self.monitor} is {current:.4g}, the best was {best}", flush=True)
