"""The names of a module's parameters, also of one whose class overrides torch's methods."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["named_with_ties"]


def named_with_ties(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter under each of its names, in the order of the modules.

    A class may override `named_parameters` without torch's arguments, or leave some parameters out: only those count
    that it yields.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 2)
        >>> net.other = net.weight
        >>> [name for name, _ in named_with_ties(net)]
        ['weight', 'bias', 'other']
    """
    if type(module).named_parameters is nn.Module.named_parameters:
        yield from module.named_parameters(remove_duplicate=False)
        return
    own = dict(module.named_parameters())
    ids = set(map(id, own.values()))
    found = nn.Module.named_parameters(module, remove_duplicate=False)
    usual = {name: param for name, param in found if id(param) in ids}
    yield from (usual | own).items()
