"""Which files a run has changed, below the working folder and below paths in the arguments. Reads no content."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST", "Snapshot", "folders_of", "snapshot"]

MOST = 200_000  # files; a data set may have more, and is not written
LEFT_OUT = {"__pycache__", ".git", "node_modules"}


@dataclass(frozen=True)
class Snapshot:
    """The files at one moment, with time and size.

    Args:
        files: by path.
        complete: False if there were more than are looked at.
    """

    files: dict[str, tuple[int, int]]
    complete: bool

    def changed_since(self, before: Snapshot) -> list[str]:
        """Return the files that are new, removed, or have another time or size."""
        paths = self.files.keys() | before.files.keys()
        return sorted(path for path in paths if self.files.get(path) != before.files.get(path))


def folders_of(words: Sequence[str], own: Path) -> list[str]:
    """Return the folders to look at: the working folder, and those that arguments name or lie in.

    Args:
        words: the arguments of the program; `--out=runs/a` counts as well.
        own: the doctor's folder, which is left out.
    """
    found = [os.getcwd()]
    for word in words:
        path = os.path.expanduser(word.rpartition("=")[2])
        for candidate in (path, os.path.dirname(path)):
            # An argument may be any text, which `os.path` finds to be no folder, and `Path` may refuse.
            if len(Path(candidate).parts) > 1 and os.path.isdir(candidate):
                found.append(os.path.realpath(candidate))
                break
    roots: list[str] = []
    for folder in sorted(set(found), key=lambda folder: (len(folder), folder)):  # without those inside of others
        if not any(Path(folder).is_relative_to(root) for root in roots) and folder != str(own):
            roots.append(folder)
    return roots


def snapshot(folders: Iterable[str], own: Path) -> Snapshot:
    """Look at all files below these folders, except those below the doctor's own."""
    files: dict[str, tuple[int, int]] = {}
    for root in folders:
        for folder, names, found in os.walk(root):
            names[:] = [name for name in names if name not in LEFT_OUT and Path(folder, name) != own]
            for name in found:
                path = os.path.join(folder, name)
                try:
                    facts = os.stat(path, follow_symlinks=False)
                except OSError:
                    continue  # removed meanwhile, or not for us
                files[path] = facts.st_mtime_ns, facts.st_size
                if len(files) >= MOST:
                    return Snapshot(files, False)
    return Snapshot(files, True)
