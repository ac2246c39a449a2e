"""The images to train on: Fashion-MNIST from wherever it can be had, else scikit-learn's digits.

Owns the sources and their order. Knows no network to train and no ranks.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from time import monotonic

import idx
import torch

__all__ = ["Images", "load"]

# File: its shape unpacked, and the MD5 of the packed file as the data set's authors publish it.
FILES = {
    "train-images-idx3-ubyte.gz": ((60_000, 28, 28), "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    "train-labels-idx1-ubyte.gz": ((60_000,), "25c81989df183df01b3e8a0aad5dffbe"),
    "t10k-images-idx3-ubyte.gz": ((10_000, 28, 28), "bef4ecab320f06d8554ea6380940ec79"),
    "t10k-labels-idx1-ubyte.gz": ((10_000,), "bb300cfdad3c16e7a12a480ee83cd310"),
}
FASHION_MNIST = "Fashion-MNIST"
CLASSES = 10
PACKAGE = "dataset-fashion-mnist"
PACKAGE_FOLDER = Path("usr/share/datasets/fashion-mnist")  # under the root that the package is unpacked to
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
CONNECT_SECONDS = 10
APT_SECONDS = 60  # for each of its runs
APT_OPTIONS = [f"-oAcquire::http::Timeout={CONNECT_SECONDS}", "-oAcquire::Retries=0"]
DOWNLOAD_SECONDS = 90  # for all four files


@dataclass(frozen=True)
class Images:
    """A data set in memory."""

    name: str
    origin: str  # where it was read, or why it is not Fashion-MNIST
    train_images: torch.Tensor  # [n, 28, 28] uint8
    train_labels: torch.Tensor  # [n] int64, below CLASSES
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def first(self, count: int | None) -> Images:
        """Only so many images to train and to test; None leaves all."""
        return replace(
            self,
            train_images=self.train_images[:count],
            train_labels=self.train_labels[:count],
            test_images=self.test_images[:count],
            test_labels=self.test_labels[:count],
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All four."""
        return self.train_images, self.train_labels, self.test_images, self.test_labels


class UnavailableError(Exception):
    """This source does not have the data set here and now; the text says why."""


def load(folder: Path, *, fetch: bool = True) -> Images:
    """Fashion-MNIST from the first source that has it, else scikit-learn's digits.

    The sources: `folder`, Debian's package where it is installed, the same package unpacked into `folder`
    (no root needed), the authors' download into `folder`.

    Args:
        folder: where the files are looked for, and put.
        fetch: False looks only on this machine's disk.

    Raises:
        ValueError: a file is there but damaged.
        ModuleNotFoundError: neither Fashion-MNIST nor scikit-learn can be had.
    """
    sources: list[Callable[[Path], Path]] = [on_disk]
    if fetch:
        sources += [from_debian, from_mirror]
    reasons = []
    for source in sources:
        try:
            return fashion_mnist(source(folder))
        except UnavailableError as error:
            reasons.append(str(error))
    return digits("; ".join(reasons))


def fashion_mnist(place: Path) -> Images:
    """The four files in `place`, each checked."""
    tensors = [idx.read(place / name, shape) for name, (shape, _) in FILES.items()]
    for name, labels in zip(FILES, tensors, strict=True):
        if "labels" in name and int(labels.max()) >= CLASSES:
            raise ValueError(f"{place / name}: has label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return Images(
        FASHION_MNIST, f"read from {_short(place)}", tensors[0], tensors[1].long(), tensors[2], tensors[3].long()
    )


def digits(reason: str) -> Images:
    """scikit-learn's 1797 handwritten digits, enlarged to Fashion-MNIST's size; `reason` says why they must do."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"no Fashion-MNIST ({reason}), and no scikit-learn for its digits instead. Put the four files named "
            f"{', '.join(FILES)} into the folder DPFUSE_DATA, or pip install scikit-learn."
        ) from error
    bunch = load_digits()
    images = torch.as_tensor(bunch.images * (255 / 16)).to(torch.uint8)  # [n, 8, 8], brightness was 0 to 16
    images = images.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)
    images = torch.nn.functional.pad(images, (2, 2, 2, 2))  # [n, 28, 28]
    labels = torch.as_tensor(bunch.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    origin = f"not Fashion-MNIST, which was not to be had: {reason}"
    return Images("scikit-learn's digits", origin, images[~test], labels[~test], images[test], labels[test])


def on_disk(folder: Path) -> Path:
    """The first place on this machine that has all four files."""
    places = [folder, folder / "fashion-mnist", Path("/") / PACKAGE_FOLDER]
    for place in places:
        if all((place / name).is_file() for name in FILES):
            return place
    raise UnavailableError(f"not on disk in any of {', '.join(str(_short(place)) for place in places)}")


def from_debian(folder: Path) -> Path:
    """Debian's package, downloaded and unpacked into `folder`. Nothing is installed; needs no root."""
    with _scratch(folder, "Debian's package") as scratch:
        work = Path(scratch)
        try:
            _run(work, "apt-get", *APT_OPTIONS, "download", PACKAGE)
        except UnavailableError:
            # Containers often come without package lists: fetch them for this once, next to the package.
            for name in ("lists/partial", "cache/archives/partial"):
                (work / name).mkdir(parents=True)
            private = [*APT_OPTIONS, f"-oDir::State::Lists={work / 'lists'}", f"-oDir::Cache={work / 'cache'}"]
            _run(work, "apt-get", *private, "update")
            _run(work, "apt-get", *private, "download", PACKAGE)
        for package in work.glob("*.deb"):
            _run(work, "dpkg-deb", "--extract", package.name, "unpacked")
        return _keep(work / "unpacked" / PACKAGE_FOLDER, folder)


def from_mirror(folder: Path) -> Path:
    """The authors' own files, downloaded into `folder` and compared with their checksums."""
    deadline = monotonic() + DOWNLOAD_SECONDS
    with _scratch(folder, "the public download") as scratch:
        for name, (_, md5) in FILES.items():
            digest = hashlib.md5(usedforsecurity=False)
            try:
                with (
                    urllib.request.urlopen(f"{MIRROR}/{name}", timeout=CONNECT_SECONDS) as answer,
                    open(Path(scratch, name), "wb") as file,
                ):
                    while chunk := answer.read(1 << 20):
                        if monotonic() > deadline:
                            raise UnavailableError(f"the public download took more than {DOWNLOAD_SECONDS} s")
                        digest.update(chunk)
                        file.write(chunk)
            except (OSError, HTTPException) as error:
                raise UnavailableError(f"the public download failed ({error})") from error
            if digest.hexdigest() != md5:
                raise UnavailableError(f"{name} came with MD5 {digest.hexdigest()}, expected {md5}")
        return _keep(Path(scratch), folder)


def _short(place: Path) -> Path:
    """As a person who is in the current folder would write it."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place


def _scratch(folder: Path, source: str) -> tempfile.TemporaryDirectory[str]:
    """A folder inside `folder` for half-done work, so that what is finished can be renamed into place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.resolve())
    except OSError as error:
        raise UnavailableError(f"{source} has no place in {folder} ({error})") from error


def _keep(place: Path, folder: Path) -> Path:
    target = folder / "fashion-mnist"
    target.mkdir(exist_ok=True)
    for name in FILES:
        if not (place / name).is_file():
            raise UnavailableError(f"{name} is not in what was fetched")
        os.replace(place / name, target / name)
    return target


def _run(folder: Path, program: str, *arguments: str) -> None:
    try:
        subprocess.run(
            [program, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=APT_SECONDS
        )
    except FileNotFoundError as error:
        raise UnavailableError(f"there is no {program} here") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{program} took more than {APT_SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines()
        why = next((line for line in lines if line.startswith("E:")), f"exit code {error.returncode}")
        raise UnavailableError(f"{program} failed ({why})") from error
