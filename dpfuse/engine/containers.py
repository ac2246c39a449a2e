"""The tensors in what a program passes around: nested containers. Runs no code of the program."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable
from types import MemberDescriptorType
from typing import Any

from torch import Tensor

__all__ = ["leaves_in", "tensors_in"]

BUILT_IN: tuple[type[Iterable[Any]], ...] = (tuple, list, set, frozenset)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, sets, dicts and dataclasses; other objects are not looked into.

    Only what containers store is read. Properties and overridden methods may raise, compute or change something, so
    they are not called. Containers may refer to each other, and be nested as deeply as memory allows.

    Example:
        >>> import torch
        >>> from dpfuse.engine.containers import tensors_in
        >>> tree = {"value": torch.ones(1), "children": [{"value": torch.zeros(1)}]}
        >>> tree["children"][0]["parent"] = tree
        >>> tensors_in(tree)
        [tensor([1.]), tensor([0.])]
    """
    return [leaf for leaf in leaves_in(value) if issubclass(type(leaf), Tensor)]


def leaves_in(value: Any) -> list[Any]:
    """Return what lies in such containers and is none itself: tensors, and objects that are not looked into.

    Example:
        >>> from dpfuse.engine.containers import leaves_in
        >>> leaves_in({"size": 3, "names": ["a", None]})
        [3, 'a', None]
    """
    found: list[Any] = []
    seen: set[int] = set()
    containers: list[Iterable[Any]] = [(value,)]
    for items in containers:  # which grow meanwhile
        for item in items:
            if issubclass(type(item), Tensor) or (inside := _items_of(item)) is None:
                found.append(item)
            elif id(item) not in seen:
                seen.add(id(item))
                containers.append(inside)
    return found


def _items_of(value: Any) -> Iterable[Any] | None:
    """Return what a container stores; None if `value` is none."""
    kind = type(value)  # and not isinstance(): a weak proxy pretends to be what it refers to
    if issubclass(kind, dict):
        return dict.values(value)
    if kind in BUILT_IN:
        return value  # type: ignore[no-any-return]
    if issubclass(kind, BUILT_IN):
        base = next(base for base in BUILT_IN if issubclass(kind, base))
        return base.__iter__(value)
    if hasattr(kind, "__dataclass_fields__") or issubclass(kind, UserDict):
        return _attributes_of(value)
    return None


def _attributes_of(value: Any) -> list[Any]:
    """Return what an object stores in its dictionary, and in slots of the fields of a dataclass."""
    kind = type(value)
    try:
        stored = object.__getattribute__(value, "__dict__")
    except AttributeError:  # all of it lies in slots
        stored = {}
    items = list(stored.values())
    for name in getattr(kind, "__dataclass_fields__", ()):
        slot = getattr(kind, name, None)
        if type(slot) is MemberDescriptorType:
            try:
                items.append(slot.__get__(value, kind))
            except AttributeError:  # it was never set
                continue
    return items
