"""Watches a program on the pretended device for races: what each operation reads and writes, and at which line.

`races.cpp` keeps the clocks. It knows the ranges of copies, collectives and memory by itself. This module adds those of
torch's operations, from their tensors, and those of the kernels of dpfuse, from the parameters of each launch.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpfuse.engine import late_reading
from tests.pretended_gpu.device import LIBRARY
from tests.pretended_gpu.footprints import footprint
from tests.pretended_gpu.values import COLLECTIVES, calculation_of, compute_kernels, over

__all__ = ["compared", "findings", "silence", "snapshot", "watched"]

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / folder}/" for folder in ("dpfuse", "kernels"))
THROUGH = tuple(str(ROOT / path) for path in ("kernels", "dpfuse/comm/collective.py"))  # the caller says more
INSTRUMENT = ("watch.py", "values.py")
TORCH = (str(Path(torch.__file__).parent), *(str(Path(__file__).with_name(name)) for name in INSTRUMENT))
MANY = 256  # pieces of a tensor with gaps; one with more counts as a whole
# These describe memory, or a collective whose ranges NCCL knows.
LEFT_ALONE = (
    *COLLECTIVES,
    "aten::set_",
    "aten::resize_",
    "aten::record_stream",
    "aten::detach",
    "aten::alias",
)
EMPTY = ("aten::empty", "aten::new_empty")
SIZED_BY_VALUES = ("aten::nonzero", "aten::masked_select")  # the host waits for the size, which no kernel here computes


@cache
def _device() -> Any:
    device = ctypes.CDLL(os.environ[LIBRARY])
    device.pretended_findings.restype = ctypes.c_char_p
    device.pretended_compared.restype = ctypes.c_long
    ranges = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    device.pretended_entry.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, *ranges]
    device.pretended_host.argtypes = [ctypes.c_char_p, ctypes.c_int, *ranges]
    device.pretended_is_captured.argtypes = [ctypes.c_void_p]
    device.pretended_keep.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return device


def findings() -> list[str]:
    """Return the races and hangs that were found so far, and forget them."""
    found: list[str] = _device().pretended_findings().decode().splitlines()
    _device().pretended_forget_findings()
    return found


def compared() -> int:
    """Return how many pairs of accesses were compared so far."""
    return int(_device().pretended_compared())


@contextmanager
def silence() -> Iterator[None]:
    """Do something of the instrument itself: it is no access and no wait."""
    _device().pretended_silent(1)
    try:
        yield
    finally:
        _device().pretended_silent(-1)


def _captured() -> bool:
    """Whether the current stream is being captured."""
    return bool(_device().pretended_is_captured(_stream()))


def snapshot(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU of what a tensor holds, for which the host waits for nothing."""
    return over(tensor.detach()).clone() if tensor.is_cuda else tensor.detach().clone()


def _stream() -> int:
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


# --- Which line of the program it is ---

_lines: dict[tuple[Any, int], int] = {}


def _site() -> int:
    """Return the number of the line of dpfuse that is running, or else of the program, or else of autograd."""
    frame = sys._getframe(1)
    first = through = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(THROUGH):
            through = through or frame
        elif name.startswith(OURS):
            return _line(frame)
        if first is None and not name.startswith(TORCH) and name[0] == "/":
            first = frame
        frame = frame.f_back  # type: ignore[assignment]
    if through is not None:
        return _line(through)
    node = torch._C._current_autograd_node()
    if node is not None:
        return _text(f"backward of {node.name()}")
    return _line(first) if first is not None else _text("")


def _line(frame: Any) -> int:
    key = frame.f_code, frame.f_lineno
    if key not in _lines:
        path = Path(frame.f_code.co_filename)
        path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        _lines[key] = _text(f"{path}:{frame.f_lineno} in {frame.f_code.co_name}")
    return _lines[key]


@cache
def _text(text: str) -> int:
    return int(_device().pretended_text(text.encode()))


# --- Which bytes an operation of torch uses ---


def _ranges(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the address and the length of each piece of the memory of a tensor."""
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta:
        return []
    size, start = tensor.element_size(), tensor.data_ptr()
    both = zip(tensor.stride(), tensor.shape, strict=True)
    dimensions = sorted((step, count) for step, count in both if count > 1 and step)
    dense = 1
    while dimensions and dimensions[0][0] == dense:
        dense *= dimensions.pop(0)[1]
    pieces = 1
    for _, count in dimensions:
        pieces *= count
    if pieces > MANY:
        last = sum(step * (count - 1) for step, count in dimensions)
        return [(start, (last + dense) * size)]
    places = product(*[range(0, step * count, step) for step, count in dimensions])
    return [(start + sum(place) * size, dense * size) for place in places]


def _tell(tell: Callable[..., None], reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
    both = [*reads, *writes]
    if not both:
        return
    count = len(both)
    words = ctypes.c_size_t * count
    tell(
        count,
        words(*[at for at, _ in both]),
        words(*[length for _, length in both]),
        (ctypes.c_int * count)(*[int(place >= len(reads)) for place in range(count)]),
    )


_kept: dict[int, Callable[[], Any]] = {}  # calculations of captured operations, by number


def _run(calculate: Callable[[], Any]) -> None:
    """Run a calculation of the instrument, or keep it for each replay of the graph."""
    if _captured():
        number = len(_kept)
        mode = torch.is_inference_mode_enabled()

        def again() -> None:
            with torch.inference_mode(mode), torch.no_grad():
                calculate()

        _kept[number] = again
        _device().pretended_keep(_stream(), number)
        return
    with silence():
        calculate()


class Watch(TorchDispatchMode):
    """Notes what each operation reads and writes, and computes its values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types if kind not in (Tensor, torch.nn.Parameter)):
            return NotImplemented  # a tensor that is made of others: those come next
        device = _device()
        if device.pretended_is_silent():
            result = func(*args, **kwargs)
            if (calculate := calculation_of(func, args, kwargs, result)) is not None:
                calculate()
            return result
        site, name = _site(), func._schema.name
        before = device.pretended_begin(site)
        try:
            result = _sized_by_values(func, args) if name in SIZED_BY_VALUES else func(*args, **kwargs)
        finally:
            launched = device.pretended_end(before)
        if name.startswith(LEFT_ALONE) or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, result))):
            return result
        self._note(func, name, args, kwargs, result, site, launched)
        if name.startswith(EMPTY):
            _fill(result)
        elif (calculate := calculation_of(func, args, kwargs, result)) is not None:
            _run(calculate)
        return result

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, site: int, launched: bool) -> None:
        reads, writes, memory = [], [], set()
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        for argument, value in given:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            memory |= {tensor.untyped_storage()._cdata for tensor in tensors}
            if argument.alias_info is None:
                reads += tensors
            elif argument.alias_info.is_write:
                writes += tensors
        if not name.startswith(EMPTY):
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            writes += [one for one in made if one.untyped_storage()._cdata not in memory]
        on_device = any(one.is_cuda for one in [*reads, *writes])
        if on_device and (launched or name in SIZED_BY_VALUES):
            entry = _device().pretended_entry
            self._tell(lambda *ranges: entry(_stream(), 1, name.encode(), site, *ranges), reads, writes, cuda=True)
        elif not on_device and (writes or func._schema.returns) and not _is_view(func):
            host = _device().pretended_host
            self._tell(lambda *ranges: host(name.encode(), site, *ranges), reads, writes, cuda=False)

    def _tell(self, tell: Callable[..., None], reads: list[Tensor], writes: list[Tensor], *, cuda: bool) -> None:
        _tell(
            tell,
            [one for tensor in reads if tensor.is_cuda is cuda for one in _ranges(tensor)],
            [one for tensor in writes if tensor.is_cuda is cuda for one in _ranges(tensor)],
        )


def _sized_by_values(func: Any, args: Any) -> Tensor:
    if not args[0].is_cuda:
        return func(*args)  # type: ignore[no-any-return]
    values = func(*[over(each) for each in args])
    torch.cuda.current_stream().synchronize()
    return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=args[0].device)


@cache
def _is_view(func: Any) -> bool:
    """Whether an operation returns other views of what it is given, and reads nothing."""
    returned = func._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def _fill(result: Any) -> None:
    """Fill new memory with NaN: whatever reads it before it is written reads that."""
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor) and not _captured():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.device.type != "meta":
                ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


# --- Which bytes a kernel of dpfuse uses ---

_compiled: dict[int, Any] = {}  # by the handle of the function


def _learn_kernels() -> None:
    from triton.compiler.compiler import CompiledKernel

    load = CompiledKernel._init_handles

    def load_and_learn(compiled: Any) -> None:
        load(compiled)
        if isinstance(compiled.function, int):
            _compiled[compiled.function] = compiled

    CompiledKernel._init_handles = load_and_learn


WIDTHS = {"fp32": ctypes.c_float, "fp64": ctypes.c_double, "i32": ctypes.c_int32, "i1": ctypes.c_bool}


def _arguments(compiled: Any, parameters: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name of a kernel, its compile-time constants, and the arguments of this launch, by name."""
    source = compiled.src
    names = source.fn.arg_names
    constants = {names[key[0]]: value for key, value in source.constants.items()}
    given = [name for name in names if source.signature[name] != "constexpr"]
    values = {
        name: WIDTHS.get(source.signature[name], ctypes.c_int64).from_address(parameters[place]).value
        for place, name in enumerate(given)
    }
    values |= {name: constants[name] for name in names if name not in values and isinstance(constants[name], int)}
    return source.fn.__name__, constants, values


def _launched(function: int, parameters: Any, programs: int, stream: int | None) -> None:
    try:
        name, constants, values = _arguments(_compiled[function], parameters)
        reads, writes = footprint(name, constants, values, programs)
        entry, site = _device().pretended_entry, _site()
        if _captured():
            _keep_tables(name, {values[each] for each in TABLES if each in values}, reads)
        _tell(lambda *ranges: entry(stream, 0, name.encode(), site, *ranges), reads, writes)
    except Exception as error:  # a callback of C has nowhere to raise
        _device().pretended_finding(f"not followed: a launch of a kernel: {type(error).__name__}: {error}".encode())


TABLES = ("address_ptr", "chunk_ptr", "row_ptr")


def _keep_tables(name: str, tables: set[int], reads: list[tuple[int, int]]) -> None:
    """Note what the tables of a captured launch hold: each replay reads them again, and must find that."""
    for at, length in reads:
        if at in tables:
            _run(partial(_compare_table, name, at, ctypes.string_at(at, length)))


def _compare_table(name: str, at: int, held: bytes) -> None:
    if ctypes.string_at(at, len(held)) != held:
        _device().pretended_finding(f"changed: a table that a captured {name} reads at each replay".encode())


# --- What the host reads beside torch's operations ---


class _Bytes:
    """The memory of a report's pairs; each look at it is noted."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    @property
    def raw(self) -> bytes:
        _host_reads("a look at the report", ctypes.addressof(self._memory), ctypes.sizeof(self._memory))
        return bytes(self._memory.raw)


def _host_reads(what: str, address: int, length: int) -> None:
    host, site = _device().pretended_host, _site()
    _tell(lambda *ranges: host(what.encode(), site, *ranges), [(address, length)], [])


def _watch_the_host() -> None:
    make = late_reading.HostPairs.__init__

    def make_watched(pairs: Any, values: Tensor) -> None:
        make(pairs, values)
        pairs.memory = _Bytes(pairs.memory)

    late_reading.HostPairs.__init__ = make_watched  # type: ignore[method-assign]
    for name in ("tolist", "numpy", "__array__"):
        setattr(Tensor, name, _reading(getattr(Tensor, name), f"Tensor.{name}"))
    save = torch.save

    def save_and_note(found: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and not leaf.is_cuda]
        for address, length in (each for tensor in tensors for each in _ranges(tensor)):
            _host_reads("torch.save", address, length)
        return save(found, *args, **kwargs)

    torch.save = save_and_note


def _reading(read: Callable[..., Any], what: str) -> Callable[..., Any]:
    def read_and_note(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_cuda and type(tensor) is Tensor:
            for address, length in _ranges(tensor):
                _host_reads(what, address, length)
        return read(tensor, *args, **kwargs)

    return read_and_note


def _seen_by_dpfuse(depth: Callable[[], int]) -> Callable[[], int]:
    def without_this_mode() -> int:
        """dpfuse starts collectives another way where a mode watches. This one must not change what it watches."""
        found = depth()
        is_ours = sys._getframe(1).f_code.co_filename.startswith(OURS)
        return found - 1 if found and is_ours else found

    return without_this_mode


_callbacks: list[Any] = []


@cache
def _install() -> None:
    """Let the device ask this module, once in a process."""
    device = _device()
    ask = ctypes.CFUNCTYPE(ctypes.c_int)(_site)
    run = ctypes.CFUNCTYPE(None, ctypes.c_long)(lambda number: _kept[number]())
    kinds = ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint, ctypes.c_void_p
    launch = ctypes.CFUNCTYPE(None, *kinds)(_launched)
    _callbacks.extend([ask, run, launch])
    _learn_kernels()
    _watch_the_host()
    compute_kernels(_run)
    torch._C._len_torch_dispatch_stack = _seen_by_dpfuse(torch._C._len_torch_dispatch_stack)
    device.pretended_ask(ask, run)
    device.pretended_on_launch(launch)


@contextmanager
def watched() -> Iterator[None]:
    """Watch what this process does on the device inside the context."""
    _install()
    _device().pretended_watch(1)
    try:
        with Watch():
            yield
    finally:
        _device().pretended_watch(0)
