"""Whether anything but a parameter uses its memory: views, another process, a program that has lent it to torch."""

from __future__ import annotations

import sys
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache
from torch.utils.dlpack import from_dlpack

from dpfuse.engine.torch_private import UNSHARED, holders_of

__all__ = ["is_held", "move_into"]

_own: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()  # those that `move_into` has made


def move_into(param: Tensor, place: Tensor) -> None:
    """Let a parameter lie in `place`, a view of the same shape, strides and dtype.

    It gets a storage of its own over this memory: programs that save a model take tensors with one storage for copies
    of each other.
    """
    with torch.cuda.device_of(place):  # torch exports from the current device only
        param.data = from_dlpack(place)
    storage = param.untyped_storage()
    _own[storage._cdata] = storage


def is_held(param: Tensor) -> bool:
    """Whether a parameter must stay where it is, since others read its memory, or may.

    These are: another tensor, such as a view that a program keeps; another process, as after `share_memory()`; what has
    lent the memory to torch, such as an array of NumPy or a file. Bare addresses are not seen.
    """
    storage = param.untyped_storage()
    if holders_of(storage) > UNSHARED[1] or sys.getrefcount(storage) > _ALONE:
        return True
    # On a GPU all memory counts as shared. What was sent to another process is in this table.
    if StorageWeakRef(storage) in shared_cache.values() if storage.is_cuda else storage.is_shared():
        return True
    return not (storage.resizable() or _own.get(storage._cdata) is storage)


def _references() -> int:
    one = torch.zeros(1, device="cpu")
    storage = one.untyped_storage()
    return sys.getrefcount(storage)


_ALONE = _references()  # to the object of a storage that only one name has; versions of torch count differently
