"""Checkpoint files in a folder: written whole or not at all, and checked before use. Knows no model and no ranks."""

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
DRAFT = ".part"  # after the name, until the content is complete and on the disk
DAMAGED = ".damaged"  # after the name of a file that was found damaged
FORMAT = "dpfuse_checkpoint"  # the key that marks a file as a checkpoint; its value is the version of the format
VERSION = 1
NO_COMMENT = b"\0\0"  # torch's files are zip archives, which end with the length of a comment
ZIP_END = b"PK\5\6"  # 20 bytes before that
COMMENT = "dpfuse crc32 "  # the comment that we add; the checksum of everything before it follows
PIECE = 4 << 20  # bytes to read at a time


class DamagedFileError(Exception):
    """A file is not as it was written; the text names the file and the symptom."""


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the file of a step; the names sort in the order of steps."""
    return folder / f"step-{step:010d}.pt"


def _steps(folder: Path) -> list[int]:
    """Return the steps that have a file, in ascending order."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)


def write_step(folder: Path, step: int, content: Mapping[str, Any], keep: int | None) -> Path:
    """Write the file of a step. Even if this process is killed, the name belongs to a complete file or to none.

    Args:
        folder: made if it does not exist.
        step: not below the step of any file in the folder.
        content: what `torch.load(path, weights_only=True)` will return.
        keep: the number of files to keep; None keeps all.

    Raises:
        ValueError: the folder has a later step, or is a file.
        TypeError: an entry of `content` cannot be loaded with `weights_only=True`.
        OSError: the disk is full, or fails otherwise.
    """
    if NAME.fullmatch(folder.name) or folder.is_file():
        raise ValueError(
            f"folder: got {folder}, which is {'a file' if folder.is_file() else 'the name of a file'}, expected a "
            "folder. Pass the folder of the checkpoints: save_checkpoint names each file by its step."
        )
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _flush_folder(folder.parent)
    latest = max(_steps(folder), default=step)
    if latest > step:
        raise ValueError(
            f"{folder} has {step_path(folder, latest).name}, later than step {step} which is to be saved, and loading "
            "would prefer it. Is it from another run? Remove the later files, or save to another folder."
        )
    for name in os.listdir(folder):
        if name.endswith(DRAFT) and NAME.fullmatch(name.removesuffix(DRAFT)):
            (folder / name).unlink()  # a process was killed while it wrote this file
    path = step_path(folder, step)
    draft = path.with_name(path.name + DRAFT)
    try:
        with open(draft, "wb") as file:
            summed = _SummedFile(file)
            torch.save({FORMAT: VERSION, **content}, summed)  # type: ignore[arg-type]  # torch.save only writes
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
    """Return the content of one file, on the CPU.

    torch.load alone does not notice flipped bits, so the checksum is compared first.

    Raises:
        DamagedFileError: the file is cut short, or has changed since it was written.
        ValueError: the file is complete, but is not a checkpoint of dpfuse. A file of torch.save is none.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        left = max(0, os.fstat(file.fileno()).st_size - len(_seal(0)))
        crc = 0
        while piece := file.read(min(left, PIECE)):
            crc = zlib.crc32(piece, crc)
            left -= len(piece)
        seal = file.read()
    if seal[-len(NO_COMMENT) - 20 :].startswith(ZIP_END) and seal.endswith(NO_COMMENT):
        raise ValueError(
            f"{path} was not written by dpfuse.save_checkpoint, expected one of its files: got a file such as "
            "torch.save writes. Read it with torch.load(), and give its parts to load_state_dict()."
        )
    if seal[:-8] != _seal(0)[:-8]:
        raise DamagedFileError(f"{path} is damaged: it is cut short, or dpfuse.save_checkpoint has not written it")
    if seal != _seal(zlib.crc32(NO_COMMENT, crc)):
        raise DamagedFileError(f"{path} is damaged: its content does not match its checksum")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is not a checkpoint of dpfuse.save_checkpoint: {error}") from error
    if not isinstance(content, dict) or FORMAT not in content:
        raise ValueError(f"{path} is not a checkpoint of dpfuse.save_checkpoint; load it with torch.load")
    if content[FORMAT] != VERSION:
        raise ValueError(
            f"{path} is of format {content[FORMAT]}, expected {VERSION}: another version of dpfuse wrote it"
        )
    return content


def read_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest complete file and its content; None if the folder has no checkpoint.

    A damaged file causes a warning and gets a name that ends in `.damaged`.

    Raises:
        DamagedFileError: the folder has files, but all are damaged.
        OSError, ValueError: as `read_whole`.
    """
    damaged = []
    steps = _steps(folder)
    while steps:
        step = steps.pop()
        path = step_path(folder, step)
        try:
            content = read_whole(path)
        except DamagedFileError as error:
            damaged.append(str(error))
            aside = path.with_name(path.name + DAMAGED)
            with suppress(OSError):  # the folder may be read-only
                os.replace(path, aside)
            if steps:
                warnings.warn(f"{error}; loading the checkpoint before it", UserWarning, stacklevel=2)
            continue
        return path, content
    if damaged:
        raise DamagedFileError(
            f"every checkpoint in {folder} is damaged: {'; '.join(damaged)}. Restore one, or remove all of them to "
            "begin again."
        )
    return None


def _flush_folder(folder: Path) -> None:
    """Flush the names in the folder to the disk, so that they survive a power cut as the contents do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not support it
            raise
    finally:
        os.close(descriptor)


class _SummedFile:
    """A file for torch.save that keeps the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _seal(crc: int) -> bytes:
    """Return the end of a file: a comment of a zip archive, after its length."""
    comment = f"{COMMENT}{crc:08x}".encode()
    return struct.pack("<H", len(comment)) + comment


def _check_loadable(path: Path, content: Mapping[str, Any]) -> None:
    unsafe = get_unsafe_globals_in_checkpoint(path)
    if not unsafe:
        return
    unsafe_names = [name for name, value in content.items() if _unsafe(value)]
    raise TypeError(
        f"{', '.join(unsafe_names)}: has {', '.join(sorted(set(unsafe)))}, which weights_only=True does not load; "
        "expected tensors, numbers, texts, and lists and dicts of them. Convert it (an array with torch.from_numpy), "
        "or allow its type with torch.serialization.add_safe_globals."
    )


def _unsafe(value: object) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return bool(get_unsafe_globals_in_checkpoint(buffer))
