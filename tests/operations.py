"""What torch does inside a `with`: operations, the bytes that they move, and what collectives send.

The dispatcher of torch shows the operations of one thread. On CPUs, a backward runs in the thread that calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Operations"]

ONLY_WRITTEN = {"copy_", "_foreach_copy_", "zero_", "fill_"}  # other functions read what they write in place


class Operations(TorchDispatchMode):
    """Operations in the order in which they end.

    Attributes:
        names: of all operations, without their overload.
        moved: bytes that each operation reads and writes; 0 for a collective.
        collectives: name and bytes of each collective; of an all-to-all, the bytes that this rank gives.

    Example:
        >>> with Operations() as done:
        ...     _ = torch.ones(2).mul_(3.0)
        >>> done.names, done.moved
        (['ones', 'mul_'], [8, 16])
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.moved: list[int] = []
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self.collectives.append((name, size_of(args[1 if name == "alltoall_base_" else 0])))
        self.names.append(name)
        self.moved.append(0 if namespace == "c10d" else moved_by(func._schema, name, args, kwargs or {}, results))
        return results

    def bytes_of(self) -> Counter[str]:
        """Bytes that are read and written, by name."""
        found: Counter[str] = Counter()
        for name, moved in zip(self.names, self.moved, strict=True):
            found[name] += moved
        return found

    def calls_of(self, least: float) -> Counter[str]:
        """Calls that move more than `least` bytes, by name."""
        return Counter(name for name, moved in zip(self.names, self.moved, strict=True) if moved > least)

    def sent(self, size: int) -> float:
        """Bytes that a rank sends in all collectives, on average over `size` ranks."""
        # A ring passes on each part of a sum twice. In the others each part goes once to where it belongs.
        times = {"allreduce_": 2, "alltoall_base_": 1, "broadcast_": 1, "allgather_": 1, "_allgather_base_": 1}
        return sum(times[name] * nbytes for name, nbytes in self.collectives) * (size - 1) / size


def moved_by(schema: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> int:
    """Bytes that an operation reads and writes."""
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return 0  # a view
    moved = 0
    given = {**kwargs, **dict(zip((argument.name for argument in schema.arguments), args, strict=False))}
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        both = written and not argument.is_out and name not in ONLY_WRITTEN
        is_view = argument.alias_info is not None and not written
        moved += (0 if is_view else 2 if both else 1) * size_of(given.get(argument.name))
    if all(result.alias_info is None for result in schema.returns):
        moved += size_of(results)
    return moved


def size_of(value: Any) -> int:
    """Bytes of all dense tensors in a value; the bytes of sparse ones are those of their parts."""
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
