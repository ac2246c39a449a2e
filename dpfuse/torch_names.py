"""Names of torch's DistributedDataParallel that neighbours touch although most are private. Adds no behaviour."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.collective import BROADCAST_BYTES
from dpfuse.errors import DPFuseError
from dpfuse.grad_sync import GradSync
from dpfuse.reducer import Phase
from dpfuse.wrapper import SyncedModule

__all__ = ["TorchNames", "TorchReducer"]


class TorchReducer:
    """What callers expect of `DistributedDataParallel.reducer`; anything else is asked of dpfuse's own.

    Args:
        sync: of the wrapper.
    """

    def __init__(self, sync: GradSync) -> None:
        self._sync = sync

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync.reducer, name)

    def prepare_for_forward(self) -> None:
        """Nothing: a forward is prepared where it runs."""

    def prepare_for_backward(self, tensors: Iterable[Any] = ()) -> None:
        """Make the next backward synchronise although its forward ran inside `no_sync()`."""
        self._sync.reducer.prepare_for_backward(tensors)

    def _rebuild_buckets(self) -> bool:
        """False: buckets are rebuilt when the first synchronised backward ends, never at another time."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing: the first synchronised backward sends everything at its end by itself."""

    def _push_all_rebuilt_params(self) -> None:
        """Nothing, as `_rebuild_buckets`."""

    def _set_static_graph(self) -> None:
        """Nothing: nothing has to be known beforehand."""

    def _ddp_graph_static(self) -> bool:
        """True: no graph is ever too dynamic."""
        return True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing is sampled; `dpfuse.time_communication` measures every step of its context."""
        if sample_rate < 1:
            raise ValueError(f"sample rate should be equal or greater than 1, got {sample_rate!r}")

    def _check_reducer_finalized(self) -> None:
        """Raises DPFuseError while a backward is open."""
        phase = self._sync.reducer.phase
        if phase is not Phase.IDLE:
            raise DPFuseError(
                f"a backward is still open ({phase.name.lower()}), or an exception ended it; expected none. Call it "
                "between steps."
            )

    def _remove_autograd_hooks(self) -> None:
        self._sync.remove_hooks()


class TorchNames(SyncedModule):
    """The smaller names of torch's class, each with what it means here."""

    process_group: dist.ProcessGroup
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    broadcast_bucket_size = BROADCAST_BYTES
    _ddp_sink_clone = False  # outputs are watched, neither wrapped nor cloned

    @property
    def reducer(self) -> Any:
        """The state machine of the synchronisation, under torch's names too."""
        return None if self._sync is None else TorchReducer(self._sync)

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronised."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronised, by the module's names."""
        ignored = self._options.ignored
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in ignored}

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        ignored = self._options.ignored
        return [param for name, param in self.module.named_parameters() if name not in ignored]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._sync is not None and self._sync.reducer.rebuilt

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward with gradients enabled sends buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters: from now on nothing is reduced."""
        self.reducer._remove_autograd_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: no output is cloned in the first place."""

    def _update_process_group(self, new_process_group: Any) -> None:
        """Reduce over another group from now on; a rank outside of it keeps the old one.

        Buckets are planned anew, and rebuilt after the next synchronised backward.
        """
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        require_sync = self.require_backward_grad_sync
        if self._sync is not None:
            self._sync.remove_hooks()
        self.process_group = new_process_group
        self._connect(new_process_group, fresh=False)
        self.require_backward_grad_sync = require_sync
