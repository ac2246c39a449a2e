"""CIFAR-10 in its binary form (cifar-10-binary.tar.gz), unpacked or not. Unpickles nothing; knows no network.

A file is a sequence of records: 1 byte with the label, then 32 x 32 bytes for each of red, green and blue, row by row.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = ["CLASSES", "Cifar10", "write_made_up"]

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes
LONGEST = 10_000 * RECORD  # bytes, the length of each published file
FOLDER = "cifar-10-batches-bin"  # inside the archive, and after unpacking
FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


class Cifar10(Dataset[tuple[torch.Tensor, int]]):
    """Pairs of a picture, [3, 32, 32] float32 from 0 to 1, and its label, 0 to 9.

    Args:
        place: the folder with the .bin files, or the archive (.tar.gz), which is read as it is.
        mode: "train" for the 50,000 pictures of five files, "test" for the 10,000 pictures of the sixth.
        limit: use only the first `limit` pictures; None uses all.

    Raises:
        FileNotFoundError: The folder, the archive, or a file in it does not exist.
        ValueError: The mode is another, or a file has a wrong format; the text names the file.
    """

    def __init__(self, place: Path, mode: str = "train", limit: int | None = None) -> None:
        if mode not in FILES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, FILES))}, got {mode!r}")
        records = np.concatenate([_records(*file) for file in _contents(place, FILES[mode])])[:limit]  # [n, RECORD]
        self.labels = torch.from_numpy(records[:, 0].astype(np.int64))
        self.images = torch.from_numpy(records[:, 1:].copy()).view(-1, *SHAPE)  # uint8

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])


def write_made_up(folder: Path, train: int = 640, test: int = 160) -> None:
    """Write files of the same form that a network learns in seconds: each class is a pattern of colours with noise.

    Args:
        folder: folder for all six files; it is made if it does not exist.
        train: pictures in the five training files together.
        test: pictures in the test file.
    """
    random = np.random.default_rng(0)
    patterns = random.integers(40, 216, (CLASSES, 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)
    folder.mkdir(parents=True, exist_ok=True)
    for mode, count in {"train": train, "test": test}.items():
        labels = np.arange(count) % CLASSES
        noisy = patterns[labels] + random.integers(-40, 41, (count, *SHAPE))
        records = np.column_stack([labels, noisy.reshape(count, -1)]).astype(np.uint8)
        for name, part in zip(FILES[mode], np.array_split(records, len(FILES[mode])), strict=True):
            (folder / name).write_bytes(part.tobytes())


def _contents(place: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield each file's name for errors, and its bytes."""
    if place.is_dir():
        for name in names:
            path = place / name
            if not path.is_file():
                raise FileNotFoundError(f"{path} is not there; expected {', '.join(names)} in {place}")
            with open(path, "rb") as file:
                yield str(path), file.read(LONGEST + 1)
    elif place.is_file():
        try:
            with tarfile.open(place) as archive:
                for name in names:
                    file = archive.extractfile(f"{FOLDER}/{name}")
                    assert file is not None, f"{name} is a folder"
                    yield f"{place}: {name}", file.read(LONGEST + 1)
        except KeyError as error:
            raise FileNotFoundError(f"{place}: {error.args[0]}; expected cifar-10-binary.tar.gz") from error
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(f"{place} is no whole tar archive ({error}); fetch it again") from error
    else:
        raise FileNotFoundError(
            f"{place} is not there; expected the folder {FOLDER} or cifar-10-binary.tar.gz, the binary version of "
            "https://www.cs.toronto.edu/~kriz/cifar.html"
        )


def _records(name: str, content: bytes) -> np.ndarray:
    """Return the records of a file, [n, RECORD] uint8."""
    if len(content) > LONGEST:
        raise ValueError(f"{name} is longer than {LONGEST} bytes, {LONGEST // RECORD} records; it is not of CIFAR-10")
    if not content or len(content) % RECORD:
        raise ValueError(f"{name} has {len(content)} bytes, expected whole records of {RECORD}; it was cut off")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    wrong = records[:, 0] >= CLASSES
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(f"{name}: record {first} has label {records[first, 0]}, expected 0 to {CLASSES - 1}")
    return records
