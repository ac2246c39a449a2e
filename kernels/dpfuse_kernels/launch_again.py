"""Makes the last launch over a table again, for tensors that are like those of that launch. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpfuse_kernels.pointer_table import PointerTable

__all__ = ["launch_again"]

_address_of = Tensor.data_ptr


def launch_again(kernel: Callable[..., None], tensors: list[Tensor | None], table: PointerTable, scale: float) -> bool:
    """Launch `kernel` as it was launched last, if that was for tensors like these, at the same addresses.

    That is the usual call of a settled model, which comes here for each bucket of each step. So all is compared in one
    function: it takes less than half the time of the checks and the launch that it stands for.

    Returns:
        Whether it was launched. If not, the tensors are still to be checked.
    """
    if "launcher" not in table.__dict__:
        return False
    launcher = table.launcher
    last = launcher.repeatable.get(kernel)
    if last is None:
        return False
    last_scale, call = last
    if last_scale != scale or table.flat.data_ptr() != table.address:
        return False
    found: list[Tensor] = tensors  # type: ignore[assignment]
    try:
        if list(map(_address_of, found)) != call.addresses:
            return False
    except (TypeError, RuntimeError):  # None and sparse tensors have no address
        return False
    # Tensors with addresses that have passed all checks pass them again.
    if not (table.seen.like(found) or table.are_views(found)):
        return False
    return launcher.dispatcher.repeat(call)
