"""Measures the communication of dpfuse, or tunes it, in the steps that are not hashed in full."""

from __future__ import annotations

from typing import Any

from dpfuse.measure.communication_times import CommunicationTimes
from dpfuse.tune import Tuning, autotune
from dpfuse.wrapper import SyncedModule

__all__ = ["Measurements"]

RECORDED = 5  # backwards that the tuner records with each plan


class Measurements:
    """What is measured in one process.

    Args:
        run: the wrapper of the request: of "dpfuse" communication is measured, and "tuned" is tuned.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._wrappers: list[SyncedModule] = []
        self._times: list[CommunicationTimes] = []
        self._tunings: list[Tuning] = []

    def add(self, wrapper: object) -> None:
        """Take a wrapper that was made, if it is one of dpfuse."""
        if isinstance(wrapper, SyncedModule):
            self._wrappers.append(wrapper)

    def begin(self) -> None:
        """Measure from now on. Where several optimizers step, this is called for each."""
        if self._run == "dpfuse" and not self._times:
            self._times = [CommunicationTimes() for _ in self._wrappers]
            for wrapper, times in zip(self._wrappers, self._times, strict=True):
                wrapper._observe(times)
        if self._run == "tuned" and not self._tunings:
            self._tunings = [autotune(wrapper, RECORDED) for wrapper in self._wrappers]

    def communication(self) -> list[dict[str, Any]]:
        """Return what was measured of the communication of each wrapper."""
        for times in self._times:
            times.finish()
        names = ("steps", "collectives", "nbytes", "seconds", "exposed")
        return [{name: getattr(times, name) for name in names} for times in self._times]

    def tunings(self) -> list[dict[str, Any]]:
        """Return what has become of the tuning of each wrapper."""
        return [{"done": tuning.done, "error": tuning.error} for tuning in self._tunings]
