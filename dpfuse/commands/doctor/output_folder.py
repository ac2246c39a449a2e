"""The folder of the report, made before anything is measured. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from dpfuse.errors import DPFuseError

__all__ = ["REPORT", "make_folder"]

REPORT = "report.json"


def make_folder(path: Path) -> None:
    """Make the folder of the report.

    Raises:
        DPFuseError: the folder cannot be made, or a report cannot be written into it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DPFuseError(f"--out: cannot make the folder {str(path)!r}: {error.strerror}; name another") from error
    if not os.access(path, os.W_OK) or (path / REPORT).is_dir():
        raise DPFuseError(f"--out: cannot write {REPORT} into the folder {str(path)!r}; name another")
