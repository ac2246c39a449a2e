"""The private parts of torch in use: Dynamo's switches, reference counts, hooks, the profiler, loaders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
import torch.utils.data.dataloader
from torch import Tensor
from torch.autograd import _profiler_enabled as profiler_runs  # type: ignore[attr-defined]
from torch.distributed.utils import _to_kwargs
from torch.utils.data._utils.signal_handling import _remove_worker_pids  # type: ignore[attr-defined]

__all__ = [
    "COUNTS_REFERENCES",
    "LOADER_ITERATOR",
    "LOADER_WITH_WORKERS",
    "NOTHING",
    "STEP",
    "UNSHARED",
    "EndOfCompiledBackward",
    "Hooks",
    "OnStream",
    "are_private",
    "call_last",
    "compiled_backward",
    "default_store",
    "dtensor_of",
    "ended_early",
    "engine_run_backward",
    "holders_at",
    "holders_of",
    "hook_tables",
    "inside_compiled",
    "is_private",
    "leave_untraced",
    "local_tensor_of",
    "names_of",
    "no_graph",
    "on_device",
    "owners_and_holders",
    "owners_of",
    "profiler_runs",
    "put_before_engine",
    "put_hooks",
    "ranged",
    "ranged_without_graph",
    "ranks_of_root",
    "set_tracer",
    "swap_contents",
    "uncompiled",
    "unwatch_workers",
]


def ended_early(error: BaseException) -> bool:
    """Whether a checkpoint has ended a forward that it computes again, as soon as it had what it needs."""
    return type(error).__name__ == "_StopRecomputationError"


def _nothing(_tracer: Any) -> None:
    """Stands for `set_tracer` where torch does not have it. Dynamo then traces our code as any other."""


try:
    # Private, but torch._dynamo itself has used it since 2.7.
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
    from torch._C._dynamo.eval_frame import set_eval_frame as set_tracer
except ImportError:
    set_tracer = _nothing  # type: ignore[assignment]
    set_code_exec_strategy = None  # type: ignore[assignment]


def leave_untraced(function: Callable[..., Any], *, calls: bool = False, reason: str | None = None) -> None:
    """Make Dynamo run `function` as it is: `torch._dynamo.disable`.

    Args:
        function: a plain function; it is marked in place.
        calls: whether the functions that it calls are left untraced, too.
        reason: for the error where Dynamo must not leave anything out (`fullgraph=True`).
    """
    if set_code_exec_strategy is None:
        return
    run = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP if calls else _FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, run)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def compiled_backward() -> Any:
    """Return compiled autograd's object for the running backward; None if there is none, or none that we know."""
    frame = sys._getframe(1)
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if module == "torch._dynamo.compiled_autograd" and code.co_name == "runtime_wrapper":
            return frame.f_locals.get("self") if "nan_checker" in code.co_names else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


class EndOfCompiledBackward:
    """Is called once at the end of the running backward, instead of compiled autograd's check for NaN.

    Compiled autograd calls no callback that was queued in the engine. It calls those queued in traced code only if
    nothing is left out of the graph. So the check after the graph, which belongs to anomaly mode, is the only place
    left. If anomaly mode has made a check, this object calls it.

    Args:
        backward: what `compiled_backward()` returned.
        call: called with whether gradients were accumulated into leaves, unless the backward raises.
    """

    def __init__(self, backward: Any, call: Callable[[bool], None]) -> None:
        self._backward = backward
        self._check = backward.nan_checker
        self._call = call
        backward.nan_checker = self

    def prep_with_inputs(self, inputs: Any) -> None:
        """Stop listening. The same graph runs again, since the backward before had died."""
        self._leave()
        if self._check is not None:
            self._check.prep_with_inputs(inputs)

    def check(self, outputs: Any) -> None:
        """Call back after the graph has run. `outputs` is what `autograd.grad` returns; empty for `backward()`."""
        self._leave()
        if self._check is not None:
            self._check.check(outputs)
        self._call(not outputs)

    leave_untraced(check, calls=True)

    def _leave(self) -> None:
        self._backward.nan_checker = self._check


engine_run_backward: Any = torch.autograd.graph._engine_run_backward  # what each backward of Python goes through


def put_before_engine(function: Callable[..., Any]) -> None:
    """Have `backward()` and `autograd.grad()` call this function, which calls `engine_run_backward`."""
    torch.autograd.graph._engine_run_backward = function  # torch itself puts another one there, and this one back
    torch.autograd._engine_run_backward = function  # type: ignore[attr-defined]


def put_hooks(tensor: Any, hooks: Mapping[int, Callable[[Tensor], None]]) -> None:
    """Call all with the gradient of `tensor`, which is no leaf: `register_hook` that leaves no trace on the tensor.

    A handle takes 2 to 4 us of each forward, most of them for weak references. A table of hooks that stays on the
    tensor makes torch warn when the tensor is saved. After a change in place, torch would also put a user's hook into
    that table, which belongs to the values before the change. So only the node of the graph keeps the table.
    """
    if type(tensor) is not Tensor and torch._C._is_torch_function_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            put_hooks(tensor, hooks)
        return
    node, before = tensor.grad_fn, tensor._backward_hooks
    tensor._backward_hooks = hooks  # from where the node takes it
    node._register_hook_dict(tensor)
    tensor._backward_hooks = before


# Where torch keeps the hooks of a leaf: those that it calls with the gradient, and those once `.grad` has it.
HOOK_TABLES = "_backward_hooks", "_post_accumulate_grad_hooks"


def hook_tables(leaf: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks of a leaf by key, in the order of their calls: with the gradient, and once `.grad` has it.

    They are torch's own dictionaries. Where torch has none under these names, they are empty.
    """
    with_gradient, accumulated = (getattr(leaf, name, None) for name in HOOK_TABLES)
    return with_gradient or {}, accumulated or {}


def call_last(hooks: dict[int, Any], keys: Iterable[int]) -> None:
    """Let these hooks of a table be called after the others, in this order.

    Torch reads the plain dictionary inside of an OrderedDict, whose order `move_to_end` does not change.
    """
    for key in keys:
        hooks[key] = hooks.pop(key)


class Hooks:
    """The post-accumulate hooks of some parameters, including ours.

    Args:
        params: the parameters. Hooks may be added to them and removed at any time.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._tables: list[Any] | None = None  # torch's own dictionaries, which show every later change

    def _look(self) -> list[Any]:
        if self._tables is not None:
            return self._tables
        tables = [param._post_accumulate_grad_hooks for param in self._params]
        if all(table is not None for table in tables):
            self._tables = tables
        return [table or () for table in tables]

    @property
    def are_ours(self) -> bool:
        """Whether no parameter has a hook besides ours, which would still have to read the gradient."""
        tables = self._tables or self._look()
        return sum(map(len, tables)) <= len(tables)

    def is_ours(self, place: int) -> bool:
        """Whether the parameter at `place` in the list has no hook besides ours."""
        return len(self._look()[place]) <= 1


# The code around the step of each optimizer, which calls the hooks before and after it.
STEP = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step).__code__

NOTHING = nullcontext()  # one for all uses: making a context costs more than entering it


def ranged(name: str, label: str) -> AbstractContextManager[object]:
    """Return a context: a range of that name in the profile, if a profiler is running."""
    if profiler_runs():
        return torch.profiler.record_function(f"{name} ({label})")
    return NOTHING


def no_graph() -> AbstractContextManager[object]:
    """Return a context without autograd: gradients with a graph (create_graph=True) are packed by value."""
    return torch.no_grad() if torch.is_grad_enabled() else NOTHING


@contextmanager
def ranged_without_graph(name: str, label: str) -> Iterator[None]:
    """Return both contexts in one."""
    with ranged(name, label), no_graph():
        yield


class OnStream:
    """A context in which a CUDA stream is the current one: `torch.cuda.stream`, to be entered again and again.

    Torch's own makes three objects for streams and asks for the current device several times: 20 us instead of one.
    It cannot be entered inside itself.

    Args:
        stream: on any device.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream.stream_id, stream.device_index, stream.device_type
        self._index = stream.device_index
        self._device = -1  # that was the current one
        self._before: Any = ()  # the stream that was the current one of this device

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(self._index)
        self._set(*self._stream)

    def __exit__(self, *error: object) -> None:
        self._set(*self._before)
        if self._device != self._index:
            torch._C._cuda_setDevice(self._device)

    @staticmethod
    def _set(stream_id: int, device_index: int, device_type: int) -> None:
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


# Counts the tensors that use the memory of which this is the `_cdata`, and its Python object as one.
holders_at: Callable[[int], int] = torch._C._storage_Use_Count


def holders_of(storage: torch.UntypedStorage) -> int:
    """Count the tensors that use this memory, and its Python object as one."""
    return holders_at(storage._cdata)


def owners_and_holders(tensors: Sequence[Tensor], storages: Sequence[int]) -> tuple[list[int], list[int]]:
    """Count the owners of each tensor in C++, and what uses its memory. Names in Python count as one owner.

    Args:
        tensors: dense.
        storages: `_cdata` of the memory of each, which must be kept alive.
    """
    return owners_of(tensors), list(map(holders_at, storages))


def owners_of(tensors: Sequence[Tensor]) -> list[int]:
    """Count the owners of each tensor in C++. Names in Python count as one owner."""
    return list(map(_owners, tensors))


def names_of(tensors: Sequence[Tensor]) -> list[int]:
    """Count the references in Python to each tensor, besides the one in `tensors`; none where only C++ has it."""
    *counts, one = map(getrefcount, [*tensors, object()])
    # What has an owner in C++ besides the object in Python refers to that object.
    owners = owners_of(tensors)
    return [count - one - 1 - (each > UNSHARED[0]) for count, each in zip(counts, owners, strict=True)]


def swap_contents(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Exchange what tensors in Python stand for with `others`: all, or none and return False.

    All names in Python are those of the same objects after it. What C++ has, such as a graph, it has of the others.
    """
    done: list[tuple[Tensor, Tensor]] = []
    try:
        for pair in zip(tensors, others, strict=True):
            torch._C._swap_tensor_impl(*pair)
            done.append(pair)
    except RuntimeError:  # C++ has a weak reference
        for pair in done:
            torch._C._swap_tensor_impl(*pair)
        return False
    return True


def is_private(grad: Tensor, storage: torch.UntypedStorage | None = None) -> bool:
    """Whether only one parameter refers to `grad` and its memory: no graph, no view, no gradient still on its way.

    A thread of the process group may have both a moment longer than an all-reduce takes. A caller that has the storage
    at hand passes it, since making its Python object takes as long as the rest.
    """
    if _REFERENCES is None or grad.requires_grad:
        return False
    return _references(grad, grad.untyped_storage() if storage is None else storage) == _REFERENCES


def are_private(grads: Sequence[Tensor], storages: Sequence[torch.UntypedStorage] = ()) -> bool:
    """Whether `is_private` holds for each of these gradients, in a few passes in C; `storages` may be passed, too."""
    if _REFERENCES is None or any(map(_requires_grad, grads)):
        return False
    holders, owners = _REFERENCES
    storages = storages or list(map(Tensor.untyped_storage, grads))
    counts = set(map(holders_at, map(_cdata, storages)))
    return counts <= {holders} and set(map(_owners, grads)) <= {owners}


def _references(grad: Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """Count the tensors that use its memory, and the owners of `grad`: parameters, autograd, views that users keep."""
    owners: int = grad._use_count()  # type: ignore[attr-defined]
    return holders_of(storage), owners


def _references_of_one() -> tuple[int, int] | None:
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    try:
        return _references(param.grad, param.grad.untyped_storage())
    except AttributeError:  # this torch does not tell: other code may refer to every gradient, too
        return None


def _counts_unshared() -> tuple[int, int]:
    one = torch.zeros(1, device="cpu")
    storage = one.untyped_storage()
    owners, holders = owners_and_holders([one], [storage._cdata])
    return owners[0], holders[0]


# The class of what `iter(DataLoader)` returns; its `__next__` waits for a batch.
LOADER_ITERATOR: type | None = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)
# The class of those that have workers. It is made with the loader, and starts them.
LOADER_WITH_WORKERS: type | None = getattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter", None)


def unwatch_workers(iterator: Any) -> None:
    """Let torch raise no error where a worker of this iterator is killed. Torch calls this before it ends workers."""
    if iterator._worker_pids_set:
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


_requires_grad, _cdata = attrgetter("requires_grad"), attrgetter("_cdata")
# Where torch does not tell, every tensor may be shared.
_owners: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda _tensor: -1)
UNSHARED = _counts_unshared() if hasattr(Tensor, "_use_count") else (1, 2)  # of a tensor that only names refer to
_REFERENCES = _references_of_one()  # of a gradient that only its parameter has; versions of torch count differently
COUNTS_REFERENCES = _REFERENCES is not None


def inside_compiled(module: object) -> torch.nn.Module | None:
    """Return the module that torch.compile has put into this one; None of any other: `_orig_mod` is a name as others.

    To import the class takes seconds; torch.compile has done it.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return module._modules["_orig_mod"] if compiler and isinstance(module, compiler.OptimizedModule) else None


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside that of torch.compile, or the module itself."""
    while (inner := inside_compiled(module)) is not None:
        module = inner
    return module


def local_tensor_of(tensor: Any) -> Tensor:
    """Return what a DTensor holds on this rank, itself: `to_local()` returns a view of it."""
    local: Tensor = tensor._local_tensor
    return local


def dtensor_of(local: Tensor, like: Any) -> Any:
    """Return a DTensor that holds `local` itself, with the mesh, placements, shape and strides of the DTensor `like`.

    `DTensor.from_local` would hold a view, which is another tensor.
    """
    spec = like._spec
    if local.dtype != like.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # A DTensor has the offset of its local tensor as its own address, and torch can copy none with an address.
    made = type(like)(local.as_strided(local.shape, local.stride(), 0), spec, requires_grad=False)
    made._local_tensor = local
    return made


def ranks_of_root(mesh: Any) -> list[int]:
    """Return the ranks of the mesh that a DeviceMesh was sliced from, in its order; its own if it is no slice."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    ranks: list[int] = root.mesh.flatten().tolist()
    return ranks


def default_store() -> Any:
    """Return the store with which the processes of the job have met."""
    return torch.distributed.distributed_c10d._get_default_store()


def on_device(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return these arguments with all tensors on `device`, as torch's class does; what is there already stays."""
    if not (inputs or kwargs):
        return inputs, kwargs
    moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, False)
    return moved[0], moved_kwargs[0]
