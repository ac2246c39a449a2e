"""The note of a rank that has left its training because all ranks stop. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["all_stopped", "note_stopped"]


def note_stopped(record: str) -> None:
    """Note that this rank has left well after its program had read that all ranks stop.

    Args:
        record: the path at which an error of this rank would be recorded.
    """
    with suppress(OSError):  # the job then ends as without the note
        _note_of(record).touch()


def all_stopped(records: Collection[str]) -> bool:
    """Whether all of these ranks have noted it; False for none.

    Args:
        records: the paths of all ranks, as for `note_stopped`.
    """
    return bool(records) and all(_note_of(record).exists() for record in records)


def _note_of(record: str) -> Path:
    return Path(f"{os.fspath(record)}.stopped")
