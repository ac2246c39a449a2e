"""What must not grow while a process goes on and on: memory, open files, threads, hooks and objects."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mode
from time import monotonic, sleep

from torch import nn
from torch.optim import optimizer

from tests.patience import patience

__all__ = ["Size"]

MB = 1 << 20
OURS = ("dpfuse", "multiprocessing")  # the second one has what runs at the end of a process


@dataclass(frozen=True)
class Size:
    """What a process holds at one moment.

    Args:
        resident: bytes of memory.
        files: what the open descriptors stand for.
        threads: of Python and of others.
        hooks: in torch's tables for all modules and all optimizers.
        ours: objects of dpfuse's classes.
        objects: all that Python's collector knows.
        kinds: the classes of dpfuse's objects at the last look, which may not be the usual one.
    """

    resident: int
    files: tuple[str, ...] = field(repr=False)
    threads: int
    hooks: int
    ours: int
    objects: int
    kinds: Counter[str] = field(repr=False)

    @classmethod
    def now(cls) -> Size:
        """Measure this process, once what is in cycles is gone."""
        gc.collect()
        objects = gc.get_objects()
        tables = [
            table
            for owner in (nn.modules.module, optimizer)
            for name, table in vars(owner).items()
            if name.startswith("_global_") and isinstance(table, dict)
        ]
        kinds = Counter(type(each).__name__ for each in objects if str(type(each).__module__).startswith(OURS))
        return cls(
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
            files=tuple(_open_files()),
            threads=len(os.listdir("/proc/self/task")),
            hooks=sum(map(len, tables)),
            ours=kinds.total(),
            objects=len(objects),
            kinds=kinds,
        )

    @classmethod
    def settled(cls, quiet: float = 2.0, within: float = 20.0) -> Size:
        """Measure once the counts stay the same for a while: threads may be about to end. `ours` is the usual number.

        Args:
            quiet: for how many seconds.
            within: after how many seconds to wait no longer.
        """
        began = changed = monotonic()
        size = cls.now()
        ours = [size.ours]  # the heartbeat's thread has one more or less while it sends
        while monotonic() < changed + patience(quiet) and monotonic() < began + patience(within):
            sleep(0.2)
            before, size = size, cls.now()
            if size.counts != before.counts:
                changed = monotonic()
                ours.clear()
            ours.append(size.ours)
        return replace(size, ours=mode(ours))

    @property
    def counts(self) -> tuple[int, ...]:
        """What must not be more by one."""
        return len(self.files), self.threads, self.hooks

    def assert_not_grown(self, before: Size, megabytes: int, objects: int, ours: int = 0) -> None:
        """Fail if more is held than before.

        Args:
            before: an earlier moment of the same process.
            megabytes: an allocator takes some at a time.
            objects: Python and torch have caches, which fill.
            ours: as many objects of dpfuse may come and go.
        """
        more = [here > there for here, there in zip(self.counts, before.counts, strict=True)]
        opened = Counter(self.files) - Counter(before.files)
        assert not any(more), f"descriptors, threads or hooks: {before.counts} became {self.counts}, opened: {opened}"
        news = self.kinds - before.kinds
        assert self.ours - before.ours <= ours, f"objects of dpfuse: {before} became {self}, {news} of {self.kinds}"
        assert self.resident - before.resident < megabytes * MB, f"memory: {before} became {self}"
        assert self.objects - before.objects <= objects, f"objects: {before} became {self}"


def _open_files() -> list[str]:
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(links)
