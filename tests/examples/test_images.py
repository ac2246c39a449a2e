"""Where the images come from: the order of the sources, each source's ways to fail, the digits in the end."""

from __future__ import annotations

import gzip
import hashlib
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import images
import pytest
import torch


@pytest.fixture
def small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a data set of 20 + 10 images that passes for Fashion-MNIST; nothing else is on this disk."""
    folder = tmp_path / "published"
    folder.mkdir()
    files = {}
    for name, (shape, _) in images.FILES.items():
        shape = (20 if "train" in name else 10, *shape[1:])
        size = torch.Size(shape).numel()
        header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
        packed = gzip.compress(header + bytes(i % 10 for i in range(size)))
        (folder / name).write_bytes(packed)
        files[name] = (shape, hashlib.md5(packed, usedforsecurity=False).hexdigest())
    monkeypatch.setattr(images, "FILES", files)
    monkeypatch.setattr(images, "PACKAGE_FOLDER", (tmp_path / "system").relative_to("/"))
    monkeypatch.setattr(images, "MIRROR", folder.as_uri())
    return folder


def refuse(reason: str) -> Callable[[Path], Path]:
    def source(folder: Path) -> Path:
        raise images.UnavailableError(reason)

    return source


@pytest.mark.slow
def test_sources_are_asked_in_order_until_one_has_the_images(
    small_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(name: str, answer: Callable[[Path], Path]) -> None:
        def source(folder: Path) -> Path:
            asked.append(name)
            return answer(folder)

        monkeypatch.setattr(images, name, source)

    noted("on_disk", refuse("not here"))
    noted("from_debian", refuse("no Debian"))
    noted("from_mirror", lambda folder: small_files)
    assert images.load(tmp_path).name == images.FASHION_MNIST
    assert asked == ["on_disk", "from_debian", "from_mirror"]

    asked.clear()
    noted("from_debian", lambda folder: small_files)
    assert images.load(tmp_path).name == images.FASHION_MNIST
    assert asked == ["on_disk", "from_debian"]

    asked.clear()
    assert images.load(tmp_path, fetch=False).name == "scikit-learn's digits"
    assert asked == ["on_disk"]


def test_the_digits_say_why_they_are_used_and_have_the_same_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("on_disk", "from_debian", "from_mirror"):
        monkeypatch.setattr(images, name, refuse(f"{name} refused"))
    digits = images.load(tmp_path)
    assert digits.name == "scikit-learn's digits"
    assert digits.origin.startswith("not Fashion-MNIST")
    assert "on_disk refused; from_debian refused; from_mirror refused" in digits.origin
    assert digits.train_images.shape == (1437, 28, 28)
    assert digits.test_images.shape == (360, 28, 28)
    assert digits.train_images.dtype == torch.uint8
    assert (int(digits.train_images.min()), int(digits.train_images.max())) == (0, 255)
    assert digits.train_labels.dtype == torch.int64
    assert set(digits.test_labels.tolist()) == set(range(images.CLASSES))


def test_without_any_images_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "on_disk", refuse("not here"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"not here.*DPFUSE_DATA, or run: .* -m pip install scikit-learn"):
        images.load(tmp_path, fetch=False)


def test_files_on_disk_are_found_in_the_folder_below_it_and_where_debian_installs(
    small_files: Path, tmp_path: Path
) -> None:
    folder, system = tmp_path / "data", tmp_path / "system"
    with pytest.raises(images.UnavailableError, match="not on disk"):
        images.on_disk(folder)
    small_files.rename(system)
    assert images.on_disk(folder) == system
    folder.mkdir()
    system.rename(folder / "fashion-mnist")
    assert images.on_disk(folder) == folder / "fashion-mnist"
    assert images.on_disk(folder / "fashion-mnist") == folder / "fashion-mnist"
    (folder / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(images.UnavailableError, match="not on disk"):
        images.on_disk(folder)


def test_a_damaged_file_is_an_error_and_not_a_reason_to_take_the_digits(small_files: Path) -> None:
    path = small_files / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(struct.pack(">2I", 0x0801, 20) + bytes([10] * 20)))
    with pytest.raises(ValueError, match=r"train-labels.*has label 10, expected 0 to 9"):
        images.load(small_files)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-labels.*length unpacked is 0"):
        images.load(small_files)


def test_the_download_is_kept_only_if_its_checksums_are_right(small_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert images.from_mirror(folder) == images.on_disk(folder) == folder / "fashion-mnist"
    assert [entry.name for entry in folder.iterdir()] == ["fashion-mnist"]

    broken = tmp_path / "broken"
    with open(small_files / "t10k-images-idx3-ubyte.gz", "ab") as file:
        file.write(b"!")
    with pytest.raises(images.UnavailableError, match=r"t10k-images.* has the MD5"):
        images.from_mirror(broken)
    assert not list(broken.iterdir())


def test_a_download_that_fails_or_takes_too_long_is_unavailable(
    small_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "DOWNLOAD_SECONDS", -1)
    with pytest.raises(images.UnavailableError, match="more than -1 s"):
        images.from_mirror(tmp_path / "data")
    (small_files / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(images.UnavailableError, match="the public download failed"):
        images.from_mirror(tmp_path / "data")


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_package_is_unpacked_without_being_installed(
    small_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    # Fails as in a container without package lists, unless they were updated in the folder given.
    program(
        programs,
        "apt-get",
        f'echo "$@" >> {tmp_path}/calls\n'
        'case "$*" in\n'
        "*update) touch lists/all;;\n"
        "*) test -f lists/all && touch dataset-fashion-mnist_1_all.deb;;\n"
        "esac",
    )
    target = f"unpacked/{images.PACKAGE_FOLDER}"
    program(programs, "dpkg-deb", f'test "$1" = --extract && mkdir -p {target} && cp {small_files}/* {target}')
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    folder = tmp_path / "data"
    assert images.from_debian(folder) == images.on_disk(folder)
    assert [entry.name for entry in folder.iterdir()] == ["fashion-mnist"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 3

    program(programs, "apt-get", 'echo "W: a warning" >&2; echo "E: no network" >&2; exit 100')
    with pytest.raises(images.UnavailableError, match=r"apt-get failed \(E: no network\)"):
        images.from_debian(folder)
    monkeypatch.setattr(images, "APT_SECONDS", 0.05)
    program(programs, "apt-get", "exec sleep 30")
    with pytest.raises(images.UnavailableError, match=r"apt-get took more than 0.05 s"):
        images.from_debian(folder)
    (programs / "apt-get").unlink()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(images.UnavailableError, match="there is no apt-get here"):
        images.from_debian(folder)


def test_a_folder_that_cannot_be_made_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for source in (images.from_debian, images.from_mirror):
        with pytest.raises(images.UnavailableError, match="has no place in"):
            source(tmp_path / "file" / "data")
