"""Which files a run has changed, below the working folder and below paths in the arguments. Reads no content."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST", "Snapshot", "folders_of", "snapshot"]

MOST = 200_000  # files of a folder; a data set may have more, and is not written
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
    """Return the folders to look at: the working folder, those that arguments name, and those that links in these name.

    Paths have no links in them, so that they are those of the files that a process is seen to open.

    Args:
        words: the arguments of the program; `--out=runs/a` counts as well.
        own: the doctor's folder, which is left out.
    """
    roots: list[str] = []

    def look_at(folder: str) -> None:
        known = folder == str(own) or any(Path(folder).is_relative_to(root) for root in roots)
        if not known and len(Path(folder).parts) > 1:  # not the whole machine
            roots.append(folder)

    look_at(os.path.realpath(os.getcwd()))
    for word in words:
        look_at(_folder_of(word.rpartition("=")[2]))
    for root in [*roots]:
        for link in _links_in(root):
            look_at(link)
    return roots


def _folder_of(word: str) -> str:
    """Return the folder that an argument names or lies in; one that is not there yet may be made by the program.

    An argument may be any text, which then names something in the working folder.
    """
    path = os.path.realpath(os.path.expanduser(word))
    if os.path.isdir(path):
        return path
    above = os.path.dirname(path)
    if os.path.isdir(above) and len(Path(above).parts) > 1:
        return above
    while not os.path.isdir(os.path.dirname(path)):
        path = os.path.dirname(path)
    return path


def _links_in(folder: str) -> list[str]:
    """Return the folders to which links of a folder lead."""
    try:
        with os.scandir(folder) as entries:
            found = [os.path.realpath(entry.path) for entry in entries if entry.is_symlink() and entry.is_dir()]
    except OSError:  # it is not there yet, or not for us
        return []
    return sorted(found)


def snapshot(folders: Sequence[str], own: Path) -> Snapshot:
    """Look at all files below these folders, except those below the doctor's own, and into which it prints.

    Each folder has its own limit of files. Of a link to a file, both the link and the file count.
    """
    files: dict[str, tuple[int, int]] = {}
    complete = True
    for root in folders:
        left_out = {str(own), *folders} - {root}
        if not _look_below(root, left_out, files):
            complete = False
    for number in (1, 2):  # where a shell has sent what the doctor prints
        files.pop(os.path.realpath(f"/proc/self/fd/{number}"), None)
    return Snapshot(files, complete)


def _look_below(root: str, left_out: Collection[str], files: dict[str, tuple[int, int]]) -> bool:
    """Add the files below a folder, but not those below others; return whether these are all."""
    count = 0
    for folder, names, found in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT and os.path.join(folder, name) not in left_out]
        for name in found:
            path = os.path.join(folder, name)
            try:
                facts = os.lstat(path)
                files[path] = facts.st_mtime_ns, facts.st_size
                if stat.S_ISLNK(facts.st_mode):
                    facts = os.stat(path)
                    files[os.path.realpath(path)] = facts.st_mtime_ns, facts.st_size
            except OSError:
                continue  # removed meanwhile, not for us, or a link to nothing
            count += 1
            if count >= MOST:
                return False
    return True
