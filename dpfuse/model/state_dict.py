"""State dicts in every form that wrappers produce: prefixed or not, tensors or numpy arrays."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["PREFIX", "accept_unprefixed", "check_mapping", "load_leniently", "own_names", "without_prefix"]

PREFIX = "module."
EXTRA_STATE = "_extra_state"  # how torch ends the key of what get_extra_state() returned


def without_prefix(state_dict: Mapping[str, Any], expected: Iterable[str]) -> OrderedDict[str, Any]:
    """The same entries under the wrapped module's own names, arrays as tensors; versions of modules are kept.

    Args:
        state_dict: keys with or without `module.` in front; tensors or numpy arrays.
        expected: the wrapped module's keys, by which the two forms are told apart.
    """
    known = set(expected)
    plain = sum(key in known for key in state_dict)
    prefixed = sum(key.removeprefix(PREFIX) in known for key in state_dict if key.startswith(PREFIX))
    strip = prefixed > plain
    own = OrderedDict(
        (key.removeprefix(PREFIX) if strip else key, _as_tensor(value)) for key, value in state_dict.items()
    )
    versions = getattr(state_dict, "_metadata", None)
    if versions is not None:
        # The module itself is "module" there, its children "module.…"; the wrapper, "", has no version to lose.
        inner = {f"{key}.".removeprefix(PREFIX)[:-1]: value for key, value in versions.items() if key or not strip}
        own._metadata = inner if strip else versions  # type: ignore[attr-defined]
    return own


def _as_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    # A copy, since torch takes no read-only memory, no negative strides and no foreign byte order.
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def check_mapping(state_dict: Any, caller: str) -> None:
    """Raise TypeError unless this is a dict of tensors by name.

    Args:
        state_dict: what a user passed.
        caller: the name of the function to which it was passed.
    """
    if not isinstance(state_dict, Mapping):
        remedy = (
            f"Read the file first: {caller}(load({state_dict!r}))."
            if isinstance(state_dict, str)
            else ("Pass what state_dict() or dpfuse.paddle.load() returned.")
        )
        raise TypeError(
            f"{caller} got a {type(state_dict).__name__}, expected a dict of tensors or arrays by name. {remedy}"
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

    Args:
        module: the wrapped module.
        state_dict: its own keys, tensors; an extra state may be anything.

    Returns:
        (missing keys, unexpected keys); a key whose tensor was loaded under another name is not missing.

    Raises:
        TypeError: a value is no tensor.
        ValueError: a shape differs, or no key matches; nothing is loaded then.
    """
    current = module.state_dict(keep_vars=True)
    unexpected = [key for key in state_dict if key not in current]
    matching = OrderedDict((key, value) for key, value in state_dict.items() if key in current)
    loaded = {id(current[key]) for key in matching}
    missing = [key for key, value in current.items() if key not in matching and id(value) not in loaded]
    if current and not matching:
        raise ValueError(
            f"no key of the state dict matches: got {_some(unexpected)}, expected {_some(missing)}. "
            "Pass the state dict of this model, with or without the 'module.' prefix."
        )
    for key, value in matching.items():
        if key.endswith(EXTRA_STATE):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{key!r} is a {type(value).__name__}; expected a tensor or a numpy array")
        if value.shape != current[key].shape:
            raise ValueError(
                f"{key!r} has shape {tuple(value.shape)}, expected {tuple(current[key].shape)}; nothing was "
                "loaded. Use a state dict of the same architecture."
            )
    if hasattr(state_dict, "_metadata"):
        matching._metadata = state_dict._metadata  # type: ignore[attr-defined]
    module.load_state_dict(matching, strict=False)
    for what, keys in (("missing", missing), ("unexpected", unexpected)):
        if keys:
            warnings.warn(f"set_state_dict: {what} keys: {_some(keys)}", stacklevel=3)
    return missing, unexpected


def _some(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:10]))
    return f"{shown} and {len(keys) - 10} more" if len(keys) > 10 else shown or "nothing"


def accept_unprefixed(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before loading: names of the bare module get the prefix that the wrapper, one level more, expects.

    Args:
        wrapper: whose child `module` the names belong to.
        state: changed in place.
        prefix: of the wrapper's own names in `state`.
    """
    ours = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
    stripped = {key.removeprefix(prefix): value for key, value in ours.items()}
    inner = without_prefix(stripped, wrapper.get_submodule("module").state_dict().keys())
    state.update({f"{prefix}{PREFIX}{key}": value for key, value in inner.items()})
