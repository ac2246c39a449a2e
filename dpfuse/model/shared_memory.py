"""Parameters in memory that several ranks of a machine have: each rank's step would change those of the others.

It happens where a model is made before the ranks are spawned, and is passed to them: torch's pickling moves its tensors
to shared memory. Buffers are left out, since a table that all ranks read may well be shared, and nothing tells at
wrapping which of them a forward writes.
"""

from __future__ import annotations

import json
import stat
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpfuse.comm import votes
from dpfuse.engine.inner_tensors import inner_tensors, memory_of
from dpfuse.errors import DPFuseError

__all__ = ["describe_shared", "is_outside", "refuse_common"]


class _Mapping(NamedTuple):
    """A part of the address space that other processes may have, too."""

    first: int  # address
    end: int
    offset: int  # of the first address in the file
    file: str  # the same in all processes of all machines that have it


class _Run(NamedTuple):
    """Bytes of a parameter that lie side by side. Runs are sorted by where they begin."""

    file: str
    first: int
    end: int
    rank: int
    place: int  # of the parameter, among those of its rank
    name: str


def describe_shared(params: Mapping[str, Tensor]) -> list[str]:
    """Return one line for each parameter that trains in memory of the host that other processes may have.

    Nothing is read of the system unless torch knows of memory that is not its own.
    """
    found = [
        (name, memory)
        for name, param in params.items()
        if param.requires_grad
        for memory in map(memory_of, (inner_tensors(param) or {}).values())
        if memory.device.type == "cpu" and memory.numel() and is_outside(memory.untyped_storage())
    ]
    mappings = _shared_mappings() if found else []
    lines = []
    for name, memory in found:
        address = memory.data_ptr()
        place = bisect_right(mappings, address, key=lambda each: each.first) - 1
        if place >= 0 and address < mappings[place].end:
            mapping = mappings[place]
            first = address - mapping.first + mapping.offset
            steps = [step * memory.itemsize for step in memory.stride()]
            lines.append(
                json.dumps([name, mapping.file, first, memory.itemsize, [*zip(steps, memory.shape, strict=True)]])
            )
    return lines


def is_outside(storage: torch.UntypedStorage) -> bool:
    """Whether NumPy or another process may have this memory, too."""
    return not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())


def _shared_mappings() -> list[_Mapping]:
    """Return what this process may write of the files that it shares; nothing where the system does not tell.

    Source: proc_pid_maps(5).
    """
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return []
    found = []
    for line in text.splitlines():
        addresses, rights, offset, device, inode, *path = line.split(maxsplit=5)
        if rights[1] == "w" and rights[3] == "s" and not _is_device(*path):
            first, end = (int(each, 16) for each in addresses.split("-"))
            found.append(_Mapping(first, end, int(offset, 16), f"{machine} {device} {inode}"))
    return found


def _is_device(path: str = "") -> bool:
    """Whether it is the file of a device, such as a GPU: each process has other memory at the same offset of it."""
    try:
        return stat.S_ISCHR(Path(path).stat().st_mode)
    except OSError:  # a file that has no name any more
        return False


def refuse_common(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Compare what `describe_shared` has returned over the ranks; to be called on all of them.

    Raises:
        DPFuseError: two ranks have memory in common; on every rank.
    """
    told = [votes.share_lines(lines, group, source) for source in range(group.size())]
    runs = sorted(
        run for rank, each in enumerate(told) for place, line in enumerate(each) for run in _runs_of(line, rank, place)
    )
    common = []
    furthest: _Run | None = None  # the run so far that ends last
    for run in runs:
        inside = furthest is not None and run.file == furthest.file and run.first < furthest.end
        if furthest is not None and inside and run.rank != furthest.rank:
            common.append(run)
        if furthest is None or not inside or run.end > furthest.end:
            furthest = run
    if common:
        raise DPFuseError(_refusal(runs, min(common, key=lambda run: run.place)))


def _runs_of(line: str, rank: int, place: int) -> Iterator[_Run]:
    name, file, first, length, dimensions = json.loads(line)
    starts = [first]
    for step, count in sorted(dimensions):
        if step == length:
            length *= count
        else:
            starts = [start + step * number for start in starts for number in range(count)]
    for start in starts:
        yield _Run(file, start, start + length, rank, place, name)


def _refusal(runs: Sequence[_Run], common: _Run) -> str:
    """Say which ranks have the first byte of `common`."""
    names = {run.rank: run.name for run in runs if run.file == common.file and run.first <= common.first < run.end}
    ranks = sorted(names)
    whose = ", ".join(f"{names[rank]!r} on rank {rank}" for rank in ranks)
    what = f"{names[ranks[0]]!r}" if len(set(names.values())) == 1 else whose
    return (
        f"the ranks {', '.join(map(str, ranks))} share the memory of the parameter {what}, expected memory of its own "
        "on each rank: each optimizer's step would also change the weights of the others. Make the model inside of the "
        "function that spawn() runs, or wrap copy.deepcopy(model) there."
    )
