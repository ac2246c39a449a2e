"""The note of a rank that has left its training because all ranks stop. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["all_stopped", "note_stopped"]


def note_stopped(record: str) -> None:
    """Note that this rank, whose errors go to `record`, has left well after its program had read that all stop."""
    with suppress(OSError):  # the job then ends as without the note
        _note_of(record).touch()


def all_stopped(records: Collection[str]) -> bool:
    """Whether each of the ranks with these records has noted it; False for none."""
    return bool(records) and all(_note_of(record).exists() for record in records)


def _note_of(record: str) -> Path:
    return Path(f"{os.fspath(record)}.stopped")
