"""Callback, the base class with `Model`'s hooks, and the list that calls them. Communicates nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Callback", "CallbackList", "Logs"]

Logs = dict[str, Any] | None


class Callback:
    """Base class of all callbacks. Override the hooks that you need. Every rank calls its own callbacks.

    `self.model` is the Model. `self.params` is a dict with batch_size, steps, verbose, metrics (names) and, in fit,
    epochs and save_dir. The `logs` of a batch hold the losses under "loss" (a list), the metrics by name, "step" and
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

    model: Any
    params: dict[str, Any]

    def set_params(self, params: dict[str, Any]) -> None:
        """Called before all other hooks."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Called before all other hooks."""
        self.model = model

    def on_train_begin(self, logs: Logs = None) -> None:
        """Called when training begins."""

    def on_train_end(self, logs: Logs = None) -> None:
        """Called when training has ended, with the `logs` of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Called when a training epoch begins."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Called when a training epoch has ended, before its evaluation."""

    def on_train_batch_begin(self, step: int, logs: Logs = None) -> None:
        """Called before a training batch."""

    def on_train_batch_end(self, step: int, logs: Logs = None) -> None:
        """Called after a training batch, and after the optimizer's step if there was one."""

    def on_eval_begin(self, logs: Logs = None) -> None:
        """Called when evaluation begins; `logs` hold "steps" and "metrics" (names)."""

    def on_eval_end(self, logs: Logs = None) -> None:
        """Called when evaluation has ended; `logs` hold the results."""

    def on_eval_batch_begin(self, step: int, logs: Logs = None) -> None:
        """Called before a batch is evaluated."""

    def on_eval_batch_end(self, step: int, logs: Logs = None) -> None:
        """Called after a batch was evaluated; `logs` hold the results so far."""

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Called when prediction begins; `logs` hold "steps"."""

    def on_predict_end(self, logs: Logs = None) -> None:
        """Called when prediction has ended."""

    def on_predict_batch_begin(self, step: int, logs: Logs = None) -> None:
        """Called before the outputs of a batch are computed."""

    def on_predict_batch_end(self, step: int, logs: Logs = None) -> None:
        """Called after the outputs of a batch were computed."""

    def close(self) -> None:
        """Called at the end of `fit`, `evaluate` or `predict`, also after an exception: release all resources."""


class CallbackList:
    """Calls every callback's hook, in order."""

    def __init__(self, callbacks: Iterable[Callback], model: Any, params: dict[str, Any]) -> None:
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
        """Call `hook`, such as "on_train_begin", of all callbacks."""
        for callback in self._callbacks:
            getattr(callback, hook)(*args)
