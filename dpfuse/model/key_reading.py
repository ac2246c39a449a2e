"""How the keys of a state dict are to be read: which prefixes in them are those of wrappers and of torch.compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpfuse.engine.torch_private import inside_compiled, uncompiled
from dpfuse.model.trial_load import changes_keys, misfits

__all__ = ["PREFIX", "KeyReading", "reading_of"]

PREFIX = "module."
WRAPPED = PREFIX[:-1]
COMPILED = "_orig_mod"


@dataclass(frozen=True)
class KeyReading:
    """One way to read all keys of a state dict as names of a module.

    Args:
        module: to whose names they lead.
        unwrapped: whether a prefix `module.` is that of a wrapper. A key without it is then no name of the module.
        recompiled: whether `_orig_mod` in a key is of torch.compile, which has compiled other parts of this module.
    """

    module: nn.Module
    unwrapped: bool
    recompiled: bool = False

    def name(self, key: str) -> str | None:
        """Return the name that this key stands for; None if it is a key of the wrapper's own."""
        parts = key.split(".")
        if self.recompiled:
            parts = [part for part in parts if part != COMPILED]
        if self.unwrapped:
            if parts[0] != WRAPPED or len(parts) == 1:
                return None
            parts = parts[1:]
        return ".".join(self._as_compiled(parts) if self.recompiled else parts)

    def names(self, keys: Iterable[str]) -> list[str | None]:
        """Return the names for these keys, in their order."""
        return [self.name(key) for key in keys]

    def versions(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the versions of modules, which a state dict holds by module, under the names of these modules."""
        named = {self.name(f"{key}." if key else key): value for key, value in saved.items()}
        return {name.removesuffix("."): value for name, value in named.items() if name is not None}

    def _as_compiled(self, parts: list[str]) -> list[str]:
        """Put what torch.compile has added here into a path."""
        path: list[str] = []
        module: nn.Module | None = self.module
        for part in parts:
            while module is not None and (inner := inside_compiled(module)) is not None:
                path.append(COMPILED)
                module = inner
            path.append(part)
            module = None if module is None else module._modules.get(part)
        return path


def reading_of(
    state: Mapping[str, Any], module: nn.Module, versions: Mapping[str, Any] | None, *, prefixed: bool
) -> KeyReading:
    """Return the reading of the whole state dict that leaves the fewest keys unexpected, after the module's own hooks.

    Where several do, it is the one of the wrapper's own state dicts: a part of one must not reach another parameter.
    Only a hook that takes any name, or that cannot be tried, leaves it to the keys: whether they have the prefix.

    Args:
        state: of this module or of a wrapper around it, compiled by torch.compile or not.
        versions: of the modules, as the state dict has them; None where it has none.
        prefixed: whether the wrapper's own state dicts have the prefix `module.`.
    """
    own = KeyReading(module, prefixed)
    known = module.state_dict().keys()
    if known >= set(own.names(state)):
        return own
    readings = [own]
    for other in _others(state, module, prefixed):
        names = other.names(state)
        whole = {key if name is None else name for key, name in zip(state, names, strict=True)}
        is_new = any(names) and all(names != reading.names(state) for reading in readings)
        if is_new and len(whole) == len(state):
            readings.append(other)
    if len(readings) == 1:
        return own
    counts = [(sum(name not in known for name in reading.names(state)), 0) for reading in readings]
    usual = prefixed
    if changes_keys(module):
        takes_prefix, tried = WRAPPED in uncompiled(module)._modules, False
        if takes_prefix or counts.count((0, 0)) != 1:
            with suppress(Exception):  # of a hook
                counts, tried = [_after_hooks(reading, state, versions) for reading in readings], True
        if not tried or min(counts)[0] == 0:
            has_prefix = [key.startswith(PREFIX) for key in state]
            usual = any(has_prefix) if prefixed else all(has_prefix) and not takes_prefix
    ranks = [(*count, reading.unwrapped != usual) for count, reading in zip(counts, readings, strict=True)]
    return readings[ranks.index(min(ranks))]


def _others(state: Mapping[str, Any], module: nn.Module, prefixed: bool) -> list[KeyReading]:
    """The readings that are none of the wrapper's own."""
    compiled = [inside_compiled(part) is not None for part in module.modules()]
    named_so = [COMPILED in part._modules for part in module.modules()]
    recompiles = (any(compiled) or any(COMPILED in key.split(".") for key in state)) and named_so == compiled
    others = [KeyReading(module, not prefixed)]
    return others + [KeyReading(module, way, recompiled=True) for way in (prefixed, not prefixed) if recompiles]


def _after_hooks(reading: KeyReading, state: Mapping[str, Any], versions: Mapping[str, Any] | None) -> tuple[int, int]:
    """Count the keys that are unexpected and the names that are missing, after the module's own hooks."""
    named = {name: value for key, value in state.items() if (name := reading.name(key)) is not None}
    found = misfits(reading.module, named, None if versions is None else reading.versions(versions))
    return len(found.unexpected) + len(state) - len(named), len(found.missing)
