"""Lets torch's own DistributedDataParallel run on the CPU what it runs on streams: there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = ["without_streams"]


class _Nothing:
    """A stream, or an event, on which nothing ever runs."""

    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@contextmanager
def without_streams() -> Iterator[None]:
    """For the oracle alone; dpfuse asks for none of these."""
    with (
        mock.patch.object(torch.accelerator, "current_stream", return_value=_Nothing()),
        mock.patch.object(torch, "Event", _Nothing),
        mock.patch.object(torch, "Stream", _Nothing),
    ):
        yield
