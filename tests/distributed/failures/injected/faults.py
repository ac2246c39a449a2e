"""Raises at the k-th line of the library, or at the k-th call of a torch function from it, in the calling thread."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from dis import opmap
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dpfuse
import dpfuse_kernels
from dpfuse.comm import collective

__all__ = ["ERRORS", "KINDS", "TEXT", "Point", "Record", "failing"]

TEXT = "injected"
KINDS = ("line", "call")
ROOT = Path(dpfuse.__file__).parent
FOLDERS = (
    f"{ROOT}/engine/",
    f"{ROOT}/gradients/",
    f"{ROOT}/measure/local_squares.py",
    f"{ROOT}/manual/call_weights.py",
    f"{ROOT}/manual/fused_allreduce.py",
    f"{ROOT}/manual/plan.py",
    f"{ROOT}/model/agreement.py",
    *(f"{ROOT}/comm/{name}.py" for name in ("abilities", "ability_trials", "failed", "registered_memory", "votes")),
    f"{Path(dpfuse_kernels.__file__).parent}/",
)
# A collective that has begun cannot be taken back, and waiting for one is not ours to interrupt.
LEFT_OUT = tuple(f"{ROOT}/comm/{name}.py" for name in ("collective", "waiting"))
COLLECTIVE = f"{ROOT}/comm/collective.py"
STARTING = {*collective.__all__}.difference({"group_device", "resolve_group"})
WIRING = tuple(f"{ROOT}/engine/{name}.py" for name in ("reducer", "bucket_maker", "membership", "sync"))
# Lines that cannot fail: they look at names, bind one, take the next number of a count, loop over a list, empty one, or
# only call a function of ours, whose own lines are points.
HARMLESS = re.compile(
    r"""try:|else:|def\ .*|\"\"\".*|for\ \w+\ in\ [\w.]+:|return\ self\.reducer\.\w+|[\w.]+\.clear\(\)
    |return(\ \w+)?
    |feature\.delivered\(\)|delivered\(\)|prepared\.weights\.\w+\([\w.]*\)|self\._check\.\w+\(\)
    |return\ self\.\w+|if\ [\w.\ ]+:|\w+\ =\ \w+\(\)\ if\ [\w.\ ]+\ else\ \w+
    |[\w.]+(:\ [^=]+)?\ =\ (\[\]|\w+|next\(_numbers\))
    |([\w.]+(\[:\])?\ =\ |return\ )?
     (self\._|self\.listener\.|self\._watch\.|votes\.|collective\.|torch\._C\.|agree_on_|report_)\w+\([\w.,=\ *"]*\)
    |self\._end\(lambda:\ .*\)""",
    re.VERBOSE,
)
YIELD = opmap["YIELD_VALUE"]
FUNCTIONS = (
    "zeros", "zeros_like", "empty", "empty_like", "empty_strided", "full", "tensor", "cat", "stack", "frombuffer",
    "view_as_real", "_foreach_copy_", "_foreach_mul_", "_foreach_add_", "_foreach_norm",
)  # fmt: skip
METHODS = (
    "copy_", "zero_", "mul_", "add_", "fill_", "clone", "tolist", "to", "double", "view", "as_strided", "split",
    "detach",
)  # fmt: skip


class OwnError(Exception):
    """An error of a library, such as Triton's, which derives from no other class than Exception."""


ERRORS: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "OwnError": OwnError}


@dataclass(frozen=True)
class Point:
    """Where a fault was, or could be.

    Attributes:
        place: file, line and function; of a call also the torch function.
        between: whether a collective had begun in a call that had not yet returned to the reducer.
        collectives: how many collectives this backward had begun before.
    """

    place: str
    between: bool
    collectives: int


@dataclass
class Record:
    """What a fault came to: the points that were passed, of which the last is the one where it raised, if it did."""

    points: list[Point] = field(default_factory=list)
    raised: bool = False


@contextmanager
def failing(record: Record, kind: str, at: int | None, error: str) -> Iterator[None]:
    """Raise the error `error` at point number `at`, from 1, of this kind; None raises nowhere.

    Only what is called within is looked at, not what calls.
    """
    tracer = _Tracer(record, at, lambda: ERRORS[error](TEXT), lines=kind == "line")
    patched = _patched(tracer) if kind == "call" else []
    sys.settrace(tracer.enter)
    try:
        yield
    finally:
        sys.settrace(None)
        for owner, name, original in patched:
            if owner is torch:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


class _Tracer:
    """Passes the points of one backward.

    Args:
        record: where to note them.
        at: the number of the point that raises; None: none does.
        make: makes the exception.
        lines: whether the points are lines, or calls that are told by `passes_call`.
    """

    def __init__(self, record: Record, at: int | None, make: Callable[[], Exception], *, lines: bool) -> None:
        self._record = record
        self._at = at
        self._make = make
        self._lines = lines
        self._scopes: dict[str, bool] = {}
        # By id: a reference to a frame would keep its tensors alive, which the library may look at.
        self._began: set[int] = set()  # frames that run, in or below which a collective has begun
        self._entered: set[tuple[int, int]] = set()  # `with` lines whose block runs, by the id of their frame
        self._collectives = 0

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The tracing function of `sys.settrace`."""
        code = frame.f_code
        if code.co_filename == COLLECTIVE:
            if code.co_name in STARTING and frame.f_back is not None and frame.f_back.f_code.co_filename != COLLECTIVE:
                self._collective_begins(frame.f_back)
            return None
        return self._step if self._in_scope(code.co_filename) else None

    def passes_call(self, name: str, frame: FrameType) -> None:
        """A torch function is called from `frame`."""
        if self._in_scope(frame.f_code.co_filename):
            self._pass(frame, f" {name}")

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and self._lines and self._can_fail(frame):
            self._pass(frame, "")
        elif event == "return" and frame.f_code.co_code[frame.f_lasti] != YIELD:
            self._began.discard(id(frame))
            self._entered = {place for place in self._entered if place[0] != id(frame)}
        return self._step

    def _pass(self, frame: FrameType, suffix: str) -> None:
        points = self._record.points
        if self._record.raised:
            return
        code = frame.f_code
        file = "/".join(Path(code.co_filename).parts[-2:])
        place = f"{file}:{frame.f_lineno} {code.co_name}{suffix}"
        points.append(Point(place, self._is_between(frame), self._collectives))
        if len(points) == self._at:
            self._record.raised = True
            raise self._make()

    def _can_fail(self, frame: FrameType) -> bool:
        """Whether an exception can come from this line; `sys.settrace` can raise one where none is possible.

        Such are the lines in `HARMLESS`. And a `with` line is told again when its block ends; an exception there would
        skip the exit of the context.
        """
        line = getline(frame.f_code.co_filename, frame.f_lineno).partition("  # ")[0].strip()
        if HARMLESS.fullmatch(line):
            return False
        if not line.startswith("with "):
            return True
        # Beginning and end alternate, also in a loop.
        self._entered ^= {(id(frame), frame.f_lineno)}
        return (id(frame), frame.f_lineno) in self._entered

    def _in_scope(self, file: str) -> bool:
        known = self._scopes.get(file)
        if known is None:
            known = self._scopes[file] = file.startswith(FOLDERS) and file not in LEFT_OUT
        return known

    def _collective_begins(self, frame: FrameType | None) -> None:
        self._collectives += 1
        while frame is not None:
            if self._in_scope(frame.f_code.co_filename):
                self._began.add(id(frame))
            frame = frame.f_back

    def _is_between(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename not in WIRING:
            # What a file that is left out calls is a part of a collective, or of waiting for one.
            if id(frame) in self._began or frame.f_code.co_filename in LEFT_OUT:
                return True
            frame = frame.f_back
        return False


def _patched(tracer: _Tracer) -> list[tuple[Any, str, Any]]:
    """Let torch's functions tell the tracer that they are called; what to put back afterwards."""
    originals = []
    owners = [(torch, name) for name in FUNCTIONS] + [(torch.Tensor, name) for name in METHODS]
    for owner, name in owners:
        original = getattr(owner, name)
        originals.append((owner, name, original))
        setattr(owner, name, _told(tracer, name, original))
    return originals


def _told(tracer: _Tracer, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **options: Any) -> Any:
        tracer.passes_call(name, sys._getframe(1))
        return original(*args, **options)

    return told
