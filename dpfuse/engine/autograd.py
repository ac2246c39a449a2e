"""The only module that touches the autograd engine: ready hooks, begin and end of a backward. Knows no bucket."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dpfuse.engine.ready import ReadyHook
from dpfuse.engine.torch_private import EndOfCompiledBackward, compiled_backward, leave_untraced
from dpfuse.errors import DPFuseError

__all__ = ["BackwardListener", "BackwardWatch", "ReadyHooks", "hooks_on"]

WHY_UNTRACED = "dpfuse notes here that a backward begins; under compiled autograd, compile without fullgraph=True"


class ReadyHooks:
    """One hook per parameter, called after each accumulation into its `.grad`.

    Post-accumulate hooks live on the tensor itself, so they survive `.to()` and `.double()`. A new hook takes the place
    of the old one, before any hook that came later.

    Args:
        alone: whether another wrapper of the same parameters would spoil what this one does.
        decorate: what to call in place of a hook, by registration index.
    """

    def __init__(self, alone: bool, decorate: Callable[[int, ReadyHook], ReadyHook]) -> None:
        self.alone = alone
        self._decorate = decorate
        self._params: Sequence[Tensor] = ()
        self._handles: dict[int, RemovableHandle] = {}  # by id of the parameter, which `_params` keeps alive
        _all_hooks.add(self)

    def put_on(self, params: Sequence[Tensor]) -> None:
        """From now on be on these parameters alone, once `install` has brought hooks for them."""
        kept = set(map(id, params))
        for key in [key for key in self._handles if key not in kept]:
            self._handles.pop(key).remove()
        self._params = params

    def install(self, hooks: Mapping[int, ReadyHook]) -> None:
        """Use these hooks, by registration index; they are called with the parameter. After `remove`, use none."""
        if not self._params:
            return
        for index, hook in hooks.items():
            param, hook = self._params[index], self._decorate(index, hook)
            handle = self._handles.get(id(param))
            installed = None if handle is None else handle.hooks_dict_ref()
            if handle is None or installed is None or handle.id not in installed:
                self._handles[id(param)] = param.register_post_accumulate_grad_hook(hook)
            else:
                installed[handle.id] = hook

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        self._params = ()

    def is_on(self, param: Tensor) -> bool:
        """Whether one of them is on this parameter."""
        handle = self._handles.get(id(param))
        return handle is not None and any(param is other for other in self._params)


def hooks_on(param: Tensor) -> list[ReadyHooks]:
    """Those of all wrappers that have a hook on this parameter. A hook in C has no attributes to know it by."""
    return [hooks for hooks in tuple(_all_hooks) if hooks.is_on(param)]


_all_hooks: weakref.WeakSet[ReadyHooks] = weakref.WeakSet()


class BackwardListener(Protocol):
    """Hears of backwards."""

    def open(self, *, announced: bool) -> None:
        """The outermost backward begins; `announced` by an output of the wrapper."""

    def close(self, reached_leaves: Callable[[], bool]) -> None:
        """It has ended; the argument tells whether it accumulated into leaves."""

    def abandon(self) -> None:
        """It died of an exception."""


class _Task:
    """The engine holds it as a callback for as long as the backward lives.

    So it dies with the backward, and if it was never called, the backward died of an exception. Compiled autograd's
    engine holds it too, but never calls it.
    """

    __slots__ = ("__weakref__", "_end", "_node")

    def __init__(self, end: Callable[[Callable[[], bool]], None], node: Any) -> None:
        self._end = end
        self._node = node

    def __call__(self) -> None:
        self._end(lambda: _reaches_leaves(self._node))

    leave_untraced(__call__, calls=True)


class BackwardWatch:
    """Tells a listener when the outermost backward of a module's outputs begins, ends or dies.

    A callback belongs to the innermost graph task at the time it is queued. Queued by a hook on an output
    it belongs to the outermost one, and a reentrant checkpoint inside ends without consequences.

    Args:
        reached: called with what was noted of a forward when a backward first comes by its outputs.
    """

    def __init__(self, reached: Callable[[int], None] = lambda _note: None) -> None:
        self.reached = reached
        self.listener: BackwardListener | None = None
        self._task: weakref.ref[_Task] | None = None

    def watch(self, outputs: Any, note: int = 0) -> bool:
        """Watch all tensors in `outputs` (nested sequences, mappings and dataclasses) of a forward; was there any?

        `note` is what `reached` is called with.
        """
        announcer = _Announcer(self, note)
        if isinstance(outputs, Tensor):
            return announcer.watch(outputs)
        # Every tensor is watched, not only those up to the first.
        return sum(map(announcer.watch, _tensors_in(outputs))) > 0

    def begin(self, *, announced: bool = False) -> None:
        """A backward is running: open it, unless it is one that is open already."""
        if self._task is not None or self.listener is None:
            return
        node = torch._C._current_autograd_node()
        compiled = compiled_backward() if node is None else None
        if node is None and compiled is None:
            raise DPFuseError(
                "this backward runs under compiled autograd, which in this version of torch does not tell when a "
                "backward ends; expected the plain engine. Turn torch._dynamo.config.compiled_autograd off; "
                "torch.compile works without it."
            )
        self.listener.open(announced=announced)
        task = _Task(self._end, node)
        self._task = weakref.ref(task, self._died)
        torch.autograd.Variable._execution_engine.queue_callback(task)
        if compiled is not None:
            EndOfCompiledBackward(compiled, lambda leaves: self._end(lambda: leaves))

    leave_untraced(begin, calls=True, reason=WHY_UNTRACED)

    def _end(self, reached_leaves: Callable[[], bool]) -> None:
        self._task = None
        if self.listener is not None:
            self.listener.close(reached_leaves)

    def _died(self, reference: weakref.ref[_Task]) -> None:
        if self._task is reference:
            self._task = None
            if self.listener is not None:
                self.listener.abandon()


class _Announcer:
    """The hook on the outputs of one forward."""

    __slots__ = ("_new", "_note", "_watch")

    def __init__(self, watch: BackwardWatch, note: int) -> None:
        self._watch = watch
        self._note = note
        self._new = True

    def watch(self, tensor: Tensor) -> bool:
        if not tensor.requires_grad:
            return False
        # A parameter returned as it is keeps its hooks for ever; its own ready mark announces it.
        if not tensor.is_leaf:
            tensor.register_hook(self)
        return True

    def __call__(self, _grad: Tensor) -> None:
        if self._new:
            self._new = False
            self._watch.reached(self._note)
        self._watch.begin(announced=True)

    leave_untraced(__call__, calls=True, reason=WHY_UNTRACED)


def _reaches_leaves(node: Any) -> bool:
    """Does the running graph task accumulate into leaves, as `backward()` does and `autograd.grad()` does not?"""
    while node is not None and node.next_functions:
        node = next((child for child, _ in node.next_functions if child is not None), None)
    if node is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # The engine refuses to answer for a leaf whose gradient autograd.grad() was asked for.
        return False


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))
