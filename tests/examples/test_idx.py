"""IDX files are read exactly, and what is no such file is refused by name."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import idx
import pytest
import torch

SHAPE = (3, 2, 2)
HEADER = struct.pack(">4I", 0x0803, *SHAPE)
WHOLE = gzip.compress(HEADER + bytes(range(12)))


def test_values_and_shape_are_read(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(WHOLE)
    assert torch.equal(idx.read(path, SHAPE), torch.arange(12, dtype=torch.uint8).view(SHAPE))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.compress(struct.pack(">4I", 0x0D03, *SHAPE) + bytes(12)),
            "magic number is 0x00000d03, expected 0x00000803",
        ),
        (gzip.compress(struct.pack(">4I", 0x0803, 4, 2, 2) + bytes(12)), r"shape is \(4, 2, 2\), expected \(3, 2, 2\)"),
        (gzip.compress(HEADER + bytes(11)), "length unpacked is 27, expected 28"),
        (gzip.compress(HEADER + bytes(10**6)), "length unpacked is above 28, expected 28"),
        (gzip.compress(HEADER[:7]), "length unpacked is 7, expected 28"),
        (gzip.compress(b""), "length unpacked is 0, expected 28"),
        (WHOLE[:-10], "no whole gzip file"),
        (WHOLE[:-6] + b"\0\0" + WHOLE[-4:], "no whole gzip file"),
        (b"<html>not found</html>", "no whole gzip file"),
        (b"", "length unpacked is 0, expected 28"),
    ],
    ids=["magic", "shape", "short", "long", "half a header", "nothing packed", "cut", "checksum", "no gzip", "empty"],
)
def test_a_damaged_file_is_refused_with_what_was_expected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        idx.read(path, SHAPE)
    assert str(path) in str(refusal.value)
    assert "delete the file" in str(refusal.value)
