"""What `dpfuse run` does inside each process of the program, once torch is imported: `patch()`, and its messages.

It is imported behind `import torch`, which may be one of dpfuse's own imports. So it takes no name from `dpfuse`.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from functools import wraps
from multiprocessing import util
from typing import Any

from torch import nn

from dpfuse.ddp.distributed_data_parallel import TORCH_CLASS, DistributedDataParallel
from dpfuse.ddp.patch import Patch
from dpfuse.engine.plan import MB
from dpfuse.engine.user_line import user_line
from dpfuse.job.descendants import descendants

__all__ = ["start"]

OUTER = "DPFUSE_STARTUP_RANK"  # the rank of the process that speaks for its children, a colon, and its `_Note`
DERIVED = "The class derives from torch's. Derive it from dpfuse.DistributedDataParallel, or make torch's class itself."
LOADED = "A copy, or what is loaded from a file, keeps its class. Wrap its `module` again."

_messages: _Messages | None = None


def start() -> None:
    """From here on torch's DistributedDataParallel makes dpfuse's. Rank 0 says once what it replaced, and what not."""
    global _messages
    if _messages is None:
        _messages = messages = _Messages()
        Patch({}, made=messages.made, left=lambda wrapper: messages.left(wrapper, DERIVED))
        _tell_of_loaded_ones(messages)
        atexit.register(messages.nothing)


class _Messages:
    """Says on stderr what was replaced. At the end of rank 0 it says what was not."""

    def __init__(self) -> None:
        self._made = 0
        self._left: dict[tuple[str, str], list[str]] = {}  # places, by the name of a class, and the reason
        self._process = os.getpid()
        rank = os.environ.get("RANK")
        outer, _, path = os.environ.get(OUTER, "").partition(":")
        self._inner = OUTER in os.environ and rank in (None, outer)  # as a compiler, or a rank of `spawn`
        self._note = _Note(path)
        if not self._inner:
            self._note.write()  # this process speaks for itself
            # Processes that it has started before, as Ray's, know of no note, and could make a wrapper unheard.
            self._note = _Note("") if descendants([self._process]) else _Note.new()
            os.environ[OUTER] = f"{rank or ''}:{self._note.path}"

    def made(self, wrapper: DistributedDataParallel) -> None:
        """Note that this wrapper was made where the program asked for torch's."""
        self._made += 1
        self._note.write()
        if self._made > 1 or wrapper.process_group.rank() != 0:
            return
        place = user_line()
        name, where = type(wrapper.module).__name__, f" ({place})" if place else ""
        _say(
            f"{name} is wrapped by dpfuse's DistributedDataParallel instead of torch's{where}: "
            f"{_size(wrapper.module)}, {wrapper.process_group.size()} ranks. So is each further model."
        )

    def left(self, wrapper: Any, reason: str) -> None:
        """Note that this wrapper stays torch's."""
        self._note.write()
        if wrapper.process_group.rank() != 0:
            return
        if not self._left:  # also in a fork of `multiprocessing`, which does not do what `atexit` has
            util.Finalize(None, self._not_replaced, exitpriority=0)
        self._left.setdefault((type(wrapper).__name__, reason), []).append(user_line())

    def nothing(self) -> None:
        """Note that the process ends."""
        rank = os.environ.get("RANK")
        speaks = not self._inner and os.getpid() == self._process and rank in (None, "0")
        failed = getattr(sys, "last_value", None) is not None  # Python has shown an exception that ended the program
        if speaks and not failed and self._note.empty():
            where = " on rank 0" if rank else " on this machine"
            _say(f"this program has made no DistributedDataParallel{where}, so dpfuse has replaced nothing")

    def _not_replaced(self) -> None:
        for (name, reason), places in self._left.items():
            models = "1 model of this process is" if len(places) == 1 else f"{len(places)} models of this process are"
            lines = ", ".join(dict.fromkeys(filter(None, places)))
            where = f" ({lines})" if lines else ""
            _say(f"{models} wrapped by torch's DistributedDataParallel and not by dpfuse's: {name}{where}. {reason}")


class _Note:
    """A file in memory, with which processes tell the one that has started them that they have made a wrapper.

    Args:
        path: of the descriptor that the other process has opened; empty where there is none.
    """

    NAME = "dpfuse-run"

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def new(cls) -> _Note:
        """Return the note of this process. It lives as long as the process, and leaves nothing behind."""
        try:
            return cls(f"/proc/{os.getpid()}/fd/{os.memfd_create(cls.NAME)}")
        except (AttributeError, OSError):  # not on Linux
            return cls("")

    def write(self) -> None:
        """Tell it."""
        with suppress(OSError):  # the process has ended, or belongs to another user
            if self._is_ours():
                with open(self.path, "ab") as file:
                    file.write(b".")

    def empty(self) -> bool:
        """Whether no process has told anything, as far as it is known."""
        with suppress(OSError):
            return self._is_ours() and os.stat(self.path).st_size == 0
        return False

    def _is_ours(self) -> bool:
        """Whether the descriptor is still that of the note: its number may have been taken again."""
        return bool(self.path) and os.readlink(self.path).startswith(f"/memfd:{self.NAME}")


def _tell_of_loaded_ones(messages: _Messages) -> None:
    """Note each wrapper of torch's that is unpickled or copied, and so not constructed."""
    plain: Any = TORCH_CLASS.__setstate__

    @wraps(plain)
    def load(wrapper: Any, state: Any) -> None:
        plain(wrapper, state)
        messages.left(wrapper, LOADED)

    TORCH_CLASS.__setstate__ = load  # type: ignore[method-assign]


def _size(module: nn.Module) -> str:
    trained = [param for param in module.parameters() if param.requires_grad]
    megabytes = sum(param.numel() * param.element_size() for param in trained) / MB
    return f"{len(trained)} parameters, {megabytes:.4g} MB of gradients"


def _say(text: str) -> None:
    print(f"dpfuse run: {text}", file=sys.stderr, flush=True)
