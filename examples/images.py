"""The images for training: Fashion-MNIST from the first source that has it, else scikit-learn's digits.

Owns the sources and their order. Knows no neural network and no ranks.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
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

# File: its unpacked shape, and the MD5 of the packed file, published by the authors of the data set.
FILES = {
    "train-images-idx3-ubyte.gz": ((60_000, 28, 28), "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    "train-labels-idx1-ubyte.gz": ((60_000,), "25c81989df183df01b3e8a0aad5dffbe"),
    "t10k-images-idx3-ubyte.gz": ((10_000, 28, 28), "bef4ecab320f06d8554ea6380940ec79"),
    "t10k-labels-idx1-ubyte.gz": ((10_000,), "bb300cfdad3c16e7a12a480ee83cd310"),
}
FASHION_MNIST = "Fashion-MNIST"
CLASSES = 10
PACKAGE = "dataset-fashion-mnist"
PACKAGE_FOLDER = Path("usr/share/datasets/fashion-mnist")  # inside the root of the unpacked package
MIRROR = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
CONNECT_SECONDS = 10
APT_SECONDS = 60  # for each of its runs
APT_OPTIONS = [f"-oAcquire::http::Timeout={CONNECT_SECONDS}", "-oAcquire::Retries=0"]
DOWNLOAD_SECONDS = 90  # for all four files


@dataclass(frozen=True)
class Images:
    """A data set in memory."""

    name: str
    origin: str  # the place from which it was read, or the reason why it is not Fashion-MNIST
    train_images: torch.Tensor  # [n, 28, 28] uint8
    train_labels: torch.Tensor  # [n] int64, below CLASSES
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def first(self, count: int | None) -> Images:
        """Return only the first `count` images for training and for the test; None returns all."""
        return replace(
            self,
            train_images=self.train_images[:count],
            train_labels=self.train_labels[:count],
            test_images=self.test_images[:count],
            test_labels=self.test_labels[:count],
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all four tensors."""
        return self.train_images, self.train_labels, self.test_images, self.test_labels


class UnavailableError(Exception):
    """A source does not have the data set. The text says why."""


def load(folder: Path, *, fetch: bool = True) -> Images:
    """Return Fashion-MNIST from the first source that has it, else scikit-learn's digits.

    The sources are: `folder`; Debian's package, if it is installed; the same package unpacked into `folder` (without
    root); the authors' download into `folder`.

    Args:
        folder: folder of the files.
        fetch: False reads only this machine's disk.

    Raises:
        ValueError: A file is damaged.
        ModuleNotFoundError: Fashion-MNIST and scikit-learn are both unavailable.
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
    """Read the four files in `place`, and check each."""
    tensors = [idx.read(place / name, shape) for name, (shape, _) in FILES.items()]
    for name, labels in zip(FILES, tensors, strict=True):
        if "labels" in name and int(labels.max()) >= CLASSES:
            raise ValueError(f"{place / name}: has label {int(labels.max())}, expected 0 to {CLASSES - 1}")
    return Images(
        FASHION_MNIST, f"read from {_short(place)}", tensors[0], tensors[1].long(), tensors[2], tensors[3].long()
    )


def digits(reason: str) -> Images:
    """Return scikit-learn's 1797 handwritten digits, enlarged to Fashion-MNIST's size. `reason` says why."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"no Fashion-MNIST ({reason}), and no scikit-learn for its digits instead. Put the four files named "
            f"{', '.join(FILES)} into the folder DPFUSE_DATA, or run: {sys.executable} -m pip install scikit-learn"
        ) from error
    bunch = load_digits()
    images = torch.as_tensor(bunch.images * (255 / 16)).to(torch.uint8)  # [n, 8, 8]; the brightness was 0 to 16
    images = images.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)
    images = torch.nn.functional.pad(images, (2, 2, 2, 2))  # [n, 28, 28]
    labels = torch.as_tensor(bunch.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    origin = f"not Fashion-MNIST, which is not available: {reason}"
    return Images("scikit-learn's digits", origin, images[~test], labels[~test], images[test], labels[test])


def on_disk(folder: Path) -> Path:
    """Return the first place on this machine that has all four files."""
    places = [folder, folder / "fashion-mnist", Path("/") / PACKAGE_FOLDER]
    for place in places:
        if all((place / name).is_file() for name in FILES):
            return place
    raise UnavailableError(f"not on disk in any of {', '.join(str(_short(place)) for place in places)}")


def from_debian(folder: Path) -> Path:
    """Download Debian's package and unpack it into `folder`, without installation and without root."""
    with _scratch(folder, "Debian's package") as scratch:
        work = Path(scratch)
        try:
            _run(work, "apt-get", *APT_OPTIONS, "download", PACKAGE)
        except UnavailableError:
            # Containers often have no package lists: fetch them for this download into the scratch folder.
            for name in ("lists/partial", "cache/archives/partial"):
                (work / name).mkdir(parents=True)
            private = [*APT_OPTIONS, f"-oDir::State::Lists={work / 'lists'}", f"-oDir::Cache={work / 'cache'}"]
            _run(work, "apt-get", *private, "update")
            _run(work, "apt-get", *private, "download", PACKAGE)
        for package in work.glob("*.deb"):
            _run(work, "dpkg-deb", "--extract", package.name, "unpacked")
        return _keep(work / "unpacked" / PACKAGE_FOLDER, folder)


def from_mirror(folder: Path) -> Path:
    """Download the authors' files into `folder`, and check their checksums."""
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
                raise UnavailableError(f"{name} has the MD5 {digest.hexdigest()}, expected {md5}")
        return _keep(Path(scratch), folder)


def _short(place: Path) -> Path:
    """Return the path relative to the current folder, if that is possible."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place


def _scratch(folder: Path, source: str) -> tempfile.TemporaryDirectory[str]:
    """Return a folder inside `folder` for incomplete files, so that complete files can be renamed into place."""
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
            raise UnavailableError(f"{name} is not in the download")
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
