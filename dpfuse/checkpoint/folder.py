"""Checkpoint files in a folder: written whole or not at all, checked before they are used. Knows no model, no ranks."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import struct
import warnings
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

__all__ = ["DamagedFileError", "read_newest", "read_whole", "step_path", "write_step"]

NAME = re.compile(r"step-(\d{10,})\.pt")
DRAFT = ".part"  # behind the name, until the content is whole and on the disk
DAMAGED = ".damaged"  # behind the name of a file that was found to be so
FORMAT = "dpfuse_checkpoint"  # the key by which a file tells that it is one, with the number of its format
VERSION = 1
NO_COMMENT = b"\0\0"  # how torch's files end, as zip archives do: the length of a comment
COMMENT = "dpfuse crc32 "  # which we add, with the checksum of all before it
PIECE = 4 << 20  # bytes that are read at a time


class DamagedFileError(Exception):
    """A file is not what was once written; the text says which one, and how that shows."""


def step_path(folder: Path, step: int) -> Path:
    """The file of a step; names sort as steps do."""
    return folder / f"step-{step:010d}.pt"


def _steps(folder: Path) -> list[int]:
    """The steps that have a file, ascending."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)


def write_step(folder: Path, step: int, content: Mapping[str, Any], keep: int | None) -> Path:
    """Write the file of a step: at every moment the name means a whole file or none, even if this process is killed.

    Args:
        folder: made if it is not there.
        step: of all files in the folder the latest.
        content: what `torch.load(path, weights_only=True)` shall return.
        keep: how many files to keep; None keeps all.

    Raises:
        ValueError: the folder has a later step.
        TypeError: an entry of `content` cannot be loaded with `weights_only=True`.
        OSError: the disk is full, and the like.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _flush_folder(folder.parent)
    latest = max(_steps(folder), default=step)
    if latest > step:
        raise ValueError(
            f"{folder} has {step_path(folder, latest).name}, later than step {step} which is to be saved, and loading "
            "would prefer it: is it of another run? Remove the later files, or save to another folder."
        )
    for name in os.listdir(folder):
        if name.endswith(DRAFT) and NAME.fullmatch(name.removesuffix(DRAFT)):
            (folder / name).unlink()  # of a process that was killed while it wrote
    path = step_path(folder, step)
    draft = path.with_name(path.name + DRAFT)
    try:
        with open(draft, "wb") as file:
            summed = _SummedFile(file)
            torch.save({FORMAT: VERSION, **content}, summed)  # type: ignore[arg-type]  # it writes, and no more
            file.seek(-len(NO_COMMENT), os.SEEK_CUR)
            file.write(_seal(summed.crc))
            file.flush()
            os.fsync(file.fileno())
        _check_loadable(draft, content)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _flush_folder(folder)
    if keep is not None:
        for old in _steps(folder)[:-keep]:
            step_path(folder, old).unlink()
    return path


def read_whole(path: Path) -> dict[str, Any]:
    """The content of one file, on the CPU.

    torch.load alone takes a file with flipped bits for a good one, so the checksum is compared first.

    Raises:
        DamagedFileError: it is cut short, or has changed since it was written.
        ValueError: it is a whole file, but no checkpoint of ours.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        left = max(0, os.fstat(file.fileno()).st_size - len(_seal(0)))
        crc = 0
        while piece := file.read(min(left, PIECE)):
            crc = zlib.crc32(piece, crc)
            left -= len(piece)
        seal = file.read()
    if seal[:-8] != _seal(0)[:-8]:
        raise DamagedFileError(f"{path} is damaged: it is cut short, or no file of dpfuse.save_checkpoint")
    if seal != _seal(zlib.crc32(NO_COMMENT, crc)):
        raise DamagedFileError(f"{path} is damaged: its content does not have its checksum")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is no checkpoint of dpfuse.save_checkpoint: {error}") from error
    if not isinstance(content, dict) or FORMAT not in content:
        raise ValueError(f"{path} is no checkpoint of dpfuse.save_checkpoint; load it with torch.load")
    if content[FORMAT] != VERSION:
        raise ValueError(
            f"{path} is of format {content[FORMAT]}, expected {VERSION}: another version of dpfuse wrote it"
        )
    return content


def read_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole file and its content; None where there is none at all.

    A damaged one is told of and put aside, under a name ending in `.damaged`.

    Raises:
        DamagedFileError: there are files, but all are damaged.
        OSError, ValueError: as `read_whole`.
    """
    damaged = []
    for step in reversed(_steps(folder)):
        path = step_path(folder, step)
        try:
            content = read_whole(path)
        except DamagedFileError as error:
            damaged.append(str(error))
            aside = path.with_name(path.name + DAMAGED)
            with suppress(OSError):  # a folder that can only be read
                os.replace(path, aside)
            warnings.warn(f"{error}; going back to the one before", UserWarning, stacklevel=2)
            continue
        return path, content
    if damaged:
        raise DamagedFileError(
            f"every checkpoint in {folder} is damaged: {'; '.join(damaged)}. Restore one, or remove all of them to "
            "begin anew."
        )
    return None


def _flush_folder(folder: Path) -> None:
    """Have the names in the folder survive a power cut, as its files' contents do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems know no such thing
            raise
    finally:
        os.close(descriptor)


class _SummedFile:
    """What torch.save needs of a file, and the checksum of what it has written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _seal(crc: int) -> bytes:
    """The end of a file: a comment, as zip archives may have, behind its length."""
    comment = f"{COMMENT}{crc:08x}".encode()
    return struct.pack("<H", len(comment)) + comment


def _check_loadable(path: Path, content: Mapping[str, Any]) -> None:
    unsafe = get_unsafe_globals_in_checkpoint(path)
    if not unsafe:
        return
    guilty = [name for name, value in content.items() if _unsafe(value)]
    raise TypeError(
        f"{', '.join(guilty)}: has {', '.join(sorted(set(unsafe)))}, which weights_only=True refuses to load; expected "
        "tensors, numbers, texts, and lists and dicts of them. Convert it (an array with torch.from_numpy), or allow "
        "its type with torch.serialization.add_safe_globals."
    )


def _unsafe(value: object) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return bool(get_unsafe_globals_in_checkpoint(buffer))
