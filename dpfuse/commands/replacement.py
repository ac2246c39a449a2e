"""What `dpfuse run` does inside each process of the program, once torch is imported: `patch()`, and its messages.

It is imported after `import torch`, which may be one of dpfuse's own imports. So it takes no name from `dpfuse`.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from multiprocessing import util
from typing import Any

from torch.optim import Optimizer

from dpfuse.commands.own_wrappers import hear_constructors
from dpfuse.ddp.distributed_data_parallel import TORCH_CLASS, DistributedDataParallel
from dpfuse.ddp.patch import Patch
from dpfuse.engine.optimizer_step_hook import call_after_steps
from dpfuse.engine.plan import MB
from dpfuse.engine.user_line import user_line
from dpfuse.job.descendants import descendants
from dpfuse.rules.codes import OTHER_MODES, OTHER_RATES, OTHER_TENSORS, SAME_BATCHES, WEIGHTS
from dpfuse.rules.w01_weights_differ import TOLD_ELSEWHERE
from dpfuse.startup import OPTIONS

__all__ = ["start"]

OUTER = "DPFUSE_STARTUP_RANK"  # the rank of the process that speaks for its children, a colon, and its `_Note`
DERIVED = "The class derives from torch's. Derive it from dpfuse.DistributedDataParallel, or make torch's class itself."
LOADED = "A copy, or what is loaded from a file, keeps its class. Wrap its `module` again."
SHOWN = 3  # models that are named
MADE = b"."  # the mark of a process that has made a wrapper, or speaks for itself
STEPPED = b"s"  # the mark of a process in which an optimizer has stepped
ON_EVERY_RANK = "|".join([SAME_BATCHES, OTHER_RATES, OTHER_MODES, WEIGHTS, OTHER_TENSORS])  # rank 0 sees them as well
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_SUBCLASS = r"\w+ derives from torch's DistributedDataParallel, and dpfuse"  # a warning of each rank
NO_VARIABLE = re.compile(r"environment variable \w+ expected")  # torch's error without them
START_RANKS = "write `dpfuse run --ranks 2` in place of `dpfuse run`"

_messages: _Messages | None = None


def start() -> None:
    """From here on torch's DistributedDataParallel makes dpfuse's. Rank 0 says once what was replaced, and what not."""
    global _messages
    if _messages is None:
        _messages = messages = _Messages()
        options = json.loads(os.environ.get(OPTIONS, "{}"))
        hear_constructors(messages.constructed)
        Patch(options, made=messages.made, left=lambda wrapper: messages.left(wrapper, DERIVED))
        _tell_of_loaded_ones(messages)
        call_after_steps(messages)
        if os.environ.get("RANK", "0") != "0":
            _leave_to_another_rank(OF_SUBCLASS)
        atexit.register(messages.nothing)


@dataclass(frozen=True)
class _Replaced:
    """One model that is wrapped by dpfuse's class instead of torch's."""

    name: str  # of its class
    place: str  # the user's line; empty if there is none
    parameters: int  # that are trained
    megabytes: float  # of their gradients
    ranks: int  # of its group


class _Messages:
    """Says on stderr what was replaced, once the program trains. At the end of rank 0 it says what was not."""

    def __init__(self) -> None:
        self._made = self._told = self._stepped = False
        self._replaced: list[_Replaced] = []  # those of groups in which this process is rank 0
        self._own: list[tuple[str, str]] = []  # what wraps in dpfuse's class itself: name and line
        self._left: dict[tuple[str, str], list[str]] = {}  # places, by the name of a class, and the reason
        self._process = os.getpid()
        rank = os.environ.get("RANK")
        outer, _, path = os.environ.get(OUTER, "").partition(":")
        self._inner = OUTER in os.environ and rank in (None, outer)  # as a compiler, or a rank of `spawn`
        self._note = _Note(path)
        if not self._inner:
            self._note.write(MADE)  # this process speaks for itself
            # Processes that it has started before, as Ray's, know of no note, and could make a wrapper unheard.
            self._note = _Note("") if descendants([self._process]) else _Note.new()
            os.environ[OUTER] = f"{rank or ''}:{self._note.path}"

    def made(self, wrapper: DistributedDataParallel) -> None:
        """Note that this wrapper was made where the program asked for torch's."""
        self._wraps()
        if wrapper.process_group.rank() == 0:
            trained = [param for param in wrapper.module.parameters() if param.requires_grad]
            megabytes = sum(param.numel() * param.element_size() for param in trained) / MB
            if self._told and not self._replaced:  # this rank is the first one of a group that was made later
                warnings.filterwarnings("default", f"{ON_EVERY_RANK}|{TOLD_ELSEWHERE}")
            name, ranks = type(wrapper.module).__name__, wrapper.process_group.size()
            self._replaced.append(_Replaced(name, user_line(), len(trained), megabytes, ranks))

    def constructed(
        self, plain: Callable[..., None], wrapper: Any, is_own: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Construct a wrapper. Note it where the program has written dpfuse's class itself."""
        plain(wrapper, *args, **kwargs)
        if is_own:
            self._wraps()
            if wrapper._group is None or wrapper._group.rank() == 0:
                self._own.append((type(wrapper.module).__name__, user_line()))

    def _wraps(self) -> None:
        if not self._made:  # a program may end without a step; `atexit` does nothing in a fork of `multiprocessing`
            util.Finalize(None, self._tell, exitpriority=1)
        self._made = True
        self._note.write(MADE)

    def after_step(self, optimizer: Optimizer) -> None:
        """As `Watcher.after_step`: the program trains."""
        if not self._stepped:
            self._stepped = True
            self._note.write(STEPPED)
        if self._made and not self._told:
            self._tell()

    def _tell(self) -> None:
        """Say what was replaced. From here on, one rank warns of what several see."""
        if self._told or getattr(sys, "last_value", None) is not None:
            return
        self._told = True
        if self._own:
            lines = ", ".join(dict.fromkeys(line for _, line in self._own[:SHOWN] if line))
            _say(
                f"{_listed([name for name, _ in self._own])} wrapped by a class of dpfuse already"
                f"{f' ({lines})' if lines else ''}, so there was nothing to replace there"
            )
        if not (self._replaced or self._own):
            _leave_to_another_rank(TOLD_ELSEWHERE)
            _leave_to_another_rank(ON_EVERY_RANK)
        if not self._replaced:
            return
        shown = self._replaced[:SHOWN]
        places = ", ".join(dict.fromkeys(one.place for one in shown if one.place))
        ranks = " and ".join(str(count) for count in sorted({one.ranks for one in self._replaced}))
        _say(
            f"{_listed([one.name for one in self._replaced])} wrapped by dpfuse's DistributedDataParallel instead of "
            f"torch's{f' ({places})' if places else ''}: {sum(one.parameters for one in self._replaced)} parameters, "
            f"{sum(one.megabytes for one in self._replaced):.4g} MB of gradients, {ranks} rank{'s' * (ranks != '1')}. "
            "So is each further model."
        )

    def left(self, wrapper: Any, reason: str) -> None:
        """Note that this wrapper stays torch's."""
        self._note.write(MADE)
        if wrapper.process_group.rank() != 0:
            return
        if not self._left:  # also in a fork of `multiprocessing`, which does not do what `atexit` has
            util.Finalize(None, self._not_replaced, exitpriority=0)
        self._left.setdefault((type(wrapper).__name__, reason), []).append(user_line())

    def nothing(self) -> None:
        """Note that the process ends."""
        rank, error = os.environ.get("RANK"), getattr(sys, "last_value", None)  # which has ended the program
        if self._inner or os.getpid() != self._process or rank not in (None, "0"):
            return
        if rank is None and _wants_ranks(error):
            _say(f"the program expects to be one of several ranks, and none was started. For two here, {START_RANKS}")
        elif error is None and {*self._note.read()} == {*STEPPED}:
            where = " on rank 0" if rank else " on this machine"
            ranks = "" if rank else f". If several ranks are to train, {START_RANKS}"
            _say(f"this program has made no DistributedDataParallel{where}, so dpfuse has replaced nothing{ranks}")

    def _not_replaced(self) -> None:
        for (name, reason), places in self._left.items():
            models = "1 model of this process is" if len(places) == 1 else f"{len(places)} models of this process are"
            lines = ", ".join(dict.fromkeys(filter(None, places)))
            where = f" ({lines})" if lines else ""
            _say(f"{models} wrapped by torch's DistributedDataParallel and not by dpfuse's: {name}{where}. {reason}")


class _Note:
    """A file in memory, with which processes tell the one that has started them what they have done.

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

    def write(self, what: bytes) -> None:
        """Tell it something."""
        with suppress(OSError):  # the process has ended, or belongs to another user
            if self._is_ours():
                with open(self.path, "ab") as file:
                    file.write(what)

    def read(self) -> bytes:
        """Return what processes have told, as far as it is known."""
        with suppress(OSError):
            if self._is_ours():
                with open(self.path, "rb") as file:
                    return file.read()
        return b""

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


def _leave_to_another_rank(text: str) -> None:
    """Show no warning with this text, unless a filter of the program wants it: those come first."""
    warnings.filterwarnings("ignore", text, append=True)


def _wants_ranks(error: BaseException | None) -> bool:
    """Whether an exception says that a variable is missing which a launcher sets for its ranks."""
    if isinstance(error, KeyError):
        return error.args[:1] in [(name,) for name in RANK_VARIABLES] and _is_of_environ(error)
    return isinstance(error, ValueError) and NO_VARIABLE.search(str(error)) is not None


def _is_of_environ(error: BaseException) -> bool:
    """Whether `os.environ` has raised an error, and not another mapping with such a key."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == "os"


def _listed(names: Sequence[str]) -> str:
    """Return names with a verb.

    Example:
        >>> _listed(["GPT"]), _listed(["Net", "Head"]), _listed(["A", "B", "C", "D", "E"])
        ('GPT is', 'Net and Head are', 'A, B, C and 2 more are')
    """
    if len(names) == 1:
        return f"{names[0]} is"
    first = names[: min(SHOWN, len(names) - 1)]
    rest = f"{len(names) - SHOWN} more" if len(names) > SHOWN else names[-1]
    return f"{', '.join(first)} and {rest} are"


def _say(text: str) -> None:
    print(f"dpfuse run: {text}", file=sys.stderr, flush=True)
