"""The peers of dpfuse: other ways to pack tensors, and other ways to wrap a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import dpfuse
from dpfuse_kernels import PointerTable, Slot, flatten, unflatten

__all__ = ["BARE", "ORDERED", "PACKS", "SCALE", "UNPACKS", "PackSet", "Wrap", "wire_wrappers", "wrappers"]

SCALE = 1 / 3  # no power of two, so that the equality test covers rounding
ALIGNMENT = 16  # bytes

Wrap = Callable[[nn.Module], nn.Module]
BARE = "bare"


class PackSet:
    """Tensors to pack, and the buffer for all contenders.

    All contenders use the same memory, so that it is equally cold or hot in the cache. dpfuse uses the padded buffer,
    the others use its beginning without gaps.

    Args:
        shapes: of the tensors.
        device: of tensors and buffer.
        scale: of the packs that scale.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device, scale: float = SCALE) -> None:
        self.scale = scale
        self.sources = [torch.randn(shape, device=device) for shape in shapes]
        self.targets = [torch.empty_like(source) for source in self.sources]
        self.numels = [source.numel() for source in self.sources]
        step = ALIGNMENT // self.sources[0].element_size()
        slots, offset = [], 0
        for index, source in enumerate(self.sources):
            slots.append(Slot(str(index), offset, tuple(source.shape), source.stride()))
            offset += -(-source.numel() // step) * step
        self.table = PointerTable(torch.zeros(offset, device=device), slots, torch.float32)
        self.dense = self.table.flat[: sum(self.numels)]
        self.twin = torch.randn(sum(self.numels), device=device)
        self.pieces = self.split(self.dense)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; a copy moves twice as many."""
        return self.dense.numel() * self.dense.element_size()

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors in `flat`, which is the padded buffer or a buffer without gaps."""
        if flat is self.table.flat:
            return self.table.views
        return [piece.view_as(s) for piece, s in zip(flat.split(self.numels), self.sources, strict=True)]


def _dpfuse(data: PackSet) -> Tensor:
    flatten(data.sources, data.table, scale=data.scale)
    return data.table.flat


def _dpfuse_unscaled(data: PackSet) -> Tensor:
    flatten(data.sources, data.table)
    return data.table.flat


def _foreach(data: PackSet) -> Tensor:
    torch._foreach_copy_(data.pieces, data.sources)
    return data.dense


def _foreach_scaled(data: PackSet) -> Tensor:
    return _foreach(data).mul_(data.scale)


def _cat(data: PackSet) -> Tensor:
    return torch.cat([source.view(-1) for source in data.sources], out=data.dense)


def _cat_scaled(data: PackSet) -> Tensor:
    return _cat(data).mul_(data.scale)


def _flatten_dense(data: PackSet) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(data.sources)
    return flat


def _flatten_dense_scaled(data: PackSet) -> Tensor:
    return _flatten_dense(data).mul_(data.scale)


def _each_copy(data: PackSet) -> Tensor:
    for piece, source in zip(data.pieces, data.sources, strict=True):
        piece.copy_(source)
    return data.dense


def _each_mul(data: PackSet) -> Tensor:
    for piece, source in zip(data.pieces, data.sources, strict=True):
        torch.mul(source, data.scale, out=piece)
    return data.dense


# name -> (pack, whether it scales). DDP uses "n x mul(out=)" by default, and "_foreach_copy_ + mul_" with
# batched_grad_copy.
PACKS: dict[str, tuple[Callable[[PackSet], Tensor], bool]] = {
    "dpfuse": (_dpfuse, True),
    "_foreach_copy_ + mul_": (_foreach_scaled, True),
    "cat(out=) + mul_": (_cat_scaled, True),
    "_flatten_dense_tensors + mul_": (_flatten_dense_scaled, True),
    "n x mul(out=)": (_each_mul, True),
    "dpfuse unscaled": (_dpfuse_unscaled, False),
    "_foreach_copy_": (_foreach, False),
    "cat(out=)": (_cat, False),
    "_flatten_dense_tensors": (_flatten_dense, False),
    "n x copy_": (_each_copy, False),
}


def _dpfuse_unpack(data: PackSet) -> None:
    unflatten(data.table, data.targets)


def _foreach_unpack(data: PackSet) -> None:
    torch._foreach_copy_(data.targets, data.pieces)


def _each_unpack(data: PackSet) -> None:
    for piece, target in zip(data.pieces, data.targets, strict=True):
        target.copy_(piece)


# name -> (unpack, the pack that it needs)
UNPACKS: dict[str, tuple[Callable[[PackSet], None], Callable[[PackSet], Tensor]]] = {
    "dpfuse unflatten": (_dpfuse_unpack, _dpfuse_unscaled),
    "_foreach_copy_ back": (_foreach_unpack, _foreach),
    "n x copy_ back": (_each_unpack, _foreach),
}


def wrappers(comm_buffer_size: float | None = None, last_comm_buffer_size: float = 1) -> dict[str, Wrap]:
    """Return the bare module twice (their difference is noise), dpfuse's two classes, and every mode of this DDP.

    The default arguments of `DataParallel` make views, those of the drop-in `DistributedDataParallel` private
    gradients. Buffers are not broadcast: DDP would pay for it in every forward.

    Args:
        comm_buffer_size: of `DataParallel`, in MB; None is its default.
        last_comm_buffer_size: of `DataParallel`, in MB.
    """

    def views(module: nn.Module) -> nn.Module:
        return dpfuse.DataParallel(
            module, comm_buffer_size=comm_buffer_size, last_comm_buffer_size=last_comm_buffer_size
        )

    known = inspect.signature(DistributedDataParallel.__init__).parameters
    keep_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"

    def ddp(**options: Any) -> Wrap:
        return lambda module: DistributedDataParallel(module, **{keep_buffers: False}, **options)

    found: dict[str, Wrap] = {
        BARE: lambda module: module,
        "bare again": lambda module: module,
        "dpfuse views": views,
        "dpfuse private": partial(dpfuse.DistributedDataParallel, forward_sync_buffers=False),
        "DDP default": ddp(),
        "DDP view": ddp(gradient_as_bucket_view=True),
    }
    if "batched_grad_copy" in known:
        found["DDP batched"] = ddp(batched_grad_copy=True)
        found["DDP view + batched"] = ddp(gradient_as_bucket_view=True, batched_grad_copy=True)
    return found


# Sums in the order of the ranks, which costs something only with several ranks.
ORDERED: dict[str, Wrap] = {"dpfuse deterministic": lambda module: dpfuse.DataParallel(module, deterministic=True)}


def wire_wrappers() -> dict[str, Wrap]:
    """Return the bare module twice, dpfuse's two modes with a bfloat16 wire, and DDP's modes with its bfloat16 hook."""

    def hooked(wrap: Wrap) -> Wrap:
        def build(module: nn.Module) -> nn.Module:
            wrapped: Any = wrap(module)
            wrapped.register_comm_hook(None, bf16_compress_hook)
            return wrapped

        return build

    def ours(views: bool) -> Wrap:
        return lambda module: dpfuse.DataParallel(
            module, broadcast_buffers=False, gradient_as_bucket_view=views, wire_dtype=torch.bfloat16
        )

    known = wrappers()
    return {
        BARE: known[BARE],
        "bare again": known["bare again"],
        "dpfuse bf16 views": ours(True),
        "dpfuse bf16 private": ours(False),
        "DDP default, bf16 hook": hooked(known["DDP default"]),
        "DDP view, bf16 hook": hooked(known["DDP view"]),
    }
