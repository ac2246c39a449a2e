"""The only module that touches the autograd engine: ready hooks, begin and end of a backward. Knows no bucket."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from time import monotonic, sleep
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dpfuse.engine.containers import tensors_in
from dpfuse.engine.feature import ReadyRecorder
from dpfuse.engine.inner_tensors import has_memory
from dpfuse.engine.local_part import LocalPart, leaf_of
from dpfuse.engine.ready import ReadyHook
from dpfuse.engine.shared_params import look_again, shared
from dpfuse.engine.torch_private import (
    EndOfCompiledBackward,
    call_last,
    compiled_backward,
    engine_run_backward,
    hook_tables,
    leave_untraced,
    put_before_engine,
    put_hooks,
)
from dpfuse.errors import DPFuseError

__all__ = [
    "BackwardListener",
    "BackwardWatch",
    "Reached",
    "ReadyHooks",
    "averaged_elsewhere",
    "backward_is_nested",
    "backward_runs",
    "hooks_on",
    "ready_keys",
    "running_backward",
    "unreached",
]

# What each backward that Python starts, and each backward of a user's autograd function, goes through.
_ENGINE = engine_run_backward.__code__
_OWN_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
FREED_WITHIN = 1.0  # seconds in which the engine frees a backward that has raised
AGAIN = object()  # in place of the note of a forward whose output was reached before
WHY_UNTRACED = "dpfuse notes here that a backward begins; under compiled autograd, compile without fullgraph=True"


class ReadyHooks:
    """One hook per parameter, called after each accumulation into its `.grad`.

    Post-accumulate hooks belong to the tensor itself, so they survive `.to()` and `.double()`. A new hook replaces the
    old one at its place. Hooks of a program are to be called before: what they make of a gradient is averaged.

    Args:
        alone: whether another wrapper of the same parameters would break what this one does.

    Attributes:
        alone: as given.
        recorder: notes when each gradient is ready; the hooks that are installed from then on tell it.
    """

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.recorder: ReadyRecorder | None = None
        self._planned: Sequence[Tensor] = ()
        self._params: Sequence[Tensor] = ()  # the leaves of the planned ones
        self._handles: dict[int, RemovableHandle] = {}  # by id of the parameter, which `_params` keeps alive
        _all_hooks.add(self)
        # The parameters may outlive this object. Handles refer to no module: one that refers to its wrapper would keep
        # both alive for ever.
        weakref.finalize(self, _take_off, self._handles).atexit = False

    def put_on(self, params: Sequence[Tensor]) -> None:
        """Use these parameters from now on: `install` puts hooks on them. Remove the hooks of other parameters."""
        self._planned, self._params = params, list(map(leaf_of, params))
        kept = set(map(id, self._params))
        for key in [key for key in self._handles if key not in kept]:
            self._handles.pop(key).remove()
        self.restore()
        _look_for_shared()

    def restore(self) -> None:
        """Have torch call the hooks of all parameters. A swap of two tensors takes them along with the memory."""
        for param in self._params:
            hooks = param._post_accumulate_grad_hooks
            if hooks is not None:
                param._post_accumulate_grad_hooks = hooks

    def install(self, hooks: Mapping[int, ReadyHook]) -> None:
        """Install these hooks, by registration index; they are called with the parameter. Do nothing after `remove`."""
        if not self._params:
            return
        for index, hook in hooks.items():
            param, planned = self._params[index], self._planned[index]
            hook = hook if self.recorder is None else self.recorder.stamped(index, hook)
            if type(planned) is LocalPart:
                hook = planned.calling(hook)
            elif not has_memory(param):
                hook = _with_dense_gradient(hook)
            handle = self._handles.get(id(param))
            installed = None if handle is None else handle.hooks_dict_ref()
            if handle is None or installed is None or handle.id not in installed:
                self._handles[id(param)] = _register(param, hook)
            else:
                installed[handle.id] = hook

    def come_last(self, param: Tensor) -> bool:
        """Have torch call the hooks of wrappers on `param` after those of the program.

        Returns:
            Whether that was the order already. If not, a backward that calls them now keeps the order before.
        """
        leaf = leaf_of(param)
        hooks, own = hook_tables(leaf)[1], self._handles.get(id(leaf))
        if own is None or next(reversed(hooks)) == own.id:
            return True
        keys, ready = [*hooks], ready_keys(leaf)
        ours = [key for key in keys if key in ready]
        if keys[-len(ours) :] == ours:
            return True
        call_last(hooks, ours)
        return False

    def remove(self) -> None:
        """Remove all hooks from the parameters."""
        self._planned = self._params = ()
        _take_off(self._handles)

    def any_on(self, leaves: Collection[int]) -> bool:
        """Whether one of these hooks is on one of these leaves, given by their ids."""
        return any(id(param) in leaves for param in self._params)

    def is_on(self, param: Tensor) -> bool:
        """Whether one of these hooks is on `param`."""
        return id(param) in self._handles  # `_params` keeps it alive

    def key_on(self, param: Tensor) -> int | None:
        """Return the key of the hook on `param` in torch's table; None if there is none."""
        handle = self._handles.get(id(param))
        return None if handle is None else handle.id


def _with_dense_gradient(hook: ReadyHook) -> ReadyHook:
    """Return a hook for a parameter of a wrapper class, whose gradients may be of that class: they get memory."""

    def call(param: Tensor) -> None:
        grad = param.grad
        if grad is not None and grad.layout is torch.strided and not has_memory(grad):
            with torch.no_grad():
                param.grad = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device).copy_(
                    grad
                )
        hook(param)

    leave_untraced(call, calls=True)
    return call


def _register(param: Tensor, hook: ReadyHook) -> RemovableHandle:
    """Register a hook, also on a parameter that is frozen now: it has a slot, and may be unfrozen at any time."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        with torch._C.DisableTorchFunctionSubclass():  # a class may not know this method
            handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            param.requires_grad_(False)
    return handle


def hooks_on(param: Tensor) -> list[ReadyHooks]:
    """Return the hooks of all wrappers that have one on `param`. A hook in C has no attribute that could mark it."""
    return [hooks for hooks in tuple(_all_hooks) if hooks.is_on(param)]


def ready_keys(param: Tensor) -> set[int]:
    """Return the keys of the hooks of all wrappers on `param`, which torch keeps among those of the program."""
    return {key for hooks in tuple(_all_hooks) if (key := hooks.key_on(param)) is not None}


_all_hooks: weakref.WeakSet[ReadyHooks] = weakref.WeakSet()


def _take_off(handles: dict[int, RemovableHandle]) -> None:
    """Take the hooks with these handles off their parameters, and forget them."""
    for handle in handles.values():
        handle.remove()
    handles.clear()
    _look_for_shared()


def _look_for_shared() -> None:
    look_again(map(id, hooks._params) for hooks in tuple(_all_hooks))


def backward_runs() -> bool:
    """Whether the autograd engine runs a backward in this thread, of this module or of another one."""
    return torch._C._current_graph_task_id() != -1


def running_backward() -> int:
    """Return a number of the innermost backward that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def unreached(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters into which the innermost backward that runs in this thread will not accumulate.

    The graph of that backward tells, and it does not show what backwards inside of it reach, as those of reentrant
    checkpoints. Where the graph cannot be asked, or nothing is accumulated at all, all parameters count as reached.
    """
    node = torch._C._current_autograd_node()
    if node is None:  # compiled autograd, or no backward
        return []
    trainable = [param for param in params if param.requires_grad]
    # Nodes are not kept: a node belongs to a stream and keeps its parameter from being swapped, and a parameter that
    # was converted has another one.
    with torch.enable_grad():
        # In torch 2.11 nothing else keeps its node alive.
        joined = _leaves(*map(leaf_of, trainable)) if trainable else None
    nodes = [] if joined is None else [node for node, _ in joined.grad_fn.next_functions]
    try:
        answers = list(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # as in `_reaches_leaves`
        return []
    if not any(answers) and not _reaches_leaves(node):
        return []
    reached = {id(param) for param, answer in zip(trainable, answers, strict=True) if answer}
    return [param for param in params if id(param) not in reached]


class _Leaves(torch.autograd.Function):
    """Has a node that leads to those of all its inputs: the fastest way to find many of them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("this node is in no graph")


_leaves: Callable[..., Any] = _Leaves.apply


def backward_is_nested() -> bool:
    """Whether the running backward began inside another one, as that of a reentrant checkpoint does."""
    frame: FrameType | None = sys._getframe(1)
    engines = 0
    while frame is not None:
        engines += frame.f_code is _ENGINE
        # On a GPU a thread of the engine runs the outer backward, and has no frame of its caller.
        if engines > 1 or (engines and frame.f_code is _OWN_BACKWARD):
            return True
        frame = frame.f_back
    return False


class BackwardListener(Protocol):
    """Is told when the outermost backward begins, ends, or dies of an exception."""

    def open(self, *, announced: bool) -> None:
        """The outermost backward begins. `announced` says that an output of the wrapper told it.

        An error of an earlier backward, of which all ranks hear, is raised here.
        """

    def close(self, reached_leaves: Callable[[], bool]) -> None:
        """The backward has ended. The argument returns whether it accumulated gradients into leaves."""

    def abandon(self, *, opened: bool) -> None:
        """The backward died of an exception. `opened` says whether `open` had returned; `close` may have, too."""

    def raised(self, error: BaseException, *, opened: bool, reached: Reached) -> None:
        """A backward of this process has raised this; `abandon` was called before.

        `opened` says whether that backward had been opened, and `reached` knows into what it was to accumulate.
        """


class Reached(Protocol):
    """Returns whether a backward was to accumulate gradients into any of these parameters.

    With `alone`, it must not be a backward of another wrapper, too.
    """

    def __call__(self, params: Sequence[Tensor], *, alone: bool) -> bool: ...


# A callback that the autograd engine holds as long as the backward lives, and frees with it. If it was never called by
# then, the backward died of an exception. It is an object in C: the traceback of an error in a frame of its own would
# keep it alive. Compiled autograd holds it too, but never calls it.
_Callback = partial[None]


class BackwardWatch:
    """Tells a listener when the outermost backward of a module's outputs begins, ends or dies.

    A callback belongs to the graph task that is innermost when it is queued. A hook on an output queues it in the
    outermost one, so the end of a reentrant checkpoint inside does not call it.

    Args:
        listener: is told of backwards.
        reached: called with the note of a forward, when a backward first reaches its outputs.
        hooks: the ready hooks of the wrapper.

    Attributes:
        listener, hooks: as given.
        unopened: gradients of outputs that a backward has reached, as long as it is not open. A hook in C puts them
            here before any line runs that may raise.
    """

    def __init__(
        self,
        listener: BackwardListener,
        reached: Callable[[int], None] = lambda _note: None,
        hooks: ReadyHooks | None = None,
    ) -> None:
        self.listener = listener
        self.reached = reached
        self.hooks = hooks
        self._announced = False  # whether an output has opened the backward that is open, or was the last
        self._task: weakref.ref[_Callback] | None = None
        self._waiting: weakref.ref[_Callback] | None = None  # to open a backward at its end
        self._leaves: list[RemovableHandle] = []
        self._opened = -1  # the number that the last backward got when it was opened
        self.unopened: list[Tensor] = []
        self.hooked = self.unopened.append
        put_before_engine(_run_backward)
        _watches.add(self)

    @property
    def is_announced(self) -> bool:
        """Whether a backward is open that has reached an output."""
        return self._task is not None and self._announced

    def look_back(self) -> None:
        """Notice that a backward has died at its first hook, before anything else was noted of it."""
        if self.unopened and self._task is None and not backward_runs():
            self.unopened.clear()
            self.listener.abandon(opened=False)

    def raised(self, error: BaseException, began: int, reached: Callable[..., bool]) -> None:
        """Note what a backward has raised, of this model or of another one.

        Args:
            error: what it has raised.
            began: the number that it got when it began.
            reached: as for the listener, with the hooks of the wrapper that asks before its arguments.
        """
        if (self._opened > began or self._waiting is not None) and not backward_runs():
            self._wait_for_death()
        self.look_back()
        self.listener.raised(error, opened=self._opened > began, reached=partial(reached, self.hooks))

    def _wait_for_death(self) -> None:
        """Wait until the engine has freed the backward that has raised.

        The engine has a thread for each GPU, which may still hold the backward, and frees it once it gets Python's
        lock. Until then every call would find a backward that runs. If another thread of the program runs a backward
        of its own, the wait ends at the limit.
        """
        limit = monotonic() + FREED_WITHIN
        while (self._task is not None or self._waiting is not None) and monotonic() < limit:
            sleep(FREED_WITHIN / 10_000)  # the other thread gets the lock

    def watch(self, outputs: Any, note: int = 0) -> bool:
        """Watch all tensors in the outputs of a forward; return whether there is any.

        `outputs` may be a tensor, or containers that `tensors_in` looks into. `reached` is called with `note`.
        """
        if self._leaves:
            self.forget_leaves()
        watched = False
        hook: Callable[[Tensor], None] = partial(_begin, [self, note])
        for tensor in (outputs,) if isinstance(outputs, Tensor) else tensors_in(outputs):
            if not tensor.requires_grad:
                continue
            watched = True
            if tensor.is_leaf:  # a parameter or an input, which keeps the hook until the next forward
                self._leaves.append(tensor.register_hook(hook))
            else:
                put_hooks(tensor, {0: self.hooked, 1: hook})
        return watched

    def forget_leaves(self) -> None:
        """Take the hooks off the outputs that are leaves, which would keep them for ever."""
        while self._leaves:
            self._leaves.pop().remove()

    def begin(self) -> None:
        """As `_begin` where no output was reached."""
        _begin([self, None])

    leave_untraced(begin, calls=True, reason=WHY_UNTRACED)

    def begin_at_end(self) -> None:
        """Open the running backward when it ends, if no output announces it before.

        A parameter is ready, and a forward waits for its backward. Only its outputs tell whether this is that backward:
        a parameter may itself be an output, or the loss may use it directly. If this is a nested backward, the one
        around it may reach them.
        """
        if self._waiting is not None or self._task is not None:
            return
        node = torch._C._current_autograd_node()
        if node is None:  # compiled autograd, which calls no callback
            self.begin()
            return
        task = partial(self._begin_late, partial(_reaches_leaves, node))
        self._waiting = weakref.ref(task, self._died_early)
        _queue_callback(task)

    leave_untraced(begin_at_end, calls=True, reason=WHY_UNTRACED)

    def _begin_late(self, reached_leaves: Callable[[], bool]) -> None:
        self._waiting = None
        # The backward around a reentrant one goes on, and may still reach an output.
        listener = self.listener
        if self._task is None and not backward_is_nested():
            self._opened = next(_numbers)
            try:
                listener.open(announced=False)
            except BaseException:
                listener.abandon(opened=False)
                raise
            try:
                listener.close(reached_leaves)
            except BaseException:
                listener.abandon(opened=True)
                raise

    leave_untraced(_begin_late, calls=True)

    def _died_early(self, reference: weakref.ref[_Callback]) -> None:
        if self._waiting is reference:
            try:
                if self._task is None:
                    self.listener.abandon(opened=False)
            finally:
                self._waiting = None  # last: another thread may wait for it

    def _end(self, reached_leaves: Callable[[], bool]) -> None:
        self.listener.close(reached_leaves)
        self._task = None  # only now: an exception before leaves it to `_died`

    leave_untraced(_end, calls=True)

    def _died(self, reference: weakref.ref[_Callback]) -> None:
        if self._task is reference:
            try:
                self.listener.abandon(opened=True)
            finally:
                self._task = None  # last: another thread may wait for it


def _begin(reached: list[Any], _grad: Tensor | None = None) -> None:
    """Open the backward that is running, unless it is open already.

    If that fails, the backward is abandoned: the peers may wait for it. The forward counts as one without a
    backward until then, so that the ranks differ where this fails before anything was noted.

    Args:
        reached: the watch, and the note of the forward whose output was reached; None where no output was. The hooks
            of all outputs of a forward share this list. After the first time it has a weak reference to the watch, and
            `AGAIN`: a strong one would keep a module alive that keeps its output.
    """
    watch, note = reached
    if note is AGAIN and (watch := watch()) is None:
        return  # the wrapper is gone
    listener, opens = watch.listener, watch._task is None
    try:
        watch.unopened.clear()
        if note is not None and note is not AGAIN:
            reached[:] = weakref.ref(watch), AGAIN
            watch.reached(note)
        if opens:
            node = torch._C._current_autograd_node()
            compiled = compiled_backward() if node is None else None
            if node is None and compiled is None:
                raise DPFuseError(
                    "this backward runs under compiled autograd, which in this version of torch does not tell when "
                    "a backward ends; expected the plain engine. Turn torch._dynamo.config.compiled_autograd off; "
                    "torch.compile works without it."
                )
            watch._opened, watch._announced = next(_numbers), note is not None
            listener.open(announced=watch._announced)
            task = partial(watch._end, partial(_reaches_leaves, node))
            watch._task = weakref.ref(task, watch._died)
            _queue_callback(task)
            if compiled is not None:
                EndOfCompiledBackward(compiled, lambda leaves: watch._end(lambda: leaves))
        elif note is not None:
            watch._announced = True  # a ready mark has opened it
    except BaseException:
        watch._task = None  # nothing tells the end of this backward
        listener.abandon(opened=False)
        raise


leave_untraced(_begin, calls=True, reason=WHY_UNTRACED)

_watches: weakref.WeakSet[BackwardWatch] = weakref.WeakSet()
_numbers = count()  # of backwards that begin, and of those that are opened: each later one is larger


def averaged_elsewhere(params: Iterable[Tensor]) -> list[Tensor]:
    """Return those of these parameters that another wrapper has, one of whose outputs an open backward has reached.

    That wrapper averages them, now or at the end of its `no_sync()`. To be asked for a wrapper of which no backward is
    open.
    """
    found = [param for param in params if id(leaf_of(param)) in shared]
    if not found:
        return []
    hooks = [watch.hooks for watch in tuple(_watches) if watch.is_announced and watch.hooks is not None]
    return [param for param in found if any(one.is_on(leaf_of(param)) for one in hooks)]


def _run_backward(roots: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a backward, and tell the watches what it raises: a callback that is freed does not know it."""
    began = next(_numbers)
    try:
        return engine_run_backward(roots, *args, **kwargs)
    except BaseException as error:
        accumulates = bool(kwargs.get("accumulate_grad")) and not backward_runs()

        def reached(of: ReadyHooks | None, params: Sequence[Tensor], *, alone: bool) -> bool:
            leaves = _leaves_of(roots) if accumulates else set()
            if leaves.isdisjoint(map(id, map(leaf_of, params))):
                return False
            if not alone:
                return True
            having = [hooks for hooks in tuple(_all_hooks) if hooks.any_on(leaves)]
            # Of wrappers that share all that was reached, those that have not opened wait for a backward of their own.
            opened, own = {watch.hooks for watch in tuple(_watches) if watch._opened > began}, leaves - shared
            return ([hooks for hooks in having if hooks in opened or hooks.any_on(own)] or having) == [of]

        for watch in tuple(_watches):
            watch.raised(error, began, reached)
        raise


def _leaves_of(roots: Sequence[Tensor]) -> set[int]:
    """Return the ids of the leaves into which a backward of these tensors accumulates, as far as its graph shows."""
    nodes = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
    seen, leaves = set(nodes), set()
    while nodes:
        node: Any = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        nodes += new
    return leaves


def _reaches_leaves(node: Any) -> bool:
    """Whether the running graph task accumulates into leaves, as `backward()` does and `autograd.grad()` does not."""
    while node is not None and node.next_functions:
        node = next((child for child, _ in node.next_functions if child is not None), None)
    if node is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # The engine refuses to answer for a leaf whose gradient autograd.grad() was asked for.
        return False
