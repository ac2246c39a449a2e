"""Callback, the hooks of `Model`, and the list that calls them. Communicates nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfuse.paddle.model import Model

__all__ = ["Callback", "CallbackList", "Logs"]

Logs = dict[str, Any] | None


class Callback:
    """Base of all callbacks: override what is needed. Every rank calls its own.

    `self.model` is the Model, `self.params` a dict with batch_size, steps, verbose, metrics (names) and, in
    fit, epochs and save_dir. `logs` of a batch hold the losses under "loss" (a list), the metrics by name, "step" and
    "batch_size".

    Example:
        >>> from dpfuse.paddle.callbacks import Callback
        >>> class Losses(Callback):
        ...     def on_train_begin(self, logs=None):
        ...         self.losses = []
        ...     def on_train_batch_end(self, step, logs=None):
        ...         self.losses.append(logs["loss"][0])

    Source: `paddle.callbacks.Callback`; `close` is new.
    """

    model: Model
    params: dict[str, Any]

    def set_params(self, params: dict[str, Any]) -> None:
        """Called before anything else."""
        self.params = params

    def set_model(self, model: Model) -> None:
        """Called before anything else."""
        self.model = model

    def on_train_begin(self, logs: Logs = None) -> None:
        """Training begins."""

    def on_train_end(self, logs: Logs = None) -> None:
        """Training has ended; `logs` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """A training epoch begins."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """A training epoch has ended; its evaluation follows."""

    def on_train_batch_begin(self, step: int, logs: Logs = None) -> None:
        """A training batch is there."""

    def on_train_batch_end(self, step: int, logs: Logs = None) -> None:
        """Its gradients are there, and the step is done if one was due."""

    def on_eval_begin(self, logs: Logs = None) -> None:
        """Evaluation begins; `logs` hold "steps" and "metrics" (names)."""

    def on_eval_end(self, logs: Logs = None) -> None:
        """Evaluation has ended; `logs` hold the results."""

    def on_eval_batch_begin(self, step: int, logs: Logs = None) -> None:
        """A batch is there."""

    def on_eval_batch_end(self, step: int, logs: Logs = None) -> None:
        """It is evaluated; `logs` hold the results so far."""

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Prediction begins; `logs` hold "steps"."""

    def on_predict_end(self, logs: Logs = None) -> None:
        """Prediction has ended."""

    def on_predict_batch_begin(self, step: int, logs: Logs = None) -> None:
        """A batch is there."""

    def on_predict_batch_end(self, step: int, logs: Logs = None) -> None:
        """Its outputs are there."""

    def close(self) -> None:
        """`fit`, `evaluate` or `predict` is over, by whatever way: give up what is still held."""


class CallbackList:
    """Calls every callback's hook, in order.

    Args:
        callbacks: one or several.
        model: what they are told of.
        params: the same.

    Raises:
        TypeError: something else than a Callback.
    """

    def __init__(self, callbacks: Iterable[Callback], model: Model, params: dict[str, Any]) -> None:
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks must be instances of dpfuse.paddle.callbacks.Callback, got {callback!r} of type "
                    f"{type(callback).__name__}"
                )
            callback.set_params(params)
            callback.set_model(model)

    def call(self, hook: str, *args: Any) -> None:
        """`hook` of all, such as "on_train_begin"."""
        for callback in self._callbacks:
            getattr(callback, hook)(*args)
