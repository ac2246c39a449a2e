"""The IDX format, gzipped: a magic number, the dimensions, then bytes. Knows no data set and no network."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch

__all__ = ["read"]

UNSIGNED_BYTES = 0x08  # type in the third byte of the magic number; the fourth byte is the number of dimensions


def read(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the unsigned bytes in the file at `path`, which must have exactly this shape.

    Raises:
        ValueError: The file cannot be unpacked, is no IDX file of bytes, or has another shape or length.
    """

    def wrong(what: str, got: object, expected: object) -> ValueError:
        return ValueError(f"{path}: {what} is {got}, expected {expected}; delete the file to have it fetched again")

    header_size = 4 + 4 * len(shape)
    size = header_size + math.prod(shape)
    try:
        with gzip.open(path) as file:
            content = file.read(size + 1)  # one byte more than expected, to detect a longer file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise wrong("the file", f"no whole gzip file ({error})", "one") from error
    if len(content) < header_size:
        raise wrong("its length unpacked", len(content), size)
    magic, *dimensions = struct.unpack(f">{1 + len(shape)}I", content[:header_size])
    if magic != (expected := UNSIGNED_BYTES << 8 | len(shape)):
        raise wrong("its magic number", f"{magic:#010x}", f"{expected:#010x}")
    if tuple(dimensions) != shape:
        raise wrong("its shape", tuple(dimensions), shape)
    if len(content) != size:
        raise wrong("its length unpacked", len(content) if len(content) < size else f"above {size}", size)
    return torch.frombuffer(bytearray(content[header_size:]), dtype=torch.uint8).view(shape)
