"""The reader of CIFAR-10's binary form, and every way in which a file can be wrong."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "paddle"))

import cifar10


def record(label: int, red: int, green: int, blue: int) -> bytes:
    """A picture of one colour, but for a first pixel of 255."""
    planes = [bytes([255]) + bytes([value]) * 1023 for value in (red, green, blue)]
    return bytes([label]) + b"".join(planes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All six files: two records in each training file, three in the other."""
    folder = tmp_path / cifar10.FOLDER
    folder.mkdir()
    for number, name in enumerate(cifar10.FILES["train"]):
        (folder / name).write_bytes(record(number, number, 10, 20) + record(9 - number, 30, number, 40))
    (folder / "test_batch.bin").write_bytes(b"".join(record(label, 1, 2, label) for label in (7, 8, 9)))
    return folder


@pytest.fixture
def archive(folder: Path) -> Path:
    path = folder.parent / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, cifar10.FOLDER)
    return path


def test_records_are_read_in_order_with_their_planes(folder: Path) -> None:
    train, test = cifar10.Cifar10(folder), cifar10.Cifar10(folder, "test")
    assert len(train) == 10
    assert train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert test.labels.tolist() == [7, 8, 9]
    assert test.images.shape == (3, 3, 32, 32)
    assert test.images[:, :, 0, 0].eq(255).all()  # the first byte of a plane is the pixel at the top left
    assert test.images[:, :, 0, 1].tolist() == test.images[:, :, 31, 31].tolist() == [[1, 2, 7], [1, 2, 8], [1, 2, 9]]

    picture, label = train[3]  # the second record of the second file
    assert label == 8
    assert picture.dtype == torch.float32
    assert torch.equal(picture[:, 1, 1], torch.tensor([30.0, 1.0, 40.0]) / 255)
    assert picture.max() == 1


def test_the_archive_is_read_as_it_is(folder: Path, archive: Path) -> None:
    for mode in ("train", "test"):
        unpacked, packed = cifar10.Cifar10(folder, mode), cifar10.Cifar10(archive, mode)
        assert torch.equal(unpacked.images, packed.images)
        assert torch.equal(unpacked.labels, packed.labels)


def test_a_limit_takes_the_first_records(folder: Path) -> None:
    assert cifar10.Cifar10(folder, limit=3).labels.tolist() == [0, 9, 1]


def test_made_up_files_have_the_form_and_every_class(tmp_path: Path) -> None:
    cifar10.write_made_up(tmp_path / "made" / "up", train=50, test=20)
    for mode, count in {"train": 50, "test": 20}.items():
        data = cifar10.Cifar10(tmp_path / "made" / "up", mode)
        assert torch.bincount(data.labels, minlength=10).tolist() == [count // 10] * 10


def test_what_is_not_there_is_named(folder: Path, archive: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is not there; expected the folder cifar-10-batches-bin or"):
        cifar10.Cifar10(folder / "nowhere")
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_4\.bin is not there; expected data_batch_1\.bin, .* in "):
        cifar10.Cifar10(folder)
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, cifar10.FOLDER)
    with pytest.raises(FileNotFoundError, match=r"tar\.gz: .*data_batch_4\.bin.*; expected cifar-10-binary\.tar\.gz"):
        cifar10.Cifar10(archive)
    with pytest.raises(ValueError, match="mode must be one of 'train', 'test', got 'valid'"):
        cifar10.Cifar10(folder, "valid")


def test_a_damaged_file_is_an_error_that_names_it(folder: Path) -> None:
    path = folder / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin has 6145 bytes, expected whole records of 3073"):
        cifar10.Cifar10(folder)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"data_batch_2\.bin has 0 bytes"):
        cifar10.Cifar10(folder)
    path.write_bytes(whole + record(10, 0, 0, 0))
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: record 2 has label 10, expected 0 to 9"):
        cifar10.Cifar10(folder)
    path.write_bytes(bytes(cifar10.LONGEST + 1))
    with pytest.raises(ValueError, match=r"data_batch_2\.bin is longer than 30730000 bytes, 10000 records"):
        cifar10.Cifar10(folder)


def test_a_damaged_archive_is_an_error_that_names_it(archive: Path) -> None:
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tar\.gz is no whole tar archive \(.*\); fetch it again"):
        cifar10.Cifar10(archive, "test")
    archive.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"tar\.gz is no whole tar archive"):
        cifar10.Cifar10(archive)
