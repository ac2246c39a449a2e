"""Names of torch's DistributedDataParallel that neighbours touch although most are private. Adds no behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dpfuse.comm.flat_broadcast import BROADCAST_BYTES
from dpfuse.engine.backward_table import IDLE
from dpfuse.errors import DPFuseError
from dpfuse.model.module_sync import ModuleSync
from dpfuse.wrapper import SyncedModule

__all__ = ["TorchNames", "TorchReducer"]


class TorchReducer:
    """What callers expect of `DistributedDataParallel.reducer`; anything else is asked of dpfuse's own."""

    def __init__(self, sync: ModuleSync) -> None:
        self._sync = sync

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync.grads.reducer, name)

    def prepare_for_forward(self) -> None:
        """Nothing: a forward is prepared where it runs."""

    def _rebuild_buckets(self) -> bool:
        """False: buckets are rebuilt when the first synchronised backward ends, never at another time."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing: the first synchronised backward sends everything at its end by itself."""

    def _ddp_graph_static(self) -> bool:
        """True: no graph is ever too dynamic."""
        return True


class TorchNames(SyncedModule):
    """The smaller names of torch's class, each with what it means here."""

    process_group: dist.ProcessGroup
    device_ids: list[int] | None
    output_device: int | None
    bucket_bytes_cap: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _authoritative_rank: int | None = None  # whose model all took when the last join() ended
    _registration_error = ""
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
        return self._sync is not None and self._sync.grads.reducer.rebuilt

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The parameters that train, and for each whether its gradients are sparse."""
        specs = self.bucket_plan.specs
        params = dict(self.module.named_parameters())
        return [params[spec.name] for spec in specs], [spec.sparse for spec in specs]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        """The names of `parameters`, which must be those of `_build_params_for_reducer`, by their position."""
        names = {param: name for name, param in self.module.named_parameters()}
        expected, _ = self._build_params_for_reducer()
        given = set(parameters)
        for param in expected:
            if param not in given:
                raise ValueError(f"Param with name {names[param]} is missing in parameters; pass all that train")
        if len(given) != len(expected):
            raise ValueError(
                f"Expected param to name mapping of {len(expected)} parameters, got {len(given)}; pass those of "
                "_build_params_for_reducer()"
            )
        return {position: names[param] for position, param in enumerate(parameters)}

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of `module` that a wrapper around it does not ignore, with their names if asked to."""
        named = ((n, p) for n, p in module.named_parameters() if not getattr(p, "_ddp_ignored", False))
        return named if named_params else (param for _, param in named)

    @property
    def _logged_error(self) -> str:
        """What went wrong last, in a backward or when a hook was registered."""
        return self._registration_error or ("" if self._sync is None else self._sync.grads.reducer.last_error)

    @contextmanager
    def _log_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._registration_error = f"{type(error)}: {error}"
            raise

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` has to be called: never, since each backward ends by itself."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise RuntimeError(
                "require_manual_backward_finalization was set to True, expected False: gradients are final when "
                "backward() returns, and nothing can be put in between. Leave it out, and finalize_backward() too."
            )

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must wait for the end of backward: never, since it is never called."""
        return False

    def finalize_backward(self) -> None:
        """Refuse, as torch's class does unless manual finalization was required.

        Raises:
            RuntimeError: each backward ends by itself.
        """
        raise RuntimeError(
            "finalize_backward() was called, expected no such call: gradients are final when backward() returns. "
            "Leave it out."
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward with gradients enabled sends buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _check_reducer_finalized(self) -> None:
        """Raises DPFuseError while a backward is open."""
        state = self.reducer.state
        if state is not IDLE:
            raise DPFuseError(
                f"a backward is still open ({state.name.lower()}), or an exception ended it; expected none. Call it "
                "between steps."
            )

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters: from now on nothing is reduced."""
        if self._sync is not None:
            self._sync.remove_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing is sampled; `dpfuse.time_communication` measures every step of its context."""
        if sample_rate < 1:
            raise ValueError(f"sample rate should be equal or greater than 1, got {sample_rate!r}")

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: no output is cloned in the first place."""

    def _update_process_group(self, new_process_group: Any) -> None:
        """Reduce over another group from now on; a rank outside of it keeps the old one.

        Buckets are planned again, and rebuilt after the next synchronised backward.
        """
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        require_sync = self.require_backward_grad_sync
        self.process_group = new_process_group
        if self._sync is not None:
            self._agreed_buffers = self._sync.buffers.agreed
        self._connect(new_process_group, fresh=False)
        self.require_backward_grad_sync = require_sync
