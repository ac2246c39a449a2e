"""Is the module still the one that was wrapped? Cached places of its parameters, compared in C loops."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_
from typing import Any

from torch import nn

__all__ = ["ModelSignature"]


class ModelSignature:
    """What a module's parameters were, and whether they still are; about 0.05 µs per parameter and child module.

    Args:
        module: the module to remember.
        ignored: names of parameters that may change.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self._params = {id(param): param for param in module.parameters()}
        self._names = dict(module.named_parameters(remove_duplicate=False))
        self._frozen = [
            (name, param)
            for name, param in module.named_parameters()
            if not param.requires_grad and name not in ignored
        ]
        self._note_places()

    def _note_places(self) -> None:
        """Where every parameter and every child module is now."""
        self._tables: list[dict[str, Any]] = []
        for child in self._module.modules():
            self._tables += [child._parameters, child._modules]
        self._sizes = list(map(len, self._tables))
        filled = [(table, key, held) for table in self._tables for key, held in table.items() if held is not None]
        self._places = [place for place, _, _ in filled]
        self._keys = [key for _, key, _ in filled]
        self._held = [held for _, _, held in filled]

    def change(self) -> str | None:
        """What has changed since, in words, or None.

        A parameter that was frozen or removed since is no change, it just takes no part any more; nor is another
        place for a parameter, or another module without any.
        """
        for name, param in self._frozen:
            if param.requires_grad:
                return f"parameter {name!r} was unfrozen"
        if (
            all(map(is_, map(dict.get, self._places, self._keys), self._held))
            and list(map(len, self._tables)) == self._sizes
        ):
            return None
        for name, param in self._module.named_parameters(remove_duplicate=False):
            if id(param) not in self._params and param.requires_grad and name not in self._ignored:
                return f"parameter {name!r} was {'replaced' if name in self._names else 'added'}"
        self._note_places()
        return None
