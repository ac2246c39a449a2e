"""Launches a kernel over a table's chunks. Triton is imported at the first launch, here and in `bound` only."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch

from dpfuse_kernels.address_ring import AddressRing, Entry
from dpfuse_kernels.bound_kernel import BoundKernel, bind
from dpfuse_kernels.launch_shape import LaunchShape, launch_shape
from dpfuse_kernels.layout import Layout

__all__ = ["Dispatcher", "Launcher", "Repeatable", "dispatch", "jit", "launch_flat", "shared_dispatcher"]

# The first arguments of every kernel over a table, with their types. Further addresses (i64) and compile-time arguments
# follow.
ARGUMENTS = {
    "flat_address": "i64",
    "address_ptr": "*i64",
    "chunk_ptr": "*i64",
    "scale_bits": "i64",
    "first_program": "i64",
}


@cache
def jit(kernel: Callable[..., None]) -> Any:
    """Return `kernel` as a Triton function, so that its file needs no triton before the first launch.

    The kernel refers to `tl`, which its own module does not import: this function sets `tl` there. It also replaces the
    functions with an underscore in front that the kernel calls. Integers are not specialised: otherwise Triton would
    compile again for each new value. Kernels loop with `while`, because the interpreter of Triton 3.6 cannot pass a
    number on the device to `range` with NumPy 2.4 or later. They make pointers of addresses by way of `tl.int64`,
    because an interpreter passes an address below 2 GiB as a number of 32 bits.
    """
    try:
        import triton
        import triton.language as tl
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Triton is not installed, and its kernels pack the buckets of tensors on a GPU. Run pip install "
            "'dpfuse[triton]', or set DPFUSE_KERNELS=reference to use torch's own operations."
        ) from error

    scope = kernel.__globals__
    scope["tl"] = tl
    for name in kernel.__code__.co_names:
        # Kernels share code in functions that they call. These need the same treatment.
        shared = getattr(scope.get(name), "fn", scope.get(name))
        if isinstance(shared, FunctionType) and name.startswith("_"):
            scope[name] = jit(shared)
    return triton.jit(kernel, do_not_specialize=[n for n, kind in kernel.__annotations__.items() if kind == "tl.int64"])


def dispatch(
    kernel: Callable[..., None],
    device: torch.device,
    programs: int,
    arguments: Sequence[Any],
    constants: dict[str, Any],
    warps: int,
) -> Any:
    """Launch `kernel` through Triton on the current stream of `device`, which must be the current device.

    Returns:
        The compiled kernel; None in Triton's interpreter.

    Raises:
        ValueError: The device is the CPU, and Triton's interpreter is off.
    """
    compiled = jit(kernel)
    if device.type == "cpu" and not interpreting(compiled):
        raise ValueError(
            "Triton got a flat buffer on the CPU, expected one on a GPU. Unset DPFUSE_KERNELS, or set "
            "TRITON_INTERPRET=1 to run Triton's interpreter."
        )
    # The product must be rounded before the addition: no fused multiply-add.
    return compiled[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return the type of `triton.language` with the same name."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def chunk_rows(table: Layout, chunk: int) -> torch.Tensor:
    """Return for each program: tensor index, first element in the tensor, number of elements, offset in flat.

    A program has at most `chunk` elements. The result is [programs, 4] int64, on the CPU.

    Example:
        >>> from dpfuse_kernels import Slot
        >>> slots = [Slot("a", 0, (3,), (1,)), Slot("b", 4, (2,), (1,))]
        >>> chunk_rows(Layout(torch.zeros(6), slots, torch.float32), 2).tolist()
        [[0, 0, 2, 0], [0, 2, 1, 2], [1, 0, 2, 4]]
    """
    numels = torch.tensor(table.numels, dtype=torch.int64, device="cpu")
    offsets = torch.tensor([slot.offset for slot in table.slots], dtype=torch.int64, device="cpu")
    counts = (numels + chunk - 1) // chunk
    index = torch.repeat_interleave(counts)
    start = (torch.arange(index.numel(), device="cpu") - (counts.cumsum(0) - counts)[index]) * chunk
    length = (numels[index] - start).clamp(max=chunk)
    return torch.stack((index, start, length, offsets[index] + start), dim=1).contiguous()


class Dispatcher:
    """Launches kernels on one device. Triton's dispatcher is skipped from the second launch of the same kind on.

    Attributes:
        launches: number of kernels launched.
        bound_launches: number of those that were launched without Triton's dispatcher.
        binds: whether Triton's dispatcher may be skipped; off to compare.
    """

    def __init__(self, device: torch.device) -> None:
        self.binds = True
        self.launches = 0
        self.bound_launches = 0
        self._device = device
        self._index = device.index or 0
        self._on_cuda = device.type == "cuda"
        self._bound: dict[Any, BoundKernel | None] = {}  # None: this version of Triton launches in an unknown way

    def launch(
        self,
        key: tuple[Any, ...],
        programs: int,
        arguments: tuple[float, ...],
        pointers: dict[int, torch.Tensor],
        constants: Callable[[], dict[str, Any]],
        warps: int,
    ) -> None:
        """Launch a kernel on the current stream of the device.

        Args:
            key: the kernel, and all that its compile-time arguments depend on.
            programs: how many.
            arguments: what may differ from launch to launch: numbers, and addresses of tensors in bytes. A Python float
                becomes a float32 of the kernel, anything else an int64.
            pointers: the tensors among them that the kernel takes as pointers to int64, by place.
            constants: returns the compile-time arguments, in the order of the kernel's.
            warps: of each program.
        """
        if self._on_cuda and torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._device):  # only here: a context costs as much as the launch
                self.launch(key, programs, arguments, pointers, constants, warps)
            return
        bound = self._bound.get(key)
        if bound is not None:
            try:
                if bound.launch(programs, self._index, arguments):
                    self.launches += 1
                    self.bound_launches += 1
                    return
            except (TypeError, AttributeError):
                # This Triton expects another call. It reads the arguments first, so nothing was launched.
                self._bound[key] = None
        values = [pointers.get(place, value) for place, value in enumerate(arguments)]
        named = constants()
        done = dispatch(key[0], self._device, programs, values, named, warps)
        if self.binds and key not in self._bound:
            types = tuple(
                "*i64" if place in pointers else "fp32" if isinstance(value, float) else "i64"
                for place, value in enumerate(arguments)
            )
            self._bound[key] = bind(done, types, tuple(named.values()))
        self.launches += 1

    def repeatable(
        self, key: tuple[Any, ...], programs: int, arguments: tuple[float, ...], copied: Entry | None
    ) -> Repeatable | None:
        """Return the launch that was just made with these arguments, if it can be repeated.

        `copied` has the addresses that the kernel read.
        """
        bound = self._bound.get(key)
        whole = None if bound is None else bound.whole(arguments)
        if bound is None or whole is None or copied is None or copied.addresses is None:
            return None
        return Repeatable(key, bound, programs, whole, copied, copied.addresses, bound.stream_of(self._index))

    def repeat(self, call: Repeatable) -> bool:
        """Launch again, and return whether that was possible. It is not on another stream, or while one is captured.

        Each step of a settled model comes here for each bucket. So all is compared in one function.
        """
        bound, index = call.bound, self._index
        # Another stream may not be ordered after the upload of the addresses.
        if bound.stream_of(index) != call.stream:
            return False
        # A capture must note which copies its graph reads.
        if self._on_cuda and (torch._C._cuda_getDevice() != index or torch._C._cuda_isCurrentStreamCapturing()):
            return False
        if not call.copied.read_again(call.addresses):
            return False
        try:
            if not bound.launch_whole(call.programs, call.stream, call.arguments):
                return False
        except (TypeError, AttributeError):  # as in `launch`
            self._bound[call.key] = None
            return False
        self.launches += 1
        self.bound_launches += 1
        return True


class Repeatable(NamedTuple):
    """A launch that can be made again with nothing to look up."""

    key: tuple[Any, ...]
    bound: BoundKernel
    programs: int
    arguments: tuple[Any, ...]  # all of them, as `BoundKernel.whole` returns them
    copied: Entry  # the copy on the device of the addresses that the kernel reads
    addresses: list[int]  # these addresses
    stream: int  # the handle of the stream of the launch, which is ordered after the upload of that copy


@cache
def shared_dispatcher(device: torch.device) -> Dispatcher:
    """Return the dispatcher of all kernels that are launched without a table, for one device."""
    return Dispatcher(device)


def launch_flat(
    kernel: Callable[..., None],
    flat: torch.Tensor,
    elements: int,
    arguments: tuple[float, ...],
    shape: LaunchShape,
    **options: torch.dtype | bool,
) -> None:
    """Launch a kernel on flat tensors, without a table, on the current stream of their device.

    Args:
        kernel: takes these arguments, the compile-time arguments `options` in their order, and CHUNK.
        flat: one of the tensors.
        elements: over all programs; without any, nothing is launched.
        arguments: as those of `Dispatcher.launch`; none is a pointer.
        shape: of the programs.
        options: numbers, and dtypes, which the kernel gets as types of Triton.
    """
    if not elements:
        return

    def constants() -> dict[str, Any]:
        kinds = {name: triton_dtype(one) if isinstance(one, torch.dtype) else one for name, one in options.items()}
        return {**kinds, "CHUNK": shape.chunk}

    key = (kernel, *options.values())
    shared_dispatcher(flat.device).launch(key, -(-elements // shape.chunk), arguments, {}, constants, shape.warps)


class Launcher:
    """Launches kernels over one table. Holds the table's chunks and the last tensors' addresses on the device.

    Args:
        table: the layout.
        shape: of the programs; by default that of `launch_shape`.

    Attributes:
        ring: the device copies of address lists; `ring.uploads` counts the host-to-device copies.
        dispatcher: launches them, and counts in `dispatcher.launches`.
        repeatable: by kernel, the scale and its last launch over all chunks without extras and options, if it can be
            made again.

    Raises:
        ValueError: A CUDA graph is being captured.
    """

    def __init__(self, table: Layout, shape: LaunchShape | None = None) -> None:
        device = table.flat.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "This table launches its first kernel while a CUDA graph is being captured, expected an earlier "
                "launch: its tables must reach the GPU first. Run a step before the capture."
            )
        self.shape = shape or launch_shape(sum(table.numels) / max(1, len(table.slots)))
        self.dispatcher = Dispatcher(device)
        self._flat_address = table.address
        self._dtypes = (table.dtype, table.flat.dtype, table.compute_dtype)
        self._rows = chunk_rows(table, self.shape.chunk).to(device)
        self._programs = range(len(self._rows))
        self._scale, self._scale_bits = 1.0, double_bits(1.0)
        self.ring = AddressRing(len(table.slots), device)
        self.repeatable: dict[Any, tuple[float, Repeatable] | None] = {}

    @property
    def programs(self) -> int:
        """Number of programs in a launch over all chunks."""
        return len(self._programs)

    def launch(
        self,
        kernel: Callable[..., None],
        addresses: list[int],
        *,
        scale: float = 1.0,
        extras: Sequence[torch.Tensor | None] = (),
        programs: range | None = None,
        **options: bool,
    ) -> None:
        """Launch `kernel` once, over all chunks or only over `programs` (for tests).

        Args:
            kernel: a kernel that takes ARGUMENTS, the addresses of `extras`, and compile-time arguments.
            addresses: one per slot, bytes; 0 means None. The list must not change later.
            scale: the factor, in double precision.
            extras: further tensors that the kernel reads or writes, on the same device and in the order of the kernel's
                arguments. None becomes the address 0.
            options: further compile-time arguments, in the order of the kernel's.

        Raises:
            ValueError: `flat` is on the CPU and Triton's interpreter is off, or `AddressRing.device_copy` raised.
        """
        programs = self._programs if programs is None else programs
        if not programs:
            return
        if scale is not self._scale:  # nearly every launch has the scale of the one before
            self._scale, self._scale_bits = scale, double_bits(scale)
        scaled = scale != 1.0
        copy = self.ring.device_copy(addresses)
        arguments = (
            self._flat_address,
            copy.data_ptr(),
            self._rows.data_ptr(),
            self._scale_bits,
            programs.start,
            *[0 if extra is None else extra.data_ptr() for extra in extras],
        )

        def constants() -> dict[str, Any]:
            tensor_type, wire_type, compute_type = map(triton_dtype, self._dtypes)
            types = {"TENSOR": tensor_type, "WIRE": wire_type, "COMPUTE": compute_type}
            return {**types, "SCALED": scaled, **options, "CHUNK": self.shape.chunk}

        key = (kernel, scaled, *options.values())  # the names of the options depend on the kernel alone
        pointers = {1: copy, 2: self._rows}
        self.dispatcher.launch(key, len(programs), arguments, pointers, constants, self.shape.warps)
        if programs is self._programs and not any((*arguments[len(ARGUMENTS) :], *options.values())):
            call = self.dispatcher.repeatable(key, len(programs), arguments, self.ring.latest)
            self.repeatable[kernel] = None if call is None else (scale, call)


def interpreting(compiled: Any) -> bool:
    """Whether `compiled` runs in Triton's interpreter."""
    return type(compiled).__name__ == "InterpretedFunction"


def double_bits(value: float) -> int:
    """Return the 64 bits of a double as a signed integer: Triton would narrow a float argument to 32 bits.

    Example:
        >>> hex(double_bits(1.0))
        '0x3ff0000000000000'
    """
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
