"""What loading a state dict would find, without loading it. Hooks of a module may change the keys before they load."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from inspect import ismethod
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["EXTRA_STATE", "Misfits", "changes_keys", "compared", "misfits"]

EXTRA_STATE = "_extra_state"  # how torch ends the key of what get_extra_state() returned
OVERRIDE = "_load_from_state_dict"


class Misfits(NamedTuple):
    """What a load reports: names of the module that got nothing, keys that nothing took, and torch's errors."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def changes_keys(module: nn.Module) -> bool:
    """Whether a part of the module has code of its own that runs before its tensors are loaded."""
    return any(
        part._load_state_dict_pre_hooks
        or OVERRIDE in vars(part)
        or getattr(type(part), OVERRIDE) is not nn.Module._load_from_state_dict
        for part in module.modules()
    )


def compared(module: nn.Module, state: Mapping[str, Any]) -> Misfits:
    """Return what loading this state dict would report. Where that cannot be tried, hooks are left out."""
    known = module.state_dict().keys()
    plain = Misfits([name for name in known if name not in state], [key for key in state if key not in known], [])
    if plain.unexpected and changes_keys(module):
        with suppress(Exception):  # of a hook
            return misfits(module, state, getattr(state, "_metadata", None))
    return plain


def misfits(module: nn.Module, state: Mapping[str, Any], versions: Mapping[str, Any] | None) -> Misfits:
    """Return what loading would report, after the module's own hooks. Nothing is loaded.

    Stand-ins of the parts run the hooks. They have the same attributes, and tensors without values, as have the
    entries of the state dict. So what a hook writes to its module, or into a tensor, is gone afterwards.

    Raises:
        Exception: a hook has raised it, perhaps since it reads values.
    """
    extra = [key for key in state if key.endswith(EXTRA_STATE)]  # setting one may have any effect
    found = Misfits([], [], [])

    def load(part: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        version = {} if versions is None else dict(versions.get(prefix[:-1], {}))
        part._load_from_state_dict(entries, prefix, version, True, *found)
        for name, child in part._modules.items():
            if child is not None:
                inner = f"{prefix}{name}."
                load(child, {key: value for key, value in entries.items() if key.startswith(inner)}, inner)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the load itself will give them
        load(_stand_in(module, {}), {key: _without_values(state[key]) for key in state if key not in extra}, "")
    unexpected = [*found.unexpected, *(key for key in extra if key not in found.missing)]
    # What cannot be copied may only be so since the stand-ins are plain tensors.
    errors = [error for error in found.errors if not error.startswith("While ")]
    return Misfits([name for name in found.missing if name not in extra], unexpected, errors)


def _stand_in(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    twin: nn.Module = object.__new__(type(module))
    made[id(module)] = twin

    def own(value: Any) -> Any:
        of = made.get(id(value.__self__)) if ismethod(value) else None  # of this part, or of one around it
        return value if of is None else MethodType(value.__func__, of)

    def of_twin(hook: Any) -> Any:
        return type(hook)(hook.hook, twin) if getattr(hook, "with_module", False) else own(getattr(hook, "hook", hook))

    vars(twin).update((name, own(value)) for name, value in vars(module).items())
    vars(twin).update(
        _parameters={name: _without_values(param) for name, param in module._parameters.items()},
        _buffers={name: _without_values(buffer) for name, buffer in module._buffers.items()},
        _modules={name: None if child is None else _stand_in(child, made) for name, child in module._modules.items()},
        _load_state_dict_pre_hooks={key: of_twin(hook) for key, hook in module._load_state_dict_pre_hooks.items()},
    )
    override = vars(twin).get(OVERRIDE)
    if override is not None and not (ismethod(override) and override.__self__ is twin):
        raise TypeError(f"{OVERRIDE} of this {type(module).__name__} would load into the module itself")
    return twin


def _without_values(value: Any) -> Any:
    """A tensor on the meta device in the place of one. One number is kept, for a hook may ask for it."""
    if not isinstance(value, Tensor):
        return value
    if is_lazy(value):
        return type(value)(device="meta")  # type: ignore[call-arg]
    bare = torch.empty(value.shape, dtype=value.dtype, device="meta")
    bare = value.detach().clone() if value.numel() == 1 else bare
    return nn.Parameter(bare, requires_grad=False) if isinstance(value, nn.Parameter) else bare
