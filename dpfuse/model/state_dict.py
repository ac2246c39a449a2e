"""State dicts in every form that wrappers produce: prefixed or not, tensors or numpy arrays."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfuse.model.key_reading import PREFIX, KeyReading, reading_of
from dpfuse.model.trial_load import EXTRA_STATE, compared

__all__ = [
    "PREFIX",
    "accept_unprefixed",
    "check_mapping",
    "load_leniently",
    "naming_keys",
    "own_names",
    "with_prefix",
    "without_prefix",
]

READ = "dpfuse read the keys"  # in what torch gives a wrapper as its version: its keys are its own already


def without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> OrderedDict[str, Any]:
    """The same entries under the module's own names, arrays as tensors; versions of modules are kept.

    They may be of the module or of a wrapper around it, compiled or not.
    """
    values, versions, reading = _read(state_dict, module, prefixed=False)
    own = OrderedDict((reading.name(key) or key, value) for key, value in values.items())
    if versions is not None:
        own._metadata = reading.versions(versions)  # type: ignore[attr-defined]
    return own


def with_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> OrderedDict[str, Any]:
    """The same entries under the names that a wrapper gives them in which the module is the child `module`."""
    values, versions, reading = _read(state_dict, module, prefixed=True)
    own = OrderedDict((_prefixed(reading, key), value) for key, value in values.items())
    named = {_prefixed(reading, f"{key}." if key else key): value for key, value in (versions or {}).items()}
    own._metadata = {name.removesuffix("."): value for name, value in named.items()}  # type: ignore[attr-defined]
    own._metadata[""] = {READ: True}  # type: ignore[attr-defined]  # a wrapper has no version to lose
    return own


@contextmanager
def naming_keys(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[None]:
    """Say in torch's error which names the user's state dict has where it was read with others, its `own`."""
    try:
        yield
    except RuntimeError as error:
        renamed = {name: key for key, name in zip(state_dict, own, strict=False) if key != name}
        if not renamed or type(error) is not RuntimeError:
            raise
        names = r'(?<=")[^"]+(?=")|(?<=mismatch for )\S+(?=:)'
        text = re.sub(names, lambda found: renamed.get(found[0], found[0]), str(error))
        name, key = next(iter(renamed.items()))
        where = f"A missing key is named as in the model: {name!r}, where this state dict has {key!r}."
        raise RuntimeError(f"{text}\n\t{where}") from None


def _read(
    state_dict: Mapping[str, Any], module: nn.Module, *, prefixed: bool
) -> tuple[OrderedDict[str, Any], Mapping[str, Any] | None, KeyReading]:
    values = OrderedDict((key, _as_tensor(value)) for key, value in state_dict.items())
    versions = getattr(state_dict, "_metadata", None)
    return values, versions, reading_of(values, module, versions, prefixed=prefixed)


def _prefixed(reading: KeyReading, key: str) -> str:
    name = reading.name(key)
    return key if name is None else f"{PREFIX}{name}"


def _as_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    # A copy, since torch takes no read-only memory, no negative strides and no foreign byte order.
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def check_mapping(state_dict: Any, caller: str) -> None:
    """Raise TypeError unless what a user passed to the function `caller` is a dict of tensors by name."""
    if not isinstance(state_dict, Mapping):
        remedy = (
            f"Read the file first: {caller}(load({state_dict!r}))."
            if isinstance(state_dict, str)
            else ("Pass what state_dict() or dpfuse.paddle.load() returned.")
        )
        raise TypeError(
            f"state_dict of {caller}: got a {type(state_dict).__name__}, expected a dict of tensors or arrays by name. "
            f"{remedy}"
        )


def own_names(module: nn.Module) -> dict[str, str]:
    """`param_<i>` and `buffer_<i>`, by registration order, to the structured names of `module`.

    Example:
        >>> import torch
        >>> from dpfuse.model.state_dict import own_names
        >>> own_names(torch.nn.Linear(2, 2))
        {'param_0': 'weight', 'param_1': 'bias'}
    """
    names = {f"param_{index}": name for index, (name, _) in enumerate(module.named_parameters())}
    names |= {f"buffer_{index}": name for index, (name, _) in enumerate(module.named_buffers())}
    return names


def load_leniently(module: nn.Module, state_dict: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Load what fits by name; warn of what is missing or unexpected.

    Returns:
        (missing keys, unexpected keys); a key whose tensor was loaded under another name is not missing.

    Raises:
        TypeError: a value is no tensor.
        ValueError: a shape differs, or no key matches; nothing is loaded then.
    """
    current = module.state_dict(keep_vars=True)
    found = compared(module, state_dict)
    if current and len(found.unexpected) >= len(state_dict):
        raise ValueError(
            f"no key of the state dict matches: got {_some(list(state_dict))}, expected {_some(found.missing)}. "
            "Pass the state dict of this model, with or without the 'module.' prefix."
        )
    for key, value in state_dict.items():
        if key not in current or key.endswith(EXTRA_STATE):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{key!r} is a {type(value).__name__}; expected a tensor or a numpy array")
        if value.shape != current[key].shape:
            raise ValueError(
                f"{key!r} has shape {tuple(value.shape)}, expected {tuple(current[key].shape)}; nothing was "
                "loaded. Use a state dict of the same architecture."
            )
    if found.errors:
        raise ValueError(f"{found.errors[0]}; nothing was loaded. Use a state dict of the same architecture.")
    loaded = {id(value) for key, value in current.items() if key not in found.missing}
    missing = [key for key in found.missing if key not in current or id(current[key]) not in loaded]
    module.load_state_dict(state_dict, strict=False)
    for what, keys in (("missing", missing), ("unexpected", found.unexpected)):
        if keys:
            warnings.warn(f"set_state_dict: {what} keys: {_some(keys)}", stacklevel=3)
    return missing, found.unexpected


def _some(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:10]))
    return f"{shown} and {len(keys) - 10} more" if len(keys) > 10 else shown or "nothing"


def accept_unprefixed(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """A hook before loading: names of the bare module get the prefix that the wrapper, one level more, expects."""
    if local_metadata.get(READ):
        return
    ours = OrderedDict((key.removeprefix(prefix), state.pop(key)) for key in list(state) if key.startswith(prefix))
    module, prefixed = wrapper.get_submodule("module"), bool(wrapper._prefixed)
    values, _versions, reading = _read(ours, module, prefixed=prefixed)
    state.update((f"{prefix}{_prefixed(reading, key)}", value) for key, value in values.items())
