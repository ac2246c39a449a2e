"""`paddle.save` and `paddle.load`: nested tensors in a file that is never partly written. Runs no code from a file."""

from __future__ import annotations

import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpfuse.arguments import a_path
from dpfuse.paddle.meters import to_numpy
from dpfuse.paddle.paddle_files import read_paddle_file

__all__ = ["is_paddle_file", "load", "plain", "save", "written_whole"]

ZIP, PICKLE = b"PK", b"\x80"  # how files of torch, and those of Paddle, begin
PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
# What files name for a number of numpy: those of torch.save, such as a learning rate that numpy has computed.
_KINDS = {type(np.dtype(code)) for code in np.typecodes["AllFloat"] + np.typecodes["AllInteger"] + "?"}
_SCALAR = np.float64(0).__reduce__()[0]
_NAMES = [(_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]  # before and since numpy 2
NUMPY_NUMBERS: list[Any] = [*_NAMES, np.dtype, *sorted(_KINDS, key=str)]


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary file in the folder of `path`. Rename it to `path` if the block did not raise.

    Missing folders are made. A reader sees the old file or the new file, never a part.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.tmp{target.suffix}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def save(obj: Any, path: str | os.PathLike[str], protocol: int = 4) -> None:
    """Write tensors, numbers, strings and None, nested in dicts, lists and tuples; state dicts, for example.

    Every rank that calls it writes; usually only rank 0 should.

    Args:
        obj: what to write. numpy arrays and numbers become tensors and numbers.
        path: of the file. Missing folders are made. An older file is replaced in one step.
        protocol: 2, 3 or 4, as in Paddle; torch's format is written with each.

    Raises:
        ValueError: `path` is empty or a folder; there is no such protocol.
        TypeError: `obj` holds something else, which `load` would reject. The text says where. Or `path` is no path.

    Example:
        >>> import tempfile, torch, dpfuse.paddle as paddle
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paddle.save({"weight": torch.ones(2), "epoch": 3}, f"{folder}/state.pdparams")
        ...     paddle.load(f"{folder}/state.pdparams")
        {'weight': tensor([1., 1.]), 'epoch': 3}

    Source: `paddle.save`; the file is torch's.
    """
    if not isinstance(protocol, int) or not 2 <= protocol <= 4:
        raise ValueError(f"protocol must be 2, 3 or 4, got {protocol!r}; leave it out")
    a_path("path", path, "folder/model.pdparams")
    name = os.fspath(path)
    if not name or name.endswith(("/", os.sep)) or Path(path).is_dir():
        raise ValueError(f"path must be that of a file, got {name!r}; pass for example 'folder/model.pdparams'")
    found = plain(obj, "obj")
    with written_whole(path) as temporary:
        torch.save(found, temporary)


def load(path: str | os.PathLike[str], return_numpy: bool = False) -> Any:
    """Read a file of `save`, of torch.save (since torch 1.6), or of real Paddle's `paddle.save`. It runs no code of it.

    Linear weights of a file of Paddle are [in, out]: see `to_torch_state_dict`.

    Args:
        path: of the file.
        return_numpy: True returns numpy arrays instead of tensors.

    Returns:
        The object; tensors are on the CPU.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: There is no such file, or it is a folder.
        ValueError: The file has another format, or holds more than tensors and plain values.

    Source: `paddle.load`.
    """
    a_path("path", path, "folder/model.pdparams")
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise FileNotFoundError(f"{os.fspath(path)!r} {what}; expected a file that save() has written")
    head = _head(path)
    if head[:1] == PICKLE:
        found = read_paddle_file(path)
        return tree_map(to_numpy, found) if return_numpy else found
    if head != ZIP:
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read ({f'it begins with {head!r}' if head else 'it is empty'}); expected a "
            "file of tensors that dpfuse.paddle.save, torch.save or real Paddle's paddle.save has written"
        )
    try:
        allowed = torch.serialization.get_safe_globals()  # by the program: these stay so
        with torch.serialization.safe_globals([each for each in NUMPY_NUMBERS if each not in allowed]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read ({reason}); expected a file of tensors and plain values that "
            "dpfuse.paddle.save or torch.save has written"
        ) from error
    return tree_map(to_numpy, found) if return_numpy else found


def is_paddle_file(path: str | os.PathLike[str]) -> bool:
    """Whether real Paddle wrote this file: its layers' weights then have Paddle's names and layouts."""
    return _head(path)[:1] == PICKLE


def plain(obj: Any, where: str) -> Any:
    """Return `obj` as `load` reads it: numpy's arrays and numbers become tensors and numbers.

    Raises:
        TypeError: there is something that `load` would reject; the text calls it `where` and what leads to it.
    """
    if isinstance(obj, np.generic):  # before the plain types: np.float64 is a float, too
        obj = obj.item()
    if type(obj) in PLAIN or isinstance(obj, Tensor):
        return obj
    if isinstance(obj, np.ndarray):
        return torch.from_numpy(obj)
    if isinstance(obj, Mapping):
        found = {plain(key, f"a key of {where}"): plain(value, f"{where}[{key!r}]") for key, value in obj.items()}
        # A module's state dict has version numbers as an attribute, which a new dict would lose.
        pairs = zip(found.items(), obj.items(), strict=True) if len(found) == len(obj) else ()
        unchanged = type(obj) in (dict, OrderedDict, Counter) and all(
            new is old and value is before for (new, value), (old, before) in pairs
        )
        return obj if unchanged else found
    if type(obj) in (list, tuple):
        return type(obj)(plain(value, f"{where}[{index}]") for index, value in enumerate(obj))
    hint = "Pass its state_dict()." if isinstance(obj, (nn.Module, torch.optim.Optimizer)) else "Leave it out."
    raise TypeError(f"{where} is a {type(obj).__name__}; expected tensors, numbers, strings or None. {hint}")


def _head(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        return file.read(2)
