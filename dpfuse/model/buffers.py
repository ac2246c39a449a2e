"""The buffers of a module that one rank sends to all: which these are, and how they travel. Knows no parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from dpfuse.comm import collective, votes
from dpfuse.comm.flat_broadcast import FlatBroadcast
from dpfuse.engine.inner_tensors import inner_tensors, memory_of
from dpfuse.engine.local_part import local_of
from dpfuse.engine.tensor_hash import hash_of, read
from dpfuse.model.buffer_writer import BufferWriter

__all__ = ["BufferKind", "BufferSync", "travelling_parts"]

END = (object(),)  # after what is compared, so that lists of different lengths differ
_shape_of, _dtype_of, _version_of = attrgetter("shape"), attrgetter("dtype"), attrgetter("_version")
# In training, these forwards take the statistics of their batch, and only write the running ones.
NORMALISES = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
LOW = 2**31 - 1  # bits that an int32 has
SMALL = 64 * 1024  # bytes of a buffer that is hashed in each step in which all ranks have written it
SAME, OTHER_SHAPE, CONVERTED = 0, 1, 2  # how a buffer of a rank differs; the number of the rank is added to the last


class BufferKind(NamedTuple):
    """What must be equal on all ranks for a buffer that travels."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)} on {self.device.type}"


class BufferSync:
    """Overwrites a module's buffers with those of one rank, in one broadcast per device.

    Buffers may be replaced, added and removed at any time, on some ranks only, or change in place: `resize_`, `set_`,
    `.data = x`, a storage that is freed. What travels stays what all ranks have settled on until they settle again: at
    first, the buffers that there are when this is made. A buffer that differs in shape, or that some ranks do not have,
    is left to each rank, as a cache that grows with the longest input.

    Args:
        ignored: names of buffers to leave alone.
        agreed: those on which the ranks have settled, in the order of the rank that sends; None for all that there are.

    Attributes:
        agreed: those that travel.
        found: the buffers that were found last, by name: the same object for as long as none has changed.
        tables: the dictionaries of buffers of all modules that were found last. They show what is there when read.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str],
        group: dist.ProcessGroup,
        agreed: Mapping[str, BufferKind] | None = None,
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._group = group
        self._kinds: Mapping[str, BufferKind] = {}  # of all that there are
        self._settled: Mapping[str, BufferKind] = {}  # the same, when the ranks last settled
        self.agreed: Mapping[str, BufferKind] = {}
        self.found: Mapping[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}  # values that travelled last, also of those that were removed since
        self._broadcasts: list[FlatBroadcast] | None = None
        self._refused = False  # whether the ranks have not settled because of a conversion
        # The buffers when all ranks had the same values last, and what a write changes; None: unknown.
        self._marked: tuple[Mapping[str, Tensor], list[tuple[int, int]]] | None = None
        self.look_again()
        self._settled = self._kinds
        if agreed is not None:  # maybe by ranks of another process, whose device was another one
            pairs = ((name, kind, self._kinds.get(name, kind)) for name, kind in agreed.items())
            agreed = {name: own if own[:2] == kind[:2] else kind for name, kind, own in pairs}
        self.agreed = self._kinds if agreed is None else agreed
        self.look_again()

    @property
    def exist(self) -> bool:
        """Whether some travel, or there are some here."""
        return bool(self.agreed or self._kinds)

    @property
    def unsettled(self) -> bool:
        """Whether buffers of this rank have changed since the ranks last settled on those that travel."""
        return self._refused or self.look() is not self._settled

    def doubt(self) -> None:
        """Settle again in the next backward: the original of a copy may have changed since the ranks settled."""
        if self.exist:
            self._settled = {}

    def look(self) -> Mapping[str, BufferKind]:
        """Return the kinds of all buffers, by name: the same object for as long as they do not change."""
        if self._were_replaced() or self._changed_in_place():
            self.look_again()
        return self._kinds

    def look_for_others(self) -> None:
        """Look whether buffers were replaced, added or removed."""
        if self._were_replaced():
            self.look_again()

    def settle(self, source: int) -> str | None:
        """Let those buffers travel from now on that rank `source` has, and that are of the same kind on all ranks.

        To be called on every rank. Those that did not travel before do so at once.

        Returns:
            The error for every rank, where a rank has converted a buffer and another one has not.
        """
        self.look_again()
        ours = {name: str(kind) for name, kind in self._kinds.items()}
        shapes = {name: str(tuple(kind.shape)) for name, kind in self._kinds.items()}
        own = [line for name in ours for line in (name, ours[name], shapes[name])]
        lines = votes.share_lines(own, self._group, source)
        described = list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))
        rank = self._group.rank()
        codes = [
            SAME if ours.get(name) == kind else CONVERTED + rank if shapes.get(name) == shape else OTHER_SHAPE
            for name, kind, shape in described
        ]
        found = torch.tensor([*codes, SAME], dtype=torch.int32, device=collective.group_device(self._group))
        collective.all_reduce_max(found, self._group)
        codes = found.tolist()[:-1]
        before, self._settled = self.agreed, self._kinds
        # In the order of the rank that sends.
        agreed = {name: self._kinds[name] for (name, _, _), code in zip(described, codes, strict=True) if code == SAME}
        self.agreed, self._fits, self._broadcasts = agreed, True, None
        new = [name for name, kind in agreed.items() if before.get(name) != kind]
        for broadcast in self._broadcasts_of([self.found[name] for name in new]):
            broadcast(source)
        self.keep_values()
        converted = next((each for each in zip(described, codes, strict=True) if each[1] >= CONVERTED), None)
        self._refused = converted is not None
        if converted is None:
            return None
        (name, kind, _), code = converted
        return (
            f"rank {rank}: buffer {name!r} is {kind} on rank {source}, and has another dtype or device on rank "
            f"{code - CONVERTED}; expected the same on every rank. Convert it on every rank, or on none."
        )

    def send(self, source: int) -> None:
        """Overwrite the buffers with those of rank `source`, in the agreed order, whichever there are here.

        One that was converted since travels in its old dtype. One that was removed or has another shape is left alone.
        """
        self.start(source)
        self.finish(source)

    def start(self, source: int) -> None:
        """Start `send`; `finish` must follow."""
        self.look()
        if not self._fits:
            self._send_stand_ins(source)
            return
        for broadcast in self._usual_broadcasts():
            broadcast.start(source)

    def keep_values(self) -> None:
        """Keep the values that there are now: what has another shape when it is to be sent travels with these."""
        if self._fits:
            for broadcast in self._usual_broadcasts():
                broadcast.stage()

    def finish(self, source: int, *, compare: bool = False) -> set[str]:
        """Wait for what was started.

        Returns:
            The buffers that had other values than those that have arrived, if these are to be compared.
        """
        other: set[str] = set()
        look = partial(self._note_other, other) if compare else None
        for broadcast in self._broadcasts or ():
            broadcast.finish(wait=False, look=look)
        return other

    def _note_other(self, other: set[str], buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        names = {id(buffer): name for name, buffer in self.found.items()}
        pairs = zip(buffers, values, strict=True)
        other.update(names[id(buffer)] for buffer, value in pairs if not _have_same_bits(buffer, value))

    def mark(self) -> None:
        """Note that all ranks have the same values now, so that `written` tells what is written from here on."""
        self.look_for_others()
        self._marked = self.found, _writes_of(self._travelling)

    def forget_mark(self) -> None:
        """Note that it is unknown whether all ranks have the same values."""
        self._marked = None

    def written(self, *, compare: bool) -> list[str] | None:
        """Return the buffers that travel and were written since all ranks had the same values; None if it is unknown.

        Statistics of a layer that normalises by its batch are not among them, since its forward only writes them.

        Args:
            compare: whether to compare values on a CPU, too: some writes leave no trace, such as those to `.data`.
        """
        if self._marked is None:
            return None
        found, writes = self._marked
        replaced = self._were_replaced()
        if not (compare or replaced) and found is self.found and writes == _writes_of(self._travelling):
            return []
        self.look()
        before = dict(zip(found, writes, strict=True))
        now = zip(self.found, _writes_of(self._travelling), strict=True)
        names = {name for name, write in now if before.get(name) != write}
        if compare and self._fits:
            names.update(
                name
                for name, value in self._sent().items()
                if value.is_cpu and not _have_same_bits(self.found[name], value)
            )
        names = names.difference(self._only_written()) if names else names
        return [name for name in self.agreed if name in names]

    def hashes_of(self, names: Iterable[str], *, looks: bool, waits: bool) -> dict[str, int]:
        """Return a hash, above 0, of the values of each of these buffers.

        Those of a layer that normalises in its own way are left out: hardly one reads its statistics in training.

        Args:
            looks: whether large ones are hashed, too.
            waits: whether the host may wait for those on a GPU.
        """
        found = {
            name: buffer
            for name in names
            if (waits if not (buffer := self.found[name]).is_cpu else looks or buffer.nbytes <= SMALL)
        }
        for prefix, layer in self._module.named_modules() if found else ():
            if layer.training and isinstance(layer, (_BatchNorm, _InstanceNorm)):
                for key in layer._buffers:
                    found.pop(f"{prefix}.{key}" if prefix else key, None)
        numbers = read([*map(hash_of, found.values())])
        return {name: number & LOW or 1 for name, number in zip(found, numbers, strict=True)}

    def _sent(self) -> dict[str, Tensor]:
        """Return the values that the broadcasts have sent last, by name."""
        if self._broadcasts is None:
            return {}
        devices = dict.fromkeys(kind.device for kind in self.agreed.values())
        names = [name for device in devices for name, kind in self.agreed.items() if kind.device == device]
        sent = chain.from_iterable(broadcast.values for broadcast in self._broadcasts)
        return dict(zip(names, sent, strict=True))

    def _only_written(self) -> list[str]:
        """Return the buffers that the next forward writes and does not read."""
        return [
            f"{prefix}.{key}" if prefix else key
            for prefix, layer in self._module.named_modules()
            if layer.training and getattr(type(layer), "forward", None) in NORMALISES
            for key in layer._buffers
        ]

    def _send_stand_ins(self, source: int) -> None:
        stand_ins = {
            name: torch.zeros(kind.shape, dtype=kind.dtype, device=kind.device) for name, kind in self.agreed.items()
        }
        pairs = self._pairs(stand_ins, self.found)
        with torch.no_grad():
            for stand_in, buffer in (*self._pairs(stand_ins, self._last), *pairs):
                stand_in.copy_(buffer)
            for broadcast in self._broadcasts_of(list(stand_ins.values()), keep=False):
                broadcast(source)
        self._last = stand_ins
        if pairs and self._group.rank() != source:  # whose own may be more precise than what travelled
            BufferWriter(self._module, [buffer for _, buffer in pairs])([stand_in for stand_in, _ in pairs])

    def _usual_broadcasts(self) -> list[FlatBroadcast]:
        if self._broadcasts is None:
            self._broadcasts = self._broadcasts_of([self.found[name] for name in self.agreed])
        return self._broadcasts

    @staticmethod
    def _pairs(stand_ins: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [
            (stand_in, buffers[name])
            for name, stand_in in stand_ins.items()
            if name in buffers and buffers[name].shape == stand_in.shape
        ]

    def _broadcasts_of(self, buffers: Sequence[Tensor], *, keep: bool = True) -> list[FlatBroadcast]:
        """Return a broadcast per device. `keep` says that they are buffers, whose values a graph may still need."""
        writer = partial(BufferWriter, self._module) if keep else None
        devices = dict.fromkeys(buffer.device for buffer in buffers)  # in the same order on every rank
        return [
            FlatBroadcast([item for item in buffers if item.device == device], self._group, writer)
            for device in devices
        ]

    def _were_replaced(self) -> bool:
        return any(self._empty) or not all(map(is_, chain.from_iterable(self._places), self._held))

    def _changed_in_place(self) -> bool:
        return any(map(_can_travel, self._left)) or self._traits != _traits(self._travelling)

    def look_again(self) -> None:
        """Look at modules that were added or removed, too."""
        tables = [(prefix, child._buffers) for prefix, child in self._module.named_modules()]
        self.tables = [table for _, table in tables]
        named = [(f"{prefix}.{key}" if prefix else key, buf) for prefix, table in tables for key, buf in table.items()]
        parts = {name: travelling_parts(buf) for name, buf in named if name not in self._ignored}
        # Each shows what is there when it is read.
        self._places: list[Iterable[object]] = [
            *(table.values() for table in self.tables if table),
            *(_InnerTensors(buf) for name, buf in named if parts.get(name) and "" not in parts[name]),
            END,
        ]
        self._empty = [table for table in self.tables if not table]
        self._held = [*chain.from_iterable(self._places)]
        whole = {name + path: each for name, inner in parts.items() for path, each in inner.items()}
        found = {name: memory_of(each) for name, each in whole.items()}
        kinds = {name: BufferKind(buf.dtype, buf.shape, buf.device) for name, buf in found.items()}
        self._travelling = list(whole.values())  # not the aliases of these, which do not follow what is assigned
        self._traits = _traits(self._travelling)
        self._left = [each for each in self._held if isinstance(each, Tensor) and not _can_travel(each)]
        self._fits = all(kinds.get(name) == kind for name, kind in self.agreed.items())
        if kinds == self._kinds and all(map(is_, found.values(), self.found.values())):
            return  # some lie in other memory by now
        self._last.update(self._sent())
        self._broadcasts = None
        self.found = found
        self._kinds = next((known for known in (self._settled, self._kinds) if known == kinds), kinds)


class _InnerTensors:
    """Shows what a buffer of a wrapper class has inside when it is read."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def __iter__(self) -> Iterator[object]:
        return iter((inner_tensors(self._buffer) or {}).values())


def _can_travel(buffer: Tensor | None) -> bool:
    return bool(travelling_parts(buffer))


def travelling_parts(buffer: Tensor | None) -> Mapping[str, Tensor]:
    """Return the tensors with memory in which a buffer has its values, as `inner_tensors`; none if it cannot travel."""
    if buffer is None or is_lazy(buffer):
        return {}
    parts = inner_tensors(local_of(buffer)) or {}
    if any(memory_of(each).is_meta for each in parts.values()):
        return {}
    # A program has freed a tensor that has elements and no memory.
    freed = any((memory := memory_of(each)).numel() and not memory.data_ptr() for each in parts.values())
    return {} if freed else parts


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(buffer: Tensor) -> Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        # One element is contiguous with any stride, but has bytes only with the usual one.
        return buffer.detach().resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _writes_of(buffers: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return what changes where a buffer is written or replaced: its version, and its address."""
    with torch._C.DisableTorchFunctionSubclass():
        addresses = map(Tensor.data_ptr, buffers)
        try:
            return list(zip(map(_version_of, buffers), addresses, strict=True))
        except RuntimeError:  # one was made in inference mode, where torch counts no writes
            return [(0 if buffer.is_inference() else buffer._version, buffer.data_ptr()) for buffer in buffers]


def _traits(buffers: Sequence[Tensor]) -> tuple[list[int], list[torch.Size], list[torch.dtype]]:
    """Return what changes where a tensor changes in place, in C loops. Strides are read whenever it is copied."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(Tensor.data_ptr, buffers)), list(map(_shape_of, buffers)), list(map(_dtype_of, buffers))
