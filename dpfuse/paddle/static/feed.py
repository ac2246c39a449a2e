"""The inputs of a run: checks fed arrays against a program, and splits them for the devices."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfuse import DPFuseError
from dpfuse.paddle.static.input_spec import InputSpec
from dpfuse.paddle.static.names import suggestion

__all__ = ["Fed", "checked_feed", "given_feed", "split_feed", "to_tensor"]

Fed = dict[str, Any]  # by name: the given tensors and arrays


def given_feed(feed: Any, feed_dict: Any) -> Any:
    """Return the feed of a call of run(), which may use the argument's old name."""
    if feed_dict is None:
        return feed
    if feed is not None:
        raise ValueError("got feed and feed_dict, its old name; expected only feed")
    warnings.warn("feed_dict is the old name of feed; pass feed", DeprecationWarning, stacklevel=3)
    return feed_dict


def checked_feed(feed: Any, feeds: Mapping[str, InputSpec], what: str = "feed") -> Fed:
    """Check names, dtypes and shapes of a feed. Return it with lists converted to arrays. Errors call it `what`."""
    if feed is None:
        feed = {}
    if not isinstance(feed, Mapping):
        raise TypeError(f"{what} must be a dict of arrays by name, got {type(feed).__name__}")
    for name in feed:
        if name not in feeds:
            raise ValueError(f"{what} has {name!r}, which is no input of the program. {suggestion(name, feeds)}")
    missing = [name for name in feeds if name not in feed]
    if missing:
        raise ValueError(
            f"{what} lacks {', '.join(map(repr, missing))}; expected a value for each input of the program"
        )
    return {name: _checked(value, feeds[name], what) for name, value in feed.items()}


def split_feed(feed: Any, feeds: Mapping[str, InputSpec], devices: int, kind: str, training: bool) -> list[Fed]:
    """Return the feed of each device.

    A dictionary is cut along dim 0 into consecutive chunks of ceil(n / devices) rows, as Paddle 2 does. For example,
    three rows on two devices are two and one. A list holds one dictionary per device and is not cut. In training every
    device must get rows. A test program may leave devices idle: then there are fewer dictionaries.
    """
    if isinstance(feed, (list, tuple)):
        if len(feed) != devices:
            raise ValueError(f"feed is a list of {len(feed)}, expected one dict for each of the {devices} devices")
        return [checked_feed(one, feeds, f"feed[{index}]") for index, one in enumerate(feed)]
    checked = checked_feed(feed, feeds)
    if devices == 1 or not checked:
        return [checked] * devices
    lengths = {name: _length(name, value) for name, value in checked.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"feed has arrays of different lengths, {lengths}; expected the same number of rows, to be cut for "
            f"{devices} devices. Feed a list with one dict per device instead."
        )
    name, rows = next(iter(lengths.items()))
    chunk = max(1, -(-rows // devices))
    starts = range(0, rows, chunk)
    if not starts:
        raise ValueError(f"feed has no rows in {name!r}; expected at least one")
    if training and len(starts) < devices:
        raise DPFuseError(
            f"the {rows} samples of {name!r} make only {len(starts)} chunks of {chunk}, less than the {devices} "
            f"devices ({kind}) of this training program; expected a chunk for each. Drop such a batch, feed a list "
            "with one dict per device, or use fewer devices."
        )
    return [{name: value[start : start + chunk] for name, value in checked.items()} for start in starts]


def to_tensor(value: Any, device: torch.device) -> Tensor:
    """Return a copy on `device`, so that a program may overwrite its inputs."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    return torch.from_numpy(np.array(value)).to(device)


def _checked(value: Any, spec: InputSpec, what: str) -> Tensor | np.ndarray[Any, Any]:
    where = f"{what}[{spec.name!r}]"
    given: Tensor | np.ndarray[Any, Any]
    if isinstance(value, Tensor):
        given = value
    elif isinstance(value, (np.ndarray, np.generic)):
        given = np.asarray(value)
        if given.dtype.kind not in "biufc":
            raise TypeError(f"{where} is an array of {given.dtype}; expected numbers")
    else:
        try:
            given = torch.tensor(value, dtype=spec.dtype, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{where} is a {type(value).__name__}; expected an array, a tensor or numbers: {error}"
            ) from None
    declared, got = (str(dtype).removeprefix("torch.") for dtype in (spec.dtype, given.dtype))
    if declared != got:
        raise ValueError(f"{where} has dtype {got}, expected {declared} as declared by data(). Convert it.")
    sizes = tuple(given.shape)
    if len(sizes) != len(spec.shape) or any(want not in (-1, got) for got, want in zip(sizes, spec.shape, strict=True)):
        raise ValueError(f"{where} has shape {sizes}, expected {spec.shape} as declared by data(), -1 being any size")
    return given


def _length(name: str, value: Any) -> int:
    if len(value.shape) == 0:
        raise ValueError(
            f"feed[{name!r}] has no dimension along which it could be cut for several devices; expected at least one. "
            "Feed a list with one dict per device instead."
        )
    return int(value.shape[0])
